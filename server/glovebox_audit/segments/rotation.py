"""Rotation and retention: when a segment ends, and which sealed ones to remove. Reads files; the log's owner writes.

Nothing is removed unless a setting says so.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from glovebox_audit import chain
from glovebox_audit.chain import EvidenceError, Head
from glovebox_audit.events import SegmentRemoved, SegmentSealed
from glovebox_audit.receipts import dsse
from glovebox_audit.receipts.dsse import STATEMENT_TYPE, EnvelopeSigner, is_newer
from glovebox_audit.receipts.parts import RemovalReason
from glovebox_audit.segments import files, merkle
from glovebox_audit.segments.merkle import Contents, ProofPart

_Kind = TypeVar("_Kind", bound="_SegmentStatement")


class _SegmentStatement(ProofPart):
    predicate_type: ClassVar[str]
    recorded_as: ClassVar[type[SegmentSealed] | type[SegmentRemoved]]
    """The event that records it in the log."""
    repeated: ClassVar[tuple[str, ...]]

    segment: int
    root: str
    """Digest of the tree's root."""
    time: str
    """When it was signed: RFC 3339, UTC. The time of its record, or a moment before."""

    def payload(self) -> bytes:
        """Return the statement's bytes."""
        told = self.model_dump()
        root = told.pop("root").removeprefix("sha256:")
        return chain.canonical(
            {
                "_type": STATEMENT_TYPE,
                "subject": [{"name": f"segment:{self.segment}", "digest": {"sha256": root}}],
                "predicateType": self.predicate_type,
                "predicate": told,
            }
        )

    def event(self, signer: dsse.EnvelopeSigner) -> SegmentSealed | SegmentRemoved:
        """Return the event that records it, with the statement signed."""
        repeated = {name: getattr(self, name) for name in self.repeated}
        return self.recorded_as(**repeated, key=signer.key_id, envelope=signer.sign(self.payload()))

    @classmethod
    def parse(cls, payload: bytes) -> Self:
        """Parse a statement of this kind; raises EvidenceError for any other bytes."""
        try:
            fields = json.loads(payload)
            kind = fields["predicateType"]
            if is_newer(kind, cls.predicate_type):
                raise EvidenceError(f"made by a newer Glovebox ({kind}): upgrade to read it")
            root = "sha256:" + fields["subject"][0]["digest"]["sha256"]
            found = cls(root=root, **fields["predicate"])
            same = found.payload() == payload
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            same = False
        if not same:
            raise EvidenceError(f"its statement is not {cls.predicate_type}")
        return found


class Seal(_SegmentStatement):
    """The content of a segment, in total."""

    predicate_type: ClassVar[str] = "https://glovebox.dev/attestation/segment/v2"
    recorded_as: ClassVar[type[SegmentSealed] | type[SegmentRemoved]] = SegmentSealed
    repeated: ClassVar[tuple[str, ...]] = ("segment", "lines", "root")

    lines: int
    """Leaves of the tree: records. Bytes in a gap have none; the gap's own record holds their digest."""
    bytes: int
    """Length of the file up to the seal."""
    after: str
    """The end of the chain before the segment, as ``SEQ:HASH``."""
    last: str
    """The last record before the seal, likewise."""
    names: int
    """Different calls and runs of its records: leaves of the tree of ``counts``."""
    names_root: str

    @classmethod
    def of(cls, segment: int, contents: Contents, *, size: int, after: Head, last: Head, time: str = "") -> Self:
        """Return the seal of a segment with these records."""
        tree, leaves = contents.tree, contents.leaves()
        return cls(
            segment=segment, root=tree.root(), time=time, lines=tree.size, bytes=size, after=files.anchor(after),
            last=files.anchor(last), names=len(leaves), names_root=merkle.root_of_counts(leaves),
        )  # fmt: skip


class Removal(_SegmentStatement):
    """The removal of a segment by retention."""

    predicate_type: ClassVar[str] = "https://glovebox.dev/attestation/segment-removed/v1"
    recorded_as: ClassVar[type[SegmentSealed] | type[SegmentRemoved]] = SegmentRemoved
    repeated: ClassVar[tuple[str, ...]] = ("segment", "seal", "root", "reason")

    seal: str
    """The record that sealed it, as ``SEQ:HASH``."""
    reason: str


