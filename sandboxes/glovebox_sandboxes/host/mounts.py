"""List what is mounted below a directory, find the file system it lies on, and report changes by inotify(7).

A bind of a directory includes all that is mounted inside it, which a person did not mean by the directory. See
proc_pid_mountinfo(5).
"""

import ctypes
import fcntl
import os
import re
import select
import struct
import termios
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath

from glovebox_sandboxes.host.descriptors import opened

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
        with opened(existing, os.O_PATH | os.O_NOFOLLOW) as descriptor:
            told = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    except OSError:
        return None
    number = told.partition("mnt_id:")[2].split()[:1]
    for columns in (line.split(" ") for line in _table().splitlines()):
        point = Path(_plain(columns[_POINT]))
        if columns[_NUMBER : _NUMBER + 1] == number and directory.is_relative_to(point):
            return columns[_DEVICE], PurePath(_plain(columns[_ROOT])) / directory.relative_to(point)
    return None


def identity(look: Callable[[str], os.stat_result], path: str) -> tuple[int, ...]:
    """Return what identifies a file or folder, even if a new one reuses the inode number; or why it is not known."""
    try:
        status = look(path)
    except OSError as problem:
        return (problem.errno or -1,)
    return status.st_dev, status.st_ino, status.st_ctime_ns


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


IN_MODIFY, IN_ATTRIB, IN_CLOSE_WRITE = 0x2, 0x4, 0x8
IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE = 0x40, 0x80, 0x100, 0x200
IN_Q_OVERFLOW, IN_IGNORED, IN_ISDIR = 0x4000, 0x8000, 0x4000_0000
_IN_ONLYDIR, _IN_DONT_FOLLOW = 0x0100_0000, 0x0200_0000

FOLDER = IN_ATTRIB | IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE | _IN_ONLYDIR | _IN_DONT_FOLLOW
"""Events of a folder: each change in it, except contents."""
FILE = IN_MODIFY | IN_CLOSE_WRITE | _IN_DONT_FOLLOW
"""Events of a file: each write, and the end of a mapping, through which writes are not reported."""

_HEAD = struct.Struct("=iIII")
_libc = ctypes.CDLL(None, use_errno=True)


class MountWatch:
    """A watch of the mounts below directories in our own mount namespace."""

    def __init__(self) -> None:
        self._table = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._table, select.POLLERR | select.POLLPRI)
        self._known: dict[str, tuple[str, ...]] = {}

    def inside(self, directory: str) -> tuple[str, ...]:
        """Return ``inside``, read anew only if the table has changed."""
        if self.changed():
            self._known.clear()
        if directory not in self._known:
            self._known[directory] = inside(directory)
        return self._known[directory]

    def changed(self) -> bool:
        """Return whether the table has changed since the last call."""
        # proc_pid_mountinfo(5): a change is an exceptional condition, reported once to each opener of the file.
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Close the table."""
        os.close(self._table)


class Inotify:
    """One queue of changes."""

    def __init__(self) -> None:
        """Open the queue. Raises OSError if the user may have no more of them."""
        self.descriptor = self._checked(_libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))

    def add(self, path: str, mask: int) -> int:
        """Watch a file or folder; return the number of its changes. Raises OSError."""
        return self._checked(_libc.inotify_add_watch(self.descriptor, os.fsencode(path), ctypes.c_uint32(mask)), path)

    def remove(self, number: int) -> None:
        """Stop watching; that it is not watched already is no error."""
        _libc.inotify_rm_watch(self.descriptor, number)

    @property
    def pending(self) -> int:
        """Return the number of unread bytes of changes."""
        return int.from_bytes(fcntl.ioctl(self.descriptor, termios.FIONREAD, bytes(4)), "little")

    def read(self) -> Iterator[tuple[int, int, str]]:
        """Yield number, kind and name of each change so far."""
        size = self.pending
        data = os.read(self.descriptor, size) if size else b""
        at = 0
        while at < len(data):
            number, mask, _, length = _HEAD.unpack_from(data, at)
            at += _HEAD.size
            yield number, mask, os.fsdecode(data[at : at + length].rstrip(b"\0"))
            at += length

    def close(self) -> None:
        """Close it."""
        os.close(self.descriptor)

    @staticmethod
    def _checked(answer: int, path: str | None = None) -> int:
        if answer < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        return int(answer)
