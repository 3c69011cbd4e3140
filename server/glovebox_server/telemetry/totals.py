"""Totals of the audit log and of messages, in one SQLite file that all servers of a state directory share.

The first process that looks counts the lines that are new, in one transaction with the place that was reached: each
line counts once, whichever process is killed at whatever moment. A log that is not the one that was counted, or turns
out to hold a gap, is counted anew from its oldest line.
"""

import bisect
import hashlib
import json
import math
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

from glovebox_audit import read, writers
from glovebox_audit.query import calls
from glovebox_audit.query.outcomes import RUNNING
from glovebox_audit.read import Snapshot
from glovebox_server.stores import database
from glovebox_server.stores.database import Database
from glovebox_server.telemetry import names
from glovebox_server.telemetry.names import Metric

#: Upper bounds of Prometheus's buckets, in seconds.
BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
#: Each bucket of OTLP ends at 2 ** (1 / 8), 9 %, above the one before; the first and the last at 15 µs and 36 hours.
SCALE: Final = 3
_FIRST, _LAST = -16 << SCALE, 17 << SCALE
_STEP_BYTES = 4 << 20
"""Lines in one transaction: some 20 ms."""
_STEPS = 64
"""Of one look; the rest is a metric."""
_SCHEMA = """
    CREATE TABLE place (until INTEGER NOT NULL, line BLOB NOT NULL, since REAL NOT NULL, exported REAL NOT NULL);
    CREATE TABLE totals (name TEXT, labels TEXT, part TEXT, value REAL NOT NULL, PRIMARY KEY (name, labels, part))
        WITHOUT ROWID
    """
_ADD = "INSERT INTO totals VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value"
_KIND = re.compile(rb'"kind":"([a-z_.]{1,128})","prev":"[0-9a-f]{64}",')
_TAIL_BYTES = 560
#: Counters of records beside calls, with their fields.
_BESIDE: Final[dict[str, tuple[Metric, tuple[str, ...]]]] = {
    "egress.decided": (names.CONNECTIONS, ("tool", "effect")), "approval.answered": (names.ANSWERS, ("effect",)),
    "watch.alarm": (names.ALARMS, ("action",)), "requests.refused": (names.REFUSED, ()),
}  # fmt: skip
_PARSED = {*_BESIDE, "call.decided", "call.finished", "call.cancelled", "call.failed", "call.lost"}


class Tally:
    """Additions to the totals. Each label's value is closed here, and nowhere else."""

    def __init__(self) -> None:
        self.parts = Counter[tuple[str, str, str]]()

    def add(self, metric: Metric, *labels: object, by: float = 1) -> None:
        """Add to a counter."""
        self._add(metric, labels, {"": by})

    def observe(self, metric: Metric, seconds: float, *labels: object) -> None:
        """Add to a histogram, in both forms of its buckets."""
        bucket = math.ceil(math.log2(max(seconds, 1e-9)) * 2**SCALE) - 1
        parts = {f"<{bisect.bisect_left(BOUNDS, seconds)}": 1, f"^{min(_LAST, max(_FIRST, bucket))}": 1}
        self._add(metric, labels, {"sum": seconds, **parts})

    def _add(self, metric: Metric, labels: tuple[object, ...], parts: dict[str, float]) -> None:
        said = tuple(each if isinstance(each, str) else "" if each is None else names.OTHER for each in labels)
        key = _key(metric, said)
        for part, value in parts.items():
            self.parts[metric.name, key, part] += value  # type: ignore[assignment]  # seconds, too


@lru_cache(4096)
def _key(metric: Metric, labels: tuple[str, ...]) -> str:
    return json.dumps([names.closed(name, value) for name, value in zip(metric.labels, labels, strict=True)])


class Series(NamedTuple):
    """One metric with the labels that have a value; of a histogram the sum, and how many are in each bucket."""

    metric: Metric
    labels: dict[str, str]
    value: float = 0.0
    counts: tuple[int, ...] = ()
    """The last one is of what is above ``BOUNDS``."""
    exponents: tuple[tuple[int, int], ...] = ()
    """Bucket and count, in order, for OTLP."""


