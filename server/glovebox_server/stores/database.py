"""A SQLite file that all server processes of a state directory share, with atomic transactions.

Rule 1  A transaction that returned survives SIGKILL of any process: it is in the kernel's page cache. A power loss can
        cost the last ones, never half of one.
Rule 2  A file that cannot be read or written raises ``StoreError`` and stays as it is: a damaged file is never
        replaced, an empty one is damaged.
Rule 3  Waits for another process's lock, or for the disk, happen in a worker thread: one for each open file.
"""

import asyncio
import contextlib
import math
import os
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import anyio

from glovebox_server.errors import StoreError

_Done = TypeVar("_Done")


class Worker:
    """The thread: started by its first task, ended by ``close``."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work: Callable[[], _Done]) -> _Done:
        """Run this after all earlier tasks, and return its result.

        Cancelled before its start, it never runs; cancelled later, it completes, and its result is returned.
        """
        job = self._pool.submit(work)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            if job.cancel():
                raise
            with anyio.CancelScope(shield=True), contextlib.suppress(Exception):  # which its result raises below
                await asyncio.wrap_future(job)
            if anyio.current_effective_deadline() != -math.inf:
                raise  # a cancellation that is not a scope's comes once, and must not be lost
        return job.result()

    def close(self) -> None:
        """End the thread. Every caller has waited for its task, so this waits for nothing."""
        self._pool.shutdown()


DIRECTORY: Final = "governance"
LOCK_WAIT_SECONDS: Final = 5.0
"""A holder needs the lock for less than a millisecond; five seconds cover a stalling disk. A stopped one (SIGSTOP) must
not stop every other server with it."""
MAX_MIB: Final = 256
"""Size of one file: each owner bounds its content, and this bounds a bug in that."""
_SETTINGS = ("trusted_schema = OFF", "cell_size_check = ON", "temp_store = MEMORY")
_HELD = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT})
_ACCESS = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)
_OTHER = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_NOLFS)
_PRIMARY = 0xFF
"""Mask of a result code; the other bits are details (https://www.sqlite.org/rescode.html)."""
_FIX_DISK = "Free space on its file system, or point the state directory at another one."
_FIX_ACCESS = "Make the directory and its files writable for the user that runs Glovebox."
_FIXES = {
    sqlite3.SQLITE_FULL: _FIX_DISK,
    **dict.fromkeys(_ACCESS, _FIX_ACCESS),
    **dict.fromkeys(_OTHER, f"{_FIX_DISK} Else check the disk and the kernel's log (`dmesg`)."),
}

_T = TypeVar("_T")
Work = Callable[[sqlite3.Connection], _T]
"""The statements of one transaction, without any waits."""


class Database:
    """One open file. Make it with ``opened``; safe for threads, which take turns."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._identity = _identity(path)
        self._lock = threading.Lock()
        self.worker = Worker(f"glovebox-{path.stem}")
        self._in_vain = -math.inf

    async def transact(self, work: Work[_T]) -> _T:
        """Do ``work`` in one transaction that writes, in a worker thread. Raises StoreError if nothing was done.

        Cancelled while it waits for its turn, it does nothing; later, it completes and returns its result.
        """
        return await self.worker.run(partial(self.transact_now, work, time.monotonic()))

    async def query(self, work: Work[_T]) -> _T:
        """Do ``work``, which only reads, on one state of the file, in a worker thread. Raises StoreError."""
        return await self.worker.run(partial(self.query_now, work))

    def transact_now(self, work: Work[_T], asked: float | None = None) -> _T:
        """Do ``transact``, as asked for at this time, in this thread: for commands; never on an event loop."""
        # IMMEDIATE takes the lock before any read, so no decision rests on what another process changes.
        return self._transaction("BEGIN IMMEDIATE", "write to", work, time.monotonic() if asked is None else asked)

    def query_now(self, work: Work[_T]) -> _T:
        """Do ``query`` in this thread."""
        return self._transaction("BEGIN", "read", work)

    def copy_now(self, into: sqlite3.Connection) -> None:
        """Copy one state of the whole file into an empty database. Raises StoreError."""
        with self._lock, translated(self.path, "copy"):
            self._connection.backup(into)

    def _transaction(self, begin: str, attempted: str, work: Work[_T], asked: float = math.inf) -> _T:
        with self._lock, translated(self.path, attempted):
            # A transaction that waited behind a timeout does not wait as long again, one after the other.
            if asked < self._in_vain:
                raise _held(self.path, attempted)
            if _identity(self.path) != self._identity:
                raise _unusable(
                    self.path, attempted, "it was removed or replaced while it was in use", "Put it back, or restart."
                )
            try:
                with _begun(self._connection, begin):
                    return work(self._connection)
            except sqlite3.OperationalError as error:
                if _code(error) in _HELD:
                    self._in_vain = time.monotonic()
                raise


@contextlib.contextmanager
def opened(path: Path, schema: str, *, lock_wait: float = LOCK_WAIT_SECONDS) -> Iterator[Database]:
    """Open a store; make it (0600, its directory 0700) if missing.

    Raises StoreError: it is not ours alone, of another version, damaged, locked by another process, or the disk fails.

    Args:
        path: of the file, in a directory of stores only.
        schema: SQL that makes its tables; a file with others is refused.
        lock_wait: seconds to wait for other processes.
    """
    with contextlib.ExitStack() as stack:
        with translated(path, "open"):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _check(path.parent, stat.S_IFDIR)
            if not os.path.lexists(path):
                _make(path, schema)
            _check(path, stat.S_IFREG)
            # SQLite accepts an empty file as a new one. Ours never are: an empty one was truncated.
            if not path.stat().st_size:
                raise _damaged(path, "it is empty")
            connection = stack.enter_context(_connected(path, lock_wait))
            for (problem,) in connection.execute("PRAGMA quick_check(1)").fetchall():
                if problem != "ok":
                    raise _damaged(path, str(problem).strip().splitlines()[-1])
            with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as whole:
                _create(whole, schema)
                if _tables(connection) != _tables(whole):
                    raise _damaged(path, "its tables are not those of this version of Glovebox")
            found = Database(path, connection)
        stack.callback(found.worker.close)
        yield found


@contextlib.contextmanager
def translated(path: Path, attempted: str) -> Iterator[None]:
    """Turn a failure of the disk or of SQLite into ``StoreError``, with its fix."""
    try:
        yield
    except OSError as error:
        raise _unusable(path, attempted, error.strerror or str(error), _FIX_ACCESS) from error
    except UnicodeDecodeError as error:  # SQLite's own message may hold bytes of a damaged file
        raise _damaged(path, "what is in it is no text") from error
    except sqlite3.Error as error:
        code = _code(error)
        if code in _HELD:
            raise _held(path, attempted) from error
        if code in _DAMAGED:
            raise _damaged(path, str(error)) from error
        if code in _FIXES:
            reason = "the disk, or its own bound, is full" if code == sqlite3.SQLITE_FULL else str(error)
            raise _unusable(path, attempted, reason, _FIXES[code]) from error
        raise  # a bug in a statement of ours


@contextlib.contextmanager
def _connected(path: Path, lock_wait: float, synchronous: str = "NORMAL") -> Iterator[sqlite3.Connection]:
    # Never made by SQLite itself: mode=rw. `as_uri` escapes what a path may hold.
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=lock_wait, isolation_level=None,
        check_same_thread=False,
    )  # fmt: skip
    with contextlib.closing(connection):
        for setting in (*_SETTINGS, f"synchronous = {synchronous}"):
            connection.execute(f"PRAGMA {setting}")
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        connection.execute(f"PRAGMA max_page_count = {MAX_MIB * 2**20 // page}")
        yield connection


def _make(path: Path, schema: str) -> None:
    """Put a whole file in place; of several processes that do it at once the first wins."""
    half = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    os.close(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    try:
        with _connected(half, LOCK_WAIT_SECONDS, "FULL") as connection:
            connection.execute("PRAGMA journal_mode = WAL")  # stored in the file
            _create(connection, schema)
        with contextlib.suppress(FileExistsError):
            os.link(half, path)
    finally:
        for each in (half, Path(f"{half}-wal"), Path(f"{half}-shm")):
            each.unlink(missing_ok=True)


def _create(connection: sqlite3.Connection, schema: str) -> None:
    with _begun(connection, "BEGIN IMMEDIATE"):
        for statement in schema.split(";"):  # not executescript: it would commit
            connection.execute(statement)


@contextlib.contextmanager
def _begun(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    """Run the block in a transaction: committed at the end, or rolled back."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # after some failures SQLite has rolled back by itself
            connection.execute("ROLLBACK")
        raise


def _tables(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    return connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name").fetchall()


def _check(path: Path, kind: int) -> None:
    found = path.lstat()
    if stat.S_IFMT(found.st_mode) != kind:
        raise _unusable(path, "open", "it is a link, or of another kind", "Move it away.")
    if found.st_uid != os.geteuid():
        fix = "Run Glovebox as that user, or choose another state directory."
        raise _unusable(path, "open", f"it belongs to user {found.st_uid}", fix)
    if found.st_mode & 0o077:
        raise _unusable(path, "open", "it is open to other users", f"Run `chmod go= {path}`.")


def _identity(path: Path) -> tuple[int, int]:
    found = os.stat(path, follow_symlinks=False)  # noqa: PTH116 - half the time of Path's, before every transaction
    return found.st_dev, found.st_ino


def _damaged(path: Path, reason: str) -> StoreError:
    fix = (
        f"Stop the servers and put a whole copy of {path} back, or move it and its -wal away: what was kept in it is "
        "then forgotten."
    )
    return _unusable(path, "read", f"it is damaged: {reason}", fix)


def _code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)) & _PRIMARY


def _held(path: Path, attempted: str) -> StoreError:
    fix = f"Find it with `fuser {path}` and continue or end it."
    return _unusable(path, attempted, "another process holds its lock", fix)


def _unusable(path: Path, attempted: str, reason: str, fix: str) -> StoreError:
    return StoreError(f"{attempted} the store {path}", reason, fix)
