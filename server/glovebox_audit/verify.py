"""Verify offline that a log is whole, in bounded memory, and name the lines where it is not.

Found: a changed byte, a removed, added, repeated or moved line, a cut end, a chain rewritten without ``head.json``, and
any other bytes; in a whole chain, a record that does not fit its call, as a second end. Not found without an anchor
kept elsewhere, because the chain has no secret: a log and a ``head.json`` both put back to an earlier state or
rewritten as a whole, and well-made records added by someone who may write the files.
"""

import hashlib
import os
import signal
import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields, replace
from multiprocessing.connection import Connection, Pipe
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Head, Record
from glovebox_audit.events import GapRecorded, SegmentBegun, SegmentRemoved, SegmentSealed
from glovebox_audit.read import LogLine
from glovebox_audit.segments import files, merkle
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME
from glovebox_audit.segments.merkle import Contents
from glovebox_audit.segments.rotation import Removal, Seal, recorded
from glovebox_audit.writers import OpenCalls

#: Public keys by id.
Keys = Mapping[str, Ed25519PublicKey]

#: Problems that are kept; the first ones say what happened, the rest are counted.
MAX_PROBLEMS = 100

#: Bytes of a file that are worth processes of their own, and of what one reads at a time: it may be as many lines.
SPREAD_BYTES, PIECE_BYTES = 8 << 20, 1 << 16
#: Records that are verified whole; of others only these fields are looked at.
_WHOLE = {GapRecorded.kind, SegmentBegun.kind, SegmentRemoved.kind, SegmentSealed.kind}
_FIELDS = {"effect", "run"}
_NAMES = [each.name for each in fields(Record) if each.name not in {"data", "line"}]
_NAMED = attrgetter(*_NAMES)

#: docs/operate/audit-problems.csv explains each.
ProblemKind = Literal[
    "edited", "foreign", "torn", "deleted", "reordered", "repeated", "forked", "truncated", "head", "anchor", "call",
    "missing", "seal", "newer",
]  # fmt: skip