class TotalStore:
    """The totals of one state directory, and what this process adds to them. All raise StoreError or AuditError."""

    def __init__(self, store: Database, log: Path) -> None:
        self.tally = Tally()
        self._store, self._log = store, log

    @classmethod
    @contextmanager
    def opened(cls, state_dir: Path) -> Iterator["TotalStore"]:
        """Open the store, made if it is missing."""
        with database.opened(state_dir / "telemetry" / "totals.sqlite", _SCHEMA) as store:
            yield cls(store, state_dir / "audit")

    async def count(self) -> None:
        """Add what is new."""
        for _ in range(_STEPS):
            tally, self.tally = self.tally, Tally()
            try:
                if not await self._store.transact(partial(self._add, tally)):
                    return
            except BaseException:
                self.tally.parts.update(tally.parts)
                raise

    async def read(self) -> tuple[list[Series], float]:
        """Return all totals in the order of metrics, and since when they are counted, in seconds since the epoch."""
        return await self._store.query(self._read)

    async def is_due(self, seconds: float) -> bool:
        """Return whether the last export is so long ago; if so, the next one is the caller's alone."""
        due, now = "UPDATE place SET exported = ?1 WHERE exported <= ?1 - ?2 OR exported > ?1", time.time()
        return await self._store.transact(lambda each: each.execute(due, (now, seconds)).rowcount == 1)

    def _add(self, tally: Tally, connection: sqlite3.Connection) -> bool:
        """Add a tally, and some new lines of the log; return whether it has more of them."""
        connection.executemany(_ADD, [(*key, value) for key, value in tally.parts.items()])
        try:
            with read.opened(self._log) as log:
                return _count(connection, log)
        except FileNotFoundError:  # retention removed a segment in this moment: the next look does not find it
            return True

    def _read(self, connection: sqlite3.Connection) -> tuple[list[Series], float]:
        rows = connection.execute("SELECT name, labels, part, value FROM totals ORDER BY name, labels").fetchall()
        until, since = connection.execute("SELECT until, since FROM place").fetchone() or (0, time.time())
        found = {
            key: _series(names.METRICS[key[0]], json.loads(key[1]), {part: value for *_, part, value in parts})
            for key, parts in groupby(rows, key=lambda row: row[:2])
        }
        for metric in names.METRICS.values():  # what did not happen yet: else Prometheus sees no increase when it does
            if metric.kind == "counter" and len(metric.labels) <= 1:
                for told in [[value] for label in metric.labels for value in names.LABELS[label]] or [[]]:
                    labels = dict(zip(metric.labels, told, strict=True))
                    found.setdefault((metric.name, json.dumps(told)), Series(metric, labels))
        with read.opened(self._log) as log:
            behind = Series(names.UNCOUNTED, {}, max(0, log.end - until))
        servers = Series(names.SERVERS, {}, len(writers.live(self._log)))
        return [*(found[key] for key in sorted(found)), servers, behind], since


def _count(connection: sqlite3.Connection, log: Snapshot) -> bool:
    place = connection.execute("SELECT until, line FROM place").fetchone()
    if place is None or (place[0] > log.start and _digest(log, place[0]) != place[1]):
        return _begin(connection, log)
    start = max(place[0], log.start)  # what came before may have been removed
    for file, base, size in log.files_from(start):
        gaps = read.gaps_in(file, start - base, size)
        if gaps and gaps[0][0] < start - base:  # earlier lines turn out to lie in a gap
            return _begin(connection, log)
        tally, done, fresh = Tally(), start, True
        clients = {json.loads(each[0])[1] for each in connection.execute(_CLIENTS, (names.CALLS.name,))}
        for at, raw, free in read.raw_lines(file, start - base, size, gaps):
            whole = raw.endswith(b"\n")
            if fresh and whole and free:
                _count_line(tally, raw, clients)
            fresh, done = whole, base + at + len(raw) if whole else done
            if done - start >= _STEP_BYTES:
                break
        connection.executemany(_ADD, [(*key, value) for key, value in tally.parts.items()])
        connection.execute("UPDATE place SET until = ?, line = ?", (done, _digest(log, done)))
        return bool(start < done < log.end)
    return False


_CLIENTS = "SELECT DISTINCT labels FROM totals WHERE name = ?"


def _digest(log: Snapshot, until: int) -> bytes:
    return hashlib.sha256(log.line_before(until)).digest()


def _begin(connection: sqlite3.Connection, log: Snapshot) -> bool:
    """Count the log from its oldest line on; what was never in it stays."""
    connection.execute("DELETE FROM totals WHERE name NOT IN (?, ?)", (names.OPERATION.name, names.SESSIONS.name))
    connection.execute("DELETE FROM place")
    connection.execute("INSERT INTO place VALUES (?, x'', ?, 0)", (log.start, time.time()))
    return True


def _count_line(tally: Tally, raw: bytes, clients: set[str]) -> None:
    found = _KIND.search(raw, max(0, len(raw) - _TAIL_BYTES))
    if found is None:
        return
    kind = found[1].decode()
    tally.add(names.RECORDS, kind)
    fields = calls.fields(raw) if kind in _PARSED else None
    if fields is None:
        return
    data = fields["data"]
    tool, outcome = data.get("tool"), calls.outcome(kind, data)
    if kind in _BESIDE:
        metric, labels = _BESIDE[kind]
        tally.add(metric, *(data.get(each) for each in labels), by=_number(data.get("count", 1)))
    elif outcome != RUNNING:
        client = names.closed("client_id", data.get("principal"))
        client = client if client in clients or len(clients) < names.MAX_CLIENTS else names.OTHER
        clients.add(client)
        tally.add(names.CALLS, tool, client, names.STATUS.get(str(outcome), "error"))
        tally.add(names.OUTCOME, tool, outcome)
        if "elapsed_ms" in data:
            error = None if outcome == "succeeded" else outcome
            tally.observe(names.DURATION, _number(data["elapsed_ms"]) / 1000, tool, error)
        if isinstance(data.get("usage"), dict):
            tally.add(names.PROCESSOR, tool, by=_number(data["usage"].get("cpu_ms")) / 1000)


def _number(value: object) -> float:
    """Return a number of a record; a forged one counts as none."""
    return float(value) if isinstance(value, int | float) and 0 <= value < 10**12 else 0.0


def _series(metric: Metric, values: list[str], parts: dict[str, float]) -> Series:
    labels = {label: value for label, value in zip(metric.labels, values, strict=True) if value}
    if metric.kind != "histogram":
        return Series(metric, labels, parts[""])
    exponents = sorted((int(part[1:]), int(value)) for part, value in parts.items() if part[0] == "^")
    counts = tuple(int(parts.get(f"<{number}", 0)) for number in range(len(BOUNDS) + 1))
    return Series(metric, labels, parts["sum"], counts, tuple(exponents))
