"""Offline proof that a log is whole: reads it once, in bounded memory, and names the lines where it is not.

Found: a changed byte, a removed, added, repeated or moved line, a cut end, a chain that was rewritten without
``head.json``, and any other bytes; and, in a whole chain, a record that does not fit its call, as a second end. Not
found without an anchor kept elsewhere: a log and a ``head.json`` that were both put back to an earlier state or
rewritten as a whole, and well-made records added by someone who may write the files, because the chain has no secret in
it.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from glovebox_server.audit import chain, read
from glovebox_server.audit.chain import Edited, Head, NotARecord, Record
from glovebox_server.audit.events import GapRecorded
from glovebox_server.audit.file import HEAD_NAME
from glovebox_server.audit.read import Line
from glovebox_server.audit.underway import UnderWay

#: Problems that are kept; the first ones say what happened, the rest are counted.
MAX_PROBLEMS = 100

ProblemKind = Literal[
    "edited", "foreign", "torn", "deleted", "reordered", "repeated", "forked", "truncated", "head", "anchor", "call"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One place where the log is not what was written."""

    line: int | None
    """Line of ``audit.jsonl``, from 1; for a cut end the line that should come next; None for ``head.json`` itself."""
    seq: int | None
    """Number of the record concerned, where it is known."""
    kind: ProblemKind
    """What happened, in one word; docs/operate/audit.md explains each."""
    detail: str
    """What happened, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What ``verify`` found."""

    ok: bool
    """Whether the log is whole."""
    records: int
    """How many records were read."""
    gaps: int
    """Recorded gaps: torn lines of crashes. No acknowledged record was in them."""
    head: Head
    """The last record: as an anchor ``SEQ:HASH``."""
    problems: tuple[Problem, ...]
    """In the order of the file; at most ``MAX_PROBLEMS``."""
    omitted: int
    """Problems beyond those."""


def verify(directory: Path, anchor: Head | None = None) -> VerifyReport:
    """Check the log in ``directory``, also while servers write to it, and against an anchor kept elsewhere.

    Raises:
        AuditUnavailable: there is no log, or it cannot be read.
    """
    with read.opened(directory) as (log, snapshot):
        verifier = _Verifier()
        if anchor is not None:
            verifier.expect(anchor, "anchor")
        try:
            verifier.expect(chain.parse_head(snapshot.head or b""), "head")
        except NotARecord:
            state = "missing" if snapshot.head is None else "damaged"
            verifier.note(None, None, "head", f"{HEAD_NAME} is {state}, so a cut end cannot be told")
        return verifier.run(read.lines(log, 0, snapshot.size))


@dataclass(slots=True, kw_only=True)
class _Claim:
    """One record that must be in the log, and what became of it."""

    head: Head
    kind: Literal["head", "anchor"]
    line: int | None = None
    end: int = 0
    met: bool = False


