"""A sandbox that is processes of this host: the byte stream to its guest, its end, and the kernel's counts."""

import fcntl
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import anyio
import anyio.abc

from glovebox_sandboxes.contract.base import SandboxStats
from glovebox_sandboxes.host import host_view
from glovebox_sandboxes.host.cgroup import Cgroup

_T = TypeVar("_T")

DETAIL_BYTES = 8192
_END_SECONDS = 0.3
"""From SIGKILL to the end of every process: usually a millisecond, and the whole must stay below 1 s."""


class SocketStream(anyio.abc.ByteStream):
    """A stream over a child's standard input and output, which are one socket."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._closed = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """See ``anyio.abc.ByteReceiveStream``."""
        try:
            data = await self._when(anyio.wait_readable, lambda: self._end.recv(max_bytes))
        except ConnectionResetError:  # the other end closed with unread data
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
        """Return a descriptor that comes with one byte; None if the other end was closed."""
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
        while True:
            if self._closed:
                raise anyio.ClosedResourceError
            try:
                return action()
            except BlockingIOError:
                await ready(self._end)

    async def send_eof(self) -> None:
        """Raise: anyio demands this method, and the wire marks its own end, so a call is a mistake."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """Close it, and wake its waiters."""
        if not self._closed:
            anyio.notify_closing(self._end)
            self.close()

    def close(self) -> None:
        """Close it when no task waits for it."""
        self._closed = True
        self._end.close()


@dataclass(slots=True)
class Process:
    """A child process. A pidfd reports its end, so its number cannot mean another process meanwhile."""

    pid: int
    pidfd: int
    stream: SocketStream
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

    def _first(self) -> int | None:
        return self._process.pid if self._zygote else host_view.only_child(self._process.pid)

    async def kill(self) -> None:
        """End every process with SIGKILL, and wait until they are gone; bwrap ends by itself.

        The guest is not asked to end: it would wait for a processor behind its own program. Killing bwrap ends it too
        (--die-with-parent), but it stays unreaped if the host's process 1 does not reap, as in many containers. If
        bwrap has not started the guest yet, its closed wire ends that.
        """
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
        with anyio.move_on_after(_END_SECONDS):
            await self._process.wait()
            return
        self._process.kill()
        await self._process.wait()

    async def stats(self) -> SandboxStats:
        """See ``Sandbox.stats``."""
        return replace(self._group.stats() or SandboxStats(), detail=read_words(self._detail)[-2000:])


def seal_size(descriptor: int) -> None:
    """Seal a memory file's size, so that no flood of messages can make it grow."""
    os.ftruncate(descriptor, DETAIL_BYTES)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)


def read_words(detail: int) -> str:
    """Return the text in a memory file of ``seal_size``."""
    return os.pread(detail, DETAIL_BYTES, 0).rstrip(b"\0").decode(errors="replace").strip()
