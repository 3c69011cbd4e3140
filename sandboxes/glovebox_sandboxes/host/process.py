"""Starting a sandbox's outermost process, and the byte stream to it. The only place that makes processes for sandboxes.

Processes are started by one thread that lives as long as the driver, for two reasons. A child may ask to die with its
parent, and the kernel means the *thread* that started it (prctl(2), PR_SET_PDEATHSIG), so it must not be one of a
pool's. And on control groups v1 a thread can enter a group by itself for the length of a fork, so that the child is
born in it: moving it later makes the kernel wait for a grace period, ten milliseconds a call
(https://docs.kernel.org/admin-guide/cgroup-v1/cgroups.html, "tasks").
"""

import errno
import os
import queue
import signal
import socket
import subprocess  # noqa: TID251 - this is the module the ban points to
import threading
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import anyio
import anyio.abc
import anyio.from_thread
import anyio.lowlevel

from glovebox_sandboxes.host.identity import unprivileged
from glovebox_sandboxes.host.staging import Stage

_T = TypeVar("_T")

START_SECONDS = 10.0
"""For the thread to open directories or start a process: milliseconds, on a host that works."""


class SocketStream(anyio.abc.ByteStream):
    """Our end of a child's standard input and output, which are one socket, as a stream."""

    def __init__(self, end: socket.socket) -> None:
        """Take it over."""
        end.setblocking(False)
        self._end = end
        self._closed = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """See ``anyio.abc.ByteReceiveStream``."""
        try:
            data = await self._when(anyio.wait_readable, lambda: self._end.recv(max_bytes))
        except ConnectionResetError:  # the other end went with something unread
            data = b""
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        """See ``anyio.abc.ByteSendStream``."""
        view = memoryview(item)
        while view:
            view = view[await self._write(partial(self._end.send, view)) :]

    async def send_descriptors(self, item: bytes, descriptors: Sequence[int]) -> None:
        """Send a short message with open descriptors; see unix(7)."""
        await self._write(lambda: socket.send_fds(self._end, [item], descriptors))

    async def receive_descriptor(self) -> int | None:
        """A descriptor that comes with one byte; None if the other end was closed instead."""
        try:
            found = await self._when(anyio.wait_readable, lambda: socket.recv_fds(self._end, 1, 1)[1])
        except ConnectionResetError:
            return None
        return found[0] if found else None

    async def _write(self, action: Callable[[], int]) -> int:
        try:
            return await self._when(anyio.wait_writable, action)
        except (BrokenPipeError, ConnectionResetError):
            raise anyio.BrokenResourceError from None

    async def _when(self, ready: Callable[[socket.socket], Awaitable[None]], action: Callable[[], _T]) -> _T:
        """Do it as soon as it can be done at once."""
        while True:
            if self._closed:
                raise anyio.ClosedResourceError
            try:
                return action()
            except BlockingIOError:
                await ready(self._end)

    async def send_eof(self) -> None:
        """Part of ``ByteStream``; nobody calls it, as the wire says when it ends. To pretend would hide a mistake."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close it, and wake who waits for it."""
        if not self._closed:
            anyio.notify_closing(self._end)
            self.close()

    def close(self) -> None:
        """Close it, where nobody waits for it."""
        self._closed = True
        self._end.close()


class Process:
    """A child process. Its end is seen through a pidfd, so its number cannot mean another process meanwhile."""

    def __init__(self, started: "Started", *, ours: bool = True) -> None:
        """Take over the running process; ``ours`` is False for a child of a child, which its own parent reaps."""
        self.pid = started.pid
        self.stream = started.stream
        self._pidfd = started.pidfd
        self._ours = ours
        self._over = False

    def kill(self) -> None:
        """Send SIGKILL; fine if it has ended."""
        if not self._over:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def wait(self) -> None:
        """Return when it has ended and is reaped."""
        if not self._over:
            await anyio.wait_readable(self._pidfd)  # see pidfd_open(2)
            self._over = True
            os.close(self._pidfd)
            if self._ours:
                os.waitpid(self.pid, os.WNOHANG)  # noqa: ASYNC222 - it has ended: nothing is waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What the thread hands back: the child by number and by descriptor, and our ends of its pipes."""

    pid: int
    pidfd: int
    stream: SocketStream


