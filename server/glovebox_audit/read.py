"""Read the log: its lines, its end, one call, and what comes next. Never writes, never trusts the bytes.

Works on a copy elsewhere and as another user, too. Reads of one line are bounded by ``chain.MAX_LINE_BYTES``.
The log is its sealed segments and ``audit.jsonl``. A segment that retention removes meanwhile is skipped.
"""

import bisect
import contextlib
import fcntl
import math
import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from glovebox_audit import chain, place
from glovebox_audit.chain import EvidenceError, Head, Record
from glovebox_audit.events import EVENTS, CallDecided, GapRecorded, SandboxTable
from glovebox_audit.place import AuditError
from glovebox_audit.segments import files
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME

#: Seconds a reader waits for a writer in mid-line. Then it reads anyway, and may see a partial line.
_LOCK_WAIT_SECONDS = 1.0


#: Bytes per step when looking for the last lines.
_BLOCK_BYTES = 1 << 16

#: Most lines ``tail`` returns: a screen's scrollback. For more, read the file.
MAX_TAIL_LINES = 10_000

#: Longest time from the id of a client's call to its decision. It waits for a turn twice and for an answer once, and
#: its files are scanned meanwhile. With room for a slow machine.
LATEST_SECONDS = 900.0

#: A synchronized clock is set back by less than this.
SKEW_SECONDS = 60.0

#: In the line of each table of sandboxes.
TABLE = f'"kind":"{SandboxTable.kind}"'

