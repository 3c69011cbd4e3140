"""Collects ``/output`` once every process of the program is dead, so that nothing changes meanwhile."""

from __future__ import annotations

import os
import stat
from itertools import chain, islice

from _glovebox_guest.loop import Loop, StreamHandler
from _glovebox_guest.stdlib import BinaryIO, Callable, Iterable, Iterator, TypeAlias

MAX_ENTRIES = 20_000
"""Directory entries examined: a million files must not keep the call from ending."""
MAX_LOOK = 50_000
"""Entries listed of one folder, and counted of a workspace: enough to report by how much it is too large."""
MAX_DEPTH = 16
MAX_SKIPPED = 50
"""Refused entries that are named; the rest are counted."""
MAX_PICTURES = 4
_CHUNK = 256 * 1024
_UNSEEN = os.stat_result((0,) * 10)
"""Of an entry that has none, as its path is longer than the kernel takes."""


Picture: TypeAlias = tuple[str, int, str, bytes]
"""Of a picture among the files: its name below ``/output``, its size in bytes, its media type and beginning."""


def send(loop: Loop, file: BinaryIO, name: str, size: int, *, kind: str = "file", cut: bool = False) -> None:
    """Send the first ``size`` bytes of a file as a stream, unless the host refuses it: then the stream is closed."""
    stream = loop.open(kind, {"name": name, "bytes": size, **({"cut": True} if cut else {})}, StreamHandler())
    while size and loop.wire.is_open(stream):
        credit = loop.wire.credit(stream)
        if credit == 0:
            loop.step(None)  # the host's clock ends a call whose host reads nothing
            continue
        data = file.read(min(credit, size, _CHUNK))
        if not data:
            break
        size -= len(data)
        loop.send(loop.wire.data(stream, data))
    if loop.wire.is_open(stream):
        loop.send(loop.wire.end(stream))


def collect(loop: Loop, root: str, *, max_files: int, max_bytes: int) -> tuple[list[dict[str, object]], list[Picture]]:
    """Send the regular files below ``root``, by name; return what was skipped and why, and the first pictures."""
    told: list[dict[str, object]] = []
    pictures: list[Picture] = []
    files = total = uncounted = 0
    since = full_since(root, (status for _, status in _entries(root)))
    unseen = None
    for number, (name, status) in enumerate(_entries(root)):
        if number == MAX_ENTRIES:
            unseen = os.path.dirname(name) or "."
            break
        if stat.S_ISDIR(status.st_mode) and name.count("/") < MAX_DEPTH:
            continue
        reason = _unfit(name, status)
        if not reason and files == max_files:
            reason = f"more than {max_files} files"
        if not reason:
            size, reason = _send(loop, root, name, max_bytes - total, pictures, full_since=since)
            files += not reason
            total += size
        if reason and len(told) < MAX_SKIPPED:
            told.append({"name": _printable(name), "reason": reason})
        elif reason:
            uncounted += 1
    if uncounted:
        told.append({"name": "…", "reason": f"and {uncounted} more", "count": uncounted})
    if unseen:  # always named, however many others are only counted
        reason = f"more than {MAX_ENTRIES} entries; the rest was not looked at"
        told.append({"name": _printable(unseen), "reason": reason})
    return told, pictures


def opened(path: str) -> BinaryIO:
    """Open a file that may have become anything else: no link is followed, and no writer of a FIFO awaited."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return open(path, "rb", opener=lambda name, _: os.open(name, flags))  # which closes a folder


def full_since(root: str, entries: Iterable[os.stat_result]) -> int | None:
    """Return the time of the last growth of a full place: files written then may be truncated.

    None where there is room. ``entries`` is its content, and is examined only where ``root`` is full.
    """
    space = os.statvfs(root)
    if space.f_bavail or not space.f_blocks:
        return None
    return max((each.st_mtime_ns for each in entries if stat.S_ISREG(each.st_mode) and each.st_size), default=0)


def _entries(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield what is below ``root``, after restoring read permission, which the program may have removed.

    The guest has the same user; Podman gives the top folder to root, and from it neither could remove any.
    """
    top = [("", os.stat(root))]
    for name, status in chain(top, walk(root, into=lambda name, _: name.count("/") < MAX_DEPTH)):
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            os.chmod(os.path.join(root, name), 0o700)
        if name:
            yield name, status


def _unfit(name: str, status: os.stat_result) -> str:
    """Return why an entry is no artifact; empty if it may be one."""
    if status is _UNSEEN:
        return "cannot be looked at: its path may be too long"
    if stat.S_ISDIR(status.st_mode):
        return f"more than {MAX_DEPTH} directories deep"
    if stat.S_ISLNK(status.st_mode):
        return "a symbolic link"
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    return "" if name == name.encode("utf-8", "replace").decode() else "its name is not UTF-8"


def walk(root: str, into: Callable[[str, os.stat_result], bool]) -> Iterator[tuple[str, os.stat_result]]:
    """Yield name and status of all entries, by name. Links are not followed, unreadable folders are empty."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(os.path.join(root, folder)) as entries:
                names = [entry.name for entry in islice(entries, MAX_LOOK + 1)]
        except OSError:
            continue
        folders = []
        for each in sorted(names):
            name = os.path.join(folder, each)
            try:
                status = os.lstat(os.path.join(root, name))
            except OSError:
                status = _UNSEEN
            yield name, status
            if stat.S_ISDIR(status.st_mode) and into(name, status):
                folders.append(name)
        waiting.extend(reversed(folders))


def _send(
    loop: Loop, root: str, name: str, room: int, pictures: list[Picture], *, full_since: int | None
) -> tuple[int, str]:
    try:
        file = opened(os.path.join(root, name))
    except OSError as problem:
        return 0, f"cannot be opened: {problem.strerror}"
    with file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            return 0, "not a regular file"
        if found.st_nlink != 1:
            return 0, "has more than one name (hard link)"
        if found.st_size > room:
            return 0, "larger than what is left of the output limit"
        if len(pictures) < MAX_PICTURES:
            from _glovebox_guest.pictures import header

            head = os.pread(file.fileno(), header.HEAD_BYTES, 0)
            media_type = header.kind(head)
            if media_type is not None:
                pictures.append((name, found.st_size, media_type, head))
        cut = full_since is not None and found.st_mtime_ns >= full_since
        send(loop, file, name, found.st_size, cut=cut)
    return found.st_size, ""


def _printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()[:255]
