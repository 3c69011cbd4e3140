"""Start a sandbox's outermost process, and a server's janitor. The only place that makes processes for sandboxes.

A sandbox here is processes of this host: a byte stream to its guest, its end, and the kernel's counts.

One thread that lives as long as the driver starts them, for two reasons. A child may ask to die with its parent, and
the kernel means the *thread* that started it (prctl(2), PR_SET_PDEATHSIG), so it must not be one of a pool's. And on
control groups v1 a thread can enter a group for the length of a fork, so that the child is born in it. Moving it later
makes the kernel wait for a grace period, ten milliseconds a call
(https://docs.kernel.org/admin-guide/cgroup-v1/cgroups.html, "tasks").
"""

import asyncio
import errno
import fcntl
import os
import signal
import socket
import subprocess  # noqa: TID251 - this is the module the ban points to
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import anyio.abc
import anyio.to_thread
from anyio.abc import ByteStream, SocketAttribute, UNIXSocketStream

from _glovebox_guest.kernel import prctl
from glovebox_sandboxes.contract.base import SandboxStats
from glovebox_sandboxes.host import host_view
from glovebox_sandboxes.host.cgroup import Cgroup, GroupFiles
from glovebox_sandboxes.host.identity import unprivileged
from glovebox_sandboxes.host.staging import Stage

_T = TypeVar("_T")
_Started = tuple[int, int, socket.socket]
"""A child's number and pidfd, and our end of its standard input and output."""

DETAIL_BYTES = 8192
END_SECONDS = 0.3
"""From SIGKILL to the end of every process: usually a millisecond, and the whole must stay below 1 s."""
_STOP_SECONDS = 10
"""Longest wait for the janitor on closing; it takes a few ms if everything is gone already."""
START_SECONDS = 10.0
"""For the thread to open directories or start a process: milliseconds on a working host."""


@dataclass(slots=True)
class Process:
    """A child process. A pidfd reports its end, so its number cannot mean another process meanwhile."""

    pid: int
    pidfd: int
    stream: UNIXSocketStream
    """Our end of its standard input and output."""
    ours: bool = True
    """False for a grandchild, which its own parent reaps."""
    _over: bool = False

    def kill(self) -> None:
        """Send SIGKILL; does nothing if it has ended."""
        if not self._over:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def wait(self) -> None:
        """Wait until it has ended and is reaped."""
        if not self._over:
            await anyio.wait_readable(self.pidfd)  # see pidfd_open(2)
            self._over = True
            os.close(self.pidfd)
            if self.ours:
                os.waitpid(self.pid, os.WNOHANG)  # noqa: ASYNC222 - it has ended: nothing is waited for


class ProcessSandbox:
    """One live sandbox: its first process, the stream to its guest, and its control group."""

    def __init__(
        self, name: str, process: Process, group: Cgroup, detail: int, *, zygote: host_view.ZygoteView | None = None
    ) -> None:
        """Take over a process: bwrap itself, or a zygote's fork, the sandbox's first."""
        self.id = name
        self.channel = process.stream
        self.user: int | None = None
        """User of its processes on the host, if it may start others as other users."""
        self._zygote = zygote
        self._process = process
        self._group = group
        self._detail = detail
        self.cpu_seconds = group.cpu_seconds
        self.weigh = group.weigh

    async def host_view(self) -> host_view.HostView:
        """See ``Sandbox.host_view``."""
        first = self._first()
        compared = self._group.read_back(first)
        if first is None:
            return host_view.unseen("bwrap's child cannot be found in /proc", compared)
        return replace(host_view.look(first, compared), zygote=self._zygote)

    def hand_over(self) -> dict[str, int]:
        """See ``OpenSandbox.hand_over``."""
        return hand_over(self.channel, self._first, self._group)

    def _first(self) -> int | None:
        return self._process.pid if self._zygote else host_view.only_child(self._process.pid)

    async def kill(self) -> None:
        """End every process with SIGKILL, and wait until they are gone; bwrap ends by itself.

        The guest is not asked to end: it would wait for a processor behind its own program. Killing bwrap ends it too
        (--die-with-parent), but it stays unreaped if the host's process 1 does not reap, as in many containers. If
        bwrap has not started the guest yet, its closed wire ends that.
        """
        with anyio.CancelScope(shield=True):
            await self._process.stream.aclose()
        # With a small share it would be slow to die: that takes a processor too.
        self.weigh(1)
        if self._zygote:
            self._process.kill()
        if self._group.directories:
            self._group.kill(spared=None if self._zygote else self._process.pid)
        elif not self._zygote and (first := self._first()) is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(first, signal.SIGKILL)
        with anyio.move_on_after(END_SECONDS):
            await self._process.wait()
            return
        self._process.kill()
        await self._process.wait()

    async def stats(self) -> SandboxStats:
        """See ``Sandbox.stats``."""
        words = read_words(self._detail)[-2000:]
        return replace(self._group.stats() or SandboxStats(), detail=words)


def hand_over(channel: ByteStream, first: Callable[[], int | None], group: GroupFiles) -> dict[str, int]:
    """Return descriptors by name: the ``wire``, and as far as they are seen, first process (``pidfd``) and ``time``.

    ``first`` returns the number of its first process if that is certain, now.
    """
    handed = {"wire": os.dup(channel.extra(SocketAttribute.raw_socket).fileno())}  # noqa: S610 - not Django's
    pid = first()
    with suppress(OSError):  # it has just ended, or no descriptor is left
        if pid is not None:
            handed["pidfd"] = os.pidfd_open(pid)
            if first() != pid:  # it has ended, and its number may be another's
                os.close(handed.pop("pidfd"))
        if (place := group.counters().get("time")) is not None:
            handed["time"] = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    return handed


