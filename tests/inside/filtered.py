"""Puts a filter of system calls on itself, then becomes a program: ``python -m tests.inside.filtered KIND PROGRAM…``.

``namespaces``: no user namespace can be made, as in a container. ``powers``: one can, but nothing can be mounted in it,
as under Ubuntu's AppArmor, which lets everybody make one and takes every capability in it away.
"""

import errno
import os
import sys

import pyseccomp

CLONE_NEWUSER = 0x10000000


def main(kind: str, *program: str) -> None:
    """Filter and become the program."""
    chosen = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    if kind == "namespaces":
        asked = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, CLONE_NEWUSER, CLONE_NEWUSER)
        for call in ("unshare", "clone"):
            chosen.add_rule(pyseccomp.ERRNO(errno.EPERM), call, asked)
        # Its flags are in memory, where no filter can look.
        chosen.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    else:
        chosen.add_rule(pyseccomp.ERRNO(errno.EACCES), "mount")
    chosen.load()
    os.execvp(program[0], program)  # noqa: S606 - that is what it is for


main(*sys.argv[1:])
