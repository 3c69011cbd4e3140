"""Nothing outlives a call (I10, I11, M6): whoever is killed, and whenever.

Whole servers and real sandboxes. Each test first sees that there is something to be left behind: that is its control.
"""

import ctypes
import json
import os
import signal
import subprocess  # noqa: TID251 - whole server processes are what is killed here
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest
from tests.fixtures import leftovers
from tests.fixtures.brokered import DRIVERS, profile, submitted
from tests.fixtures.leftovers import until
from tests.fixtures.workers import forks, workers

from glovebox_audit import chain
from glovebox_audit.chain import Record, new_call_id
from glovebox_audit.events import EVENTS, CallLost
from glovebox_audit.segments.files import LOG_NAME
from glovebox_audit.verify import verify
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host import cgroup, process
from glovebox_sandboxes.worker import client
from glovebox_server import app as apps
from glovebox_server.app import App
from glovebox_server.settings import Settings

ROOT = Path(__file__).parents[2]
#: At which moment of the call the server is killed: the sandbox is being made; it is proved; the program runs.
MOMENTS = ("call.decided", "sandbox.started", "running")
AT_ONCE = 3
#: The promise for a cancelled call, of which a busy machine may take a part.
CANCEL_SECONDS = 1.0
#: What a sandbox is given to end by itself where a test shows that this is not waited for.
WAITED_SECONDS = 20.0
PROGRAM = """
import os, time
print("begun", flush=True)
if os.fork() == 0:
    os.setsid()
time.sleep(600)
"""
ENDED = ("call.finished", "call.cancelled", "call.failed")


def _directories(tmp_path: Path, driver: str) -> Settings:
    profiles, workspace = tmp_path / "profiles", tmp_path / "workspace"
    profiles.mkdir()
    workspace.mkdir()
    (profiles / "run_python.toml").write_text(profile("run_python", driver))
    return Settings(workspace=workspace, profiles_dir=profiles, state_dir=tmp_path / "state")


def _command(settings: Settings, *words: str) -> list[str]:
    places = ["--workspace", str(settings.workspace), "--profiles-dir", str(settings.profiles_dir)]
    return [sys.executable, "-m", "glovebox_server", *words, *places, "--state-dir", str(settings.state_dir)]


