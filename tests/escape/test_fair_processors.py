"""M7: twelve programs of one caller that burn processors leave another's as much as all of them, in real sandboxes."""

import os
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.fixtures.brokered import Heard, profile
from tests.fixtures.leftovers import until

from glovebox_sandboxes.host import cgroup
from glovebox_server import app as apps
from glovebox_server.app import App
from glovebox_server.calls import Principal
from glovebox_server.settings import Settings

pytestmark = pytest.mark.driver("bubblewrap")
SHARE_OF_ONE = 3
"""What the peer's program uses at least, in what one of the twelve uses on average: sixteen by weight, but one core at
most. On average, since the kernel hands out turns of some 10 ms, and one of twelve has a few more than the others."""


async def burn(app: App, name: str) -> None:
    """Call a program that never ends."""
    who = Principal(id=f"token:{name}", transport="http")
    await app.broker.submit(who, "run_python", {"code": f"while True: pass  # {anyio.current_time()}"}, Heard())


def used(app: App) -> dict[str, list[float]]:
    """Seconds of processor time by caller, of each sandbox that runs."""
    running = app.broker.sandboxes.pool._processor._running
    return {key: [seconds(each) for each in sandboxes] for key, sandboxes in running.items()}


def seconds(sandbox: Any) -> float:
    """Processor time of the processes in its control group, see proc_pid_stat(5)."""
    ticks = 0
    for pid in Path([*sandbox._group.directories.values()][-1], "cgroup.procs").read_text().split():
        user, system = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[11:13]
        ticks += int(user) + int(system)
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("weighed", [True, False], ids=["weighed", "control"])
async def test_many_programs_get_no_more_of_the_processors_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, weighed: bool
) -> None:
    """The control: without weights each of the twelve gets about as much as the peer's one."""
    if cgroup.detect("g0-0") is None:
        pytest.skip("no control groups can be made here")
    if not weighed:
        monkeypatch.setattr(cgroup.Cgroup, "weigh", lambda *_: None)
    profiles, workspace = tmp_path / "profiles", tmp_path / "workspace"
    profiles.mkdir()
    workspace.mkdir(mode=0o755)
    (profiles / "run_python.toml").write_text(profile("run_python", "bubblewrap", wall=120))
    settings = Settings(workspace=workspace, profiles_dir=profiles, state_dir=tmp_path / "state")
    async with apps.opened(settings, "http") as app, anyio.create_task_group() as tasks:
        for _ in range(12):
            tasks.start_soon(burn, app, "greedy")
        await until(lambda: len(used(app).get("token:greedy", [])) == 12)
        tasks.start_soon(burn, app, "peer")
        await until(lambda: "token:peer" in used(app))
        before = used(app)
        await until(lambda: used(app)["token:peer"][0] - before["token:peer"][0] > 0.3, 60)
        after = used(app)
        greedy = [late - early for early, late in zip(before["token:greedy"], after["token:greedy"], strict=True)]
        peer = after["token:peer"][0] - before["token:peer"][0]
        tasks.cancel_scope.cancel()
    assert (peer > SHARE_OF_ONE * sum(greedy) / len(greedy)) == weighed