_Claimant = Literal["head", "anchor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One place where the log is not what was written."""

    file: str
    """Path below the log's directory."""
    line: int | None
    """From 1; for a cut end the line that should come next; None for ``head.json`` or a missing file."""
    seq: int | None
    kind: ProblemKind
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of ``verify``."""

    ok: bool
    records: int
    segments: int
    """Sealed segments that are there."""
    removed: int
    gaps: int
    """Recorded gaps: torn lines of crashes. No acknowledged record was in them."""
    head: Head
    """The last record: as an anchor ``SEQ:HASH``."""
    problems: tuple[Problem, ...]
    """In the order of the log; at most ``MAX_PROBLEMS``."""
    omitted: int
    """Problems beyond those."""


@dataclass(slots=True, kw_only=True)
class _File:
    """The current file, and what its seal is to say."""

    name: str
    number: int | None
    after: Head
    """The end of the chain before it, with the file's offset in the log."""
    problems: int
    """Problems before it."""
    lines: int = 0
    sealed: bool = False
    contents: Contents = field(default_factory=Contents)


class Verifier:
    """A verifier of a log's lines, file by file, in bounded memory."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._file = _File(name=LOG_NAME, number=None, after=Head(), problems=0)
        self._oldest = True
        # The segment before the oldest that is there, with its seal; and the recorded removals.
        self._owed: tuple[int, str] | None = None
        self._removed: dict[int, str] = {}
        # Records that must be there, and by their numbers the records with these: line, file, and end of the chain.
        self._claims: list[tuple[Head, _Claimant]] = []
        self._found: dict[int, list[tuple[int, str, Head]]] = {}
        self._calls = OpenCalls()
        self._misfits: list[Problem] = []
        self._problems: list[Problem] = []
        self._omitted = self._records = self._gaps = 0
        # The chain so far: the place of the last record in order, and that record.
        self._line, self._line_file = 0, LOG_NAME
        self._tail = Head()
        self._prev = ""
        # Lines since the last record that are none and may replace records, and bytes that a gap accounts for.
        self._unreadable = 0
        self._gap, self._gap_bytes, self._gap_line = hashlib.sha256(), 0, 0
        # Skipped numbers, by the place of their problem: a later line may hold them.
        self._jumped: dict[int, tuple[int, int]] = {}

    def note(
        self, line: int | None, seq: int | None, kind: ProblemKind, detail: str, *, file: str | None = None
    ) -> None:
        """Note a problem, of the current file if no other is named."""
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(Problem(file=file or self._file.name, line=line, seq=seq, kind=kind, detail=detail))
        else:
            self._omitted += 1

    def expect(self, head: Head, kind: _Claimant) -> None:
        """Compare a record with the one in the log that has its number."""
        self._claims.append((head, kind))
        self._found[head.seq] = []

    def verify(self, name: str, number: int | None, lines: Iterable[LogLine]) -> None:
        """Verify the next file; its number is None if it is the only one."""
        self._file = _File(name=name, number=number, after=self._tail, problems=self._noted())
        self._unreadable = 0
        for line in lines:
            if line.in_gap:
                self._gap_line = self._gap_line if self._gap_bytes else line.number
                self._gap.update(line.raw)
                self._gap_bytes += len(line.raw)
            else:
                self._verify_line(line)
        self._oldest = False
        if name != LOG_NAME and not self._file.sealed and self._noted() == self._file.problems:
            detail = f"segment {number} has no seal: its end is missing"
            self.note(self._file.lines + 1, self._tail.seq + 1, "truncated", detail)

    def missing(self, first: int, following: int) -> None:
        """Note that the segments from ``first`` up to ``following`` are missing."""
        which = f"segment {first} is" if following - first == 1 else f"segments {first} to {following - 1} are"
        detail = f"{which} missing, and younger than one that is there: retention removes the oldest first"
        self.note(None, None, "missing", detail, file=files.name(first))
        self._oldest = False
        self._lose()

    def report(self, segments: int) -> VerifyReport:
        """Finish, and return the report, given the number of sealed segments that are there."""
        owed = self._owed
        removed = owed[0] if owed is not None and self._removed.get(owed[0]) == owed[1] else 0
        if owed is not None and not removed:
            detail = f"segment {owed[0]} and those before it are missing, and no record says that they were removed"
            self.note(None, None, "missing", detail, file=files.name(owed[0]))
        for head, kind in self._claims:
            self._judge(head, kind)
        if not self._problems:
            # In a broken chain it would only repeat the problem.
            self._problems = self._misfits[:MAX_PROBLEMS]
            self._omitted += len(self._misfits) - len(self._problems)
        # Of the names of its files, head.json sorts before segments/…
        self._problems.sort(key=lambda problem: (problem.file == LOG_NAME, problem.file, problem.line or 0))
        return VerifyReport(
            ok=not self._problems, records=self._records, segments=segments, removed=removed, gaps=self._gaps,
            head=self._tail, problems=tuple(self._problems), omitted=self._omitted,
        )  # fmt: skip

    def _noted(self) -> int:
        return len(self._problems) + self._omitted

    def _lose(self) -> None:
        """Restart at the next record: what was before it is gone."""
        self._tail = Head(seq=-1)
        self._calls = OpenCalls(forgot=True)

    def _verify_line(self, line: LogLine) -> None:
        file, record = self._file, line.record
        fresh, file.lines = line.number != file.lines, line.number
        if fresh and line.number == 1 and record is not None:
            self._first(record)
        if file.sealed:
            self.note(line.number, record.seq if record else None, "foreign", "it stands behind the segment's seal")
            return
        if record is None:
            if fresh:
                self._no_record(line)
            return
        self._records += 1
        # An older seal is a replay, or part of what a crash left.
        if record.kind == SegmentSealed.kind and record.seq > self._tail.seq:
            file.sealed = True
            self._seal(line, record)
        else:
            file.contents.tree.add(line.leaf or merkle.leaf_hash(line.raw))
            file.contents.count(record.call_id, record.data)
        if not self._record(line, record):
            return
        self._compare(line.number, self._tail)
        wrong = self._calls.note(record, Head())
        if wrong and len(self._misfits) <= MAX_PROBLEMS:
            self._misfits.append(Problem(file=file.name, line=line.number, seq=record.seq, kind="call", detail=wrong))
        if record.kind == SegmentRemoved.kind:
            try:
                said = recorded(record.data, Removal, self._keys)
                self._removed[said.segment] = said.seal
            except EvidenceError as problem:
                self.note(line.number, record.seq, "seal", f"the removal of a segment: {problem}")

    def _first(self, record: Record) -> None:
        """Note the segment that the first line names; a line without one is the first."""
        file = self._file
        try:
            start = files.begun(record)
        except EvidenceError as problem:
            self.note(1, record.seq, "newer", str(problem))
            start = None
        number = start.number if start else 1
        if file.name == LOG_NAME and file.number is not None and number > file.number:
            self.missing(file.number, number)
        elif file.number not in {None, number}:
            self.note(1, record.seq, "seal", f"this is the beginning of segment {number}, not of {file.number}")
        file.number = number if file.name == LOG_NAME else file.number
        if start is None:
            return
        if self._oldest and number > 1:
            self._owed = (number - 1, files.anchor(start.before))
            self._lose()
            self._compare(1, start.before)
        if self._tail.seq < 0:
            self._tail = start.before
        elif start.before.size != self._tail.size and start.before.seq == self._tail.seq:
            self.note(1, record.seq, "seal", "it names another offset than that of its file")
        file.after = self._tail

    def _seal(self, line: LogLine, record: Record) -> None:
        file = self._file
        if self._noted() > file.problems:
            return  # the file is not what was sealed, and that has been said
        size = line.end - len(line.raw)
        told = Seal.of(file.number or 1, file.contents, size=size, after=file.after, last=self._tail)
        try:
            same = recorded(record.data, Seal, self._keys).model_copy(update={"time": ""}) == told
            wrong = "" if same else "it is not that of the segment as it is here"
        except EvidenceError as problem:
            wrong = str(problem)
        if wrong:
            self.note(line.number, record.seq, "seal", f"the seal of segment {told.segment}: {wrong}")

    def _no_record(self, line: LogLine) -> None:
        self._unreadable += 1
        if line.error is not None and line.error.kind in {"newer", "edited"}:
            self.note(line.number, line.error.seq, line.error.kind, str(line.error))
        elif not line.raw.endswith(b"\n") and len(line.raw) < chain.MAX_LINE_BYTES:
            detail = "the line has no end: a crash in mid-write, which the next server records, or a cut"
            self.note(line.number, None, "torn", detail)
        else:
            self.note(line.number, None, "foreign", f"no record: {line.error}")

    def _record(self, line: LogLine, record: Record) -> bool:
        """Continue the chain; return False for a record that is none of its own."""
        if self._tail.seq < 0:  # nothing before it can be known
            self._tail = Head(seq=record.seq - 1, hash=record.prev, size=self._file.after.size)
        seq, expected = record.seq, self._tail.seq + 1
        if record.kind == GapRecorded.kind:
            self._end_gap(line, record)
        if seq < expected:
            return self._out_of_order(line, record)
        if seq - expected > self._unreadable:
            if len(self._problems) < MAX_PROBLEMS:
                self._jumped[len(self._problems)] = (expected, seq - 1)
            self.note(line.number, seq, "deleted", f"records {expected} to {seq - 1} are missing before this line")
        elif seq == expected and record.prev != self._tail.hash and self._unreadable == 0:
            if seq == 1:
                self.note(line.number, 1, "edited", "the first record is chained to another one")
            else:
                detail = f"this is not the record that record {seq} on line {line.number} was chained to"
                self.note(self._line, seq - 1, "edited", detail, file=self._line_file)
        self._move(line, record)
        return True

    def _end_gap(self, line: LogLine, record: Record) -> None:
        found = {"bytes": self._gap_bytes, "digest": "sha256:" + self._gap.hexdigest()}
        if found.items() <= record.data.items():
            self._gaps += 1
        elif self._gap_bytes:
            self.note(self._gap_line, None, "foreign", "no record: the gap after it describes other bytes")
        elif self._unreadable == 0:
            self.note(line.number, record.seq, "deleted", "the bytes that this gap describes are not before it")
        self._gap, self._gap_bytes = hashlib.sha256(), 0

    def _out_of_order(self, line: LogLine, record: Record) -> bool:
        for place, (first, last) in self._jumped.items():
            if first <= record.seq <= last:
                detail = f"records {first} to {last} are not before this line; {record.seq} is on line {line.number}"
                self._problems[place] = replace(self._problems[place], kind="reordered", detail=detail)
                return False
        if record.seq == self._tail.seq and record.prev == self._prev and record.hash != self._tail.hash:
            self.note(line.number, record.seq, "forked", f"lines {self._line} and {line.number} are both {record.seq}")
            self._move(line, record)
            return True
        self.note(line.number, record.seq, "repeated", f"record {record.seq} was there before")
        return False

    def _move(self, line: LogLine, record: Record) -> None:
        self._line, self._line_file, self._prev = line.number, self._file.name, record.prev
        self._unreadable = 0
        self._tail = Head(seq=record.seq, hash=record.hash, size=self._file.after.size + line.end)

    def _compare(self, line: int, end: Head) -> None:
        """Keep it for the claims; only records of the chain count."""
        if end.seq in self._found:
            self._found[end.seq].append((line, self._file.name, end))

    def _judge(self, head: Head, kind: _Claimant) -> None:
        """Note whether a record that must be in the log was not, now that all was read."""
        reached, seq, found = self._tail.seq + self._unreadable, head.seq, self._found[head.seq]
        named = HEAD_NAME if kind == "head" else "the anchor"
        if found and all(end.hash != head.hash for _, _, end in found):
            line, file, _ = found[-1]
            self.note(line, seq, kind, f"{named} names another record {seq}: the log was rewritten", file=file)
        elif not found and reached < seq:
            detail = f"records {reached + 1} to {seq}, the last that {named} knows, are missing at the end"
            self.note(self._file.lines + 1, reached + 1, "truncated" if kind == "head" else "anchor", detail)
        elif seq == 0 and head.hash != chain.GENESIS:
            self.note(None, None, kind, f"{named} describes no log", file=HEAD_NAME)
        elif not found and seq > 0 and not self._problems:
            detail = f"{named} names record {seq}, which lay in a segment removed on record: not compared"
            self.note(None, seq, kind, detail, file=HEAD_NAME)
        elif kind == "head" and head.size != (found[-1][2].size if found else 0) and not self._problems:
            self.note(None, seq, "head", f"{HEAD_NAME} has the wrong size for record {seq}", file=HEAD_NAME)


def verify(
    directory: Path, anchor: Head | None = None, *, anchors: Sequence[Head] = (), keys: Keys | None = None
) -> VerifyReport:
    """Check the log, or a copy of it, also while servers write to it.

    Args:
        directory: of the log or the copy.
        anchor: a record kept elsewhere, that must be in it.
        anchors: likewise, except those of records before the oldest segment, which retention may have removed.
        keys: one of which must have signed each seal; None leaves the signatures unproved.

    Raises:
        AuditError: there is no log, or it cannot be read.
    """
    while True:
        with suppress(FileNotFoundError):  # retention removed it in this moment: the next look does not find it
            return _verify(directory, anchor, anchors, Verifier(keys or {}))


def _verify(directory: Path, anchor: Head | None, anchors: Sequence[Head], verifier: Verifier) -> VerifyReport:
    with read.opened(directory) as snapshot:
        oldest = 0
        if anchors:
            with suppress(EvidenceError):
                oldest = files.start_of(snapshot.line(snapshot.start)).before.seq
        for each in (*([] if anchor is None else [anchor]), *(each for each in anchors if each.seq > oldest)):
            verifier.expect(each, "anchor")
        try:
            verifier.expect(chain.parse_head(snapshot.head or b""), "head")
        except EvidenceError:
            how = "missing" if snapshot.head is None else "damaged"
            verifier.note(None, None, "head", f"{HEAD_NAME} is {how}, so a lost end would not show", file=HEAD_NAME)
        for stray in snapshot.strays:
            verifier.note(None, None, "foreign", "it is no segment of the log", file=stray)
        following: int | None = None
        for number in snapshot.numbers:
            if number is not None and following is not None and following < number:
                verifier.missing(following, number)
            with snapshot.segment(number) as (log, size):
                name = LOG_NAME if number is None else files.name(number)
                with closing(_lines(log, size)) as lines:
                    verifier.verify(name, following if number is None else number, lines)
            following = None if number is None else number + 1
        return verifier.report(len(snapshot.sealed))


_Piece = tuple[int, int, read.Gaps, int]  # as ``read.lines`` takes it


def _processes(size: int) -> int:
    """Return how many processes may parse a file: they are forked, which only a process without threads can be."""
    return 1 if size < SPREAD_BYTES or threading.active_count() > 1 else len(os.sched_getaffinity(0))


def _lines(log: BinaryIO, size: int) -> Generator[LogLine, None, None]:
    """Yield the lines of a file; a large one is parsed by processes that take its pieces in turn.

    They end with this generator, or once their pipe is closed. Lines that one fails to deliver are read here.
    """
    if (count := _processes(size)) == 1:
        yield from read.lines(log, 0, size)
        return
    pieces, pipes, children = list(_pieces(log, size)), list[Connection](), list[int]()
    try:
        for first in range(count):
            reader, writer = Pipe(duplex=False)
            pipes.append(reader)
            with suppress(OSError), writer:
                if (child := os.fork()) == 0:
                    _work(log, pieces[first::count], pipes, writer)
                children.append(child)
        for place, piece in enumerate(pieces):
            try:
                yield from map(_unpacked, pipes[place % count].recv())
            except (EOFError, OSError):
                yield from read.lines(log, *piece)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for each in pipes:
            each.close()


def _pieces(log: BinaryIO, size: int) -> Iterator[_Piece]:
    """Yield parts of a file that end where a line does."""
    gaps = read.gaps_in(log, 0, size)
    log.seek(0)
    start = end = before = 0
    while block := log.read(min(PIECE_BYTES, size - end)):
        if count := block.count(b"\n"):
            cut = end + block.rindex(b"\n") + 1
            yield start, cut, gaps, before
            start, before = cut, before + count
        end += len(block)
    yield start, end, gaps, before


def _work(log: BinaryIO, pieces: Iterable[_Piece], pipes: Iterable[Connection], writer: Connection) -> NoReturn:
    """Send the lines of each piece, without what is not needed of them, and end this process."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for each in pipes:  # else somebody could still read them
            each.close()
        with Path(f"/proc/self/fd/{log.fileno()}").open("rb") as own:  # with an offset of its own
            for piece in pieces:
                writer.send([*map(_packed, read.lines(own, *piece))])
    finally:
        os._exit(0)


def _packed(line: LogLine) -> LogLine | tuple[Any, ...]:
    """Return what is sent of a line: of most records only what is verified, which is read faster than it is made."""
    record = line.record
    if record is None or record.kind in _WHOLE:
        return line
    data = {name: record.data[name] for name in _FIELDS & record.data.keys()}
    return line.number, line.end, merkle.leaf_hash(line.raw), data, *_NAMED(record)


def _unpacked(sent: LogLine | tuple[Any, ...]) -> LogLine:
    if isinstance(sent, LogLine):
        return sent
    number, end, leaf, data, *named = sent
    record = Record(data=data, line=b"", **dict(zip(_NAMES, named, strict=True)))
    return LogLine(number=number, raw=b"", end=end, record=record, error=None, leaf=leaf)
