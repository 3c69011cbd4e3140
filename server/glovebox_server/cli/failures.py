"""Translates failures into sentences for a person and exit codes for scripts, in one table.

Imported only after a failure, because it imports the failures of every part.
"""

import errno
import os
import sys
from typing import Any

from rich.console import Console

from glovebox_audit.printable import printable
from glovebox_profiles.errors import ProfileError
from glovebox_sandboxes.contract.errors import DiagnosedError, MisnamedError, RefusedError
from glovebox_server.cli.terminal import print_json
from glovebox_server.exits import UNAVAILABLE, USAGE
from glovebox_server.failures import failure_of, with_own_command

_FULL = "Free space there, or name a directory on another disk."
_ACCESS = "Run as a user who may, change its permissions, or name another."
_WAY = "Name another, or repair the way to it."
_FIXES = {
    errno.ENOSPC: _FULL, errno.EDQUOT: _FULL, errno.EFBIG: _FULL,
    errno.EACCES: _ACCESS, errno.EPERM: _ACCESS, errno.EROFS: _ACCESS,
    errno.ENOENT: _WAY, errno.ENOTDIR: _WAY, errno.EISDIR: _WAY, errno.ELOOP: _WAY, errno.ENAMETOOLONG: _WAY,
    errno.EMFILE: "Raise the limit of open files (`ulimit -n`).",
    errno.ENFILE: "Raise the limit of open files (`sysctl fs.file-max`).",
    errno.EAGAIN: "Raise the limit of processes (`ulimit -u`), or end some.",
    errno.ENOMEM: "Free memory, or raise the limit (`ulimit -v`).",
    errno.EIO: "Check the disk and the kernel's log (`dmesg`).",
    errno.ESTALE: "Check the disk and the kernel's log (`dmesg`).",
}  # fmt: skip
"""Errors of the system whose cause lies with the host, each with its fix."""


def foreseen(raised: BaseException, doing: str) -> tuple[BaseException, int] | None:
    """Return the failure behind an exception, with its exit code; None for an internal error.

    Of a group, its first failure counts. ``doing`` names the command, for a failure of the system.
    """
    problem = raised
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    if isinstance(problem, MemoryError):
        problem = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    if isinstance(problem, OSError) and problem.errno in _FIXES:
        on = f" on {problem.filename}" if problem.filename else ""
        problem = DiagnosedError(f"{doing}{on}", os.strerror(problem.errno), _FIXES[problem.errno])
    if (known := failure_of(problem)) is not None:
        return problem, known.exit_code
    if isinstance(problem, DiagnosedError):  # no call ends in it
        return problem, USAGE if isinstance(problem, MisnamedError | ProfileError) else UNAVAILABLE
    return None


def tell(problem: BaseException, err: Console, *, as_json: bool) -> None:
    """Print a failure on standard error and, for programs, as one JSON object on standard output."""
    # It may quote a hostile name or file, and a terminal obeys what it prints.
    told = str(problem)
    body: dict[str, Any] = {"error": {"kind": type(problem).__name__, "message": with_own_command(told)}}
    if isinstance(problem, RefusedError):
        told = f"Refused ({problem.rule}): {problem}"
        body = {"error": None, "refused": {"rule": problem.rule, "reason": problem.reason, "hint": problem.hint}}
    if as_json:
        print_json(sys.stdout, body)
    err.print(printable(with_own_command(told), "\n"), style="red")
