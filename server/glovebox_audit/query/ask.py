"""Query the log. The index says where to look; each answer is a proved record of the log.

If a place is not what the index says, the index is rebuilt once; a remaining fault is the log's.
"""

import sqlite3
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Record
from glovebox_audit.events import CallDecided
from glovebox_audit.query import calls, index
from glovebox_audit.query.calls import CallSummary
from glovebox_audit.query.index import CallSpan, Filters, Totals
from glovebox_audit.query.outcomes import RUNNING
from glovebox_audit.read import Snapshot

#: Name of the newest call.
LAST = "last"

#: Most calls listed for an ambiguous beginning of an id.
MOST_NAMED = 5

#: Most records that stand around a call.
MOST_ABOUT = 200

#: Attempts while retention removes segments.
_LOOKS = 3

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The receivers of progress reports."""

    say: Callable[[str], None]
    progress: Callable[[int, int], None]
    """Gets the bytes of the log that are indexed, and those that are new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryAnswer:
    """The calls found."""

    calls: tuple[CallSummary, ...]
    """Newest first."""
    more: bool
    damaged: int
    """Calls left out, because their records were changed."""


def ask(directory: Path, filters: Filters, limit: int, told: Told) -> QueryAnswer:
    """Find calls; raises AuditError if there is no log, or it cannot be read."""
    return _looked(directory, told, lambda view: _answer(view, filters, limit))


def named(directory: Path, name: str, told: Told) -> list[str]:
    """Return at most ``MOST_NAMED`` ids for an id, the beginning of some, or ``LAST``; raises like ``ask``."""
    if name == LAST:
        return [call.call_id for call in ask(directory, Filters(), 1, told).calls]
    found = _looked(directory, told, lambda view: list(view.named(name)))
    return [name] if name in found else found


def about(directory: Path, names: Collection[str], told: Told) -> list[Record]:
    """Return the newest records of no call that name one of these, at most ``MOST_ABOUT``; raises like ``ask``."""
    return _looked(directory, told, lambda view: view.about(names))


def totals(directory: Path, filters: Filters, told: Told) -> Totals:
    """Count calls; raises like ``ask``."""
    return _looked(directory, told, lambda view: index.totals(view.connection, filters))


class _View:
    def __init__(self, connection: sqlite3.Connection, log: Snapshot) -> None:
        self.connection, self.log = connection, log

    def call(self, place: CallSpan) -> CallSummary | None:
        """Return the call there; None if a line has the form of its record, but was changed."""
        decided = self._record(place.first)
        end = self._record(place.first if place.last is None else place.last)
        if decided is None or end is None:
            return None
        ended = calls.outcome(end.kind, end.data) not in {None, RUNNING}
        if decided.kind != CallDecided.kind or end.call_id != decided.call_id or ended != (place.last is not None):
            raise _stale()
        return calls.of_records(decided, end)

    def named(self, beginning: str, most: int = MOST_NAMED) -> dict[str, CallSpan]:
        """Return places of calls whose id begins so."""
        found = index.named(self.connection, self.log.start, beginning, most)
        for call_id, place in found.items():
            call = self.call(place)
            if call is not None and call.call_id != call_id:
                raise _stale()
        return found

    def about(self, names: Collection[str]) -> list[Record]:
        """Return the records of no call that name one of these."""
        found = []
        for place in index.about(self.connection, self.log.start, names, MOST_ABOUT):
            with suppress(EvidenceError):  # changed since: a verifier names it
                found.append(chain.parse(self.log.line(place)))
        if any(each.call_id is not None for each in found):
            raise _stale()
        return found

    def records(self, call_id: str) -> list[Record]:
        """Return the records of a call by its id; none if it is not indexed."""
        place = self.named(call_id, 1).get(call_id)
        return [] if place is None else self.records_of(call_id, place)

    def records_of(self, call_id: str, place: CallSpan) -> list[Record]:
        """Return the records of a call, its receipt included."""
        found: list[Record] = []
        until = self.log.end
        if place.last is not None:  # the next line may be its receipt
            after = place.last + len(self.log.line(place.last))
            until = after + len(self.log.line(after))
        for file, base, size in self.log.files_from(place.first):
            if base < until:
                found += read.records_in(file, min(until - base, size), call_id, max(place.first - base, 0))
        return found

    def _record(self, offset: int) -> Record | None:
        line = self.log.line(offset)
        if calls.label(line) is None:
            raise _stale()
        try:
            return chain.parse(line)
        except EvidenceError:
            return None


def _stale() -> sqlite3.DatabaseError:
    return sqlite3.DatabaseError("the log is not what the index says")


def records(directory: Path, call_id: str, told: Told) -> list[Record]:
    """Return the records of one call, from its first to its last; raises like ``ask``."""
    found = _looked(directory, told, lambda view: view.records(call_id))
    # An index that omits a call must not hide it.
    return found or list(read.records_of(directory, call_id))


def _answer(view: _View, filters: Filters, limit: int) -> QueryAnswer:
    found: list[CallSummary] = []
    damaged, seen = 0, set[int]()
    for place in index.find(view.connection, view.log.start, filters):
        call = view.call(place)
        if call is None:
            damaged += 1
            continue
        if place.first in seen or not filters.fit(call):
            raise _stale()
        seen.add(place.first)
        kept = view.records_of(call.call_id, place) if filters.text is not None or filters.hosts else []
        if filters.came(call) and filters.hold(kept):
            if len(found) == limit:
                return QueryAnswer(calls=tuple(found), more=True, damaged=damaged)
            found.append(call)
    return QueryAnswer(calls=tuple(found), more=False, damaged=damaged)


def _looked(directory: Path, told: Told, look: Callable[[_View], _Found]) -> _Found:
    def looked(connection: sqlite3.Connection) -> _Found:
        removed = 0
        while True:
            try:
                with read.opened(directory) as log:
                    index.update(connection, log, told.progress)
                    return look(_View(connection, log))
            except FileNotFoundError:  # retention removed a segment in this moment: the next look does not find it
                removed += 1
                if removed == _LOOKS:
                    raise

    return index.queried(directory, told.say, looked)
