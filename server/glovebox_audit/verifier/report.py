"""What a check of the log finds. Plain data."""

from dataclasses import dataclass
from typing import Literal

from glovebox_audit.chain import Head

#: Problems that are kept; the first ones say what happened, the rest are counted.
MAX_PROBLEMS = 100

ProblemKind = Literal[
    "edited", "foreign", "torn", "deleted", "reordered", "repeated", "forked", "truncated", "head", "anchor", "call",
    "missing", "seal", "newer",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One place where the log is not what was written."""

    file: str
    """The file concerned, below the log's directory."""
    line: int | None
    """Its line, from 1; for a cut end the line that should come next; None for ``head.json`` or a missing file."""
    seq: int | None
    """Number of the record concerned, where it is known."""
    kind: ProblemKind
    """What happened, in one word; docs/operate/audit-problems.csv explains each."""
    detail: str
    """What happened, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What ``verify`` found."""

    ok: bool
    """Whether the log is whole."""
    records: int
    """How many records there are."""
    known: int
    """How many of them were not read, because an earlier verification had found their segments whole."""
    segments: int
    """Sealed segments that are there."""
    removed: int
    """Segments before these, which retention removed on record."""
    gaps: int
    """Recorded gaps: torn lines of crashes. No acknowledged record was in them."""
    head: Head
    """The last record: as an anchor ``SEQ:HASH``."""
    problems: tuple[Problem, ...]
    """In the order of the file; at most ``MAX_PROBLEMS``."""
    omitted: int
    """Problems beyond those."""
