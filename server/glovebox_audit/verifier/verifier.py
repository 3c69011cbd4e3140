"""Verify the lines of a log and note every place where they differ from what was written. No I/O."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from glovebox_audit import chain
from glovebox_audit.chain import EvidenceError, Head, Record
from glovebox_audit.events import GapRecorded, SegmentRemoved, SegmentSealed
from glovebox_audit.read import LogLine
from glovebox_audit.segments import files, merkle
from glovebox_audit.segments.counts import Counts
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME, SegmentStart
from glovebox_audit.segments.statements import Removal, Seal, recorded
from glovebox_audit.segments.verified import VerifiedSegments
from glovebox_audit.under_way import OpenCalls
from glovebox_audit.verifier.report import MAX_PROBLEMS, Problem, ProblemKind, VerifyReport
from glovebox_sandboxes.plural import counted

#: Public keys by id.
Keys = Mapping[str, Ed25519PublicKey]


@dataclass(slots=True, kw_only=True)
class _Claim:
    """A record that must be in the log, and the state of its search."""

    head: Head
    kind: Literal["head", "anchor"]
    file: str = LOG_NAME
    line: int | None = None
    end: int = 0
    met: bool = False


class Verifier:
    """A verifier of a log's lines, file by file, in bounded memory."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        # The current file: its name, its number if known, its place among the files, its offset.
        self._file, self._order, self._base = LOG_NAME, 0, 0
        self._number: int | None = None
        self._files: dict[str, int] = {HEAD_NAME: -1}
        self._last_line = 0
        self._problems_before = 0
        # For its seal: the trees of records and (earlier seals) of all lines, the leaf so far, the chain before it.
        self._tree, self._all_lines, self._leaf = merkle.Tree(), merkle.Tree(), hashlib.sha256(b"\0")
        self._counts = Counts()
        self._after = Head()
        self._has_seal = False
        # The segment before the oldest that is there, with its seal; and the recorded removals.
        self._owed: tuple[int, str] | None = None
        self._removed: dict[int, str] = {}
        self._known = self.last_known = 0
        self._claims: list[_Claim] = []
        self._claims_at: dict[int, list[_Claim]] = {}
        self._calls = OpenCalls()
        self._misfits: list[Problem] = []
        self._problems: list[Problem] = []
        self._omitted = 0
        self._records = self._gaps = 0
        # The chain so far: the place of the last record in order, and that record.
        self._line, self._line_file = 0, LOG_NAME
        self._tail = Head()
        self._prev = ""
        # Lines since then that are no records: they may replace records, or a gap may account for them.
        self._unreadable = self._unreadable_bytes = 0
        self._unreadable_hash = hashlib.sha256()
        self._unreadable_since = self._omitted_since = 0
        # Skipped numbers, by the place of their problem: a later line may hold them.
        self._jumped: dict[int, tuple[int, int]] = {}

    def note(
        self, line: int | None, seq: int | None, kind: ProblemKind, detail: str, *, file: str | None = None
    ) -> None:
        """Note a problem, of the current file if no other is named."""
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(Problem(file=file or self._file, line=line, seq=seq, kind=kind, detail=detail))
        else:
            self._omitted += 1

    def expect(self, head: Head, kind: Literal["head", "anchor"]) -> None:
        """Compare a record with the one in the log that has its number."""
        claim = _Claim(head=head, kind=kind)
        self._claims.append(claim)
        self._claims_at.setdefault(head.seq, []).append(claim)

    def resume(self, known: VerifiedSegments, oldest: SegmentStart) -> None:
        """Continue after what was verified before, unless it holds a record to be found."""
        end = known.end
        if any(claim.head.seq < end.seq for claim in self._claims):
            return
        self._known, self.last_known = known.records, known.last
        self._records, self._gaps = known.records, known.gaps
        self._tail = end
        self._calls.resume(known.calls, forgot=known.forgot)
        self._removed = dict(known.removed)
        if oldest.number > 1:
            self._owed = (oldest.number - 1, files.anchor(oldest.before))
        for claim in self._claims:
            if claim.head.seq == end.seq:
                claim.line, claim.end, claim.met = 1, end.size, claim.head.hash == end.hash

    def state(self, stamps: Mapping[int, tuple[int, int, int, int]]) -> VerifiedSegments | None:
        """Return the verified state of the segments up to the one just read."""
        if self._problems or self._misfits or self._number is None:
            return None
        there = {number: each for number, each in stamps.items() if number <= self._number}
        return VerifiedSegments(
            last=self._number,
            end=self._tail,
            stamps=there,
            calls=tuple(self._calls.ids()),
            forgot=self._calls.forgot,
            removed={number: seal for number, seal in self._removed.items() if number >= min(there) - 1},
            records=self._records,
            gaps=self._gaps,
            keys=tuple(sorted(self._keys)),
        )

    def begin(self, name: str, number: int | None) -> None:
        """Begin the next file; its number is None if it is the only one."""
        self._file, self._number, self._order = name, number, self._order + 1
        self._files[name] = self._order
        self._base = self._tail.size
        self._last_line, self._problems_before = 0, len(self._problems) + self._omitted
        self._tree, self._all_lines, self._leaf = merkle.Tree(), merkle.Tree(), hashlib.sha256(b"\0")
        self._counts = Counts()
        self._after, self._has_seal = self._tail, False
        self._unreadable = 0

    def missing(self, first: int, following: int) -> None:
        """Note that the segments from ``first`` up to ``following`` are missing."""
        name, self._order = files.name(first), self._order + 1
        self._files[name] = self._order
        which = f"segment {first} is" if following - first == 1 else f"segments {first} to {following - 1} are"
        detail = f"{which} missing, and younger than one that is there: retention removes the oldest first"
        self.note(None, None, "missing", detail, file=name)
        self._lose()

    def forgotten(self, gone: set[int]) -> None:
        """Note that verified segments are missing; retention may have removed the oldest."""
        if gone := {number for number in gone if self._owed is None or number > self._owed[0]}:
            detail = f"{counted(len(gone), 'sealed segment')} found whole before: gone, and no record says so"
            self.note(None, None, "missing", detail, file=files.name(min(gone)))

    def _lose(self) -> None:
        """Restart at the next record: what was before it is gone."""
        self._tail = Head(seq=-1)
        self._calls.resume((), forgot=True)

    def run(self, found: Iterable[LogLine]) -> None:
        """Verify the lines of the current file."""
        for line in found:
            fresh, self._last_line = line.number != self._last_line, line.number
            record = line.record
            if fresh and line.number == 1:
                self._first(record)
            # An older one is a replay, or part of what a crash left.
            seals = record is not None and record.kind == SegmentSealed.kind and record.seq > self._tail.seq
            if record is not None and seals and not self._has_seal:
                self._seal(line, record)
            elif self._has_seal:
                self.note(line.number, record.seq if record else None, "foreign", "it stands behind the segment's seal")
                continue
            self._leaf.update(line.raw.removesuffix(b"\n"))
            if line.raw.endswith(b"\n"):
                self._all_lines.add(self._leaf.digest())
                if record is not None:
                    self._tree.add(self._leaf.digest())
                    self._counts.record(record.call_id, record.data)
                self._leaf = hashlib.sha256(b"\0")
            if record is None:
                self._no_record(line, fresh=fresh)
                continue
            self._records += 1
            if not self._record(line, record):
                continue
            self._compare(line.number, self._tail)
            self._fit(line, record)
            if record.kind == SegmentRemoved.kind:
                self._removal(line, record)

    def _first(self, record: Record | None) -> None:
        """Note the segment that the first line names; a line without one is the first."""
        try:
            start = files.begun(record) if record else None
        except EvidenceError as problem:
            self.note(1, record.seq if record else None, "newer", str(problem))
            start = None
        if record is None:
            return
        number = start.number if start else 1
        if self._file == LOG_NAME and self._number is not None and number > self._number:
            self.missing(self._number, number)
            self._order += 1
            self._files[self._file] = self._order
        elif self._number not in {None, number}:
            self.note(1, record.seq, "seal", f"this is the beginning of segment {number}, not of {self._number}")
        self._number = self._number if self._file != LOG_NAME else number
        if start is None:
            return
        if self._order == 1 and self.last_known == 0 and number > 1:
            self._owed = (number - 1, files.anchor(start.before))
            self._lose()
            self._compare(1, start.before)
        if self._tail.seq < 0:
            self._tail = start.before
        elif start.before.size != self._tail.size and start.before.seq == self._tail.seq:
            self.note(1, record.seq, "seal", "it names another offset than that of its file")
        self._base, self._after = self._tail.size, self._tail

    def _seal(self, line: LogLine, record: Record) -> None:
        self._has_seal = True
        told = Seal(
            segment=self._number or 1,
            root="sha256:" + self._tree.root().hex(),
            time="",
            lines=self._tree.size,
            bytes=line.end - len(line.raw),
            after=files.anchor(self._after),
            last=files.anchor(self._tail),
        )
        if len(self._problems) + self._omitted > self._problems_before:
            return  # the file is not what was sealed, and that has been said
        earlier = replace(told, root="sha256:" + self._all_lines.root().hex(), lines=self._all_lines.size)
        leaves = self._counts.leaves()
        whole = replace(told, names=len(leaves), names_root=self._counts.root(leaves))
        try:
            same = replace(recorded(record.data, Seal, self._keys), time="") in {whole, told, earlier}
            wrong = "" if same else "it is not that of the segment as it is here"
        except EvidenceError as problem:
            wrong = str(problem)
        if wrong:
            self.note(line.number, record.seq, "seal", f"the seal of segment {told.segment}: {wrong}")

    def _removal(self, line: LogLine, record: Record) -> None:
        try:
            said = recorded(record.data, Removal, self._keys)
            self._removed[said.segment] = said.seal
        except EvidenceError as problem:
            self.note(line.number, record.seq, "seal", f"the removal of a segment: {problem}")

    def end_sealed(self, number: int) -> None:
        """Finish a file among the sealed segments."""
        if not self._has_seal and len(self._problems) + self._omitted == self._problems_before:
            detail = f"segment {number} has no seal: its end is missing"
            self.note(self._last_line + 1, self._tail.seq + 1, "truncated", detail)

    def finish(self) -> None:
        """Finish the last file."""
        if self._owed is not None and self._removed.get(self._owed[0]) != self._owed[1]:
            number = self._owed[0]
            detail = f"segment {number} and those before it are missing, and no record says that they were removed"
            self._files[files.name(number)] = 0
            self.note(None, None, "missing", detail, file=files.name(number))
        self._end(self._last_line)

    def report(self, sealed: tuple[int, ...]) -> VerifyReport:
        """Return the report, given the sealed segments that are there."""
        if not self._problems:
            # In a broken chain it would only repeat the problem.
            self._problems = self._misfits[:MAX_PROBLEMS]
            self._omitted += len(self._misfits) - len(self._problems)
        self._problems.sort(key=lambda problem: (self._files.get(problem.file, 0), problem.line or 0))
        return VerifyReport(
            ok=not self._problems,
            records=self._records,
            known=self._known,
            segments=len(sealed),
            removed=self._owed[0] if self._owed and self._removed.get(self._owed[0]) == self._owed[1] else 0,
            gaps=self._gaps,
            head=self._tail,
            problems=tuple(self._problems),
            omitted=self._omitted,
        )

    def _no_record(self, line: LogLine, *, fresh: bool) -> None:
        if self._unreadable == 0:
            self._unreadable_since, self._omitted_since = len(self._problems), self._omitted
            self._unreadable_hash, self._unreadable_bytes = hashlib.sha256(), 0
        self._unreadable_hash.update(line.raw)
        self._unreadable_bytes += len(line.raw)
        if not fresh:
            return
        self._unreadable += 1
        if line.error is not None and line.error.kind is not None and line.error.kind != "unsealed":
            self.note(line.number, line.error.seq, line.error.kind, str(line.error))
        elif not line.raw.endswith(b"\n") and len(line.raw) < chain.MAX_LINE_BYTES:
            detail = "the line has no end: a crash in mid-write, which the next server records, or a cut"
            self.note(line.number, None, "torn", detail)
        else:
            self.note(line.number, None, "foreign", f"no record: {line.error}")

    def _record(self, line: LogLine, record: Record) -> bool:
        """Continue the chain; return False for a record that is none of its own."""
        if self._tail.seq < 0:  # nothing before it can be known
            self._tail = Head(seq=record.seq - 1, hash=record.prev, size=self._base)
        seq, expected = record.seq, self._tail.seq + 1
        if self._accounts_for_gap(record):
            del self._problems[self._unreadable_since :]
            self._omitted = self._omitted_since
            self._gaps += 1
            self._unreadable = 0
        elif record.kind == GapRecorded.kind and self._unreadable == 0:
            self.note(line.number, seq, "deleted", "the bytes that this gap describes are not before it")
        if seq < expected:
            # A gap accounts for all bytes before it: bytes inserted there must not pass as those of a crash.
            self._unreadable_hash.update(line.raw)
            self._unreadable_bytes += len(line.raw)
            return self._out_of_order(line, record)
        if seq - expected > self._unreadable:
            if len(self._problems) < MAX_PROBLEMS:
                self._jumped[len(self._problems)] = (expected, seq - 1)
            self.note(line.number, seq, "deleted", f"records {expected} to {seq - 1} are missing before this line")
        elif seq == expected and record.prev != self._tail.hash and self._unreadable == 0:
            self._broken_link(line, record)
        self._move(line, record)
        return True

    def _accounts_for_gap(self, record: Record) -> bool:
        return (
            self._unreadable > 0
            and record.kind == GapRecorded.kind
            and (record.seq, record.prev) == (self._tail.seq + 1, self._tail.hash)
            and record.data.get("bytes") == self._unreadable_bytes
            and record.data.get("digest") == "sha256:" + self._unreadable_hash.hexdigest()
        )

    def _broken_link(self, line: LogLine, record: Record) -> None:
        if record.seq == 1:
            self.note(line.number, 1, "edited", "the first record is chained to another one")
            return
        detail = f"this is not the record that record {record.seq} on line {line.number} was chained to"
        self.note(self._line, record.seq - 1, "edited", detail, file=self._line_file)

    def _out_of_order(self, line: LogLine, record: Record) -> bool:
        for place, (first, last) in self._jumped.items():
            if first <= record.seq <= last:
                detail = f"records {first} to {last} are not before this line; {record.seq} is on line {line.number}"
                old = self._problems[place]
                self._problems[place] = replace(old, kind="reordered", detail=detail)
                return False
        if record.seq == self._tail.seq and record.prev == self._prev and record.hash != self._tail.hash:
            self.note(line.number, record.seq, "forked", f"lines {self._line} and {line.number} are both {record.seq}")
            self._move(line, record)
            return True
        self.note(line.number, record.seq, "repeated", f"record {record.seq} was there before")
        return False

    def _move(self, line: LogLine, record: Record) -> None:
        self._line, self._line_file, self._prev, self._unreadable = line.number, self._file, record.prev, 0
        self._tail = Head(seq=record.seq, hash=record.hash, size=self._base + line.end)

    def _compare(self, line: int, end: Head) -> None:
        """Compare with the claims; only records of the chain count."""
        for claim in self._claims_at.get(end.seq, ()):
            claim.line, claim.file, claim.end = line, self._file, end.size
            claim.met = claim.met or end.hash == claim.head.hash

    def _fit(self, line: LogLine, record: Record) -> None:
        wrong = self._calls.note(record, Head())
        if wrong and len(self._misfits) <= MAX_PROBLEMS:
            self._misfits.append(Problem(file=self._file, line=line.number, seq=record.seq, kind="call", detail=wrong))

    def _end(self, last: int) -> None:
        reached = self._tail.seq + self._unreadable
        for claim in self._claims:
            seq, named = claim.head.seq, HEAD_NAME if claim.kind == "head" else "the anchor"
            if claim.line is not None and not claim.met:
                detail = f"{named} names another record {seq}: the log was rewritten"
                self.note(claim.line, seq, claim.kind, detail, file=claim.file)
            elif claim.line is None and reached < seq:
                detail = f"records {reached + 1} to {seq}, the last that {named} knows, are missing at the end"
                self.note(last + 1, reached + 1, "truncated" if claim.kind == "head" else "anchor", detail)
            elif seq == 0 and claim.head.hash != chain.GENESIS:
                self.note(None, None, claim.kind, f"{named} describes no log", file=HEAD_NAME)
            elif claim.line is None and seq > 0 and not self._problems:
                detail = f"{named} names record {seq}, which lay in a segment removed on record: not compared"
                self.note(None, seq, claim.kind, detail, file=HEAD_NAME)
            elif claim.kind == "head" and claim.head.size != claim.end and not self._problems:
                self.note(None, seq, "head", f"{HEAD_NAME} has the wrong size for record {seq}", file=HEAD_NAME)
