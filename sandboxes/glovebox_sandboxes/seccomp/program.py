"""Further filters for programs alone, which the guest installs if the kernel or the host lacks something.

Linux keeps from a pid namespace's process 1 every signal of its own namespace that it does not handle
(pid_namespaces(7)). gVisor does not, and has no Landlock to keep signals apart, so a program there may not name process
1 to any call that signals.

Without a control group that counts processor time, the guest counts it, from processes that live or were waited for.
Children of a process that ignores SIGCHLD are never waited for (sigaction(2), SA_NOCLDWAIT), so a program there may not
change that signal's action. Nothing here may import a driver, a profile or the server.
"""

import errno
import signal
from functools import cache
from typing import Any

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.seccomp.filters import exported, libseccomp

_INT = 0xFFFF_FFFF
"""The bits of an argument that the kernel reads as an int."""
_EVERYBODY = -1 & _INT
"""To F_SETOWN, the process group 1. To kill(2) it is all processes except process 1, in gVisor too."""
_NAMES_A_PROCESS = {
    "kill": (0,), "tkill": (0,), "tgkill": (0, 1), "rt_sigqueueinfo": (0,), "rt_tgsigqueueinfo": (0, 1),
    "pidfd_open": (0,),
}  # fmt: skip
"""Calls that signal, or lead to it, and their arguments for the target."""
_F_SETOWN, _F_SETOWN_EX = 8, 15
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_PR_SET_SECCOMP = 22
_CLONE_PARENT = 0x8000
_SIGNAL_BITS = 8
"""clone(2): the lowest byte of the flags is the parent's signal at the child's end."""


@cache
def for_programs(*, process_1: bool, children: bool) -> bytes:
    """Return the filter as an array of ``struct sock_filter``: EPERM for these calls, everything else is allowed.

    Args:
        process_1: keep programs from signalling process 1.
        children: keep programs from having children that are never waited for. With neither, the filter is empty.

    Raises:
        SandboxError: libseccomp is missing or refuses it.
    """
    if not process_1 and not children:
        return b""
    library = libseccomp()
    # The next filter would be the program's own.
    refused = [("prctl", [_whole(library, 0, _PR_SET_SECCOMP)])]
    if process_1:
        refused += _signals_process_1(library)
    if children:
        # Reading the action is harmless: the second argument is then NULL.
        refused.append(("rt_sigaction", [_whole(library, 0, signal.SIGCHLD), library.Arg(1, library.NE, 0)]))
    try:
        rules = library.SyscallFilter(library.ALLOW)
        rules.set_attr(library.Attr.ACT_BADARCH, library.KILL_PROCESS)
        for name, comparison in refused:
            rules.add_rule(library.ERRNO(errno.EPERM), name, *comparison)
        return exported(rules)
    except OSError as error:
        raise SandboxError(
            "compile the filter for programs alone",
            f"libseccomp refused a rule ({error})",
            "Update libseccomp2 to 2.5 or later",
        ) from error


def _whole(library: Any, argument: int, value: int) -> Any:
    return library.Arg(argument, library.MASKED_EQ, _INT, int(value))


def _signals_process_1(library: Any) -> list[tuple[str, list[Any]]]:
    def whole(argument: int, value: int) -> Any:
        return _whole(library, argument, value)

    def bits(value: int, mask: int) -> Any:
        return library.Arg(0, library.MASKED_EQ, mask, value)

    found = [(name, [whole(argument, 1)]) for name, arguments in _NAMES_A_PROCESS.items() for argument in arguments]
    # Signals for events of a descriptor, sent to its owner.
    found += [("fcntl", [whole(1, _F_SETOWN), whole(2, owner)]) for owner in (1, _EVERYBODY)]
    found += [("fcntl", [whole(1, _F_SETOWN_EX)]), ("ioctl", [whole(1, _FIOSETOWN)]), ("ioctl", [whole(1, _SIOCSPGRP)])]
    # A child's last signal goes to its parent, which is process 1 after CLONE_PARENT, and for every orphan. So it is
    # SIGCHLD or, as for threads, none. A filter cannot say "not equal" of some bits, but each other bit.
    found.append(("clone", [bits(_CLONE_PARENT, _CLONE_PARENT)]))
    others = [1 << bit for bit in range(_SIGNAL_BITS) if not signal.SIGCHLD >> bit & 1]
    found += [("clone", [bits(bit, bit)]) for bit in others]
    parts = [1 << bit for bit in range(_SIGNAL_BITS) if signal.SIGCHLD >> bit & 1]
    found += [("clone", [bits(part, 0xFF)]) for part in parts]
    return found
