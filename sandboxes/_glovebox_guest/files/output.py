"""Collects ``/output`` once every process of the program is dead, so that nothing changes meanwhile."""

from __future__ import annotations

import errno
import io
import os
import stat
from itertools import islice

from _glovebox_guest.loop import Loop, StreamHandler
from _glovebox_guest.stdlib import Callable, Iterable, Iterator

MAX_ENTRIES = 20_000
"""Directory entries examined: a million files must not keep the call from ending."""
MAX_DEPTH = 16
MAX_SKIPPED = 50
"""Refused entries that are named; the rest are counted."""
MAX_PICTURES = 4
"""Pictures shown to a client; the rest are files like others."""
_CHUNK = 256 * 1024


class Picture:
    """A picture among the files: its name below ``/output``, and its size in bytes."""

    __slots__ = ("head", "media_type", "name", "size")

    def __init__(self, name: str, media_type: str, head: bytes, size: int) -> None:
        self.name = name
        self.media_type = media_type
        self.head = head
        self.size = size


class _Sender(StreamHandler):
    def __init__(
        self, loop: Loop, read: Callable[[int], bytes], name: str, size: int, *, kind: str = "file", cut: bool = False
    ) -> None:
        self._over = False
        stream = loop.open(kind, {"name": name, "bytes": size, **({"cut": True} if cut else {})}, self)
        remaining = size
        while remaining and not self._over:
            credit = loop.wire.credit(stream)
            if credit == 0:
                loop.step(None)  # the host's clock ends a call whose host reads nothing
                continue
            data = read(min(credit, remaining, _CHUNK))
            if not data:
                break
            remaining -= len(data)
            loop.send(loop.wire.data(stream, data))
        if not self._over:
            loop.send(loop.wire.end(stream))

    def on_reset(self, body: object) -> None:  # noqa: ARG002 - the host knows why
        """Stop: the host refuses the file."""
        self._over = True


def send_bytes(loop: Loop, kind: str, content: bytes) -> None:
    """Send content that is not a file of the program, as a stream of its own kind."""
    _Sender(loop, io.BytesIO(content).read, "", len(content), kind=kind)


def collect(loop: Loop, root: str, *, max_files: int, max_bytes: int) -> tuple[list[dict[str, object]], list[Picture]]:
    """Send the regular files below ``root``, by name; return what was skipped and why, and the first pictures."""
    skipped: list[dict[str, object]] = []
    pictures: list[Picture] = []
    uncounted = 0
    files = total = 0
    since = full_since(root, _entries(root))
    unseen: list[str] = []
    for name, unfit in _walk(root, unseen):
        reason = unfit
        if not reason and files == max_files:
            reason = f"more than {max_files} files"
        if not reason:
            size, reason = _send(loop, root, name, max_bytes - total, pictures, full_since=since)
            files += not reason
            total += size
        if reason and len(skipped) < MAX_SKIPPED:
            skipped.append({"name": _printable(name), "reason": reason})
        elif reason:
            uncounted += 1
    if uncounted:
        skipped.append({"name": "…", "reason": f"and {uncounted} more", "count": uncounted})
    for folder in unseen:  # always named, however many others are only counted
        reason = f"more than {MAX_ENTRIES} entries; the rest was not looked at"
        skipped.append({"name": _printable(folder), "reason": reason})
    return skipped, pictures


def contents(root: str, pictures: Iterable[Picture]) -> list[tuple[str, bytes]]:
    """Read pictures that were sent, once more; nothing has changed since."""
    found = []
    for picture in pictures:
        with open(_opened(root, picture.name), "rb") as file:
            found.append((picture.name, file.read(picture.size)))
    return found


def _opened(root: str, name: str) -> int:
    # O_NONBLOCK: opening a FIFO must not wait for a writer. O_NOFOLLOW: a link's target is not an output.
    return os.open(os.path.join(root, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def full_since(root: str, entries: Iterable[os.stat_result]) -> int | None:
    """Return the time of the last growth of a full place: files written then may be truncated.

    None where there is room. ``entries`` is its content, and is examined only where ``root`` is full.
    """
    space = os.statvfs(root)
    if space.f_bavail or not space.f_blocks:
        return None
    return max((each.st_mtime_ns for each in entries if stat.S_ISREG(each.st_mode) and each.st_size), default=0)


def _entries(root: str) -> Iterator[os.stat_result]:
    for name, _ in _walk(root, []):
        try:
            yield os.lstat(os.path.join(root, name))
        except OSError:
            continue


def _send(
    loop: Loop, root: str, name: str, room: int, pictures: list[Picture], *, full_since: int | None
) -> tuple[int, str]:
    try:
        descriptor = _opened(root, name)
    except OSError as problem:
        return 0, f"cannot be opened: {problem.strerror}"
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            return 0, "not a regular file"
        if found.st_nlink != 1:
            return 0, "has more than one name (hard link)"
        if found.st_size > room:
            return 0, "larger than what is left of the output limit"
        if len(pictures) < MAX_PICTURES:
            from _glovebox_guest.pictures import header

            head = os.pread(descriptor, header.HEAD_BYTES, 0)
            media_type = header.kind(head)
            if media_type is not None:
                pictures.append(Picture(name, media_type, head, found.st_size))
        cut = full_since is not None and found.st_mtime_ns >= full_since
        _Sender(loop, lambda size: os.read(descriptor, size), name, found.st_size, cut=cut)
        return found.st_size, ""
    finally:
        os.close(descriptor)


def _walk(root: str, unseen: list[str]) -> Iterator[tuple[str, str]]:
    """Yield names below ``root``, with the reason for those that are no artifacts; add to ``unseen`` where it stops."""
    seen = 0
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            # The program may have removed read permission; the guest has the same user. Podman gives the top folder to
            # root, and from it neither could remove any.
            if os.stat(os.path.join(root, folder)).st_uid == os.getuid():
                os.chmod(os.path.join(root, folder), 0o700)
            with os.scandir(os.path.join(root, folder)) as found:
                entries = list(islice(found, MAX_ENTRIES - seen))
                more = next(found, None) is not None
        except OSError as problem:
            yield folder or ".", f"cannot be listed: {errno.errorcode.get(problem.errno or 0, 'error')}"
            continue
        seen += len(entries)
        folders = []
        for entry in sorted(entries, key=lambda each: each.name):
            name = os.path.join(folder, entry.name)
            reason = "" if name == name.encode("utf-8", "replace").decode() else "its name is not UTF-8"
            if entry.is_symlink():
                reason = "a symbolic link"
            elif entry.is_dir(follow_symlinks=False):
                if name.count("/") < MAX_DEPTH:
                    folders.append(name)
                else:
                    yield name, f"more than {MAX_DEPTH} directories deep"
                continue
            elif not entry.is_file(follow_symlinks=False):
                reason = "not a regular file"
            yield name, reason
        if more:
            unseen.append(folder or ".")
            return
        waiting.extend(reversed(folders))


def _printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()[:255]
