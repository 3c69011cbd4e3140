"""Check that no other user could have written or exchanged files that decide what we run.

Must import nothing of ours.
"""

import errno
import os
import stat
from pathlib import Path


def flaw(place: Path | int) -> tuple[str, str] | None:
    """Return what lets another user change a file, and a command to end it, without the path; else None.

    Root, the user of this process and the owner of this package are no others: they decide what runs in any case. A
    descriptor as ``place`` makes the answer about what is open. Raises OSError.
    """
    found = os.stat(place)  # noqa: PTH116 - a descriptor, too
    if found.st_uid not in {0, os.geteuid(), Path(__file__).stat().st_uid}:
        return f"belongs to user {found.st_uid}", f"chown {os.geteuid()}"
    if found.st_mode & stat.S_IWOTH:
        return "is writable by every user", "chmod o-w"
    if found.st_mode & stat.S_IWGRP and found.st_gid not in {0, os.getegid()}:
        return f"is writable by group {found.st_gid}", "chmod g-w"
    # With a list, the group's bits are the most that anyone in it has: acl(5), "correspondence between".
    if found.st_mode & stat.S_IWGRP and _has_access_list(place):
        return "is writable by whom its access list names", "setfacl -b"
    return None


def _has_access_list(place: Path | int) -> bool:
    try:
        return bool(os.getxattr(place, "system.posix_acl_access"))
    except OSError as error:
        # None is set, or this file system has none; after any other error there may be one.
        return error.errno not in {errno.ENODATA, errno.EOPNOTSUPP}


def flaw_above(directory: Path) -> tuple[Path, str, str] | None:
    """Return the nearest directory above in which others could replace the next one, as for ``flaw``.

    In a sticky one, like ``/tmp``, users cannot move files of others. One that does not exist yet, as in a new home,
    will be this process's own; what lies above decides who could make it first.
    """
    for parent in directory.parents:
        try:
            status = parent.stat()
            sticky = status.st_mode & stat.S_ISVTX and status.st_uid in {0, os.geteuid()}
            found = None if sticky else flaw(parent)
        except FileNotFoundError:
            continue
        if found is not None:
            return parent, *found
    return None
