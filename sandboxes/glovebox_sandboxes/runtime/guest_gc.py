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
    found = [path for pattern in _PATTERNS for path in data.glob(pattern) if path != current]
    return sum(_remove(path) for path in found)


def _remove(path: Path) -> bool:
    try:
        place = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False  # no directory, or gone
    try:
        if time.time() - os.fstat(place).st_mtime < _OLD_SECONDS:
            return False
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Away from its name first: whoever finds a guest takes it to be whole.
        going = path.with_name(f".building-{secrets.token_hex(8)}")
        path.rename(going)
        shutil.rmtree(going)
    except OSError:
        return False  # in use, or not ours
    finally:
        os.close(place)
    return True
