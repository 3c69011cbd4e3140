"""One fork of a zygote, in blocking code: how it is made, looked at and ended. For a thread of its own.

The zygote gets an order with descriptors, and the fork sends its pidfd over its own wire before it is a guest. See
``_glovebox_guest.zygote``.
"""

import json
import os
import select
import signal
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host import host_view
from glovebox_sandboxes.host.cgroup import Cgroup
from glovebox_sandboxes.host.descriptors import opened, receive
from glovebox_sandboxes.host.process import END_SECONDS, START_SECONDS, read_words, seal_size

_FDINFO_BYTES = 4096


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Fork:
    """A sandbox that a zygote forked."""

    id: str
    pid: int
    pidfd: int
    wire: socket.socket
    """Our end of its standard input and output."""
    group: Cgroup
    detail: int
    """A memory file with its standard error."""
    zygote: host_view.ZygoteView

    @property
    def counters(self) -> dict[str, str]:
        """See ``GroupFiles.counters``."""
        return self.group.counters()

    def hand_over(self) -> dict[str, int]:
        """Return descriptors for the call that gets it, by name; they stay ours."""
        return {"wire": self.wire.fileno(), "pidfd": self.pidfd, "detail": self.detail}

    def weigh(self, parts: int) -> None:
        """See ``Sandbox.weigh``."""
        self.group.weigh(parts)

    def look(self) -> host_view.HostView:
        """Return the host's view of its first process."""
        return replace(host_view.look(self.pid, self.group.read_back(self.pid)), zygote=self.zygote)

    def end(self) -> None:
        """Kill all its processes, wait until they are gone, and remove its group. Raises SandboxError if one stays."""
        with ExitStack() as held:
            held.callback(os.close, self.detail)
            held.callback(os.close, self.pidfd)
            self.wire.close()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)  # and all in its pid namespace with it
            over = select.poll()
            over.register(self.pidfd, select.POLLIN)  # see pidfd_open(2)
            over.poll(END_SECONDS * 1000)
            for pause in self.group.removing():
                time.sleep(pause)


def _remove(group: Cgroup) -> None:
    with suppress(SandboxError):
        for pause in group.removing():
            time.sleep(pause)


def fork(orders: socket.socket, zygote: host_view.ZygoteView, name: str, group: Cgroup, uid: int | None) -> Fork:
    """Have a zygote fork a sandbox with this name, into its group, as this user by the zygote's numbers.

    ``orders`` is the zygote's socket, and ``group`` is removed if the fork fails.

    Raises:
        OSError: the zygote is gone, or a step was refused.
        LookupError: the fork ended at once; the message is its last words.
    """
    with ExitStack() as failed, ExitStack() as sent:
        failed.callback(_remove, group)
        detail = os.memfd_create("guest-stderr", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        failed.callback(os.close, detail)
        seal_size(detail)
        ours, theirs = socket.socketpair()
        failed.callback(ours.close)
        sent.callback(theirs.close)
        descriptors = [theirs.fileno(), detail]
        for entrance in group.entrances:
            descriptors.append(os.open(entrance, os.O_WRONLY | os.O_CLOEXEC))
            sent.callback(os.close, descriptors[-1])
        socket.send_fds(orders, [json.dumps({"uid": uid}).encode()], descriptors)
        sent.close()
        ours.settimeout(START_SECONDS)
        _, pidfds = receive(ours, 1, 1)
        if not pidfds:
            raise LookupError(read_words(detail) or "its zygote has ended")
        failed.callback(os.close, pidfds[0])
        # proc(5), /proc/pid/fdinfo: the process's number on our side.
        with opened(f"/proc/self/fdinfo/{pidfds[0]}") as told:
            pid = int(os.read(told, _FDINFO_BYTES).partition(b"\nPid:")[2].split()[0])
        failed.pop_all()
        return Fork(id=name, pid=pid, pidfd=pidfds[0], wire=ours, group=group, detail=detail, zygote=zygote)
