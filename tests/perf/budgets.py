"""``python -m tests.perf.budgets [CALLS]``: what budgets add to a warm call: with three of them and none, in turns.

Two servers in one process, a call of the one, then a call of the other, each after the ready sandboxes are made again:
whatever slows the machine meanwhile slows both. Also the store alone: a reservation and its settling.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from rich.console import Console
from tests.fixtures.brokered import Heard

from glovebox_server import app as apps
from glovebox_server.app import App
from glovebox_server.calls import Principal
from glovebox_server.settings import Settings

POLICY = """
version = 1
default = "any"

[roles.any]
tools = ["run_python", "read_workspace_file", "list_workspace_files", "search_workspace", "fetch_url"]
"""
BUDGETS = """
[[roles.any.budget]]
name = "calls-a-day"
per = "principal"
every = "day"
calls = 1_000_000

[[roles.any.budget]]
name = "time-an-hour"
per = "run"
every = "hour"
wall_seconds = 1_000_000
cpu_seconds = 1_000_000

[[roles.any.budget]]
name = "told-a-day"
per = "tool"
every = "day"
disclosed_bytes = 1_000_000_000
"""
EXAMPLE = """
[[example]]
principal = "token:a"
call = { tool = "run_python" }
expect = "deny"
"""
"""Each policy ends with one."""
WHO = Principal(id="local:0", transport="cli")
PAUSE = 0.12
"""Seconds in which a sandbox is made for the next call."""


@asynccontextmanager
async def server(directory: Path, policy: str) -> AsyncIterator[App]:
    """One with this policy."""
    directory.mkdir(mode=0o700)
    (directory / "policy.toml").write_text(policy)
    (directory / "workspace").mkdir()
    settings = Settings(
        workspace=directory / "workspace", state_dir=directory / "state", policy=directory / "policy.toml"
    )
    async with apps.opened(settings, "stdio") as app:
        yield app


async def timed(app: App) -> float:
    """Milliseconds of one call."""
    await anyio.sleep(PAUSE)
    began = time.perf_counter()
    result = await app.broker.submit(WHO, "run_python", {"code": "print(1)"}, Heard(), run="r_1")
    assert not result.failed, result.structured
    return (time.perf_counter() - began) * 1000


async def measure(calls: int) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as directory:
        async with (
            server(Path(directory, "off"), POLICY + EXAMPLE) as off,
            server(Path(directory, "on"), POLICY + BUDGETS + EXAMPLE) as on,
        ):
            for app in (off, on) * 20:
                await timed(app)
            found: dict[str, list[float]] = {"off": [], "on": []}
            for number in range(calls):
                pair = [("off", off), ("on", on)]
                for name, app in pair if number % 2 else reversed(pair):
                    found[name].append(await timed(app))
    console = Console()
    for name, times in found.items():
        quantiles = statistics.quantiles(times, n=20)
        console.print(f"{name:4} p50 {statistics.median(times):.2f} ms, p95 {quantiles[18]:.2f} ms, {len(times)} calls")
    differences = [b - a for a, b in zip(found["off"], found["on"], strict=True)]
    least = [statistics.quantiles(times, n=10)[0] for times in found.values()]
    console.print(
        f"on - off: median of pairs {statistics.median(differences):+.2f} ms, of the quickest tenths "
        f"{least[1] - least[0]:+.2f} ms"
    )


if __name__ == "__main__":
    anyio.run(measure, int(sys.argv[1]) if len(sys.argv) > 1 else 300)
