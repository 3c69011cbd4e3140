"""The derived index of the log's calls: where each lies, and its searchable fields. Evidence of nothing.

Rule 1  What is shown is read from the log, at the place the index names.
Rule 2  It holds the whole lines up to one offset of the log, and the digest of the last. If the log has another line
        there, or records a gap before it, the index is rebuilt; else what is new is added.
Rule 3  Its SQLite file beside the log is one user's, in one process at a time, with our tables only.
"""

import contextlib
import hashlib
import os
import re
import sqlite3
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from glovebox_audit import read
from glovebox_audit.chain import Record
from glovebox_audit.event import WHOSE
from glovebox_audit.events import CallDecided, EgressDecided
from glovebox_audit.place import take_lock
from glovebox_audit.query import calls
from glovebox_audit.query.outcomes import CANCELLED, ERRORS, FAILED, RUNNING
from glovebox_audit.read import Snapshot
from glovebox_audit.segments import files

NAME = "index.sqlite"

#: Changes with the tables. An index of another format is rebuilt.
FORMAT = 6

#: Seconds one query waits for another. The first one on a large log takes minutes.
LOCK_WAIT_SECONDS = 300.0

_MEMORY = ":memory:"

_SETTINGS = ("trusted_schema = OFF", "locking_mode = EXCLUSIVE", "temp_store = MEMORY", "cache_size = -65536")

_COLUMNS = "call, tool, principal, client, run, workflow, rule, outcome, time, first, last"
_TABLES = (
    # Its extent: the offsets it begins and ends at, and the digest of the last line.
    "CREATE TABLE state (began INTEGER, until INTEGER, line BLOB)",
    # No SQL index but for names: a full scan takes a tenth of a second, and the planner cannot err.
    f"CREATE TABLE calls (id INTEGER PRIMARY KEY, {_COLUMNS})",
    "CREATE INDEX names ON calls (call)",
    "CREATE TABLE hosts (host, call INTEGER, PRIMARY KEY (host, call)) WITHOUT ROWID",
    # How many calls there are of each kind: counting them takes a third of a second for each million records.
    "CREATE TABLE counts (tool, principal, outcome, number INTEGER, PRIMARY KEY (tool, principal, outcome))",
    # Records of no call that name one, or what one names, each at its place: see ``calls.named_by``.
    "CREATE TABLE about (name TEXT, place INTEGER)",
    "CREATE INDEX abouts ON about (name, place)",
)
#: A row for each record, numbered by its call's id and its own number: see ``ROW_BITS``.
_TEXTS = "CREATE VIRTUAL TABLE texts USING fts5(text, content='', columnsize=0, tokenize='trigram case_sensitive 1')"


#: Errors of a damaged file: its numbers may be too large, and SQLite's own message may hold bytes that are no text.
DAMAGED = (sqlite3.Error, UnicodeDecodeError, OverflowError)
_Found = TypeVar("_Found")


def queried(directory: Path, say: Callable[[str], None], look: Callable[[sqlite3.Connection], _Found]) -> _Found:
    """Return what ``look`` finds with the index of the log in a directory: the kept one, a new one, one in memory.

    ``say`` gets a sentence about what takes long or cannot be kept. ``look`` raises one of ``DAMAGED`` if the index
    does not fit the log; the one in memory is the last.
    """
    try:
        return kept(directory, say, look)
    except (OSError, *DAMAGED) as problem:
        words = (isinstance(problem, OSError) and problem.strerror) or str(problem)
        say(f"The index of the log is made in memory, for this command alone, and not kept: {words}.")
    with _connected(_MEMORY) as unkept:
        return look(unkept)


def kept(directory: Path, say: Callable[[str], None], look: Callable[[sqlite3.Connection], _Found]) -> _Found:
    """Return what ``look`` finds with the index that is kept; raises OSError or one of ``DAMAGED`` if it cannot be."""
    path = directory / NAME
    with locked(directory, say):
        _require_own(path)
        try:
            with _connected(str(path)) as connection:
                return look(connection)
        except sqlite3.OperationalError:  # of the disk
            raise
        except DAMAGED:
            for each in (path, path.with_name(f"{path.name}-journal")):  # the rest of a crashed change
                each.unlink(missing_ok=True)
            _create(path)
            with _connected(str(path)) as new:
                return look(new)


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
                if there != _schema(ours):
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


#: Digits of a digest or an address that are searched: the rest would be most of the index.
HEX_KEPT = 12

#: Bytes of the log in one commit: what an interrupted query has to read again.
_COMMIT_BYTES = 64 << 20

