"""The SQLite file of the index beside the log: one user's, in one process at a time, with our tables only."""

import contextlib
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from glovebox_audit.place import take_lock

NAME = "index.sqlite"

#: Changes with the tables. An index of another format is rebuilt.
FORMAT = 4

#: Seconds one query waits for another. The first one on a large log takes minutes.
LOCK_WAIT_SECONDS = 300.0

_MEMORY = ":memory:"

_SETTINGS = ("trusted_schema = OFF", "locking_mode = EXCLUSIVE", "temp_store = MEMORY", "cache_size = -65536")

_COLUMNS = "call, tool, principal, client, run, workflow, outcome, time, first, last"
_TABLES = (
    # Its extent: the offsets it begins and ends at, the digest of the last line, the last text's number.
    "CREATE TABLE state (began INTEGER, until INTEGER, line BLOB, texts INTEGER)",
    # No SQL index but for names: a full scan takes a tenth of a second, and the planner cannot err.
    f"CREATE TABLE calls (id INTEGER PRIMARY KEY, {_COLUMNS})",
    "CREATE INDEX names ON calls (call)",
    # Each text is in the index once: most are common to many calls.
    "CREATE TABLE known (digest BLOB PRIMARY KEY, text INTEGER) WITHOUT ROWID",
    "CREATE TABLE uses (text INTEGER, call INTEGER, PRIMARY KEY (text, call)) WITHOUT ROWID",
)
_TEXTS = "CREATE VIRTUAL TABLE texts USING fts5(text, content='', columnsize=0, tokenize='trigram case_sensitive 1')"


#: Errors of a damaged file: SQLite's own message may hold bytes of it that are no text.
DAMAGED = (sqlite3.Error, UnicodeDecodeError)


class IndexDatabase:
    """An open index. Make it with ``opened``."""

    def __init__(self, path: Path | None) -> None:
        """Open the file, or one in memory; raises one of ``DAMAGED``, also for another format."""
        self._path = path
        self._renewed = False
        self.connection = _connected(_MEMORY if path is None else str(path))

    def reset(self) -> None:
        """Replace it with an empty one."""
        self.close()
        if self._path is not None:
            _renew(self._path)
        self.connection = _connected(_MEMORY if self._path is None else str(self._path))

    def renew(self, problem: Exception, say: Callable[[str], None]) -> None:
        """Replace it after a failure; in memory if the disk refuses, or a new one failed too.

        Raises:
            Exception: the same, if it failed in memory too.
        """
        if self._path is None:
            raise problem
        if self._renewed or isinstance(problem, sqlite3.OperationalError):
            say(in_memory(problem))
            self._path = None
        self._renewed = True
        self.reset()

    def close(self) -> None:
        """Close it."""
        self.connection.close()


@contextlib.contextmanager
def opened(directory: Path, say: Callable[[str], None]) -> Iterator[IndexDatabase]:
    """Open the index of the log in a directory, or a new one if it is unusable.

    ``say`` gets a sentence about what takes long or cannot be kept.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_locked(directory, say))
            found = _beside(directory / NAME)
        except (OSError, *DAMAGED) as problem:
            say(in_memory(problem))
            found = IndexDatabase(None)
        stack.callback(found.close)
        yield found


def in_memory(problem: Exception) -> str:
    """Return the message for an index that is not kept."""
    words = (isinstance(problem, OSError) and problem.strerror) or str(problem)
    return f"The index of the log is made in memory, for this command alone, and not kept: {words}."


@contextlib.contextmanager
def _locked(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    if directory.stat().st_uid != os.geteuid():
        raise OSError("the log is another user's")  # another user's file in it would be in the way of its owner
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not take_lock(descriptor, 1):
            say("Waiting for another query, which makes the index of the log.")
            if not take_lock(descriptor, LOCK_WAIT_SECONDS):
                raise OSError(f"another query has held its lock for {LOCK_WAIT_SECONDS:g} seconds")
        yield
    finally:
        os.close(descriptor)


def _beside(path: Path) -> IndexDatabase:
    with contextlib.suppress(FileExistsError):
        _create(path)
    found = path.lstat()
    ours = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()
    if not ours or found.st_mode & 0o077:
        raise OSError(f"{path} is not a file of our own alone: remove it")
    try:
        return IndexDatabase(path)
    except sqlite3.OperationalError:  # of the disk
        raise
    except DAMAGED:
        _renew(path)
        return IndexDatabase(path)


def _renew(path: Path) -> None:
    """Replace the file with an empty one, without what a crash left of its last change."""
    for each in (path, path.with_name(f"{path.name}-journal")):
        each.unlink(missing_ok=True)
    _create(path)


def _create(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def _connected(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        for setting in _SETTINGS:
            connection.execute(f"PRAGMA {setting}")
        there = _schema(connection)
        if len(there) == 1:  # nothing yet
            _make(connection)
        else:
            with contextlib.closing(_connected(_MEMORY)) as ours:
                same = there == _schema(ours)
            if not same:
                raise sqlite3.DatabaseError("it is no index of this format")  # noqa: TRY301 - closed below
    except BaseException:
        connection.close()
        raise
    return connection


def _schema(connection: sqlite3.Connection) -> list[tuple[object, ...]]:
    tables = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name").fetchall()
    return [connection.execute("PRAGMA user_version").fetchone(), *tables]


def _make(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for table in _TABLES:
        connection.execute(table)
    with contextlib.suppress(sqlite3.OperationalError):  # a SQLite without trigrams: before 3.34, or without FTS5
        connection.execute(_TEXTS)
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    connection.execute("COMMIT")
