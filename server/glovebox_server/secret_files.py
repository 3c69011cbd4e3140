"""Small secret files: one directory, one secret per file; refused if others could have read it.

No secret is printed or logged here. ``Files`` are those that every process checks before each call: one ``stat`` if
nothing changed.

Rule 1  A file is there whole or not at all, and never changes: making and removing one are single operations of the
        file system. So readers need no lock, and a killed command leaves nothing half done. A writer counts the files
        under a lock, but waits for it no longer than ``LOCK_SECONDS``: a process that hangs blocks no other.
Rule 2  A file with other content than was written is damaged; the reader decides what that means.
"""

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from glovebox_audit.place import take_lock
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_sandboxes.host import permissions
from glovebox_sandboxes.host.identity import changes_user

_THE_FILE = "Name the file itself."
_WRITABLE = "make the directory writable."
_STATE = "state directory"
_READING = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags. Non-blocking: a FIFO in its place cannot stop the server from starting."""


class SecretFileError(DiagnosedError):
    """A secret file or its directory cannot be used safely, so what needs it does not start."""

    def __init__(self, kind: str, path: Path, reason: str, fix: str) -> None:
        """Take what the file holds, its path, what is wrong with it, and the command that repairs it."""
        super().__init__(f"{kind} {path}", reason, fix)
        self.path = path


def prepare_state(directory: Path) -> None:
    """Make a state directory (0700) if missing; refuse one that others could read, change or exchange.

    Raises SecretFileError: it belongs to another user (also for a server of root) or is open to others; or root's lies
    where another user can replace it; or it cannot be made.
    """
    other = "name another with --state-dir or GLOVEBOX_STATE_DIR"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        reason = f"it cannot be made: {error.strerror}"
        raise SecretFileError(_STATE, directory, reason, f"Make room for it, or {other}.") from error
    # As for each file in it, whose own checks decide about one that others could have read.
    _check(found, directory, _STATE, f"{other[0].upper()}{other[1:]}.", directory=True)
    for place in {directory.absolute(), directory.resolve()} if changes_user() else ():
        if (flaw := permissions.flaw_above(place)) is not None:
            above, problem, command = flaw
            reason = f"{above} {problem}, who could put another in its place"
            raise SecretFileError(_STATE, directory, reason, f"Run `{command} {above}`, or {other}.")


class SecretDirectory:
    """An open directory of secrets; see ``opened``."""

    def __init__(self, path: Path, descriptor: int, kind: str) -> None:
        self.path = path
        self._descriptor = descriptor
        self._kind = kind

    def names(self) -> list[str]:
        """Return the sorted names of the files; those that begin with a dot are half made."""
        listed = os.listdir(self._descriptor)  # noqa: PTH208 - by descriptor
        return sorted(name for name in listed if not name.startswith("."))

    def mark(self, name: str) -> "Mark":
        """Return what changes with a file; None if that is not sure, or the file cannot be looked at."""
        with suppress(OSError):
            return _mark(os.stat(name, dir_fd=self._descriptor, follow_symlinks=False))
        return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock out other writers during the block; after ``LOCK_SECONDS`` run without: the holder may be suspended."""
        take_lock(self._descriptor, LOCK_SECONDS)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def take(self) -> bool:
        """Lock out other processes until this is closed; return False if one was first."""
        return take_lock(self._descriptor)

    def remove(self, name: str) -> None:
        """Remove a file, and return once the removal survives a crash. Raises SecretFileError."""
        try:
            os.unlink(name, dir_fd=self._descriptor)
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._refusal(name, f"it cannot be removed: {error.strerror}", _WRITABLE.capitalize()) from error

    def make(self, name: str, content: bytes, *, replace: bool = False) -> bool:
        """Publish a whole file at once; the first of several makers of a name wins, and the rest change nothing.

        Returns True if the file now has this content. Raises SecretFileError if it cannot be written.
        """
        draft = f".new-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(draft, flags, 0o600, dir_fd=self._descriptor)
            try:
                if os.write(fd, content) < len(content):  # a disk that is nearly full writes a part without an error
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(fd)
                publish = os.rename if replace else os.link
                publish(draft, name, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            except FileExistsError:
                return False
            finally:
                os.close(fd)
                with suppress(FileNotFoundError):  # after the rename
                    os.unlink(draft, dir_fd=self._descriptor)
                os.fsync(self._descriptor)
        except OSError as error:
            reason = f"it cannot be written: {error.strerror}"
            raise self._refusal(name, reason, f"Free space, or {_WRITABLE}") from error
        return True

    def read(self, name: str, most: int) -> bytes:
        """Return the content of a file, at most one byte more than ``most``.

        Raises SecretFileError if it is a link, not a regular file, another user's, or open to others.
        """
        path = self.path / name
        try:
            fd = os.open(name, _READING, dir_fd=self._descriptor)
        except OSError as error:
            reason = f"it cannot be opened as a file of its own: {error.strerror}"
            raise self._refusal(name, reason, f"Remove {path}; a new one is made.") from error
        return _content(fd, path, most, self._kind, f"Remove {path}.")

    def _refusal(self, name: str, reason: str, fix: str) -> SecretFileError:
        return SecretFileError(self._kind, self.path / name, reason, fix)


@contextmanager
def opened(directory: Path, kind: str) -> Iterator[SecretDirectory]:
    """Open a directory of secrets, made (0700) if missing; its state directory is made and checked too.

    ``kind`` names the content in errors. Raises SecretFileError if either is a link, another user's, or open to others.
    """
    prepare_state(directory.parent)
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise SecretFileError(kind, directory, f"it is not a directory: {error.strerror}", "Remove it.") from error
    try:
        _check(os.fstat(descriptor), directory, kind, f"Remove {directory}.", directory=True)
        yield SecretDirectory(directory, descriptor, kind)
    finally:
        os.close(descriptor)


def read_own(path: Path, most: int, kind: str, fix: str) -> bytes:
    """Return the content of an operator's secret file, at most one byte more than ``most``.

    Raises SecretFileError: it is missing (then with ``fix``), a link, not a regular file, another user's, or open to
    others.
    """
    try:
        fd = os.open(path, _READING)
    except OSError as error:
        # The file may be the only copy of another key, or a link to it.
        there = fix if isinstance(error, FileNotFoundError) else _THE_FILE
        raise SecretFileError(kind, path, f"it cannot be opened: {error.strerror}", there) from error
    return _content(fd, path, most, kind, _THE_FILE)


def _content(fd: int, path: Path, most: int, kind: str, instead: str) -> bytes:
    """Return what an open file has, and close it; ``instead`` is what to do about another thing in its place."""
    try:
        _check(os.fstat(fd), path, kind, instead)
        return os.read(fd, most + 1)
    finally:
        os.close(fd)


def _check(found: os.stat_result, path: Path, kind: str, instead: str, *, directory: bool = False) -> None:
    form, mode = (stat.S_IFDIR, "700") if directory else (stat.S_IFREG, "600")
    if stat.S_IFMT(found.st_mode) != form:
        raise SecretFileError(kind, path, "it is not what is expected there", instead)
    if found.st_uid != os.geteuid():
        fix = f"Run Glovebox as that user, or `chown {os.geteuid()} {path}`."
        raise SecretFileError(kind, path, f"it belongs to user {found.st_uid}", fix)
    if found.st_mode & 0o077:
        reason = f"others have access to it (mode {stat.S_IMODE(found.st_mode):03o})"
        fix = "Run" if kind == _STATE else "Remove it if others may have read it, else run"
        raise SecretFileError(kind, path, reason, f"{fix} `chmod {mode} {path}`.")


FOLDER = "governance"
MAX_BYTES = 8192
LOCK_SECONDS = 1.0
"""Others hold the lock for a few writes to the disk."""
_TICK_NS = 50_000_000
"""Two changes within one tick of the kernel's clock (at most 10 ms) look the same to ``stat``."""
Mark = tuple[int, ...] | None


def _mark(found: os.stat_result) -> Mark:
    """Return what changes with a file or directory; None right after a change, as the next would look the same."""
    settled = abs(time.time_ns() - found.st_ctime_ns) > _TICK_NS
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns) if settled else None


