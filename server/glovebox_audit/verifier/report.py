"""The report of a verification. Plain data."""

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
    """Path below the log's directory."""
    line: int | None
    """From 1; for a cut end the line that should come next; None for ``head.json`` or a missing file."""
    seq: int | None
    kind: ProblemKind
    """One word; docs/operate/audit-problems.csv explains each."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of ``verify``."""

    ok: bool
    records: int
    known: int
    """Records not read, because an earlier verification found their segments whole."""
    segments: int
    """Sealed segments that are there."""
    removed: int
    gaps: int
    """Recorded gaps: torn lines of crashes. No acknowledged record was in them."""
    head: Head
    """The last record: as an anchor ``SEQ:HASH``."""
    problems: tuple[Problem, ...]
    """In the order of the file; at most ``MAX_PROBLEMS``."""
    omitted: int
    """Problems beyond those."""
