"""Query the log. The index says where to look; each answer is a proved record of the log.

If a place is not what the index says, the index is rebuilt once; a remaining fault is the log's.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Record
from glovebox_audit.events import CallDecided
from glovebox_audit.query import calls, database
from glovebox_audit.query.calls import CallSummary
from glovebox_audit.query.index import CallSpan, Filters, Index
from glovebox_audit.query.offsets import OffsetReader, StaleIndexError
from glovebox_audit.query.outcomes import RUNNING

#: Name of the newest call.
LAST = "last"

#: Most calls listed for an ambiguous beginning of an id.
MOST_NAMED = 5

#: Attempts while retention removes segments.
_LOOKS = 3

_Found = TypeVar("_Found")


class _DamagedCallError(Exception):
    """A line has the form of the record, but was changed."""


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
    return _looked(directory, told, lambda view: view.named(name))


class _View:
    def __init__(self, index: Index, log: OffsetReader) -> None:
        self.index, self.log = index, log

    def call(self, place: CallSpan) -> CallSummary:
        decided = self._record(place.first)
        end = self._record(place.first if place.last is None else place.last)
        ended = calls.outcome(end.kind, end.data) not in {None, RUNNING}
        if decided.kind != CallDecided.kind or end.call_id != decided.call_id or ended != (place.last is not None):
            raise StaleIndexError
        return calls.of_records(decided, end)

    def named(self, beginning: str) -> list[str]:
        found = self.index.named(beginning, MOST_NAMED)
        for call_id, place in found.items():
            with contextlib.suppress(_DamagedCallError):
                if self.call(place).call_id != call_id:
                    raise StaleIndexError
        return [beginning] if beginning in found else list(found)

    def records(self, call_id: str) -> list[Record]:
        place = self.index.named(call_id, 1).get(call_id)
        if place is None:
            return []
        with contextlib.suppress(_DamagedCallError):
            if self.call(place).call_id != call_id:
                raise StaleIndexError
        return list(self.log.records_of(call_id, place.first, place.last))

    def _record(self, offset: int) -> Record:
        line = self.log.line(offset)
        if calls.label(line) is None:
            raise StaleIndexError
        try:
            return chain.parse(line)
        except EvidenceError:
            raise _DamagedCallError from None


def records(directory: Path, call_id: str, told: Told) -> list[Record]:
    """Return the records of one call, from its first to its last; raises like ``ask``."""
    found = _looked(directory, told, lambda view: view.records(call_id))
    # An index that omits a call must not hide it.
    return found or list(read.records_of(directory, call_id))


def _answer(view: _View, filters: Filters, limit: int) -> QueryAnswer:
    found: list[CallSummary] = []
    damaged, seen = 0, set[int]()
    for place in view.index.find(filters):
        try:
            call = view.call(place)
            if place.first in seen or not filters.fit(call):
                raise StaleIndexError
        except _DamagedCallError:
            damaged += 1
            continue
        seen.add(place.first)
        if filters.came(call) and (
            filters.text is None
            or calls.holds(view.log.records_of(call.call_id, place.first, place.last), filters.text)
        ):
            if len(found) == limit:
                return QueryAnswer(calls=tuple(found), more=True, damaged=damaged)
            found.append(call)
    return QueryAnswer(calls=tuple(found), more=False, damaged=damaged)


def _looked(directory: Path, told: Told, look: Callable[[_View], _Found]) -> _Found:
    """Query with the index: the existing one, a rebuilt one, one in memory."""
    removed = 0
    with database.opened(directory, told.say) as kept:
        while True:
            try:
                with read.opened(directory) as snapshot, OffsetReader(snapshot) as log:
                    index = Index(kept, log)
                    index.update(told.progress)
                    return look(_View(index, log))
            except FileNotFoundError:  # retention removed a segment in this moment: the next look does not find it
                removed += 1
                if removed == _LOOKS:
                    raise
            except (StaleIndexError, *database.DAMAGED) as problem:
                kept.renew(problem, told.say)