class Spawner:
    """The thread that starts processes."""

    def __init__(self, rest: Sequence[str] = ()) -> None:
        """Start the thread.

        Args:
            rest: ``tasks`` files of the v1 control groups the thread waits in between two starts.
        """
        self._rest = tuple(rest)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="glovebox-spawner", daemon=True)
        self._thread.start()

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
        started = await self._run(lambda: self._start(argv, stderr, descriptors, tasks), discard=_end)
        return Process(started)

    async def places(self, directories: Iterable[Path]) -> list[int]:
        """Descriptors of directories for a process to mount; it inherits them, and the caller closes them.

        Raises:
            OSError: one cannot be opened; none stays open.
        """
        return await self._run(lambda: self._open(directories), discard=_close)

    def _open(self, directories: Iterable[Path]) -> list[int]:
        opened: list[int] = []
        try:
            for directory in directories:
                opened.append(self._stage.open(directory))  # noqa: PERF401 - those before a failure are closed
        except BaseException:
            for descriptor in opened:
                os.close(descriptor)
            raise
        return opened

    async def _run(self, action: Callable[[], _T], *, discard: Callable[[_T], None]) -> _T:
        """Let the thread do something, and wait for it; what comes after START_SECONDS is discarded.

        Raises:
            OSError: what the action raised, or ETIMEDOUT.
        """
        future: Future[_T] = Future()
        token = anyio.lowlevel.current_token()
        done = anyio.Event()

        def work() -> None:
            try:
                future.set_result(action())
            except BaseException as problem:  # noqa: BLE001 - handed to the caller
                future.set_exception(problem)
            with suppress(anyio.RunFinishedError):
                anyio.from_thread.run_sync(done.set, token=token)

        self._work.put(work)
        # Shielded, else nobody would know the child. It takes milliseconds, but a directory of a file server that does
        # not answer holds the thread up for good.
        with anyio.move_on_after(START_SECONDS, shield=True):
            await done.wait()
            return future.result()
        future.add_done_callback(lambda late: None if late.exception() else discard(late.result()))
        raise OSError(errno.ETIMEDOUT, "the system did not answer")

    def _start(self, argv: Sequence[str], stderr: int, descriptors: Sequence[int], tasks: Sequence[str]) -> Started:
        # A socket: pipes could be opened a second time through /proc, and no descriptors would go through them.
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
        with ExitStack() as undo:
            # Out of descriptors, for instance: nobody would know the child any more.
            undo.callback(child.wait)
            undo.callback(child.kill)
            undo.callback(ours.close)
            pidfd = os.pidfd_open(child.pid)
            undo.callback(os.close, pidfd)
            stream = SocketStream(ours)
            undo.pop_all()
        child.returncode = 0  # reaped by Process: Popen must not look for it again
        return Started(pid=child.pid, pidfd=pidfd, stream=stream)

    def _serve(self) -> None:
        self._stage = Stage()
        while (work := self._work.get()) is not None:
            work()

    def close(self) -> None:
        """End the thread. Children that asked to die with their parent die now."""
        self._work.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def helper(argv: Sequence[str]) -> tuple[int, int]:
    """Start a small program of ours beside the server, in a session of its own; its number and its standard input.

    It keeps the server's rights. Raises OSError.
    """
    # A session of its own: a Ctrl-C for the server must not reach it before the server is gone.
    child = subprocess.Popen(  # noqa: S603 - the interpreter we run on, with a program from this package
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        start_new_session=True,
    )
    if child.stdin is None:
        raise TypeError("a child without pipes")
    standard_input = os.dup(child.stdin.fileno())
    child.stdin.close()
    child.returncode = 0  # waited for by number
    return child.pid, standard_input


def _end(started: Started) -> None:
    """Nobody waits for it any more."""
    signal.pidfd_send_signal(started.pidfd, signal.SIGKILL)
    started.stream.close()
    os.close(started.pidfd)
    os.waitpid(started.pid, 0)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _enter(tasks: Sequence[str]) -> None:
    """Put the calling thread, and so what it starts next, into control groups. 0 is "myself"."""
    for path in tasks:
        Path(path).write_text("0")
