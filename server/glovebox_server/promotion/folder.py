"""A folder of the operator, accessed by descriptor only and never through a symbolic link.

Each path segment is opened by itself (``O_NOFOLLOW``) and must be on the folder's own file system. A new file is
exchanged with the old one in one operation (renameat2(2)), so the old content is never lost, even if just written.
Must never be imported here: policy, the audit log, anything async.
"""

import ctypes
import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from pydantic import ConfigDict

from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.artifacts.names import quoted

MAX_FILE_BYTES: Final = 1 << 30
"""Bytes of a file that is replaced, and kept to be put back."""
_CHUNK: Final = 1 << 20
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_NOREPLACE, _EXCHANGE = 1, 2
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_HINT: Final = "Make it an ordinary folder or file, or promote elsewhere."


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """The state of a file."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    sha256: str
    bytes: int
    mode: int


class TargetFolder:
    """An open folder; see ``opened``."""

    def __init__(self, path: Path, descriptor: int, largest: int) -> None:
        """Take the open descriptor."""
        self.path = path
        self._largest = largest
        found = os.fstat(descriptor)
        self.device, self.inode = found.st_dev, found.st_ino
        self.descriptor = descriptor

    @contextmanager
    def parent(self, name: str) -> Iterator[tuple[int, str]]:
        """Yield the parent folder's descriptor and the file's name in it.

        Raises FileNotFoundError: a folder is missing; RefusedError: a segment of the path is a link, not a folder, or
        on another file system.
        """
        *way, leaf = name.split("/")
        held = os.dup(self.descriptor)
        try:
            for part in way:
                try:
                    step = os.open(part, _FOLDER, dir_fd=held)
                except OSError as problem:
                    if problem.errno in (errno.ELOOP, errno.ENOTDIR):
                        raise _in_the_way(name, f"{quoted(part)} on its way is a link, or no folder") from None
                    raise
                os.close(held)
                held = step
                if os.fstat(held).st_dev != self.device:
                    raise _in_the_way(name, f"{quoted(part)} on its way is on another file system")
            yield held, leaf
        finally:
            os.close(held)

    def look(self, name: str) -> FileState | None:
        """Return the state of a file; None if it does not exist.

        Raises:
            RefusedError: it is a link, not a regular file, on another file system, too large, or has other hard links.
        """
        with self._open(name) as descriptor:
            if descriptor is None:
                return None
            found = os.fstat(descriptor)
            digest, size = hashlib.sha256(), 0
            while chunk := os.read(descriptor, _CHUNK):
                digest.update(chunk)
                size += len(chunk)
            return FileState(sha256=digest.hexdigest(), bytes=size, mode=stat.S_IMODE(found.st_mode))

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield a file's content; nothing if it does not exist. Raises as ``look``."""
        with self._open(name) as descriptor:
            while descriptor is not None and (chunk := os.read(descriptor, _CHUNK)):
                yield chunk

    def head(self, name: str, most: int) -> bytes:
        """Return the first ``most`` bytes of a file. Raises as ``look``."""
        with self._open(name) as descriptor:
            return b"" if descriptor is None else os.pread(descriptor, most, 0)

    def missing(self, name: str) -> list[str]:
        """Return the missing parent folders of a file, outermost first."""
        parts = name.split("/")[:-1]
        ways = ["/".join(parts[: count + 1]) for count in range(len(parts))]
        return [way for way in ways if not self.is_there(f"{way}/.")]

    def make(self, way: str, mode: int = 0o777) -> None:
        """Create a folder, which must not exist."""
        with self.parent(way) as (parent, leaf):
            os.mkdir(leaf, mode, dir_fd=parent)
            os.fsync(parent)

    def unmake(self, ways: Iterable[str]) -> None:
        """Remove these folders if they exist and are empty, the last first."""
        for way in reversed(list(ways)):
            with suppress(OSError, RefusedError):
                self._remove(way)

    def write(self, name: str, chunks: Iterable[bytes], mode: int, like: str | None = None) -> str:
        """Write a new file durably, with the owner of another if that exists, and return its digest."""
        with self.parent(name) as (parent, leaf):
            descriptor = os.open(leaf, _NEW, 0o600, dir_fd=parent)
        digest = hashlib.sha256()
        with os.fdopen(descriptor, "wb") as file:
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            if like is not None:
                self._give(descriptor, like)
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        return digest.hexdigest()

    def _give(self, descriptor: int, like: str) -> None:
        with self._open(like) as other:
            wanted = os.fstat(descriptor if other is None else other)
        made = os.fstat(descriptor)
        if (made.st_uid, made.st_gid) != (wanted.st_uid, wanted.st_gid):
            os.fchown(descriptor, wanted.st_uid, wanted.st_gid)

    def exchange(self, one: str, other: str) -> None:
        """Exchange two files atomically."""
        self._rename(one, other, _EXCHANGE)

    def move(self, name: str, to: str) -> None:
        """Move a file atomically to a name that is free."""
        self._rename(name, to, _NOREPLACE)

    def is_there(self, name: str) -> bool:
        """Return whether anything has this name."""
        with suppress(FileNotFoundError), self.parent(name) as (parent, leaf):
            os.stat(leaf, dir_fd=parent, follow_symlinks=False)
            return True
        return False

    def sync(self, names: Iterable[str]) -> None:
        """Make the parent folders of these files durable."""
        for name in dict.fromkeys(name.rpartition("/")[0] for name in names):
            with suppress(FileNotFoundError), self.parent(f"{name}/." if name else ".") as (parent, _):
                os.fsync(parent)

    def clear(self, way: str) -> None:
        """Remove a folder of regular files, if it exists; a folder made in it since stays."""
        with suppress(FileNotFoundError), self.parent(f"{way}/.") as (folder, _):
            for leaf in os.listdir(folder):  # noqa: PTH208 - by descriptor
                with suppress(IsADirectoryError, FileNotFoundError):
                    os.unlink(leaf, dir_fd=folder)
            self._remove(way)

    def _remove(self, way: str) -> None:
        with self.parent(way) as (parent, leaf):
            os.rmdir(leaf, dir_fd=parent)
            os.fsync(parent)

    @contextmanager
    def _open(self, name: str) -> Iterator[int | None]:
        descriptor = None
        try:
            with suppress(FileNotFoundError), self.parent(name) as (parent, leaf):
                descriptor = os.open(leaf, _READ, dir_fd=parent)
        except OSError as problem:
            if problem.errno in (errno.ELOOP, errno.ENXIO):
                raise _in_the_way(name, "what is there is a link, or no plain file") from None
            raise
        try:
            if descriptor is not None:
                self._require_plain(name, os.fstat(descriptor))
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _require_plain(self, name: str, found: os.stat_result) -> None:
        for is_so, why in (
            (not stat.S_ISREG(found.st_mode), "is no plain file"),
            (found.st_dev != self.device, "is on another file system"),
            (found.st_nlink > 1, "has other names too, which would no longer be the same file"),
            (found.st_size > self._largest, f"is larger than {self._largest} bytes"),
        ):
            if is_so:
                raise _in_the_way(name, f"what is there {why}")

    def _rename(self, name: str, to: str, flags: int) -> None:
        with self.parent(name) as (here, one), self.parent(to) as (there, other):
            if _LIBC.renameat2(here, os.fsencode(one), there, os.fsencode(other), flags) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))


@contextmanager
def opened(path: Path, largest: int = MAX_FILE_BYTES) -> Iterator[TargetFolder]:
    """Open a folder; ``path`` is absolute, without symbolic links. Larger files than ``largest`` bytes are refused.

    Raises RefusedError: rule ``promotion.path``: it is missing, a link, not a folder, or not readable.
    """
    try:
        descriptor = os.open(path, _FOLDER)
    except OSError as problem:
        reason = f"{path} cannot be opened as a folder: {os.strerror(problem.errno or errno.EIO)}."
        raise RefusedError("promotion.path", reason, "Put it back in its place, or let yourself read it.") from problem
    try:
        yield TargetFolder(path, descriptor, largest)
    finally:
        os.close(descriptor)


def _in_the_way(name: str, reason: str) -> RefusedError:
    return RefusedError("promotion.path", f"{quoted(name)} cannot be put there: {reason}.", _HINT)
