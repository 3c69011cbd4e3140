"""``python -m tests.perf.governance [CALLS]``: what governance adds to a warm call: some, all and none of it, in turns.

Servers in one process, a call of each after the other, each after the ready sandboxes are made again: whatever slows
the machine meanwhile slows all of them.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import anyio
from rich.console import Console
from tests.fixtures.brokered import Heard

from glovebox_server import app as apps
from glovebox_server.calls import Principal
from glovebox_server.core.broker import Broker
from glovebox_server.guards.stops.stops import new_stop, stops_of
from glovebox_server.guards.watch.canaries import plant
from glovebox_server.settings import Settings

ROLE = """
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
REST = """
[roles.any.narrow.run_python]
limits = { wall_seconds = 20 }

[[roles.any.approval]]
name = "long"
tool = "run_python"
when = "longer_than"
seconds = 20

[watch]
denials = "slow"
secrets = "stop"
"""
EXAMPLE = """
[[example]]
principal = "token:a"
call = { tool = "run_python" }
expect = "deny"
"""  # each policy ends with one
POLICIES = {"nothing": ROLE, "role": ROLE, "budgets": ROLE + BUDGETS, "all": ROLE + BUDGETS + REST}
"""By row: nothing governs at all; a role; three budgets with it; and approvals that do not ask, stops, watch rules."""
PAIRS = (("role", "budgets"), ("nothing", "all"))  # what is held against what
STOPS = 20  # in force, for somebody else
WHO = Principal(id="local:0", transport="cli")
PAUSE = 0.12  # seconds in which a sandbox is made for the next call


@asynccontextmanager
async def server(directory: Path, name: str) -> AsyncIterator[Broker]:
    """The broker of one with what a row says."""
    directory.mkdir(mode=0o700)
    (directory / "policy.toml").write_text(POLICIES[name] + EXAMPLE)
    workspace, state_dir = directory / "workspace", directory / "state"
    workspace.mkdir()
    settings = Settings(workspace=workspace, state_dir=state_dir, policy=directory / "policy.toml")
    async with apps.opened(settings, "stdio") as app:
        if name == "nothing":
            bare = replace(app.guards, stops=None, approvals=None, budgets=None, watch=None)
            yield replace(app.broker, guards=bare)
            return
        if name == "all":
            for number in range(STOPS):
                stop = new_stop("run", f"r_{number}", because="It is another.", by="local:0", made=datetime.now(UTC))
                stops_of(state_dir).add(stop.id, stop.model_dump_json().encode())
            plant(state_dir, workspace, "keys.txt")
        yield app.broker


async def timed(broker: Broker) -> float:
    """Milliseconds of one call."""
    await anyio.sleep(PAUSE)
    began = time.perf_counter()
    result = await broker.submit(WHO, "run_python", {"code": "print(1)"}, Heard(), run="r")
    assert not result.failed, result.structured
    return (time.perf_counter() - began) * 1000


async def measure(calls: int) -> None:
    """Print the tables."""
    found: dict[str, list[float]] = {name: [] for name in POLICIES}
    with tempfile.TemporaryDirectory() as directory:
        async with AsyncExitStack() as running:
            brokers = {
                name: await running.enter_async_context(server(Path(directory, name), name)) for name in POLICIES
            }
            for number in range(20 + calls):
                rows = list(brokers.items())
                for name, broker in rows if number % 2 else reversed(rows):
                    took = await timed(broker)
                    if number >= 20:
                        found[name].append(took)
    console = Console()
    for name, times in found.items():
        p95 = statistics.quantiles(times, n=20)[18]
        console.print(f"{name:8} p50 {statistics.median(times):.2f} ms, p95 {p95:.2f} ms, {len(times)} calls")
    for off, on in PAIRS:
        differences = [b - a for a, b in zip(found[off], found[on], strict=True)]
        least = [statistics.quantiles(found[name], n=10)[0] for name in (off, on)]
        console.print(
            f"{on} - {off}: median of pairs {statistics.median(differences):+.2f} ms, of the quickest tenths "
            f"{least[1] - least[0]:+.2f} ms"
        )


if __name__ == "__main__":
    anyio.run(measure, int(sys.argv[1]) if len(sys.argv) > 1 else 300)
