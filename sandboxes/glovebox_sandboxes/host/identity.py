"""Chooses the user and group that sandboxes run as on the host. Must start nothing.

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
"""Who sandboxes are outside when the server is root: users that own nothing and that no registry gives out
(https://systemd.io/UIDS-GIDS). One for each sandbox: what the kernel counts per user (inotify, pipe buffers, pending
signals) is then no way for one to starve another, or to tell it something."""
FALLBACK_UID = 65532
"""In a container that has no such users."""
INNER_UIDS = range(100_000, 100_000 + len(HOST_UIDS))
"""What a user namespace that has all of HOST_UIDS calls them."""
SETPRIV = "/usr/bin/setpriv"
"""Of util-linux, which every Debian has."""
_OVERFLOW = 65534
"""What the kernel calls a user without a number in our namespace."""


def unprivileged(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` run as a user that owns nothing; ``argv`` itself where we cannot change users."""
    if not changes_user():
        return list(argv)
    # Not Popen's `user`: with it Python has to fork, which copies the page tables of a whole server, instead of vfork.
    uid = HOST_UIDS[secrets.randbelow(len(HOST_UIDS))] if has_users() else FALLBACK_UID
    return [SETPRIV, f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", "--", *argv]


def changes_user() -> bool:
    """Whether sandboxes run as users of their own: where we are root, and our user namespace has others to become."""
    return os.geteuid() == 0 and mapped(range(FALLBACK_UID, FALLBACK_UID + 1))


def has_users() -> bool:
    """Return whether every sandbox can be a user of its own."""
    return changes_user() and mapped(HOST_UIDS)


def user_map(own: int, inside: int) -> str:
    """Return what to write into the map of a namespace whose first process is to start sandboxes as other users.

    Args:
        own: that process, one of HOST_UIDS.
        inside: what it is called in there.
    """
    at = own - HOST_UIDS.start
    # The kernel wants a 0 for a file system of terminals; nobody is that user.
    lines = [(0, HOST_UIDS.stop, 1), (inside, own, 1), (INNER_UIDS[0], HOST_UIDS.start, at)]
    lines.append((INNER_UIDS[0] + at + 1, own + 1, len(HOST_UIDS) - at - 1))
    return "".join(f"{first} {outside} {count}\n" for first, outside, count in lines if count)


def another(own: int) -> int:
    """Return one of the users of ``user_map`` that is not the process itself, by its number inside."""
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
    """Return what our user namespace calls the kernel's user 0; None where it is not in the namespace."""
    with suppress(OSError):
        # The kernel's own settings belong to nobody else, and stat(2) answers by our numbers.
        owner = Path("/proc/sys").stat().st_uid
        if owner != _OVERFLOW:
            return owner
        # It may be one that is really called so: then our map gives that number to the root outside.
        for line in Path("/proc/self/uid_map").read_text().splitlines():
            first, outside, _ = map(int, line.split())
            if (first, outside) == (_OVERFLOW, 0):
                return owner
        return None
    return 0


def is_kernels_root() -> bool:
    """Return whether what we start would be the kernel's user 0, under whatever name."""
    return not changes_user() and os.geteuid() == kernels_root()
