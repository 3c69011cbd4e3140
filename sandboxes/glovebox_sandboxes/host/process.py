"""Start a sandbox's outermost process, and a server's janitor. The only place that makes processes for sandboxes.

One thread that lives as long as the driver starts them, for two reasons. A child may ask to die with its parent, and
the kernel means the *thread* that started it (prctl(2), PR_SET_PDEATHSIG), so it must not be one of a pool's. And on
control groups v1 a thread can enter a group for the length of a fork, so that the child is born in it. Moving it later
makes the kernel wait for a grace period, ten milliseconds a call
(https://docs.kernel.org/admin-guide/cgroup-v1/cgroups.html, "tasks").
"""

import errno
import os
import queue
import signal
import socket
import subprocess  # noqa: TID251 - this is the module the ban points to
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.abc
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from glovebox_sandboxes.host.identity import unprivileged
from glovebox_sandboxes.host.sandbox import Process, SocketStream
from glovebox_sandboxes.host.staging import Stage

_T = TypeVar("_T")

_STOP_SECONDS = 10
"""Longest wait for the janitor on closing; it takes a few ms if everything is gone already."""
START_SECONDS = 10.0
"""For the thread to open directories or start a process: milliseconds on a working host."""


class Spawner:
    """The thread that starts processes."""

    def __init__(self, rest: Sequence[str] = ()) -> None:
        """Start the thread; it waits in the v1 control groups of the ``tasks`` files in ``rest``."""
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
        return await self._run(lambda: self._start(argv, stderr, descriptors, tasks), discard=_end)

    async def places(self, directories: Iterable[Path]) -> list[int]:
        """Return descriptors of directories, which a process inherits and the caller closes; all, or OSError."""
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
        """Run a function in the thread; discard a result after START_SECONDS. Raises its OSError, or ETIMEDOUT."""
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
        # Shielded, else the child would be lost. It takes milliseconds; a directory of a file server that hangs blocks
        # the thread for good.
        with anyio.move_on_after(START_SECONDS, shield=True):
            await done.wait()
            return future.result()
        future.add_done_callback(lambda late: None if late.exception() else discard(late.result()))
        raise OSError(errno.ETIMEDOUT, "the system did not answer")

    def _start(self, argv: Sequence[str], stderr: int, descriptors: Sequence[int], tasks: Sequence[str]) -> Process:
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
        with ExitStack() as undo:
            # Out of descriptors, for instance: the child would be lost.
            undo.callback(child.wait)
            undo.callback(child.kill)
            undo.callback(ours.close)
            pidfd = os.pidfd_open(child.pid)
            undo.callback(os.close, pidfd)
            stream = SocketStream(ours)
            undo.pop_all()
        child.returncode = 0  # reaped by Process: Popen must not wait for it again
        return Process(child.pid, pidfd, stream)

    def _serve(self) -> None:
        self._stage = Stage()
        while (work := self._work.get()) is not None:
            work()

    def close(self) -> None:
        """End the thread. Children that asked to die with their parent die now."""
        self._work.put(None)
        self._thread.join()


class Janitor:
    """A process that cleans up after a server killed with SIGKILL: its control groups, or what a driver names.

    With bubblewrap all else ends with the server: processes by PR_SET_PDEATHSIG, mounts and files with their namespace.
    It waits for its standard input to close, which the kernel does for a dead server. One per driver, started with its
    first sandbox.
    """

    def __init__(self, program: Path, *arguments: str) -> None:
        """Take its program for when its standard input closes: after ``bye`` by a server that ends properly."""
        self._command = [sys.executable, "-I", "-S", str(program), *arguments]
        self._running: tuple[int, int] | None = None

    def start(self) -> None:
        """Start it, once. Raises OSError."""
        if self._running is not None:
            return
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            # A session of its own: a Ctrl-C for the server must not reach it before the server is gone.
            child = subprocess.Popen(  # noqa: S603 - the interpreter we run on, with a program from this package
                self._command,
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                start_new_session=True,
            )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
        child.returncode = 0  # waited for by number
        self._running = child.pid, writing

    async def stop(self) -> bool:
        """Let it do its work now, and wait at most 10 s for it; return whether there was one."""
        if self._running is None:
            return False
        (pid, standard_input), self._running = self._running, None
        with suppress(BrokenPipeError):
            os.write(standard_input, b"bye")
        os.close(standard_input)
        with anyio.move_on_after(_STOP_SECONDS, shield=True) as waiting:
            await anyio.to_thread.run_sync(os.waitpid, pid, 0, abandon_on_cancel=True)
        if waiting.cancelled_caught:
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGKILL)  # the thread still waits for it
        return True


def _end(started: Process) -> None:
    signal.pidfd_send_signal(started.pidfd, signal.SIGKILL)
    started.stream.close()
    os.close(started.pidfd)
    os.waitpid(started.pid, 0)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _enter(tasks: Sequence[str]) -> None:
    """Move the calling thread, and so its next children, into control groups. 0 is "myself"."""
    for path in tasks:
        Path(path).write_text("0")
