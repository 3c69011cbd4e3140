"""List the file systems mounted below a directory, and find the one it lies on. Reads /proc; changes nothing.

A bind of a directory includes all that is mounted inside it, which a person did not mean by the directory. See
proc_pid_mountinfo(5).
"""

import os
import re
from pathlib import Path, PurePath

_SHOWN = 3
"""Mounts named in a message; the rest are counted."""
_NUMBER, _DEVICE, _ROOT, _POINT = 0, 2, 3, 4
"""Columns: the mount's number, its file system, the directory that is its root, and the mount point."""
_ESCAPED = re.compile(r"\\([0-7]{3})")


def inside(directory: str, table: str | None = None) -> tuple[str, ...]:
    """Return mount points strictly below a directory without links, relative and sorted; ``table``: our mountinfo."""
    table = _table() if table is None else table
    above = directory.rstrip("/") + "/"
    points = {_plain(line.split(" ")[_POINT]) for line in table.splitlines()}
    return tuple(sorted(point.removeprefix(above) for point in points if point.startswith(above) and point != above))


def origin(directory: Path) -> tuple[str, PurePath] | None:
    """Return a directory's file system and its path there, equal under every bind mount; None if not reported.

    ``directory`` is an absolute path without links; a missing one lies where it would be made.
    """
    try:
        existing = next(each for each in (directory, *directory.parents) if each.exists())
        descriptor = os.open(existing, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            told = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        finally:
            os.close(descriptor)
    except OSError:
        return None
    number = told.partition("mnt_id:")[2].split()[:1]
    for columns in (line.split(" ") for line in _table().splitlines()):
        point = Path(_plain(columns[_POINT]))
        if columns[_NUMBER : _NUMBER + 1] == number and directory.is_relative_to(point):
            return columns[_DEVICE], PurePath(_plain(columns[_ROOT])) / directory.relative_to(point)
    return None


def _table() -> str:
    return Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")


def named(points: tuple[str, ...]) -> str:
    """Return the first few mount points as part of a sentence, and the number of others; safe to print."""
    names = [ascii(point)[1:-1] for point in points[:_SHOWN]]
    more = len(points) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _plain(point: str) -> str:
    """Return an unescaped path: the kernel writes spaces, tabs, line feeds and backslashes in octal."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), point)