#: Calls under way, cached in memory.
_MOST_OPEN = 65_536

#: A row of texts has the id of its call above these bits, and the number of its record, ``seq``, in them.
ROW_BITS = 32

_DIGEST = re.compile(rf"([0-9a-f]{{{HEX_KEPT}}})[0-9a-f]{{20,}}")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Adder:
    """A writer of one index. Its methods raise the errors in ``DAMAGED``; its caller begins transactions."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection, self._execute = connection, connection.execute
        self._calls = int(connection.execute("SELECT coalesce(max(id), 0) FROM calls").fetchone()[0])
        self._searchable = has_texts(connection)
        # Calls under way: each with its number, tool and principal, and its indexed texts.
        self._open: dict[str, tuple[int, tuple[str, str], set[str]]] = {}
        self._counts = Counter[tuple[str, str, str]]()

    def add(self, lines: Iterable[tuple[int, bytes, bool]], base: int) -> int | None:
        """Add some whole lines of a file, whose first byte has the offset ``base``; return the last one's end.

        A line in a gap is no record. None if there is no whole line.
        """
        fresh, done, read = True, None, 0
        for at, raw, free in lines:
            whole = raw.endswith(b"\n")
            if fresh and whole and free:
                self._take(raw, base + at)
            fresh, read = whole, read + len(raw)
            done = at + len(raw) if whole else done
            if read >= _COMMIT_BYTES and whole:
                break
        return done

    def save(self, began: int, until: int, last: bytes) -> None:
        """Note that the index covers ``began`` to ``until`` and ends with the line ``last``."""
        self._execute("DELETE FROM state")
        self._execute("INSERT INTO state VALUES (?, ?, ?)", (began, until, hashlib.sha256(last).digest()))
        counted = "INSERT INTO counts VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET number = number + excluded.number"
        self._connection.executemany(counted, [(*kind, number) for kind, number in self._counts.items()])
        self._counts.clear()
        if len(self._open) > _MOST_OPEN:
            self._open.clear()

    def _take(self, raw: bytes, offset: int) -> None:
        label = calls.label(raw)
        if label is None:
            rows = [(clean(name), offset) for name in calls.named_by(raw)]
            self._connection.executemany("INSERT INTO about VALUES (?, ?)", rows)
            return
        if label[0] in calls.UNSEARCHED:
            return
        kind, call = label
        fields = calls.fields(raw)
        if fields is None:
            return
        if kind == CallDecided.kind:
            self._begin(call, fields, offset)
        elif call not in self._open and not self._resume(call):
            return  # its beginning was removed
        number, kind_of, noted = self._open[call]
        if self._searchable:
            new = dict.fromkeys(text for text in calls.texts(fields["data"]) if text not in noted)
            noted.update(new)
            row = number << ROW_BITS | int(fields["seq"]) & (1 << ROW_BITS) - 1
            text = clean(_DIGEST.sub(r"\1", "\n".join(new)))
            self._execute("INSERT INTO texts (rowid, text) VALUES (?, ?)", (row, text))
        if kind == EgressDecided.kind:
            asked = clean(str(fields["data"].get("host"))), number
            self._execute("INSERT OR IGNORE INTO hosts VALUES (?, ?)", asked)
        outcome = calls.outcome(kind, fields["data"])
        if outcome is not None and outcome != RUNNING:
            del self._open[call]
            self._counts[*kind_of, RUNNING] -= 1
            self._counts[*kind_of, outcome] += 1
            self._execute("UPDATE calls SET outcome = ?, last = ? WHERE id = ?", (outcome, offset, number))

    def _begin(self, call: str, fields: Any, offset: int) -> None:
        data = fields["data"]
        whose = {name: clean("" if data.get(name) is None else str(data[name])) for name in WHOSE}
        self._calls += 1
        try:
            time = microseconds(datetime.fromisoformat(fields["time"]))
        except ValueError:
            time = 0
        values = (self._calls, clean(call), *whose.values(), clean(str(data.get("rule"))), RUNNING, time, offset)
        self._execute("INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)", values)
        kind_of = whose["tool"], whose["principal"]
        self._counts[*kind_of, RUNNING] += 1
        self._open[call] = (self._calls, kind_of, set())

    def _resume(self, call: str) -> bool:
        asked = "SELECT id, tool, principal FROM calls WHERE call = ? ORDER BY id DESC LIMIT 1"
        found = self._execute(asked, (clean(call),)).fetchone()
        if found is not None:
            self._open[call] = (int(found[0]), (str(found[1]), str(found[2])), set())
        return found is not None


def has_texts(connection: sqlite3.Connection) -> bool:
    """Return whether texts are indexed."""
    return connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'texts'").fetchone() is not None


def clean(text: str) -> str:
    """Return a text as SQLite can hold it."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def microseconds(time: datetime) -> int:
    """Return a time in microseconds since the epoch."""
    return (time - _EPOCH) // timedelta(microseconds=1)


