"""Nothing of a container outlives its call: crash, cancellation, SIGKILL of the server (I10, I11, M6)."""

import gc
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import pytest
from anyio.streams.buffered import BufferedByteReceiveStream
from tests.fixtures.docker_sandboxes import (
    TIMEOUT_SECONDS,
    program,
    python,
    read_all,
    sandboxes,
    spec,
    wait_until_removed,
)
from tests.fixtures.docker_victim import COUNT

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.docker import usage
from glovebox_sandboxes.drivers.docker.driver import DockerDriver
from glovebox_sandboxes.drivers.docker.engine import CALL_SECONDS, Engine, host_from_environment
from glovebox_sandboxes.host.cgroup import GroupFiles

pytestmark = pytest.mark.driver("docker")

ROOT = Path(__file__).parent.parent.parent
_NAME_BYTES = 100


@asynccontextmanager
async def victim(*arguments: str) -> AsyncIterator[tuple[anyio.abc.Process, list[str]]]:
    """A server process with open containers, and their names."""
    command = [sys.executable, "-m", "tests.fixtures.docker_victim", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    async with await anyio.open_process(command, cwd=ROOT, env=environment, stderr=None) as process:
        if process.stdout is None:
            raise TypeError("a process without a pipe")
        lines = BufferedByteReceiveStream(process.stdout)
        with anyio.fail_after(TIMEOUT_SECONDS):
            yield process, [(await lines.receive_until(b"\n", _NAME_BYTES)).decode() for _ in range(COUNT)]


async def kill(process: anyio.abc.Process) -> None:
    """SIGKILL, and wait."""
    process.send_signal(signal.SIGKILL)
    await process.wait()


async def test_after_a_call_its_container_is_gone() -> None:
    """Leaving the driver waits for every removal; nothing is reported as leaked."""
    async with DockerDriver.connect() as driver:
        for _ in range(3):
            await program(driver, "print(1)")
    assert sandboxes(driver) == set()
    assert driver.leaked == {}


async def test_an_exception_in_a_call_leaves_nothing_and_stays_itself() -> None:
    """The caller's exception passes unchanged, the container goes."""
    with pytest.raises(ZeroDivisionError):
        async with DockerDriver.connect() as driver, driver.open(driver.plan(spec())):
            raise ZeroDivisionError
    assert sandboxes(driver) == set()


@pytest.mark.parametrize("moment", ["create", "attach", "start"])
async def test_a_cancelled_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """M6: cancelled just after any step of the start, the container is removed all the same."""
    original = getattr(Engine, moment)

    async def then_cancel(engine: Engine, *arguments: object) -> object:
        answer = await original(engine, *arguments)
        scope.cancel()
        return answer

    monkeypatch.setattr(Engine, moment, then_cancel)
    async with DockerDriver.connect() as driver:
        with anyio.CancelScope() as scope:
            async with driver.open(driver.plan(spec())):
                await anyio.sleep_forever()
        assert scope.cancelled_caught
    assert sandboxes(driver) == set()
    assert driver.leaked == {}


async def test_kill_returns_when_every_process_is_gone() -> None:
    """A program that ignores what can be ignored, in a session of its own: the connection ends at once."""
    code = (
        "import os, signal, sys\n"
        "for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    os.fork()\n"
        "os.write(1, b'up')\n"
        "while True: signal.pause()\n"
    )
    async with DockerDriver.connect() as driver, python(driver, code) as sandbox:
        with anyio.fail_after(TIMEOUT_SECONDS):
            assert (await sandbox.channel.receive()).startswith(b"up")
            await sandbox.kill()
            await sandbox.kill()
        assert set(await read_all(sandbox)) <= set("up")


async def test_without_sight_of_its_control_groups_a_container_is_killed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that is in a container itself: no accounts, and neither kill nor facts wait for any."""
    monkeypatch.setattr(usage, "group", lambda *_: GroupFiles({}))
    async with DockerDriver.connect() as driver, python(driver, "import signal; signal.pause()") as sandbox:
        with anyio.fail_after(CALL_SECONDS / 2):
            assert (await sandbox.stats()).memory_peak_bytes is None
            await sandbox.kill()
        assert await read_all(sandbox) == ""


@pytest.mark.parametrize("state", ["running", "created"])
async def test_a_killed_server_leaves_no_container(state: str) -> None:
    """I11: SIGKILL while containers run, and while they are created and not yet started."""
    async with victim(state) as (process, names):
        assert {name.removeprefix("glovebox-") for name in names} <= sandboxes()
        await kill(process)
        wait_until_removed(names)
        assert not {name.removeprefix("glovebox-") for name in names} & sandboxes()


async def test_without_janitor_a_created_container_stays_until_the_next_server() -> None:
    """Control for the janitor, and what happens where it was killed too: the next server on the machine reaps."""
    async with victim("created", "without-janitor") as (process, names):
        ids = {name.removeprefix("glovebox-") for name in names}
        async with DockerDriver.connect():
            assert ids <= sandboxes(), "a living server's containers are not the next one's to remove"
        await kill(process)
        assert ids <= sandboxes()
        async with DockerDriver.connect() as driver:
            pass
        assert not ids & sandboxes()
        assert driver.leaked == {}


# The SDK leaves the socket of a failed connection to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_an_engine_that_goes_away_is_told_with_its_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The socket disappears under a server: the call is refused with the fix; what cannot be removed is told."""
    link = tmp_path / "engine.sock"
    link.symlink_to(host_from_environment().removeprefix("unix://"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{link}")
    async with DockerDriver.connect() as driver:
        plan = driver.plan(spec())
        link.unlink()
        driver._connection.engine.close()  # type: ignore[union-attr]  # its idle connections would still work
        with pytest.raises(SandboxError, match=r"^Creating a container.*systemctl start docker"):
            async with driver.open(plan):
                pytest.fail("there is no Engine")
    assert list(driver.leaked.values()) == ["No such file or directory"]
    gc.collect()
