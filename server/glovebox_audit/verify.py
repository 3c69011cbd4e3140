"""Verify offline that a log is whole, in bounded memory, and name the lines where it is not.

Found: a changed byte, a removed, added, repeated or moved line, a cut end, a chain rewritten without ``head.json``, and
any other bytes; in a whole chain, a record that does not fit its call, as a second end. Not found without an anchor
kept elsewhere, because the chain has no secret: a log and a ``head.json`` both put back to an earlier state or
rewritten as a whole, and well-made records added by someone who may write the files.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Head, Record
from glovebox_audit.events import GapRecorded, SegmentRemoved, SegmentSealed
from glovebox_audit.read import LogLine
from glovebox_audit.segments import files, merkle
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME
from glovebox_audit.segments.merkle import Counts
from glovebox_audit.segments.rotation import Removal, Seal, recorded
from glovebox_audit.writers import OpenCalls

#: Public keys by id.
Keys = Mapping[str, Ed25519PublicKey]

#: Problems that are kept; the first ones say what happened, the rest are counted.
MAX_PROBLEMS = 100

#: docs/operate/audit-problems.csv explains each.
ProblemKind = Literal[
    "edited", "foreign", "torn", "deleted", "reordered", "repeated", "forked", "truncated", "head", "anchor", "call",
    "missing", "seal", "newer",
]  # fmt: skip


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
class _Claim:
    """A record that must be in the log, and the state of its search."""

    head: Head
    kind: Literal["head", "anchor"]
    file: str = LOG_NAME
    line: int | None = None
    end: int = 0
    met: bool = False


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
    tree: merkle.Tree = field(default_factory=merkle.Tree)
    counts: Counts = field(default_factory=Counts)


@dataclass(slots=True, kw_only=True)
class _Unreadable:
    """Lines since the last record that are none: they may replace records, or a gap may account for them."""

    problems: int = 0
    omitted: int = 0
    lines: int = 0
    size: int = 0
    hash: Any = field(default_factory=hashlib.sha256)

    def add(self, raw: bytes) -> None:
        self.hash.update(raw)
        self.size += len(raw)


class Verifier:
    """A verifier of a log's lines, file by file, in bounded memory."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._file = _File(name=LOG_NAME, number=None, after=Head(), problems=0)
        self._oldest = True
        # The segment before the oldest that is there, with its seal; and the recorded removals.
        self._owed: tuple[int, str] | None = None
        self._removed: dict[int, str] = {}
        self._claims: dict[int, list[_Claim]] = {}
        self._calls = OpenCalls()
        self._misfits: list[Problem] = []
        self._problems: list[Problem] = []
        self._omitted = self._records = self._gaps = 0
        # The chain so far: the place of the last record in order, and that record.
        self._line, self._line_file = 0, LOG_NAME
        self._tail = Head()
        self._prev = ""
        self._unreadable = _Unreadable()
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

    def expect(self, head: Head, kind: Literal["head", "anchor"]) -> None:
        """Compare a record with the one in the log that has its number."""
        self._claims.setdefault(head.seq, []).append(_Claim(head=head, kind=kind))

    def verify(self, name: str, number: int | None, lines: Iterable[LogLine]) -> None:
        """Verify the next file; its number is None if it is the only one."""
        self._file = _File(name=name, number=number, after=self._tail, problems=self._noted())
        self._unreadable.lines = 0
        for line in lines:
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
        for claims in self._claims.values():
            for claim in claims:
                self._judge(claim)
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
            self._no_record(line, fresh=fresh)
            return
        self._records += 1
        # An older seal is a replay, or part of what a crash left.
        if record.kind == SegmentSealed.kind and record.seq > self._tail.seq:
            file.sealed = True
            self._seal(line, record)
        else:
            file.tree.add(merkle.leaf_hash(line.raw[:-1]))
            file.counts.record(record.call_id, record.data)
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
        told = Seal.of(file.number or 1, file.tree, file.counts, size=size, after=file.after, last=self._tail)
        try:
            same = replace(recorded(record.data, Seal, self._keys), time="") == told
            wrong = "" if same else "it is not that of the segment as it is here"
        except EvidenceError as problem:
            wrong = str(problem)
        if wrong:
            self.note(line.number, record.seq, "seal", f"the seal of segment {told.segment}: {wrong}")

    def _no_record(self, line: LogLine, *, fresh: bool) -> None:
        if self._unreadable.lines == 0:
            self._unreadable = _Unreadable(problems=len(self._problems), omitted=self._omitted)
        self._unreadable.add(line.raw)
        if not fresh:
            return
        self._unreadable.lines += 1
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
        if self._accounts_for_gap(record):
            del self._problems[self._unreadable.problems :]
            self._omitted = self._unreadable.omitted
            self._gaps += 1
            self._unreadable.lines = 0
        elif record.kind == GapRecorded.kind and self._unreadable.lines == 0:
            self.note(line.number, seq, "deleted", "the bytes that this gap describes are not before it")
        if seq < expected:
            # A gap accounts for all bytes before it: bytes inserted there must not pass as those of a crash.
            self._unreadable.add(line.raw)
            return self._out_of_order(line, record)
        if seq - expected > self._unreadable.lines:
            if len(self._problems) < MAX_PROBLEMS:
                self._jumped[len(self._problems)] = (expected, seq - 1)
            self.note(line.number, seq, "deleted", f"records {expected} to {seq - 1} are missing before this line")
        elif seq == expected and record.prev != self._tail.hash and self._unreadable.lines == 0:
            if seq == 1:
                self.note(line.number, 1, "edited", "the first record is chained to another one")
            else:
                detail = f"this is not the record that record {seq} on line {line.number} was chained to"
                self.note(self._line, seq - 1, "edited", detail, file=self._line_file)
        self._move(line, record)
        return True

    def _accounts_for_gap(self, record: Record) -> bool:
        found = self._unreadable
        return (
            found.lines > 0
            and record.kind == GapRecorded.kind
            and (record.seq, record.prev) == (self._tail.seq + 1, self._tail.hash)
            and record.data.get("bytes") == found.size
            and record.data.get("digest") == "sha256:" + found.hash.hexdigest()
        )

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
        self._unreadable.lines = 0
        self._tail = Head(seq=record.seq, hash=record.hash, size=self._file.after.size + line.end)

    def _compare(self, line: int, end: Head) -> None:
        """Compare with the claims; only records of the chain count."""
        for claim in self._claims.get(end.seq, ()):
            claim.line, claim.file, claim.end = line, self._file.name, end.size
            claim.met = claim.met or end.hash == claim.head.hash

    def _judge(self, claim: _Claim) -> None:
        """Note whether a record that must be in the log was not, now that all was read."""
        reached, seq = self._tail.seq + self._unreadable.lines, claim.head.seq
        named = HEAD_NAME if claim.kind == "head" else "the anchor"
        if claim.line is not None and not claim.met:
            detail = f"{named} names another record {seq}: the log was rewritten"
            self.note(claim.line, seq, claim.kind, detail, file=claim.file)
        elif claim.line is None and reached < seq:
            detail = f"records {reached + 1} to {seq}, the last that {named} knows, are missing at the end"
            self.note(self._file.lines + 1, reached + 1, "truncated" if claim.kind == "head" else "anchor", detail)
        elif seq == 0 and claim.head.hash != chain.GENESIS:
            self.note(None, None, claim.kind, f"{named} describes no log", file=HEAD_NAME)
        elif claim.line is None and seq > 0 and not self._problems:
            detail = f"{named} names record {seq}, which lay in a segment removed on record: not compared"
            self.note(None, seq, claim.kind, detail, file=HEAD_NAME)
        elif claim.kind == "head" and claim.head.size != claim.end and not self._problems:
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
            verifier.note(None, None, "head", f"{HEAD_NAME} is {how}, so a cut end cannot be told", file=HEAD_NAME)
        for stray in snapshot.strays:
            verifier.note(None, None, "foreign", "it is no segment of the log", file=stray)
        following: int | None = None
        for number in snapshot.numbers:
            if number is not None and following is not None and following < number:
                verifier.missing(following, number)
            with snapshot.segment(number) as (log, size):
                name = LOG_NAME if number is None else files.name(number)
                verifier.verify(name, following if number is None else number, read.lines(log, 0, size))
            following = None if number is None else number + 1
        return verifier.report(len(snapshot.sealed))