def seal_size(descriptor: int) -> None:
    """Seal a memory file's size, so that no flood of messages can make it grow."""
    os.ftruncate(descriptor, DETAIL_BYTES)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)


def read_words(detail: int) -> str:
    """Return the text in a memory file of ``seal_size``."""
    return os.pread(detail, DETAIL_BYTES, 0).rstrip(b"\0").decode(errors="replace").strip()


class Spawner:
    """The thread that starts processes, itself started by its first task."""

    def __init__(self, rest: Sequence[str] = ()) -> None:
        """Have it wait in the v1 control groups of the ``tasks`` files in ``rest``."""
        self._rest = tuple(rest)
        self._thread = ThreadPoolExecutor(1, "glovebox-spawner", self._prepare)

    def _prepare(self) -> None:
        self._stage = Stage()

    async def start(
        self, argv: Sequence[str], *, stderr: int, descriptors: Sequence[int], tasks: Sequence[str] = ()
    ) -> Process:
        """Start a process as the unprivileged user, without environment, with one socket for input and output.

        Args:
            argv: program and arguments.
            stderr: descriptor that becomes its standard error.
            descriptors: others it inherits, under their own numbers.
            tasks: ``tasks`` files of the v1 control groups it is to be born in.

        Raises:
            OSError: it could not be started.
        """
        pid, pidfd, ours = await self._run(lambda: self._start(argv, stderr, descriptors, tasks), discard=_end)
        return Process(pid, pidfd, await UNIXSocketStream.from_socket(ours))

    async def places(self, directories: Iterable[Path]) -> list[int]:
        """Return descriptors of directories, which a process inherits and the caller closes; all, or OSError."""
        return await self._run(lambda: self._open(directories), discard=_close)

    def _open(self, directories: Iterable[Path]) -> list[int]:
        opened: list[int] = []
        try:
            for directory in directories:
                opened.append(self._stage.open(directory))  # noqa: PERF401 - those before a failure are closed
        except BaseException:
            _close(opened)
            raise
        return opened

    async def _run(self, action: Callable[[], _T], *, discard: Callable[[_T], None]) -> _T:
        """Run a function in the thread; discard a result after START_SECONDS. Raises its OSError, or ETIMEDOUT."""
        future = self._thread.submit(action)
        # Shielded, else the child would be lost. It takes milliseconds; a directory of a file server that hangs blocks
        # the thread for good.
        with anyio.move_on_after(START_SECONDS, shield=True):
            return await asyncio.wrap_future(future)

        def late(done: Future[_T]) -> None:
            if not done.cancelled() and done.exception() is None:
                discard(done.result())

        future.add_done_callback(late)
        raise OSError(errno.ETIMEDOUT, "the system did not answer")

    def _start(self, argv: Sequence[str], stderr: int, descriptors: Sequence[int], tasks: Sequence[str]) -> _Started:
        # A socket: pipes could be opened a second time through /proc, and cannot carry descriptors.
        ours, theirs = socket.socketpair()
        try:
            _enter(tasks)
            # Not asyncio's: it starts in the event loop's thread, and brings a thread of its own for every child.
            child = subprocess.Popen(  # noqa: S603 - a fixed program of the system's, no shell
                unprivileged(argv),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=stderr,
                env={},
                cwd="/",
                pass_fds=tuple(descriptors),
                umask=0o077,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            if tasks:
                _enter(self._rest)
        try:
            pidfd = os.pidfd_open(child.pid)
        except BaseException:
            # Out of descriptors, for instance: the child would be lost.
            ours.close()
            child.kill()
            child.wait()
            raise
        child.returncode = 0  # reaped by Process: Popen must not wait for it again
        return child.pid, pidfd, ours

    def close(self) -> None:
        """End the thread. Children that asked to die with their parent die now."""
        self._thread.shutdown()


class Janitor:
    """A process that cleans up after a server killed with SIGKILL: its control groups, or what a driver names.

    With bubblewrap all else ends with the server: processes by PR_SET_PDEATHSIG, mounts and files with their namespace.
    It waits for its standard input to close, which the kernel does for a dead server. One per driver, started with its
    first sandbox.
    """

    def __init__(self, program: Path, *arguments: str) -> None:
        """Take its program for when its standard input closes: after ``bye`` by a server that ends properly."""
        self._command = [sys.executable, "-I", "-S", str(program), *arguments]
        self._running: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, once. Raises OSError."""
        if self._running is None:
            # A session of its own: a Ctrl-C for the server must not reach it before the server is gone.
            self._running = subprocess.Popen(  # noqa: S603 - the interpreter we run on, with a program from this package
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                start_new_session=True,
            )

    async def stop(self) -> bool:
        """Let it do its work now, and wait at most 10 s for it; return whether there was one."""
        running, self._running = self._running, None
        if running is None:
            return False
        with anyio.CancelScope(shield=True):
            try:
                await anyio.to_thread.run_sync(running.communicate, b"bye", _STOP_SECONDS)
            except subprocess.TimeoutExpired:
                running.kill()
                await anyio.to_thread.run_sync(running.wait)
        return True


def end_with_parent(parent: int) -> None:
    """Have this process asked to end when its parent has ended."""
    prctl("PR_SET_PDEATHSIG", signal.SIGTERM)
    if os.getppid() != parent:
        signal.raise_signal(signal.SIGTERM)


def _end(started: _Started) -> None:
    pid, pidfd, ours = started
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    ours.close()
    os.close(pidfd)
    os.waitpid(pid, 0)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _enter(tasks: Sequence[str]) -> None:
    """Move the calling thread, and so its next children, into control groups. 0 is "myself"."""
    for path in tasks:
        Path(path).write_text("0")
