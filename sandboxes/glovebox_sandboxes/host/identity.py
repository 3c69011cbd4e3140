"""Choose the user and group that sandboxes run as on the host. Must start nothing.

A process of the kernel's user 0 keeps rights over files owned by root (``/proc/sys`` among them) even without any
capability, and a user namespace can call it by any number. See user_namespaces(7).
"""

import functools
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

HOST_UIDS = range(2_000_000_000, 2_000_065_536)
"""Users of sandboxes on the host when the server is root. They own nothing and no registry assigns them
(https://systemd.io/UIDS-GIDS). One per sandbox: counters per user (inotify, pipe buffers, pending signals) then let
none starve or signal another."""
FALLBACK_UID = 65532
INNER_UIDS = range(100_000, 100_000 + len(HOST_UIDS))
SETPRIV = "/usr/bin/setpriv"
_OVERFLOW = 65534
"""The kernel's number for a user without one in our namespace."""


def unprivileged(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` run as a user that owns nothing; ``argv`` itself if we cannot change users."""
    if not changes_user():
        return list(argv)
    # Not Popen's `user`: Python would then fork, which copies the page tables of a whole server, instead of vfork.
    uid = HOST_UIDS[secrets.randbelow(len(HOST_UIDS))] if has_users() else FALLBACK_UID
    return [SETPRIV, f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", "--", *argv]


def changes_user() -> bool:
    """Report whether sandboxes run as other users: we are root, and our user namespace has others."""
    return os.geteuid() == 0 and mapped(range(FALLBACK_UID, FALLBACK_UID + 1))


def has_users() -> bool:
    """Return whether every sandbox can be a user of its own."""
    return changes_user() and mapped(HOST_UIDS)


def user_map(own: int, inside: int) -> str:
    """Return the uid map of a namespace whose first process starts sandboxes as other users.

    ``own`` is that process's user, one of HOST_UIDS, and ``inside`` its number in there.
    """
    at = own - HOST_UIDS.start
    # The kernel requires a 0 for a file system of terminals; no process is that user.
    lines = [(0, HOST_UIDS.stop, 1), (inside, own, 1), (INNER_UIDS[0], HOST_UIDS.start, at)]
    lines.append((INNER_UIDS[0] + at + 1, own + 1, len(HOST_UIDS) - at - 1))
    return "".join(f"{first} {outside} {count}\n" for first, outside, count in lines if count)


def another(own: int) -> int:
    """Return one of the users of ``user_map`` except the process's own, by its number inside."""
    at = secrets.randbelow(len(HOST_UIDS) - 1)
    return INNER_UIDS[at + (at >= own - HOST_UIDS.start)]


@functools.cache
def mapped(users: range) -> bool:
    """Return whether this process's user namespace has these users, and as many groups."""
    return all(covers(Path(f"/proc/self/{kind}_map").read_text(), users) for kind in ("uid", "gid"))


def covers(mapping: str, users: range) -> bool:
    """Return whether one line of a map, ``inside outside count``, holds all of them."""
    lines = [[int(number) for number in line.split()] for line in mapping.splitlines()]
    return any(first <= users.start and users.stop <= first + count for first, _, count in lines)


def kernels_root() -> int | None:
    """Return our user namespace's number for the kernel's user 0; None if it is not mapped."""
    with suppress(OSError):
        # The kernel's own settings belong to no other user, and stat(2) answers by our numbers.
        owner = Path("/proc/sys").stat().st_uid
        if owner != _OVERFLOW:
            return owner
        # It may be one that really has this number: then our map gives that number to the root outside.
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            first, outside, _ = map(int, line.split())
            if (first, outside) == (_OVERFLOW, 0):
                return owner
        return None
    return 0


def is_kernels_root() -> bool:
    """Return whether our children would be the kernel's user 0, by whatever number."""
    return not changes_user() and os.geteuid() == kernels_root()