class StoredItem(BaseModel):
    """The content of one file, which is named by its id."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: Literal[1] = 1
    id: str


T = TypeVar("T", bound=StoredItem)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItems(Generic[T]):
    """The items of a directory."""

    items: tuple[T, ...] = ()
    """By the names of their files, which begin with the time."""
    damaged: tuple[SecretFileError, ...] = ()


class Files(Generic[T]):
    """One directory. It costs only its name until it is used."""

    def __init__(self, path: Path, model: type[T], *, fix: Callable[[Path], str], kind: str, most: int) -> None:
        """Take the directory, in ``FOLDER`` of a state directory; nothing is read.

        ``fix`` says what to do with a damaged file; ``kind`` names the content in errors.
        """
        self.path = path
        self._model = model
        self._fix = fix
        self._kind = kind
        self._most = most
        self._seen: Mark = None
        self._found: StoredItems[T] = StoredItems()

    def prepare(self) -> None:
        """Make the directory if missing. Raises SecretFileError if it cannot be used safely."""
        with self._opened():
            pass

    def look(self) -> StoredItems[T]:
        """Return the current items of a directory that was prepared; one that is gone is damaged."""
        try:
            found = os.stat(self.path)  # noqa: PTH116 - a Path's own costs as much again, for every call
        except OSError as problem:
            self._seen = None
            return StoredItems(damaged=(self._unusable(self.path, problem),))
        mark = _mark(found)
        if mark is None or mark != self._seen:
            self._found, self._seen = self.read(), mark
        return self._found

    def read(self) -> StoredItems[T]:
        """Read the items anew; empty without a directory."""
        if not os.path.lexists(self.path):
            return StoredItems()
        try:
            with self._opened() as directory:
                names = directory.names()
                read = [self._item(directory, name) for name in names[: self._most]]
        except SecretFileError as problem:
            return StoredItems(damaged=(problem,))
        except OSError as problem:
            return StoredItems(damaged=(self._unusable(self.path, problem),))
        damaged = [each for each in read if isinstance(each, SecretFileError)]
        if len(names) > self._most:
            damaged.append(self._crowded(self._most + 1))
        items = tuple(each for each in read if each is not None and not isinstance(each, SecretFileError))
        return StoredItems(items=items, damaged=tuple(damaged))

    def names(self) -> list[str]:
        """Return the names of the files, whole or damaged. Raises SecretFileError if the directory is unsafe."""
        with self._opened() as directory:
            return directory.names()

    def add(self, name: str, content: bytes, *, instead: bytes | None = None, spare: int = 0) -> bool:
        """Add a file, with the content ``instead`` if the disk is full; return whether it has its own content.

        ``spare`` places are left to others. Raises SecretFileError if it could not be made, or there are too many.
        """
        with self._opened() as directory, directory.locked():
            if len(directory.names()) >= self._most - spare:
                raise self._crowded(self._most - spare)
            try:
                directory.make(name, content)
            except SecretFileError:
                if instead is None:
                    raise
                directory.make(name, instead)
                return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file, if it exists. Raises SecretFileError if it could not be removed."""
        with self._opened() as directory:
            try:
                directory.remove(name)
            except SecretFileError:
                if os.path.lexists(self.path / name):
                    raise

    def _opened(self) -> AbstractContextManager[SecretDirectory]:
        prepare_state(self.path.parent.parent)
        return opened(self.path, self._kind)

    def _item(self, directory: SecretDirectory, name: str) -> T | SecretFileError | None:
        try:
            content = directory.read(name, MAX_BYTES)
        except SecretFileError as problem:
            return problem if os.path.lexists(self.path / name) else None  # removed in this moment
        except OSError as problem:
            return self._unusable(self.path / name, problem)
        with suppress(ValidationError):
            item = self._model.model_validate_json(content)
            if item.id == name and len(content) <= MAX_BYTES:
                return item
        path = self.path / name
        return SecretFileError(self._kind, path, "it is not what was written", self._fix(path))

    def _crowded(self, count: int) -> SecretFileError:
        return SecretFileError(self._kind, self.path, f"it has {count} files already", "Remove some.")

    def _unusable(self, path: Path, problem: OSError) -> SecretFileError:
        fix = f"Make {path} usable for the user that runs Glovebox, then start the server again."
        return SecretFileError(self._kind, path, f"it cannot be used: {problem.strerror}", fix)
