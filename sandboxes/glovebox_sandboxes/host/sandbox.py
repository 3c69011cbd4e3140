"""A sandbox that is processes of this host: the byte stream to its guest, its end, and the kernel's counts."""

import fcntl
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, replace

import anyio
from anyio.abc import UNIXSocketStream

from glovebox_sandboxes.contract.base import SandboxStats
from glovebox_sandboxes.host import host_view
from glovebox_sandboxes.host.cgroup import Cgroup

DETAIL_BYTES = 8192
_END_SECONDS = 0.3
"""From SIGKILL to the end of every process: usually a millisecond, and the whole must stay below 1 s."""


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