def recorded(data: Mapping[str, Any], kind: type[_Kind], keys: Mapping[str, Ed25519PublicKey]) -> _Kind:
    """Return the statement of ``signed`` if the record's other fields agree; raises likewise."""
    found = signed(data, kind, keys)
    if any(data.get(name) != getattr(found, name) for name in kind.repeated):
        raise EvidenceError("its record does not say what was signed")
    return found


def signed(data: Mapping[str, Any], kind: type[_Kind], keys: Mapping[str, Ed25519PublicKey]) -> _Kind:
    """Return the statement in the data of a seal's or a removal's record.

    One of ``keys`` must have signed it; with none, nothing is proved.

    Raises:
        EvidenceError: it is not this statement, or not signed so.
    """
    envelope = dsse.parse(chain.canonical(data.get("envelope")))
    if envelope.key_id != data.get("key"):
        raise EvidenceError("it names another key than its record")
    if keys:
        dsse.check(envelope, keys.get(envelope.key_id) or next(iter(keys.values())))
    return kind.parse(envelope.payload)


#: File size before it is sealed: about 2,700 calls, whose counts are hashed in 7 ms. One proof reads it in 0.03 s.
SEGMENT_BYTES = 16 << 20

#: A segment ends after a day at the latest, with the next record: a daily check then verifies sealed data.
SEGMENT_SECONDS = 24 * 3600.0

#: No younger segment is removed, whatever the settings: a call (ten minutes at most) may be under way in it.
YOUNGEST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Limits of the sealed segments to keep."""

    seconds: float | None = None
    """Remove segments sealed longer ago; None for no limit."""
    bytes: int | None = None
    """Remove the oldest while the log takes more; None for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The limits and the signer of a log's rotation."""

    signer: EnvelopeSigner
    segment_bytes: int = SEGMENT_BYTES
    segment_seconds: float = SEGMENT_SECONDS
    retention: Retention = Retention()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A sealed segment, unproved, from its last line."""

    number: int
    size: int
    time: float
    """Unix time of the seal in seconds."""
    end: int
    """Offset in the log of the byte after it."""
    root: str
    seal: str
    """The record that sealed it, as ``SEQ:HASH``."""


def sealed(directory: Path, number: int) -> Sealed | None:
    """Return a segment from its two ends; None if it does not end with a seal, or is gone."""
    try:
        with files.opened(directory / files.name(number)) as descriptor:
            size = os.fstat(descriptor).st_size
            start = files.start_of(files.line_at(descriptor, 0))
            last = chain.parse(files.line_before(descriptor, size))
    except (OSError, EvidenceError):
        return None
    if last.kind != SegmentSealed.kind or (last.data.get("segment"), start.number) != (number, number):
        return None
    return Sealed(
        number=number,
        size=size,
        time=datetime.fromisoformat(last.time).timestamp(),
        end=start.before.size + size,
        root=str(last.data.get("root")),
        seal=files.anchor(last),
    )


def removable(
    directory: Path, retention: Retention, *, current: int, needed: int | None = None
) -> list[tuple[Sealed, RemovalReason]]:
    """Return the oldest segments to remove, up to the first that must stay.

    ``current`` is the size in bytes of the current segment. From the offset ``needed`` on everything stays: calls of
    dead servers have no end yet.
    """
    if retention.seconds is None and retention.bytes is None:
        return []
    now = time.time()
    found: list[Sealed] = []
    for number in files.listed(directory)[0]:
        each = sealed(directory, number)
        if each is None or (found and number != found[-1].number + 1):
            break  # a damaged log is evidence
        found.append(each)
    total = current + sum(each.size for each in found)
    going: list[tuple[Sealed, RemovalReason]] = []
    for each in found:
        age = now - each.time
        old = retention.seconds is not None and age > retention.seconds
        large = retention.bytes is not None and total > retention.bytes
        if not (old or large) or age < YOUNGEST_SECONDS or (needed is not None and each.end > needed):
            break
        going.append((each, "age" if old else "size"))
        total -= each.size
    return going
