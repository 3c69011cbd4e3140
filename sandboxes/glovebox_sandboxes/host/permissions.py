"""Checks that nobody else could have written or exchanged files that decide what we run.

Must import nothing of ours.
"""

import errno
import os
import stat
from pathlib import Path


def flaw(place: Path | int) -> tuple[str, str] | None:
    """Return what lets another user change a file or directory; None where nothing does.

    Root, the user of this process and the owner of this package are no others: they decide what runs in any case.

    Args:
        place: its path, or a descriptor of it, so that the answer is about what is open.

    Returns:
        What is wrong with it, and the command that ends that, to which its path is to be added.

    Raises:
        OSError: it cannot be looked at.
    """
    found = os.stat(place)  # noqa: PTH116 - a descriptor, too
    if found.st_uid not in {0, os.geteuid(), Path(__file__).stat().st_uid}:
        return f"belongs to user {found.st_uid}", f"chown {os.geteuid()}"
    if found.st_mode & stat.S_IWOTH:
        return "is writable by every user", "chmod o-w"
    if found.st_mode & stat.S_IWGRP and found.st_gid not in {0, os.getegid()}:
        return f"is writable by group {found.st_gid}", "chmod g-w"
    # Where there is a list, the group's bits are the most that anybody in it has: acl(5), "correspondence between".
    if found.st_mode & stat.S_IWGRP and _has_access_list(place):
        return "is writable by whom its access list names", "setfacl -b"
    return None


def _has_access_list(place: Path | int) -> bool:
    try:
        return bool(os.getxattr(place, "system.posix_acl_access"))
    except OSError as error:
        # None is set, or this file system has none; whatever else hinders the look, there may be one.
        return error.errno not in {errno.ENODATA, errno.EOPNOTSUPP}


def flaw_above(directory: Path) -> tuple[Path, str, str] | None:
    """Return the nearest directory above in which others could put something else in its place, as for ``flaw``.

    A sticky one, like ``/tmp``, lets nobody move what belongs to somebody else. One that does not exist yet, as in a
    new home, will be this process's own once it makes it; what lies above decides who could make it first.
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
