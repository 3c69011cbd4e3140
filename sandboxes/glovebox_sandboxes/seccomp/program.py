"""Further filters for programs alone, which the guest installs if the kernel or the host lacks something.

Linux keeps from a pid namespace's process 1 every signal of its own namespace that it does not handle
(pid_namespaces(7)). gVisor does not, and has no Landlock to keep signals apart, so a program there may not name process
1 to any call that signals.

Without a control group that counts processor time, the guest counts it, from processes that live or were waited for.
Children of a process that ignores SIGCHLD are never waited for (sigaction(2), SA_NOCLDWAIT), so a program there may not
change that signal's action.
"""

import errno
import signal
from functools import cache

from glovebox_sandboxes.seccomp.filters import compiling, exported

_Bits = tuple[int, int, int]
"""A comparison: an argument, the bits of it that count, and their value."""
_INT = 0xFFFF_FFFF
"""The bits of an argument that the kernel reads as an int."""
_EVERYBODY = -1 & _INT
"""To F_SETOWN, the process group 1. To kill(2) it is all processes except process 1, in gVisor too."""
_F_SETOWN, _F_SETOWN_EX = 8, 15
_FIOSETOWN, _SIOCSPGRP = 0x8901, 0x8902
_PR_SET_SECCOMP = 22
_CLONE_PARENT = 0x8000
_SIGNALS = [1 << bit for bit in range(8)]
"""clone(2): the lowest byte of the flags is the parent's signal at the child's end."""

_ALWAYS: list[tuple[str, list[_Bits]]] = [("prctl", [(0, _INT, _PR_SET_SECCOMP)])]
"""The next filter would be the program's own."""
_PROCESS_1: list[tuple[str, list[_Bits]]] = [
    # Calls that signal, or lead to it, by their arguments for the target.
    *((name, [(0, _INT, 1)]) for name in ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo",
                                          "pidfd_open")),
    *((name, [(1, _INT, 1)]) for name in ("tgkill", "rt_tgsigqueueinfo")),
    # Signals for events of a descriptor, sent to its owner.
    *(("fcntl", [(1, _INT, _F_SETOWN), (2, _INT, owner)]) for owner in (1, _EVERYBODY)),
    ("fcntl", [(1, _INT, _F_SETOWN_EX)]), ("ioctl", [(1, _INT, _FIOSETOWN)]), ("ioctl", [(1, _INT, _SIOCSPGRP)]),
    # A child's last signal goes to its parent, which is process 1 after CLONE_PARENT, and for every orphan. So it is
    # SIGCHLD or, as for threads, none. A filter cannot say "not equal" of some bits, but each other bit.
    ("clone", [(0, _CLONE_PARENT, _CLONE_PARENT)]),
    *(("clone", [(0, bit, bit)]) for bit in _SIGNALS if not signal.SIGCHLD & bit),
    *(("clone", [(0, 0xFF, bit)]) for bit in _SIGNALS if signal.SIGCHLD & bit),
]  # fmt: skip


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
    with compiling() as library:
        rules = library.SyscallFilter(library.ALLOW)
        rules.set_attr(library.Attr.ACT_BADARCH, library.KILL_PROCESS)
        refuse = library.ERRNO(errno.EPERM)
        for name, comparisons in [*_ALWAYS, *(_PROCESS_1 if process_1 else ())]:
            rules.add_rule(refuse, name, *(library.Arg(at, library.MASKED_EQ, *bits) for at, *bits in comparisons))
        if children:
            # Reading the action is harmless: the second argument is then NULL.
            changed = library.Arg(0, library.MASKED_EQ, _INT, int(signal.SIGCHLD)), library.Arg(1, library.NE, 0)
            rules.add_rule(refuse, "rt_sigaction", *changed)
        return exported(rules)
