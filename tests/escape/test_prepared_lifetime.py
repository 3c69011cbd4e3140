"""I9, I11: a server whose sandboxes stand ready, and what is killed under it: calls go on, and nothing is left.

Whole servers, real zygotes. Each test first sees that something stands ready: that is its control.
"""

import json
import os
import signal
import subprocess  # noqa: TID251 - whole server processes are what is killed here
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from tests.fixtures import leftovers, zygotes
from tests.fixtures.brokered import profile, submitted
from tests.fixtures.leftovers import until
from tests.fixtures.workers import forks, workers

from glovebox_audit.verify import verify
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_server import app as apps
from glovebox_server.app import App
from glovebox_server.settings import Settings

pytestmark = pytest.mark.driver("bubblewrap")
ROOT = Path(__file__).parents[2]
FOR_EVER = "import time\nprint('begun', flush=True)\ntime.sleep(600)"


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[Settings]:
    """A server that has sandboxes ready, by a worker that is ended afterwards."""
    profiles, workspace = tmp_path / "profiles", tmp_path / "workspace"
    profiles.mkdir()
    workspace.mkdir(mode=0o755)
    text = profile("run_python", "bubblewrap") + '[files]\nworkspace = "read"\n[python]\nstart = "warm"\n'
    (profiles / "run_python.toml").write_text(text)
    state = tmp_path / "state"
    yield Settings(workspace=workspace, profiles_dir=profiles, state_dir=state)
    for pid in workers(state):
        family = leftovers.family(pid)
        os.kill(pid, signal.SIGKILL)
        with anyio.from_thread.start_blocking_portal() as portal:
            portal.call(until, lambda family=family: not leftovers.alive(family))


async def printed(app: App, code: str) -> str:
    """What a program printed in a call of its own."""
    result = await submitted(app, "run_python", {"code": code})
    return str(result.structured["stdout"]["text"])


@asynccontextmanager
async def warm(settings: Settings) -> AsyncIterator[App]:
    """A server with something that stands ready."""
    async with apps.opened(settings, "cli", worker=True) as app:
        assert await printed(app, "print(1)") == "1\n"
        await one_ready(app, settings)
        yield app


async def one_ready(app: App, settings: Settings, code: str = "print(1)") -> None:
    """Call until a call gets one that was forked before, then wait until the next stands ready."""
    with anyio.fail_after(leftovers.TIMEOUT_SECONDS):
        before: dict[str, int] = {}
        while not before or started(settings)[-1] not in before:
            before = forks(settings.state_dir)
            await printed(app, code)
    await until(lambda: [each for each in forks(settings.state_dir) if each not in started(settings)])


def started(settings: Settings) -> list[str]:
    """Ids of all sandboxes that calls got."""
    found = leftovers.records(settings.state_dir, os.getpid())
    return [each.data["sandbox_id"] for each in found if each.kind == "sandbox.started"]


async def test_a_call_gets_one_that_stood_ready(settings: Settings) -> None:
    """And no two calls the same one, however many there are at one time."""
    async with warm(settings) as app:
        before = len(started(settings))
        async with anyio.create_task_group() as tasks:
            for _ in range(40):
                tasks.start_soon(printed, app, "print(1)")
    assert len(started(settings)) == len(set(started(settings))) == before + 40


async def test_modules_are_imported_ahead_for_programs_that_may_want_them_alone(settings: Settings) -> None:
    """A program that does not name one is in a sandbox without it, and can import it all the same."""
    file = settings.profiles_dir / "run_python.toml"
    file.write_text(file.read_text() + 'preload = ["colorsys"]\n')
    there = "import sys\nprint('color' + 'sys' in sys.modules)"
    async with warm(settings) as app:
        await one_ready(app, settings, "1  # colorsys")
        assert await printed(app, there) == "False\n"
        assert await printed(app, f"{there}  # colorsys") == "True\n"
        assert await printed(app, "print(__import__('color' + 'sys').rgb_to_hsv(0, 0, 0))") == "(0.0, 0.0, 0)\n"