_HEX = re.compile(rf"[0-9a-f]{{{HEX_KEPT + 1},}}")

#: The shortest text that trigrams find.
_SHORTEST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpan:
    """The place of a call in the log."""

    first: int
    """Offset of its first record."""
    last: int | None
    """Offset of the record that ends it; None for one without an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The conditions of a query, all of which must hold. Empty fits all."""

    tools: tuple[str, ...] = ()
    principals: tuple[str, ...] = ()
    clients: tuple[str, ...] = ()
    """As a call states it; empty for none, or as ``Call.through`` has it."""
    runs: tuple[str, ...] = ()
    workflows: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    """Of policy or profile, by which it was decided."""
    hosts: tuple[str, ...] = ()
    """Asked for in one of its connections, whatever became of that."""
    outcomes: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    """Exclusive."""
    text: str | None = None
    """Folded; in one of the call's texts."""

    def fit(self, call: calls.CallSummary) -> bool:
        """Return whether a call fits, its texts aside."""
        time = datetime.fromisoformat(call.time)
        return (
            all((getattr(call, name) or "") in wanted for name, wanted in self.columns().items())
            and (self.since is None or time >= self.since)
            and (self.until is None or time < self.until)
        )

    def columns(self) -> dict[str, set[str]]:
        """Return what each column may hold: of clients without transports, of outcomes without who cancelled a call."""
        found = {
            "tool": set(self.tools),
            "principal": set(self.principals),
            "client": {"" if each.startswith(calls.OVER) else each for each in self.clients} | set(self.clients),
            "run": set(self.runs),
            "workflow": set(self.workflows),
            "rule": set(self.rules),
            "outcome": {*self.outcomes, *((*ERRORS, CANCELLED) if FAILED in self.outcomes else ())},
        }
        return {name: wanted for name, wanted in found.items() if wanted}

    def hold(self, records: Sequence[Record]) -> bool:
        """Return whether a call's records have the text, and a connection to one of the hosts."""
        asked = {each.data.get("host") for each in records if each.kind == EgressDecided.kind}
        return (self.text is None or calls.holds(records, self.text)) and (
            not self.hosts or not asked.isdisjoint(self.hosts)
        )

    def came(self, call: calls.CallSummary) -> bool:
        """Return whether a call that fits also has one of the clients and outcomes."""
        out = not self.outcomes or call.outcome in self.outcomes or (FAILED in self.outcomes and call.is_error)
        return out and (not self.clients or bool({call.client or "", call.through} & set(self.clients)))


def update(connection: sqlite3.Connection, log: Snapshot, progress: Callable[[int, int], None]) -> None:
    """Index what is new; ``progress`` gets the bytes done, and their total.

    Raises one of ``DAMAGED`` if the index does not fit the log, or file or disk fail.
    """
    began, start = _indexed(connection, log)
    adder, end = Adder(connection), log.end
    for file, base, size in log.files_from(start):
        at = max(start - base, 0)
        gaps = read.gaps_in(file, at, size)
        if gaps and gaps[0][0] < at:
            raise sqlite3.DatabaseError("earlier lines turn out to lie in a gap")
        lines = read.raw_lines(file, at, size)
        while at < size:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                done = adder.add(lines, base)
                if done is None:
                    break  # a line that is not whole yet
                at = done
                adder.save(began, base + at, files.line_before(file.fileno(), at))
            progress(base + at - start, end - start)


def _indexed(connection: sqlite3.Connection, log: Snapshot) -> tuple[int, int]:
    """Return the indexed range of the log; raise sqlite3.DatabaseError if the index does not fit it."""
    state = connection.execute("SELECT began, until, line FROM state").fetchone()
    if state is None:
        return log.start, log.start
    began, until, line = state
    # Removed segments stay in the index as long as they are the smaller part.
    kept = type(began) is type(until) is int and log.start - began <= until - log.start
    if not kept or hashlib.sha256(log.line_before(until)).digest() != line:
        raise sqlite3.DatabaseError("it is not of this log")
    return began, until


