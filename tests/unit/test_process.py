"""Starting a process for a sandbox: its stream, its end, and what happens when starting it breaks off half-way."""

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from glovebox_sandboxes.host.cgroup import Cgroup
from glovebox_sandboxes.host.identity import HOST_UIDS, SETPRIV, covers, mapped, unprivileged
from glovebox_sandboxes.host.process import Process, ProcessSandbox, Spawner

CAT = shutil.which("cat") or "/bin/cat"
SECONDS = 20


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    """A thread that starts processes; no descriptor more afterwards than before."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with closing(Spawner()) as made:
        yield made
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.fixture
def null() -> Iterator[int]:
    """Standard error of the processes."""
    descriptor = os.open("/dev/null", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


def children() -> list[str]:
    """Numbers of this process's children."""
    tasks = Path("/proc/self/task").iterdir()
    found: list[str] = []
    for task in tasks:
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended, as of another test's pool
            found += (task / "children").read_text().split()
    return found


async def over(process: Process) -> None:
    """End a process."""
    await process.stream.aclose()
    process.kill()
    await process.wait()


async def everything(process: Process) -> str:
    """What it prints until it ends."""
    told = bytearray()
    while True:
        try:
            told += await process.stream.receive()
        except anyio.EndOfStream:
            return told.decode()


async def test_a_process_is_a_stream(spawner: Spawner, null: int) -> None:
    """What is sent comes back whole, also more than a pipe holds; one that ends ends it, and sending then is told."""
    content = os.urandom(1_000_000)
    with anyio.fail_after(SECONDS):
        process = await spawner.start([CAT], stderr=null, descriptors=())
        got = bytearray()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(process.stream.send, content)
            while len(got) < len(content):
                got += await process.stream.receive()
        assert got == content
        await over(process)
        await over(process)  # twice is once
    with pytest.raises(anyio.ClosedResourceError):
        await process.stream.receive()
    with anyio.fail_after(SECONDS):
        process = await spawner.start(["/bin/true"], stderr=null, descriptors=())
        with pytest.raises(anyio.EndOfStream):
            await process.stream.receive()
        await process.wait()
        with pytest.raises(anyio.BrokenResourceError):
            await process.stream.send(b"x")
        await over(process)


async def test_a_process_has_nothing_of_ours(spawner: Spawner, null: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """M12: no environment, no descriptor but its own, no group, no user of ours, `/` as its directory."""
    monkeypatch.setenv("CANARY", "secret")
    held = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(held, True)
    script = "env; ls /proc/self/fd; id -u; id -G; pwd; umask; grep NoNewPrivs /proc/self/status"
    try:
        with anyio.fail_after(SECONDS):
            process = await spawner.start(["/bin/sh", "-c", script], stderr=null, descriptors=())
            told = await everything(process)
            await over(process)
    finally:
        os.close(held)
    lines = told.split("\n")
    assert "secret" not in told
    assert [line for line in lines if line.isdigit() and len(line) < 4] == ["0", "1", "2", "3"]  # 3 is ls's own
    assert "/" in lines
    assert "0077" in lines
    if os.geteuid() == 0:
        ids = [int(line) for line in lines if line.isdigit() and int(line) >= 65532]
        assert len(ids) == 2  # the user, and no group but the same number
        assert ids[0] == ids[1]
        assert ids[0] in HOST_UIDS or not mapped(HOST_UIDS)
        assert "NoNewPrivs:\t1" in lines


async def test_a_start_that_breaks_off_leaves_no_process(
    spawner: Spawner, null: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of descriptors after the child was made: it is ended and reaped, and the reason is told."""

    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = children()
    with monkeypatch.context() as patch:
        patch.setattr("os.pidfd_open", fail)
        with anyio.fail_after(SECONDS), pytest.raises(OSError, match="Too many open files"):
            await spawner.start([CAT], stderr=null, descriptors=())
    assert children() == before


async def test_a_program_that_is_not_there_is_told(spawner: Spawner, null: int) -> None:
    """As an error, or, where another program has to become the user first, as an end without a word."""
    with anyio.fail_after(SECONDS):
        try:
            process = await spawner.start(["/nonexistent"], stderr=null, descriptors=())
        except FileNotFoundError:
            return
        with pytest.raises(anyio.EndOfStream):
            await process.stream.receive()
        await over(process)


async def test_starting_is_not_cut_in_two_by_cancellation(spawner: Spawner, null: int) -> None:
    """Who is cancelled meanwhile still gets the process, to end it."""
    process: Process | None = None
    with anyio.fail_after(SECONDS):
        with anyio.CancelScope() as scope:
            scope.cancel()
            process = await spawner.start([CAT], stderr=null, descriptors=())
        assert process is not None
        await over(process)


@pytest.mark.skipif(os.geteuid() != 0, reason="only a server run as root becomes another user")
def test_each_sandbox_is_a_user_of_its_own() -> None:
    """So that nothing the kernel counts per user is shared by two of them."""
    users = {unprivileged(["true"])[1] for _ in range(20)}
    assert len(users) > 15 or not mapped(HOST_UIDS)
    assert unprivileged(["true", "x"])[0] == SETPRIV
    assert unprivileged(["true", "x"])[-3:] == ["--", "true", "x"]


@pytest.mark.parametrize(
    ("mapping", "wanted"),
    [
        ("         0          0 4294967295\n", True),
        ("0 100000 65536\n", False),
        ("0 1000 1\n1 100000 65535\n", False),
        ("0 0 2000065536\n", True),
        ("0 0 2000065535\n", False),
        ("", False),
    ],
)
def test_users_that_do_not_exist_here_are_not_used(mapping: str, *, wanted: bool) -> None:
    """In a container with its own users there may be only 65,536 of them."""
    assert covers(mapping, HOST_UIDS) is wanted


async def test_a_system_that_does_not_answer_is_told(
    spawner: Spawner, null: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that hangs fails after START_SECONDS, and what it starts later is ended. Control: it runs."""
    await over(await spawner.start([CAT], stderr=null, descriptors=()))
    before = len(children())
    release = threading.Event()
    original = spawner._start

    def hanging(*arguments: Any) -> Any:
        release.wait(SECONDS)
        return original(*arguments)

    monkeypatch.setattr(spawner, "_start", hanging)
    monkeypatch.setattr("glovebox_sandboxes.host.process.START_SECONDS", 0.05)
    with anyio.fail_after(SECONDS):
        with pytest.raises(OSError, match="did not answer") as told:
            await spawner.start([CAT], stderr=null, descriptors=())
        release.set()
        await anyio.to_thread.run_sync(spawner.close)
    assert told.value.errno == errno.ETIMEDOUT
    assert len(children()) == before


class Noted(Cgroup):
    """A control group that notes what is done to it."""

    def __init__(self) -> None:
        super().__init__(None, "s1", {})
        self.directories = {"": "/nowhere"}
        self.said: list[tuple[str, int | None]] = []

    def weigh(self, parts: int) -> None:
        """Note it."""
        self.said.append(("weigh", parts))

    def kill(self, *, spared: int | None = None) -> None:
        """Note it."""
        self.said.append(("kill", spared))


async def test_a_sandbox_has_a_whole_share_to_end_with(spawner: Spawner, null: int) -> None:
    """One of many of its caller's has a small share, and to end takes a processor; bwrap is spared, which reaps."""
    process, group = await spawner.start([CAT], stderr=null, descriptors=()), Noted()
    await ProcessSandbox("s1", process, group, null).kill()
    assert group.said == [("weigh", 1), ("kill", process.pid)]
