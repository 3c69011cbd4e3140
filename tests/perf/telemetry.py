"""``python -m tests.perf.telemetry [CALLS]``: what telemetry adds to a warm call, in processor time of the server.

Two servers over stdio in turns, one of which sends spans and metrics to a collector in this process.
"""

import os
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import psutil
from mcp import Client, StdioServerParameters
from rich.console import Console
from tests.fixtures.collectors import collecting

_WARM, _TURN = 20, 25
"""Calls before any is counted, and in one turn."""


async def _measure(calls: int, variables: dict[str, str], directory: Path) -> dict[str, list[float]]:
    """Return milliseconds of processor per call, of each turn."""
    program = str(Path(sys.executable).with_name("glovebox"))
    found: dict[str, list[float]] = {"off": [], "on": []}
    async with AsyncExitStack() as stack:
        servers = {}
        for name, more in (("off", {}), ("on", variables)):
            words = ["serve", "--state-dir", str(directory / name), "--workspace", str(directory)]
            before = {each.pid for each in psutil.Process().children()}
            server = StdioServerParameters(command=program, args=words, env={**os.environ, **more})
            client = await stack.enter_async_context(Client(server))
            (process,) = (each for each in psutil.Process().children() if each.pid not in before)
            servers[name] = client, process
        for turn in range(calls // _TURN + 1):
            for name, (client, process) in servers.items():
                began = process.cpu_times()
                for _ in range(_TURN if turn else _WARM):
                    assert not (await client.call_tool("run_python", {"code": "print(1)"})).is_error
                    await anyio.sleep(0.05)  # until a sandbox stands ready again
                ended = process.cpu_times()
                if turn:
                    found[name].append((ended.user + ended.system - began.user - began.system) * 1000 / _TURN)
    return found


def main() -> None:
    """Print the medians, and that of the differences of turns."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    out = Console()
    with collecting() as collector, tempfile.TemporaryDirectory() as name:
        variables = {**collector.variables, "OTEL_BSP_SCHEDULE_DELAY": "5000", "OTEL_METRIC_EXPORT_INTERVAL": "60000"}
        found = anyio.run(_measure, calls, variables, Path(name))
    for server, times in found.items():
        out.print(f"{server}: {statistics.median(times):.2f} ms of processor a call")
    differences = [on - off for off, on in zip(*found.values(), strict=True)]
    out.print(f"difference: median {statistics.median(differences):.2f}, mean {statistics.mean(differences):.2f} ms")


if __name__ == "__main__":
    main()