#: Bytes read of a file to find its time span: its first and its last line.
_SPAN_BYTES = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of the file, or one part of a line longer than ``chain.MAX_LINE_BYTES``."""

    number: int
    """From 1, where reading began in the file; parts of one line share it."""
    raw: bytes
    """Line feed included; at most ``chain.MAX_LINE_BYTES``."""
    end: int
    """Offset in the file of the byte after it."""
    record: Record | None
    error: EvidenceError | None
    in_gap: bool = False
    leaf: bytes | None = None
    """Hash of ``raw`` in a segment's tree, where ``verify`` dropped it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The log at a moment without a writer. Offsets count over all files: rotation moves none."""

    directory: Path
    head: bytes | None
    """The bytes of ``head.json``, at most one more than it may have; None if missing."""
    log: BinaryIO | None
    """``audit.jsonl``; None if missing."""
    size: int
    """Length of ``audit.jsonl`` in bytes."""
    sealed: tuple[int, ...]
    strays: tuple[str, ...]
    """Other files among the sealed segments."""
    bases: dict[int | None, int] = field(default_factory=dict)
    """Offsets of the files as far as they were looked up; None is ``audit.jsonl``."""

    @contextlib.contextmanager
    def segment(self, number: int | None) -> Iterator[tuple[BinaryIO, int]]:
        """Open a sealed segment, or None for ``audit.jsonl``, and yield it with its length in bytes.

        Raises:
            FileNotFoundError: it was removed since.
            AuditError: it cannot be read.
        """
        if number is None:
            if self.log is not None:
                yield self.log, self.size
            return
        path = self.directory / files.name(number)
        with _translated(self.directory), files.opened(path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
            yield file, os.fstat(descriptor).st_size

    @property
    def numbers(self) -> list[int | None]:
        """Return the files, the oldest first: sealed segments, and None for ``audit.jsonl``."""
        return [*self.sealed, *([] if self.log is None else [None])]

    def each(self, *, newest_first: bool = False) -> Iterator[tuple[BinaryIO, int]]:
        """Yield every file that is still there, with its length in bytes."""
        for number in reversed(self.numbers) if newest_first else self.numbers:
            with contextlib.suppress(FileNotFoundError), self.segment(number) as found:
                yield found

    @property
    def start(self) -> int:
        """Return the offset of the oldest byte that is still there."""
        return self._base(self.numbers[0])

    @property
    def end(self) -> int:
        """Return the offset of the byte after the newest."""
        last = self.numbers[-1]
        with self.segment(last) as (_, size):
            return self._base(last) + size

    def files_from(self, offset: int) -> Iterator[tuple[BinaryIO, int, int]]:
        """Yield each file from ``offset`` on, its offset and length; nothing if none holds it."""
        first = bisect.bisect_right(self.numbers, offset, key=self._base) - 1
        for number in self.numbers[first:] if first >= 0 else ():
            with self.segment(number) as (file, size):
                yield file, self._base(number), size

    def line(self, offset: int) -> bytes:
        """Return the line that begins there; empty if there is none."""
        for file, base, size in self.files_from(offset):
            line = files.line_at(file.fileno(), offset - base) if offset - base < size else b""
            return line if line.endswith(b"\n") else b""
        return b""

    def line_before(self, offset: int) -> bytes:
        """Return the line that ends there; empty if there is none."""
        for file, base, size in self.files_from(max(0, offset - 1)):
            return files.line_before(file.fileno(), offset - base) if 0 < offset - base <= size else b""
        return b""

    def _base(self, number: int | None) -> int:
        if number not in self.bases:
            with self.segment(number) as (file, _):
                line = files.line_at(file.fileno(), 0)
                begins = b'"kind":"segment.begun"' in line
                self.bases[number] = files.start_of(line).before.size if begins else 0
        return self.bases[number]


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[Snapshot]:
    """Open the log and note how far it is whole; raises AuditError if it is missing or unreadable."""
    with contextlib.ExitStack() as stack:
        with _translated(directory, missing=True), contextlib.ExitStack() as lock:
            content: bytes | None = None
            with contextlib.suppress(FileNotFoundError):
                head = lock.enter_context(files.opened(directory / HEAD_NAME))
                place.take_lock(head, _LOCK_WAIT_SECONDS, fcntl.LOCK_SH)
                content = os.pread(head, chain.HEAD_BYTES + 1, 0)
            sealed, strays = files.listed(directory)
            log: BinaryIO | None = None
            try:
                descriptor = stack.enter_context(files.opened(directory / LOG_NAME))
                log = stack.enter_context(os.fdopen(os.dup(descriptor), "rb"))
            except FileNotFoundError:
                if not sealed:
                    raise
            size = 0 if log is None else os.fstat(log.fileno()).st_size
        yield Snapshot(directory=directory, head=content, log=log, size=size, sealed=sealed, strays=strays)


@contextlib.contextmanager
def _translated(directory: Path, *, missing: bool = False) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not missing:
            raise
        attempted = f"read the audit log in {directory}"
        fix = "Name the directory that holds audit.jsonl, as a user who may read it."
        raise AuditError(attempted, error.strerror or str(error), fix) from error


def head(directory: Path) -> Head:
    """Return the end of the chain as ``head.json`` states it.

    Raises:
        AuditError: there is no log, it cannot be read, or ``head.json`` is missing or damaged.
    """
    with opened(directory) as snapshot:
        try:
            return chain.parse_head(snapshot.head or b"")
        except EvidenceError as error:
            attempted = f"read {HEAD_NAME} in {directory}"
            raise AuditError(attempted, "it is missing or damaged", "Run `glovebox audit verify`.") from error


def lines(log: BinaryIO, start: int, end: int, gaps: "Gaps | None" = None, before: int = 0) -> Iterator[LogLine]:
    """Yield the lines between two offsets; no bytes raise an error.

    A line in a recorded gap is no record, whatever its form: the chain skips it. ``gaps`` are those of the whole file,
    if lines follow; ``before`` lines are not counted anew.
    """
    number, fresh = before, True
    for at, raw, free in raw_lines(log, start, end, gaps):
        number += fresh
        record, error = parsed(raw) if fresh else (None, EvidenceError("the line is too long"))
        if not free:
            record, error = None, EvidenceError("it lies in a recorded gap")
        yield LogLine(number=number, raw=raw, end=at + len(raw), record=record, error=error, in_gap=not free)
        fresh = raw.endswith(b"\n")


def raw_lines(log: BinaryIO, start: int, end: int, gaps: "Gaps | None" = None) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the offset and bytes of each line between two offsets, and whether it lies in no recorded gap.

    A line longer than ``chain.MAX_LINE_BYTES`` comes in parts.
    """
    gaps = gaps_in(log, start, end) if gaps is None else gaps
    log.seek(start)
    while start < end and (raw := log.readline(min(chain.MAX_LINE_BYTES, end - start))):
        yield start, raw, not in_gap(start, gaps)
        start += len(raw)


#: In each line with the record of a gap; and bytes in which it is looked for at a time.
_GAP, _STEP_BYTES = b'"kind":"log.gap"', 1 << 20

Gaps = Sequence[tuple[int, int]]
"""The parts of a file that its ``log.gap`` records account for: ordered, disjoint."""


def in_gap(offset: int, gaps: Gaps) -> bool:
    """Return whether the line that begins there lies in a gap."""
    place = bisect.bisect_right(gaps, (offset, math.inf))
    return place > 0 and offset < gaps[place - 1][1]


def gaps_in(log: BinaryIO, start: int, end: int) -> Gaps:
    """Return the gaps recorded between two line starts; each may begin before them."""
    steps = range(start, end, _STEP_BYTES)
    there = (_GAP in os.pread(log.fileno(), min(_STEP_BYTES + len(_GAP), end - at), at) for at in steps)
    return _scanned(log, start, end, ())[0] if any(there) else ()


def _scanned(log: BinaryIO, start: int, end: int, needles: Sequence[bytes]) -> tuple[Gaps, list[tuple[int, int]]]:
    """Return the gaps, and offset and length of each line with one of the needles."""
    found: list[tuple[int, int]] = []
    places: list[tuple[int, int]] = []
    log.seek(start)
    while start < end and (raw := log.readline(min(chain.MAX_LINE_BYTES, end - start))):
        # Parsing is what costs.
        if _GAP in raw and (first := _gap_before(log.fileno(), start, raw)) is not None:
            found.append((first, start))
        if any(needle in raw for needle in needles):
            places.append((start, len(raw)))
        start += len(raw)
    kept: list[tuple[int, int]] = []
    for each in reversed(found):  # what looks like the record of a gap may lie in one
        if not kept or each[1] < kept[-1][0]:
            kept.append(each)
    kept.reverse()
    return kept, places


def _gap_before(descriptor: int, at: int, raw: bytes) -> int | None:
    """Return the start of the bytes that a ``log.gap`` record at this offset accounts for.

    It is chained to the record before them, so no record of the chain can be among them.
    """
    record, _ = parsed(raw)
    length = record.data.get("bytes") if record is not None and record.kind == GapRecorded.kind else None
    if record is None or type(length) is not int or not 0 < length <= at:
        return None
    first = at - length
    if first > 0:
        before, _ = parsed(files.line_before(descriptor, first))
        if before is None or (before.seq + 1, before.hash) != (record.seq, record.prev):
            return None
    return first if parsed(files.line_at(descriptor, first))[0] is None else None


def parsed(raw: bytes) -> tuple[Record | None, EvidenceError | None]:
    """Return the record of a line, or why it is none."""
    try:
        return chain.parse(raw), None
    except EvidenceError as error:
        return None, error


def tail(directory: Path, count: int) -> list[LogLine]:
    """Return the last ``count`` lines, at most ``MAX_TAIL_LINES``; raises like ``opened``."""
    with opened(directory) as snapshot:
        return last_lines(snapshot, count)


def last_lines(snapshot: Snapshot, count: int) -> list[LogLine]:
    """Return the last lines of a snapshot, at most ``MAX_TAIL_LINES``."""
    found: list[LogLine] = []
    wanted = min(max(count, 0), MAX_TAIL_LINES)
    for log, size in snapshot.each(newest_first=True):
        start = _start_of_last(log, size, wanted - len(found))
        found[:0] = lines(log, start, size)
        if len(found) >= wanted:
            break
    return found


def _start_of_last(log: BinaryIO, size: int, count: int) -> int:
    length = _BLOCK_BYTES
    while count > 0:
        start = max(0, size - length)
        log.seek(start)
        found = log.read(size - start)
        lines = found.removesuffix(b"\n").split(b"\n")
        if start == 0 or len(lines) > count:
            return size - len(b"\n".join(lines[-count:])) - found.endswith(b"\n")
        length *= 4
    return size


def records_of(directory: Path, call_id: str) -> list[Record]:
    """Return the records of one call, searched from the newest segment on; raises like ``opened``.

    The first is its ``call.decided``, which names the principal: check that before a client sees them.
    """
    with opened(directory) as snapshot:
        found: list[Record] = []
        for log, size in snapshot.each(newest_first=True):
            found[:0] = records_in(log, size, call_id)
            if any(record.kind == CallDecided.kind for record in found):
                break
        return found


def records_near(directory: Path, call_id: str, charge: Callable[[int], None]) -> Generator[Record, None, None]:
    """Yield the records of one call, and the table of its sandbox, from segments near its id's time.

    Its first record is searched in segments that span that time, from ``SKEW_SECONDS`` before it to ``LATEST_SECONDS``
    after it, and in segments whose own times do not run forward. The others are searched from there to its end. Records
    elsewhere, as of a clock that was wrong for less than a segment, are not found: a reader has to say so. An id of
    another form than ``chain.new_call_id`` gives has no time, and no record here. ``charge`` gets the bytes of each
    part of the log that is read. Raises like ``opened``.
    """
    made = chain.time_of(call_id)
    if made is None:
        return
    with opened(directory) as snapshot:
        begun = ended = False
        before = 0.0
        for log, size in snapshot.each():
            if not begun:
                charge(_SPAN_BYTES)
                first, last = _span(log, size)
                last = math.inf if log is snapshot.log else last
                forward, before = before <= first <= last, last
                if forward and not (first <= made + LATEST_SECONDS and made - SKEW_SECONDS <= last):
                    continue
            charge(size)
            for record in _with_tables(log, size, call_id):
                begun, ended = True, ended or is_last(record)
                yield record
            if ended:
                return


def is_last(record: Record) -> bool:
    """Return whether only a receipt may follow of this call."""
    event = EVENTS.get(record.kind)
    refused = record.kind == CallDecided.kind and record.data.get("effect") != "allow"
    return refused or (event is not None and event.ends_call)


def _span(log: BinaryIO, size: int) -> tuple[float, float]:
    """Return when the first and last record of a file were written; (inf, 0) if one is none."""
    try:
        ends = chain.parse(files.line_at(log.fileno(), 0)), chain.parse(files.line_before(log.fileno(), size))
    except EvidenceError:
        return math.inf, 0.0
    first, last = (datetime.fromisoformat(record.time).timestamp() for record in ends)
    return first, last


def records_in(log: BinaryIO, size: int, call_id: str, start: int = 0) -> Iterator[Record]:
    """Yield the records of a call in one file, between two line starts."""
    # Parsing is expensive: parse only lines that contain the id.
    return (record for record in records_with(log, size, [call_id], start) if record.call_id == call_id)


def _with_tables(log: BinaryIO, size: int, call_id: str) -> Iterator[Record]:
    """Yield the records of a call in one file, each after the table of sandboxes that it names."""
    tables: dict[object, Record] = {}
    for record in records_with(log, size, [call_id, TABLE]):
        if record.kind == SandboxTable.kind:
            tables[record.data.get("digest")] = record
        elif record.call_id == call_id:
            if (named := record.data.get("table")) in tables:
                yield tables.pop(named)
            yield record


def records_with(log: BinaryIO, size: int, texts: Iterable[str], start: int = 0) -> Iterator[Record]:
    """Yield the records of one file that contain one of the texts, between two line starts."""
    gaps, places = _scanned(log, start, size, [text.encode() for text in texts])
    for at, length in places:
        if not in_gap(at, gaps):
            with contextlib.suppress(EvidenceError):
                yield chain.parse(os.pread(log.fileno(), length, at))


def records_about(directory: Path, texts: Collection[str], since: int) -> list[Record]:
    """Return records of no call with one of the texts, from record ``since``'s segment on; raises like ``opened``."""
    found: list[Record] = []
    with opened(directory) as snapshot:
        for log, size in snapshot.each(newest_first=True):
            found[:0] = [record for record in records_with(log, size, texts) if record.call_id is None]
            first, _ = parsed(files.line_at(log.fileno(), 0))
            if first is None or first.seq <= since:
                break
    return found
