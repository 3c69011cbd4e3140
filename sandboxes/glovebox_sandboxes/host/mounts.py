"""Lists the file systems that are mounted below a directory of the host. Reads one file of /proc; changes nothing.

A bind of a directory brings along whatever is mounted inside it, and that is no part of what a person meant by the
directory. See proc_pid_mountinfo(5).
"""

import os
import re
import select
from pathlib import Path

_SHOWN = 3
"""Mounts named in a message; the rest are counted."""
_POINT = 4
"""Column of the mount point."""
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Watch:
    """``inside`` for one's own mount namespace, which reads the table only if it has changed."""

    def __init__(self) -> None:
        """Open the table; ``close`` closes it."""
        self._table = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._table, select.POLLERR | select.POLLPRI)
        self._known: dict[str, tuple[str, ...]] = {}

    def inside(self, directory: str) -> tuple[str, ...]:
        """As the function of that name."""
        # proc_pid_mountinfo(5): a change is an exceptional condition, told once to each who has the file open.
        if self._poll.poll(0):
            self._known.clear()
        if directory not in self._known:
            self._known[directory] = inside(directory)
        return self._known[directory]

    def close(self) -> None:
        """Close the table."""
        os.close(self._table)


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