class _Verifier:
    def __init__(self) -> None:
        self._claims: list[_Claim] = []
        self._calls = UnderWay()
        self._misfits: list[Problem] = []
        self._problems: list[Problem] = []
        self._omitted = 0
        self._records = self._gaps = 0
        # The chain so far: where the last record in order stands, and what it was.
        self._line = 0
        self._tail = Head()
        self._prev = ""
        # Lines since then that are no records: they may stand in for records, or a gap may account for them.
        self._unreadable = self._unreadable_bytes = 0
        self._unreadable_hash = hashlib.sha256()
        self._unreadable_since = 0
        # Numbers that were jumped over, by the place of their problem: a later line may turn out to hold them.
        self._jumped: dict[int, tuple[int, int]] = {}

    def note(self, line: int | None, seq: int | None, kind: ProblemKind, detail: str) -> None:
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(Problem(line=line, seq=seq, kind=kind, detail=detail))
        else:
            self._omitted += 1

    def expect(self, head: Head, kind: Literal["head", "anchor"]) -> None:
        self._claims.append(_Claim(head=head, kind=kind))

    def run(self, found: Iterable[Line]) -> VerifyReport:
        last = 0
        for line in found:
            fresh, last = line.number != last, line.number
            if line.record is None:
                self._no_record(line, fresh=fresh)
                continue
            self._records += 1
            self._record(line, line.record)
            self._compare(line, line.record)
            self._fit(line, line.record)
        self._end(last)
        if not self._problems:
            # In a broken chain it would only say once more what is broken.
            for misfit in self._misfits:
                self.note(misfit.line, misfit.seq, misfit.kind, misfit.detail)
        self._problems.sort(key=lambda problem: problem.line or 0)
        return VerifyReport(
            ok=not self._problems,
            records=self._records,
            gaps=self._gaps,
            head=self._tail,
            problems=tuple(self._problems),
            omitted=self._omitted,
        )

    def _no_record(self, line: Line, *, fresh: bool) -> None:
        if self._unreadable == 0:
            self._unreadable_since = len(self._problems)
            self._unreadable_hash, self._unreadable_bytes = hashlib.sha256(), 0
        self._stands_before_gap(line)
        if not fresh:
            return
        self._unreadable += 1
        if isinstance(line.error, Edited):
            self.note(line.number, line.error.seq, "edited", str(line.error))
        elif not line.raw.endswith(b"\n") and len(line.raw) < chain.MAX_LINE_BYTES:
            detail = "the line has no end: a crash in mid-write, which the next server records, or a cut"
            self.note(line.number, None, "torn", detail)
        else:
            self.note(line.number, None, "foreign", f"no record: {line.error}")

    def _stands_before_gap(self, line: Line) -> None:
        self._unreadable_hash.update(line.raw)
        self._unreadable_bytes += len(line.raw)

    def _record(self, line: Line, record: Record) -> None:
        seq, expected = record.seq, self._tail.seq + 1
        if self._accounts_for_gap(record):
            del self._problems[self._unreadable_since :]
            self._gaps += 1
            self._unreadable = 0
        elif record.kind == GapRecorded.kind and self._unreadable == 0:
            self.note(line.number, seq, "deleted", "the bytes that this gap describes are not before it")
        if seq < expected:
            # A gap accounts for all that stands before it: what was put there must not go with the bytes of a crash.
            self._stands_before_gap(line)
            self._out_of_order(line, record)
            return
        if seq - expected > self._unreadable:
            if len(self._problems) < MAX_PROBLEMS:
                self._jumped[len(self._problems)] = (expected, seq - 1)
            self.note(line.number, seq, "deleted", f"records {expected} to {seq - 1} are missing before this line")
        elif seq == expected and record.prev != self._tail.hash and self._unreadable == 0:
            self._broken_link(line, record)
        self._move(line, record)

    def _accounts_for_gap(self, record: Record) -> bool:
        return (
            self._unreadable > 0
            and record.kind == GapRecorded.kind
            and (record.seq, record.prev) == (self._tail.seq + 1, self._tail.hash)
            and record.data.get("bytes") == self._unreadable_bytes
            and record.data.get("digest") == "sha256:" + self._unreadable_hash.hexdigest()
        )

    def _broken_link(self, line: Line, record: Record) -> None:
        if record.seq == 1:
            self.note(line.number, 1, "edited", "the first record is chained to another one")
            return
        detail = f"this is not the record that record {record.seq} on line {line.number} was chained to"
        self.note(self._line, record.seq - 1, "edited", detail)

    def _out_of_order(self, line: Line, record: Record) -> None:
        for place, (first, last) in self._jumped.items():
            if first <= record.seq <= last:
                detail = f"records {first} to {last} are not before this line; {record.seq} is on line {line.number}"
                old = self._problems[place]
                self._problems[place] = Problem(line=old.line, seq=old.seq, kind="reordered", detail=detail)
                return
        if record.seq == self._tail.seq and record.prev == self._prev and record.hash != self._tail.hash:
            self.note(line.number, record.seq, "forked", f"lines {self._line} and {line.number} are both {record.seq}")
            self._move(line, record)
            return
        self.note(line.number, record.seq, "repeated", f"record {record.seq} was there before")

    def _move(self, line: Line, record: Record) -> None:
        self._line, self._prev, self._unreadable = line.number, record.prev, 0
        self._tail = Head(seq=record.seq, hash=record.hash, size=line.end)

    def _compare(self, line: Line, record: Record) -> None:
        for claim in self._claims:
            if record.seq == claim.head.seq:
                claim.line = line.number
                claim.met = claim.met or record.hash == claim.head.hash
                claim.end = line.end

    def _fit(self, line: Line, record: Record) -> None:
        wrong = self._calls.note(record, Head())
        if wrong and len(self._misfits) <= MAX_PROBLEMS:
            self._misfits.append(Problem(line=line.number, seq=record.seq, kind="call", detail=wrong))

    def _end(self, last: int) -> None:
        reached = self._tail.seq + self._unreadable
        for claim in self._claims:
            seq, named = claim.head.seq, HEAD_NAME if claim.kind == "head" else "the anchor"
            if claim.line is not None and not claim.met:
                self.note(claim.line, seq, claim.kind, f"{named} names another record {seq}: the log was rewritten")
            elif claim.line is None and reached < seq:
                detail = f"records {reached + 1} to {seq}, the last that {named} knows, are missing at the end"
                self.note(last + 1, reached + 1, "truncated" if claim.kind == "head" else "anchor", detail)
            elif seq == 0 and claim.head.hash != chain.GENESIS:
                self.note(None, None, claim.kind, f"{named} describes no log")
            elif claim.kind == "head" and claim.head.size != claim.end and not self._problems:
                self.note(None, seq, "head", f"{HEAD_NAME} has the wrong size for record {seq}")
