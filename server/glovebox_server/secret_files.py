"""Small secret files: one directory, one secret per file; refused if others could have read it.

No secret is printed or logged here.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_sandboxes.host import permissions
from glovebox_sandboxes.host.identity import changes_user

_LOCK_POLL_SECONDS = 0.005
_THE_FILE = "Name the file itself."
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

    Raises:
        SecretFileError: it belongs to another user (also for a server of root) or is open to others; or
            root's lies where another user can replace it; or it cannot be made.
    """
    other = "name another with --state-dir or GLOVEBOX_STATE_DIR"
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.stat()
    except OSError as error:
        reason = f"it cannot be made: {error.strerror}"
        raise SecretFileError(_STATE, directory, reason, f"Make room for it, or {other}.") from error
    if found.st_uid != os.geteuid():
        reason = f"it belongs to user {found.st_uid}"
        raise SecretFileError(_STATE, directory, reason, f"Run Glovebox as that user, or {other}.")
    if found.st_mode & 0o077:  # as for each file in it, whose own checks decide about one that others could have read
        reason = f"others have access to it (mode {stat.S_IMODE(found.st_mode):03o})"
        raise SecretFileError(_STATE, directory, reason, f"Run `chmod 700 {directory}`, or {other}.")
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

    @contextlib.contextmanager
    def locked(self, seconds: float | None = None) -> Iterator[None]:
        """Lock out other writers during the block; after ``seconds`` run without: the holder may be suspended."""
        if seconds is None:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        else:
            self._try_lock(time.monotonic() + seconds)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _try_lock(self, until: float) -> None:
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(_LOCK_POLL_SECONDS)

    def remove(self, name: str) -> None:
        """Remove a file, and return once the removal survives a crash. Raises SecretFileError."""
        try:
            os.unlink(name, dir_fd=self._descriptor)
            os.fsync(self._descriptor)
        except OSError as error:
            reason = f"it cannot be removed: {error.strerror}"
            raise SecretFileError(self._kind, self.path / name, reason, "Make the directory writable.") from error

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
                with contextlib.suppress(FileNotFoundError):  # after the rename
                    os.unlink(draft, dir_fd=self._descriptor)
                os.fsync(self._descriptor)
        except OSError as error:
            reason = f"it cannot be written: {error.strerror}"
            raise SecretFileError(
                self._kind, self.path / name, reason, "Free space, or make the directory writable."
            ) from error
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
            raise SecretFileError(self._kind, path, reason, f"Remove {path}; a new one is made.") from error
        return _content(fd, path, most, self._kind, f"Remove {path}.")


@contextlib.contextmanager
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

    Raises:
        SecretFileError: it is missing (then with ``fix``), a link, not a regular file, another user's, or open
            to others.
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
        raise SecretFileError(kind, path, f"it belongs to user {found.st_uid}", f"Run `chown {os.geteuid()} {path}`.")
    if found.st_mode & 0o077:
        reason = f"others have access to it (mode {stat.S_IMODE(found.st_mode):03o})"
        raise SecretFileError(
            kind, path, reason, f"Remove it if others may have read it, else run `chmod {mode} {path}`."
        )
