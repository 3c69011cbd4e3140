"""``python -m tests.perf.telemetry [CALLS]``: what telemetry adds to a warm call, in processor time of the server.

Servers over stdio in turns, of which some send spans, metrics or both to a collector in this process.
"""

import os
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import psutil
from mcp import Client, StdioServerParameters
from rich.console import Console
from tests.fixtures.collectors import collecting
from tests.repo.files import ROOT

_WARM, _TURN = 20, 25
"""Calls before any is counted, and in one turn."""


_SENT: dict[str, set[str]] = {"none": set(), "spans": {"TRACES"}, "metrics": {"METRICS"}, "both": {"TRACES", "METRICS"}}


async def _measure(calls: int, variables: dict[str, str], directory: Path) -> dict[str, list[float]]:
    """Return milliseconds of processor per call, of each turn."""
    program = str(Path(sys.executable).with_name("glovebox"))
    found: dict[str, list[float]] = {name: [] for name in _SENT}
    async with AsyncExitStack() as stack:
        servers = {}
        for name, sent in _SENT.items():
            more = variables | {f"OTEL_{signal}_EXPORTER": "none" for signal in {"TRACES", "METRICS"} - sent}
            words = ["serve", "--state-dir", str(directory / name), "--workspace", str(ROOT / "examples")]
            before = {each.pid for each in psutil.Process().children()}
            server = StdioServerParameters(command=program, args=words, env={**os.environ, **more})
            client = await stack.enter_async_context(Client(server))
            (process,) = (each for each in psutil.Process().children() if each.pid not in before)
            servers[name] = client, ~process.pid << 3 | 2  # the clock of its processor time: clock_getcpuclockid(3)
        for turn in range(calls // _TURN + 1):
            for name, (client, clock) in servers.items():
                began = time.clock_gettime(clock)
                for _ in range(_TURN if turn else _WARM):
                    assert not (await client.call_tool("run_python", {"code": "print(1)"})).is_error
                    await anyio.sleep(0.05)  # until a sandbox stands ready again
                if turn:
                    found[name].append((time.clock_gettime(clock) - began) * 1000 / _TURN)
    return found


def main() -> None:
    """Print the medians, and what is added in each turn."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    out = Console()
    with collecting() as collector, tempfile.TemporaryDirectory() as name:
        variables = {**collector.variables, "OTEL_BSP_SCHEDULE_DELAY": "5000", "OTEL_METRIC_EXPORT_INTERVAL": "60000"}
        found = anyio.run(_measure, calls, variables, Path(name))
    for name, times in found.items():
        added = [on - off for off, on in zip(found["none"], times, strict=True)]
        middle, mean, error = (
            statistics.median(added),
            statistics.mean(added),
            statistics.stdev(added) / len(added) ** 0.5,
        )
        text = f"added in the median {middle:.2f} ms, in the mean {mean:.2f} ± {error:.2f} ms"
        out.print(f"{name}: {statistics.median(times):.2f} ms of processor a call; {text}")


if __name__ == "__main__":
    main()
