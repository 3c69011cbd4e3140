"""The SQLite file of the index beside the log: one user's, in one process at a time, with our tables only."""

import contextlib
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from glovebox_audit.place import take_lock

NAME = "index.sqlite"

#: Changes with the tables. An index of another format is rebuilt.
FORMAT = 5

#: Seconds one query waits for another. The first one on a large log takes minutes.
LOCK_WAIT_SECONDS = 300.0

_MEMORY = ":memory:"

_SETTINGS = ("trusted_schema = OFF", "locking_mode = EXCLUSIVE", "temp_store = MEMORY", "cache_size = -65536")

_COLUMNS = "call, tool, principal, client, run, workflow, outcome, time, first, last"
_TABLES = (
    # Its extent: the offsets it begins and ends at, and the digest of the last line.
    "CREATE TABLE state (began INTEGER, until INTEGER, line BLOB)",
    # No SQL index but for names: a full scan takes a tenth of a second, and the planner cannot err.
    f"CREATE TABLE calls (id INTEGER PRIMARY KEY, {_COLUMNS})",
    "CREATE INDEX names ON calls (call)",
)
#: A row for each record, numbered by its call's id and its own number: see ``index.ROW_BITS``.
_TEXTS = "CREATE VIRTUAL TABLE texts USING fts5(text, content='', columnsize=0, tokenize='trigram case_sensitive 1')"


#: Errors of a damaged file: its numbers may be too large, and SQLite's own message may hold bytes that are no text.
DAMAGED = (sqlite3.Error, UnicodeDecodeError, OverflowError)
_Found = TypeVar("_Found")


def queried(directory: Path, say: Callable[[str], None], look: Callable[[sqlite3.Connection], _Found]) -> _Found:
    """Return what ``look`` finds with the index of the log in a directory: the kept one, a new one, one in memory.

    ``say`` gets a sentence about what takes long or cannot be kept. ``look`` raises one of ``DAMAGED`` if the index
    does not fit the log; the one in memory is the last.
    """
    path = directory / NAME
    try:
        with locked(directory, say):
            _require_own(path)
            try:
                with _connected(str(path)) as kept:
                    return look(kept)
            except sqlite3.OperationalError:  # of the disk
                raise
            except DAMAGED:
                for each in (path, path.with_name(f"{path.name}-journal")):  # the rest of a crashed change
                    each.unlink(missing_ok=True)
                _create(path)
                with _connected(str(path)) as new:
                    return look(new)
    except (OSError, *DAMAGED) as problem:
        words = (isinstance(problem, OSError) and problem.strerror) or str(problem)
        say(f"The index of the log is made in memory, for this command alone, and not kept: {words}.")
    with _connected(_MEMORY) as unkept:
        return look(unkept)


@contextlib.contextmanager
def locked(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Lock the index during the block; raises OSError if the log is another user's, or another query holds it long."""
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


def _require_own(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        _create(path)
    found = path.lstat()
    ours = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()
    if not ours or found.st_mode & 0o077:
        raise OSError(f"{path} is not a file of our own alone: remove it")


def _create(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


@contextlib.contextmanager
def _connected(path: str) -> Iterator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for setting in _SETTINGS:
            connection.execute(f"PRAGMA {setting}")
        there = _schema(connection)
        if len(there) == 1:  # nothing yet
            _make(connection)
        else:
            with _connected(_MEMORY) as ours:
                same = there == _schema(ours)
            if not same:
                raise sqlite3.DatabaseError("it is no index of this format")
        yield connection


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
