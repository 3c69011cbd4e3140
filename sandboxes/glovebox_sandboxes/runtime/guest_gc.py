"""Removes unreferenced guests and runtimes from the data directory, except those a server uses.

Their directories are named after their content, so every upgrade leaves some behind, and a server that was started
before still uses its own. Must not be imported here: anything that starts sandboxes.
"""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from glovebox_sandboxes.host.descriptors import opened

_OLD_SECONDS = 24 * 3600.0
"""Younger ones stay: a starting server has found its own and not yet locked it."""
_PATTERNS = ("guest-*", "runtime-*", ".building-*")
"""Candidates: guests, runtimes, and half-built leftovers of a killed setup."""


@contextmanager
def held(directories: Iterable[Path]) -> Iterator[None]:
    """Keep guests and runtimes from being removed for the length of the block; the kernel unlocks them if we die."""
    with ExitStack() as stack:
        for directory in directories:
            place = stack.enter_context(opened(directory, os.O_DIRECTORY))
            with suppress(OSError):  # a file system without locks: then age alone protects it
                fcntl.flock(place, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield


def remove(data: Path, current: Collection[Path]) -> int:
    """Remove what is older than a day, not ``current``, and not used by a running server; return the number."""
    return sum(_remove(path) for path in removable(data, current))


def removable(data: Path, current: Collection[Path]) -> list[Path]:
    """Return what ``remove`` would remove now; nothing is changed."""
    found = [path for pattern in _PATTERNS for path in sorted(data.glob(pattern)) if path not in current]
    return [path for path in found if unused(path, _OLD_SECONDS)]


def unused(path: Path, seconds: float = 0) -> bool:
    """Return whether no running server uses a directory that is at least so old."""
    try:
        with _unused(path, seconds):
            return True
    except OSError:
        return False


@contextmanager
def _unused(path: Path, seconds: float) -> Iterator[None]:
    """Lock a directory that is unused and so old; raise OSError for anything else."""
    with opened(path, os.O_DIRECTORY | os.O_NOFOLLOW) as place:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if seconds and time.time() - os.fstat(place).st_mtime < seconds:
            raise BlockingIOError
        yield


def _remove(path: Path) -> bool:
    try:
        with _unused(path, _OLD_SECONDS):
            # Renamed first: a guest under its name counts as whole.
            going = path.with_name(f".building-{secrets.token_hex(8)}")
            path.rename(going)
            shutil.rmtree(going)
    except OSError:
        return False  # in use, young, not ours, or no directory
    return True
