"""Guests of other versions in the data directory: kept while a server uses them, removed by ``glovebox setup``.

A guest's directory is named after its content, so every upgrade leaves one behind, and a server of the old version that
still runs goes on using its own. Must not be imported here: anything that starts sandboxes.
"""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OLD_SECONDS = 24 * 3600.0
"""Younger ones stay: a server that is being started has found its guest and not yet taken hold of it, and a guest is
small."""
_PATTERNS = ("guest-*", ".building-*")
"""What is looked at: guests, and what a setup that was killed left half-built."""


@contextmanager
def held(guest: Path | None) -> Iterator[None]:
    """Keep a guest's directory from being removed for the length of the block; the kernel lets go if we die."""
    if guest is None:
        yield
        return
    place = os.open(guest, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks: then age alone protects it
            fcntl.flock(place, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(place)


def remove(data: Path, current: Path) -> int:
    """Remove what no running server uses and what is older than a day; how many there were.

    Args:
        data: the data directory.
        current: the guest of this version, which stays.
    """
    return sum(_remove(path) for path in _others(data, current))


def removable(data: Path, current: Path) -> list[Path]:
    """What ``remove`` would remove now; nothing is changed."""
    found = []
    for path in _others(data, current):
        with suppress(OSError), _unused(path):
            found.append(path)
    return found


def _others(data: Path, current: Path) -> list[Path]:
    return sorted(path for pattern in _PATTERNS for path in data.glob(pattern) if path != current)


@contextmanager
def _unused(path: Path) -> Iterator[None]:
    """Hold what nobody uses and what is old; raises OSError for anything else."""
    place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if time.time() - os.fstat(place).st_mtime < _OLD_SECONDS:
            raise BlockingIOError
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(place)


def _remove(path: Path) -> bool:
    try:
        with _unused(path):
            # Away from its name first: whoever finds a guest takes it to be whole.
            going = path.with_name(f".building-{secrets.token_hex(8)}")
            path.rename(going)
            shutil.rmtree(going)
    except OSError:
        return False  # in use, young, not ours, or no directory
    return True
