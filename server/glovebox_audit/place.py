"""The log's directory for its writer: only files of its own, one lock, and the disk's failures in words.

Must import nothing of the log's format.
"""

import contextlib
import errno
import fcntl
import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from glovebox_sandboxes.contract.errors import DiagnosedError

#: Seconds a writer waits for the lock. A holder needs it for one disk write (under 1 ms). Five seconds cover a stalling
#: disk; a stopped holder (SIGSTOP) must not stop every other server.
LOCK_WAIT_SECONDS = 5.0

#: First and longest pause in seconds between attempts: short against one fdatasync, few wake-ups in a long wait.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0001, 0.002

#: ``FS_IOC_GETFLAGS``, and the flags of ``chattr +a`` and ``+i``: such a file cannot be renamed (linux/fs.h).
_GETFLAGS, _FIXED = 0x80086601, 0x20 | 0x10


class AuditError(DiagnosedError):
    """A record could not be made durable, so the effect it announces does not happen."""


_FIX_DISK = "Free space on its file system, or point the state directory at another one."
_FIX_ACCESS = "Make the directory and its files writable for the user that runs Glovebox."
_FIX_NEWER = "Upgrade Glovebox, or name another state directory."
_FIX_EVIDENCE = (
    "Run `glovebox audit verify` and keep the directory as evidence; Glovebox starts a new log when it is moved away."
)


@dataclass(frozen=True, slots=True)
class LogDirectory:
    """An open directory. Make it with ``opened``; raises OSError unless stated otherwise."""

    path: Path
    descriptor: int

    def open(self, name: str, flags: int, *, create: bool = True) -> int:
        """Open a file for reading and writing; raises AuditError unless it is ours alone."""
        flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
        descriptor = os.open(name, flags, 0o600, dir_fd=self.descriptor)
        try:
            self._check(os.fstat(descriptor), stat.S_IFREG, self.path / name)
        except AuditError:
            os.close(descriptor)
            raise
        return descriptor

    def folder(self, name: str) -> None:
        """Make a folder if there is none; raises AuditError unless it is ours alone."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=self.descriptor)
            os.fsync(self.descriptor)
        self._check(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False), stat.S_IFDIR, self.path / name)

    def check(self, name: str) -> None:
        """Check a file without opening it; raises AuditError unless it is ours alone."""
        self._check(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False), stat.S_IFREG, self.path / name)

    def found(self, name: str) -> os.stat_result | None:
        """Return what the system says about a file; None if there is none."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def rename(self, old: str, new: str) -> None:
        """Move a file over any file of the new name."""
        os.rename(old, new, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Remove a file."""
        os.unlink(name, dir_fd=self.descriptor)

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder."""
        with self._folder(folder) as descriptor:
            return sorted(os.listdir(descriptor))  # noqa: PTH208 - a descriptor, not a path

    def sync(self, folder: str = ".") -> None:
        """Sync the names in a folder to the disk."""
        with self._folder(folder) as descriptor:
            os.fsync(descriptor)

    @contextlib.contextmanager
    def _folder(self, name: str) -> Iterator[int]:
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self.descriptor)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def may_rename(self, descriptor: int) -> bool:
        """Return whether a file here can be renamed; ``chattr +a`` forbids it."""
        flags = bytearray(8)
        with contextlib.suppress(OSError):  # a file system without such flags
            fcntl.ioctl(descriptor, _GETFLAGS, flags)
        writable = os.access(".", os.W_OK | os.X_OK, dir_fd=self.descriptor, effective_ids=True)
        return writable and not int.from_bytes(flags[:4], sys.byteorder) & _FIXED

    def lock(self, descriptor: int) -> None:
        """Take the exclusive lock on a file; raises AuditError after ``LOCK_WAIT_SECONDS``."""
        if not take_lock(descriptor, LOCK_WAIT_SECONDS):
            reason = f"another process has held its lock for {LOCK_WAIT_SECONDS:g} seconds"
            name = Path(f"/proc/self/fd/{descriptor}").readlink()
            raise self.refused(reason, f"Find it with `fuser {name}` and continue or end it.")

    def refused(self, reason: str, fix: str) -> AuditError:
        """Return the error for a log that cannot be used."""
        return AuditError(f"use the audit log in {self.path}", reason, fix)

    def tampered(self, reason: str) -> AuditError:
        """Return the error for a log that was tampered with."""
        return self.refused(reason, _FIX_EVIDENCE)

    def newer(self, problem: Exception) -> AuditError:
        """Return the error for a log that a later version wrote."""
        return self.refused(str(problem), _FIX_NEWER)

    def _check(self, found: os.stat_result, kind: int, path: Path) -> None:
        if stat.S_IFMT(found.st_mode) != kind or (kind == stat.S_IFREG and found.st_nlink != 1):
            raise self.refused(f"{path} is not a file of its own", "Move it away.")
        if found.st_uid != os.geteuid():
            fix = f"Run Glovebox as that user, or choose another state directory than {self.path}."
            raise self.refused(f"{path} belongs to user {found.st_uid}", fix)
        if found.st_mode & 0o077:
            raise self.refused(f"{path} is open to other users", f"Run `chmod go= {path}`.")


def take_lock(descriptor: int, seconds: float = 0.0, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file, waiting that long for another holder; return whether it is locked.

    By flock, not POSIX locks: those vanish when any other descriptor of the file is closed in this process.
    """
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock of a file or folder; raises OSError.

    It tries a shared lock, so that two who ask at once do not see each other.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return not take_lock(descriptor, kind=fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[LogDirectory]:
    """Open the directory, made (0700) if missing; raises AuditError unless it is ours alone."""
    if not os.path.lexists(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        place = LogDirectory(path, descriptor)
        place._check(os.fstat(descriptor), stat.S_IFDIR, path)  # noqa: SLF001 - of this module
        yield place
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def translated(path: Path, attempted: str) -> Iterator[None]:
    """Turn an OSError into AuditError, with what to do about it."""
    try:
        yield
    except OSError as error:
        raise unavailable(path, attempted, error) from error


def unavailable(path: Path, attempted: str, error: OSError) -> AuditError:
    """Return the error for a failure of the disk."""
    full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
    access = error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST}
    link = error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and path.is_symlink())
    fix = _FIX_DISK if full else _FIX_ACCESS if access else "Check the disk and the kernel's log (`dmesg`)."
    reason = "it is a symbolic link" if link else (error.strerror or str(error))
    return AuditError(f"{attempted} in {path}", reason, "Replace the link." if link else fix)