async def test_a_killed_zygote_costs_the_calls_under_way_and_no_other(settings: Settings) -> None:
    """SIGKILL: they fail as unavailable; the next call gets a sandbox of its own; later ones stand ready again."""
    async with warm(settings) as app:
        (worker,) = workers(settings.state_dir)
        (first,) = zygotes.running(worker)
        begun = len(started(settings)) + 1
        failed: list[SandboxError] = []

        async def lost() -> None:
            with pytest.raises(SandboxError) as caught:
                await printed(app, FOR_EVER)
            failed.append(caught.value)

        with anyio.fail_after(leftovers.TIMEOUT_SECONDS):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(lost)
                await until(lambda: len(started(settings)) == begun)
                assert started(settings)[-1] in forks(settings.state_dir)
                os.kill(first, signal.SIGKILL)
            assert failed
            await until(lambda: not forks(settings.state_dir))  # the kernel ends them one after the other
            assert await printed(app, "print(2)") == "2\n"

        await one_ready(app, settings, "print(3)")
        assert zygotes.running(worker) != [first]
    kinds = leftovers.kinds(leftovers.records(settings.state_dir, os.getpid()))
    assert kinds.count("call.failed") == 1
    changes = [
        each.data["what"] for each in leftovers.records(settings.state_dir, os.getpid()) if each.kind == "pool.changed"
    ]
    assert changes == ["opened", "failed", "recovered"]
    assert verify(settings.state_dir / "audit").ok


async def test_a_workspace_that_was_replaced_is_not_what_a_call_sees(settings: Settings) -> None:
    """The same path, another directory: neither what stood ready nor the zygote's forks show the old one."""
    look = "import os\nprint(os.listdir('/workspace'))"
    workspace = settings.workspace
    assert workspace is not None
    (workspace / "old").touch()
    async with warm(settings) as app:
        assert await printed(app, look) == "['old']\n"
        workspace.rename(workspace.with_name("before"))
        workspace.mkdir(mode=0o755)
        (workspace / "new").touch()
        seen = []
        for _ in range(6):
            seen.append(await printed(app, look))
            with anyio.move_on_after(2):
                await one_ready(app, settings, look)
        assert seen == ["['new']\n"] * 6


@pytest.mark.parametrize("family", range(3))
async def test_sigkill_of_a_server_with_sandboxes_that_stand_ready(settings: Settings, family: int) -> None:
    """I11: of its calls nothing is left; with its worker, nothing of those that nobody had asked for yet either."""
    mounts = leftovers.mounts()
    await _killed(settings, family)
    assert leftovers.mounts() == mounts
    assert verify(settings.state_dir / "audit").ok


async def _killed(settings: Settings, least: int) -> None:
    places = ["--workspace", str(settings.workspace), "--profiles-dir", str(settings.profiles_dir)]
    command = [sys.executable, "-m", "glovebox_server", "serve", *places, "--state-dir", str(settings.state_dir)]
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    process = await anyio.open_process(command, stderr=subprocess.DEVNULL, cwd=ROOT)
    async with process:
        assert process.stdin is not None
        for message in (
            {"id": 1, "method": "initialize", "params": hello},
            {"method": "notifications/initialized"},
            {"id": 2, "method": "tools/call", "params": {"name": "run_python", "arguments": {"code": FOR_EVER}}},
        ):
            await process.stdin.send(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        # At another moment each time: the zygote starts, it forks, sandboxes wait.
        await until(lambda: any(zygotes.running(pid) for pid in workers(settings.state_dir)))
        (worker,) = workers(settings.state_dir)
        if least:
            (pid,) = zygotes.running(worker)
            # A guest, then its program. Where the call was first, it has one started for it, and one more waits.
            await until(lambda: len(leftovers.family(pid)) >= least)
        prepared = leftovers.family(worker)
        family = tuple(each for each in leftovers.family(process.pid) if each not in prepared and each.pid != worker)
        process.kill()
    await until(lambda: not leftovers.alive(family))
    await until(lambda: not leftovers.groups(process.pid))
    family = leftovers.family(worker)
    assert len(family) >= 2
    os.kill(worker, signal.SIGKILL)
    await until(lambda: not leftovers.alive(family))
    await until(lambda: not leftovers.groups(worker))