def find(connection: sqlite3.Connection, start: int, filters: Filters) -> Iterator[CallSpan]:
    """Yield places of calls from an offset on that may fit, newest first; with a text, others too."""
    conditions, values = _conditions(start, filters)
    wanted = " AND ".join(conditions)
    if connection.execute(f"SELECT 1 FROM calls WHERE {wanted}", values).fetchone() is None:  # noqa: S608 - of ours
        return
    asked = f"SELECT first, last FROM calls WHERE {wanted} ORDER BY id DESC"  # noqa: S608 - likewise
    if phrases := has_texts(connection) and _phrases(filters.text):
        # Every call may have the text: its rows are read from the newest on, as far as calls are asked for.
        asked = (
            f"SELECT first, last FROM texts CROSS JOIN calls ON id = texts.rowid >> {ROW_BITS}"  # noqa: S608 - likewise
            f" WHERE texts MATCH ? AND {wanted} ORDER BY texts.rowid DESC"
        )
        values.insert(0, phrases)
    before: object = None
    for first, last in connection.execute(asked, values):
        if first != before or not phrases:  # of a call that has the text in several records, once
            yield _place(first, last)
        before = first


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Numbers of calls, as the index has them: evidence of nothing."""

    calls: Mapping[tuple[str, str], int]
    """By tool and outcome."""
    callers: int


COUNTED = frozenset({"tool", "principal", "outcome"})
"""Columns whose calls are counted: of conditions on others, or on time, nothing is known without a look at each."""


def totals(connection: sqlite3.Connection, filters: Filters) -> Totals:
    """Return how many calls fit conditions on ``COUNTED`` columns, those of removed segments included."""
    conditions, values = ["number > 0"], list[object]()
    for column, wanted in filters.columns().items():
        conditions.append(f"{column} IN ({', '.join('?' * len(wanted))})")
        values += map(clean, wanted)
    asked = f"SELECT tool, outcome, principal, number FROM counts WHERE {' AND '.join(conditions)}"  # noqa: S608 - of ours
    found, callers = Counter[tuple[str, str]](), set[str]()
    for tool, came, principal, number in connection.execute(asked, values):
        found[str(tool), str(came)] += int(number)
        callers.add(str(principal))
    return Totals(calls=found, callers=len(callers))


def about(connection: sqlite3.Connection, start: int, names: Iterable[str], most: int) -> list[int]:
    """Return the places of at most ``most`` records of no call that name one of these, the newest, in their order."""
    wanted = [*map(clean, names)]
    asked = (
        f"SELECT DISTINCT place FROM about WHERE name IN ({', '.join('?' * len(wanted))})"  # noqa: S608 - only marks
        " AND place >= ? ORDER BY place DESC LIMIT ?"
    )
    return [int(place) for (place,) in connection.execute(asked, (*wanted, start, most))][::-1]


def named(connection: sqlite3.Connection, start: int, beginning: str, most: int) -> dict[str, CallSpan]:
    """Return at most ``most`` calls from an offset on whose id begins so."""
    asked = (
        "SELECT call, first, last, max(id) FROM calls"
        " WHERE call >= ? AND call < ? AND first >= ? GROUP BY call ORDER BY call LIMIT ?"
    )
    found = connection.execute(asked, (beginning, beginning + "\U0010ffff", start, most))
    return {call: _place(first, last) for call, first, last, _ in found}


def _phrases(text: str | None) -> str:
    """Return what FTS5 matches; empty if all may."""
    # Long hexadecimal numbers are indexed in part: what follows one is a phrase of its own.
    parts = _HEX.sub(lambda number: f"{number[0][:HEX_KEPT]}\0", text or "").split("\0")
    found = [part for part in parts if len(part) >= _SHORTEST]
    return " AND ".join('"' + clean(part).replace('"', '""') + '"' for part in found)


def _conditions(start: int, filters: Filters) -> tuple[list[str], list[object]]:
    """Return the conditions in SQL."""
    conditions, values = ["first >= ?"], [start]  # type: list[str], list[object]
    for column, wanted in filters.columns().items():
        conditions.append(f"{column} IN ({', '.join('?' * len(wanted))})")
        values += map(clean, wanted)
    if filters.hosts:
        conditions.append(f"id IN (SELECT call FROM hosts WHERE host IN ({', '.join('?' * len(filters.hosts))}))")  # noqa: S608 - only marks
        values += map(clean, filters.hosts)
    for comparison, time in (("time >= ?", filters.since), ("time < ?", filters.until)):
        if time is not None:
            conditions.append(comparison)
            values.append(microseconds(time))
    return conditions, values


def _place(first: object, last: object) -> CallSpan:
    if not isinstance(first, int) or not isinstance(last, int | None):
        raise sqlite3.DatabaseError("it holds what was not put into it")
    return CallSpan(first=first, last=last)
