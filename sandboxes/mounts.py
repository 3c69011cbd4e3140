"""Which file systems are mounted below a directory of the host. Reads one file of /proc; changes nothing.

A bind of a directory brings along whatever is mounted inside it, and that is no part of what a person meant by the
directory. See proc_pid_mountinfo(5).
"""

import re
from pathlib import Path

_SHOWN = 3
"""Mounts named in a message; the rest are counted."""
_POINT = 4
"""Column of the mount point."""
_ESCAPED = re.compile(r"\\([0-7]{3})")


def inside(directory: str, table: str | None = None) -> tuple[str, ...]:
    """Mount points strictly below a directory, by their paths relative to it, sorted.

    Args:
        directory: absolute path without links.
        table: text of a mountinfo file; this process's own unless given.
    """
    if table is None:
        table = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    above = directory.rstrip("/") + "/"
    points = {_plain(line.split(" ")[_POINT]) for line in table.splitlines()}
    return tuple(sorted(point.removeprefix(above) for point in points if point.startswith(above) and point != above))


def named(points: tuple[str, ...]) -> str:
    """The first few mount points as part of a sentence, and how many more there are; safe to print."""
    names = [ascii(point)[1:-1] for point in points[:_SHOWN]]
    more = len(points) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _plain(point: str) -> str:
    """A path as the kernel meant it: spaces, tabs, line feeds and backslashes are written as octal escapes."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), point)
