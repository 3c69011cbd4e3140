"""Events of the log itself: gaps and segments. Written by the log only."""

from collections.abc import Mapping
from typing import Any, Literal

from glovebox_audit.events.base import Event


class GapRecorded(Event, kind="log.gap"):
    """The log itself found bytes after its last whole record, left by a crash or a full disk. Written by the log only.

    The bytes stay where they are, right before this record; none of them was ever acknowledged.
    """

    bytes: int
    """How many, the line feed that ends them included."""
    digest: str
    """Digest of exactly these bytes."""


class SegmentSealed(Event, kind="segment.sealed"):
    """A segment of the log ends here: the last record of its file. Written by the log only."""

    segment: int
    """Number of the segment, from 1."""
    lines: int
    """Records before this one in its file, without what lies in gaps: the leaves of the tree."""
    root: str
    """Root of the Merkle tree (RFC 6962) over their lines, without the line feeds: digest."""
    key: str
    """Id of the key that signed it."""
    envelope: Mapping[str, Any]
    """The seal itself: the same, and the end of the chain before the segment and in it, signed as receipts are."""


class SegmentBegun(Event, kind="segment.begun"):
    """A segment of the log begins: the first record of every file but the first, chained to the seal before.

    Written by the log only.
    """

    format: int
    """Version of the format of all records of the segment; a log whose first record says none has format 1."""
    segment: int
    """Number of the segment, from 2."""
    offset: int
    """Bytes of the log before it, in all segments."""


RemovalReason = Literal["age", "size"]


class SegmentRemoved(Event, kind="segment.removed"):
    """Retention is about to remove a sealed segment, the oldest. Written by the log only."""

    segment: int
    """Number of the segment."""
    seal: str
    """Its seal, as ``SEQ:HASH``: the record that the next segment is chained to."""
    root: str
    """Root of the tree over its lines: digest."""
    reason: RemovalReason
    """Which setting wants it: ``age`` or ``size``."""
    key: str
    """Id of the key that signed it."""
    envelope: Mapping[str, Any]
    """The same, signed as receipts are."""