@asynccontextmanager
async def _call_under_way(
    settings: Settings, moment: str, temporary: Path
) -> AsyncIterator[tuple[anyio.abc.Process, list[Record]]]:
    """A server process in the middle of a call, with the record of its sandbox if there is one already."""
    code = json.dumps({"code": PROGRAM})
    process = await anyio.open_process(
        _command(settings, "call", "run_python", "--args", code),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    started: list[Record] = []

    def reached() -> bool:
        assert process.returncode is None, "the call ended by itself"
        found = leftovers.records(settings.state_dir, process.pid)
        started[:] = [record for record in found if record.kind == "sandbox.started"]
        if moment == "running":
            # The guest and at least two of the program's.
            return bool(started) and len(leftovers.of_sandbox(started[0])) >= 3
        return moment in leftovers.kinds(found)

    async with process:
        await until(reached)
        yield process, started
        process.kill()


async def _kill_in_mid_call(settings: Settings, moment: str, temporary: Path) -> None:
    async with _call_under_way(settings, moment, temporary) as (process, started):
        family = leftovers.family(process.pid)
        if moment != "call.decided":
            assert family or leftovers.containers(process.pid), "control: there is something to be left behind"
    await until(lambda: not leftovers.alive(family))
    await until(lambda: not any(leftovers.of_sandbox(record) for record in started))
    await until(lambda: not leftovers.groups(process.pid))
    await until(lambda: not leftovers.containers(process.pid))
    assert not set(ENDED) & set(leftovers.kinds(leftovers.records(settings.state_dir, process.pid)))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("driver", "share"),
    [
        pytest.param("bubblewrap", 1, marks=pytest.mark.driver("bubblewrap")),
        pytest.param("docker", 2, marks=pytest.mark.driver("docker")),
        pytest.param("gvisor", 2, marks=pytest.mark.driver("gvisor")),
    ],
)
async def test_sigkill_of_the_server_in_mid_call(driver: str, share: int, kills: int, tmp_path: Path) -> None:
    """I11: no process, control group, container, mount or temporary file is left, and the log of all of it verifies."""
    times = max(kills // share, len(MOMENTS))
    settings = _directories(tmp_path, driver)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    mounts = leftovers.mounts()
    limiter = anyio.CapacityLimiter(AT_ONCE)

    async def once(moment: str) -> None:
        async with limiter:
            await _kill_in_mid_call(settings, moment, temporary)

    async with anyio.create_task_group() as tasks:
        for number in range(times):
            tasks.start_soon(once, MOMENTS[number % len(MOMENTS)])
    assert leftovers.mounts() == mounts
    assert not list(temporary.iterdir())
    report = verify(settings.state_dir / "audit")
    assert report.ok, report
    # The next server starts on what they left, and works.
    async with _server(settings) as app:
        await submitted(app, "run_python", {"code": "print(1)"})
    assert verify(settings.state_dir / "audit").ok
    assert _lost(settings) == times


@pytest.mark.driver("bubblewrap")
async def test_without_the_janitor_control_groups_stay_until_the_next_server(tmp_path: Path) -> None:
    """I11, the control: what removes a killed server's groups is the janitor; the next server does where it is dead."""
    settings = _directories(tmp_path, "bubblewrap")
    async with _call_under_way(settings, "running", tmp_path) as (process, started):
        if not leftovers.groups(process.pid):
            pytest.skip("limits hold per process here, and there are no groups")
        # Everything but bwrap and what it holds: the janitor is the server's only other child.
        for each in leftovers.family(process.pid):
            if each.parent == process.pid and each.name != "bwrap":
                os.kill(each.pid, signal.SIGKILL)
    await until(lambda: not leftovers.of_sandbox(started[0]))
    assert leftovers.groups(process.pid)
    async with _server(settings) as app:
        await submitted(app, "run_python", {"code": "print(1)"})
        assert not leftovers.groups(process.pid)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_sigterm_of_a_server_ends_its_calls(driver: str, tmp_path: Path) -> None:
    """I10, I11: the call is cancelled, said so in one record, its sandbox gone, and the server's exit is in order."""
    settings = _directories(tmp_path, driver)
    process = await anyio.open_process(_command(settings, "serve"), stderr=subprocess.DEVNULL, cwd=ROOT)
    async with process:
        assert process.stdin is not None
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        for message in (
            {"id": 1, "method": "initialize", "params": hello},
            {"method": "notifications/initialized"},
            {"id": 2, "method": "tools/call", "params": {"name": "run_python", "arguments": {"code": PROGRAM}}},
        ):
            await process.stdin.send(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
        started = await _started(settings, process.pid)
        family = leftovers.family(process.pid)
        process.send_signal(signal.SIGTERM)
        with anyio.fail_after(leftovers.TIMEOUT_SECONDS):
            assert await process.wait() == 0
    await until(lambda: not leftovers.of_sandbox(started), 1)
    await until(lambda: not leftovers.alive(family), 1)
    assert not leftovers.groups(process.pid)
    assert not leftovers.containers(process.pid)
    found = leftovers.kinds(leftovers.records(settings.state_dir, process.pid))
    assert [kind for kind in found if kind in ENDED] == ["call.cancelled"]
    assert found[-1] == "server.stopped"
    assert verify(settings.state_dir / "audit").ok


@pytest.mark.parametrize("driver", DRIVERS)
async def test_cancel_kills_the_sandbox_within_a_second(driver: str, tmp_path: Path) -> None:
    """M6: also where the program ignores every signal and has left its session; one terminal record."""
    settings = _directories(tmp_path, driver)
    async with _server(settings) as app:
        async with anyio.create_task_group() as tasks:
            call_id, code = new_call_id(), "import signal; signal.signal(15, signal.SIG_IGN)\n" + PROGRAM
            tasks.start_soon(submitted, app, "run_python", {"code": code}, None, call_id)
            started = await _started(settings, os.getpid(), call_id)
            cancelled = time.monotonic()
            tasks.cancel_scope.cancel()
        await until(lambda: not leftovers.of_sandbox(started))
        assert time.monotonic() - cancelled < CANCEL_SECONDS
        assert _ends(settings, call_id) == ["call.cancelled"]


@pytest.mark.parametrize(("start", "grouped"), [("cold", True), ("cold", False), ("warm", True)])
@pytest.mark.driver("bubblewrap")
async def test_nobody_in_a_sandbox_is_asked_to_end(
    start: str, grouped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orphans: None
) -> None:
    """M6: a guest that answers nobody, as one that waits for a processor behind its program, is not waited for.

    And it is reaped, by bwrap or the zygote: not every host's process 1 would.
    """
    for module in (process, client):
        monkeypatch.setattr(module, "END_SECONDS", WAITED_SECONDS)
    if not grouped:
        monkeypatch.setattr(cgroup, "detect", lambda _: None)
    settings = _directories(tmp_path, "bubblewrap")
    text = profile("run_python", "bubblewrap") + f'[python]\nstart = "{start}"\n'
    (settings.profiles_dir / "run_python.toml").write_text(text)
    async with _server(settings, worker=start == "warm") as app:
        await submitted(app, "run_python", {"code": "print(1)"})
        ready: dict[str, int] = {}
        while start == "warm" and _sandbox(settings) not in ready:
            ready = forks(settings.state_dir)
            await submitted(app, "run_python", {"code": "print(1)"})
        await until(lambda: start == "cold" or len({*forks(settings.state_dir)} - {*ready}) > 0)
        ready = forks(settings.state_dir)
        async with anyio.create_task_group() as tasks:
            call_id = new_call_id()
            tasks.start_soon(submitted, app, "run_python", {"code": PROGRAM}, None, call_id)
            started = await _started(settings, os.getpid(), call_id)
            assert (started.data["sandbox_id"] in ready) == (start == "warm")
            for number in _numbers(started):
                os.kill(number, signal.SIGSTOP)
            before = _zombies()  # of what tried bwrap out
            cancelled = time.monotonic()
            tasks.cancel_scope.cancel()
        assert time.monotonic() - cancelled < WAITED_SECONDS / 2
        assert not leftovers.of_sandbox(started)
        assert _zombies() == before


@pytest.fixture
def orphans() -> Iterator[None]:
    """Processes whose parent ends become children of this one, which waits for none of them: PR_SET_CHILD_SUBREAPER."""
    libc = ctypes.CDLL(None)
    libc.prctl(36, 1, 0, 0, 0)
    yield
    libc.prctl(36, 0, 0, 0, 0)


def _sandbox(settings: Settings) -> str:
    found = leftovers.records(settings.state_dir, os.getpid())
    return str([each.data["sandbox_id"] for each in found if each.kind == "sandbox.started"][-1])


def _zombies() -> list[str]:
    """Children of this process that have ended and that nobody has waited for."""
    numbers = [each for task in Path("/proc/self/task").iterdir() for each in (task / "children").read_text().split()]
    return [each for each in numbers if Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[0] == "Z"]


def _numbers(started: Record) -> list[int]:
    return [int(line.split()[1].rstrip(":")) for line in leftovers.of_sandbox(started)]


def _kill_container(started: Record) -> None:
    name = f"glovebox-{started.data['sandbox_id']}"
    subprocess.run(["docker", "kill", name], check=True, stdout=subprocess.DEVNULL)


def _kill_guest(started: Record) -> None:
    os.kill(min(_numbers(started)), signal.SIGKILL)


def _kill_sentry(started: Record) -> None:
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in _numbers(started)}
    sentries = [pid for pid, said in words.items() if said.startswith(b"runsc-sandbox")]
    assert sentries, "control: gVisor's kernel is a process of the host's"
    os.kill(sentries[0], signal.SIGKILL)


def _kill_bwrap(_: Record) -> None:
    found = [each for each in leftovers.family(os.getpid()) if each.name == "bwrap"]
    assert found, "control: there is a bwrap"
    for each in found:
        os.kill(each.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("driver", "kill"),
    [
        pytest.param("bubblewrap", _kill_bwrap, marks=pytest.mark.driver("bubblewrap")),
        pytest.param("bubblewrap", _kill_guest, marks=pytest.mark.driver("bubblewrap")),
        pytest.param("docker", _kill_container, marks=pytest.mark.driver("docker")),
        pytest.param("docker", _kill_guest, marks=pytest.mark.driver("docker")),
        pytest.param("gvisor", _kill_bwrap, marks=pytest.mark.driver("gvisor")),
        pytest.param("gvisor", _kill_sentry, marks=pytest.mark.driver("gvisor")),
    ],
)
async def test_a_sandbox_that_is_killed_never_looks_like_a_program_that_ended(
    driver: str, kill: Any, tmp_path: Path
) -> None:
    """I11: the call fails as ours and says so in one record; nothing of it is left, and the next call works."""
    settings = _directories(tmp_path, driver)
    async with _server(settings) as app:
        call_id = new_call_id()
        raised: list[Exception] = []

        async def make() -> None:
            try:
                await submitted(app, "run_python", {"code": PROGRAM}, call_id=call_id)
            except SandboxError as problem:
                raised.append(problem)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(make)
            started = await _started(settings, os.getpid(), call_id)
            kill(started)
        assert len(raised) == 1
        assert _ends(settings, call_id) == ["call.failed"]
        await until(lambda: not leftovers.of_sandbox(started), 2)
        result = await submitted(app, "run_python", {"code": "print(1)"})
        assert result.structured["stdout"]["text"] == "1\n"
    assert not leftovers.containers(os.getpid())
    assert verify(settings.state_dir / "audit").ok


@asynccontextmanager
async def _server(settings: Settings, *, worker: bool = False) -> AsyncIterator[App]:
    async with apps.opened(settings, "cli", worker=worker) as app:
        yield app
    for pid in workers(settings.state_dir):
        os.kill(pid, signal.SIGKILL)


async def _started(settings: Settings, server: int, call_id: str = "") -> Record:
    """The record of the call's sandbox, once its program runs."""
    found: list[Record] = []

    def running() -> bool:
        records = leftovers.records(settings.state_dir, server)
        found[:] = [each for each in records if each.kind == "sandbox.started" and call_id in ("", each.call_id)]
        # The guest and at least two of the program's.
        return bool(found) and len(leftovers.of_sandbox(found[0])) >= 3

    await until(running)
    return found[0]


def _lost(settings: Settings) -> int:
    """How many calls the log says are lost to their server's death, each of them once and with no other end."""
    lines = (settings.state_dir / "audit" / LOG_NAME).read_bytes().splitlines(keepends=True)
    found = [record for record in map(chain.parse, lines) if record.call_id is not None]
    ends = Counter(record.call_id for record in found if EVENTS[record.kind].ends_call)
    assert ends == Counter({record.call_id for record in found})
    lost = [record for record in found if record.kind == CallLost.kind]
    assert {record.data["cause"] for record in lost} == {"server"}
    return len(lost)


def _ends(settings: Settings, call_id: str) -> list[str]:
    found = [each for each in leftovers.records(settings.state_dir, os.getpid()) if each.call_id == call_id]
    return [each.kind for each in found if each.kind in ENDED]
