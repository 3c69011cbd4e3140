"""Signed statements of the log: a segment was sealed, or removed. Bytes in, bytes out; no file.

in-toto statements in a DSSE envelope, signed with the receipts' key; their subject is the root of the segment's tree. A
statement has one form only, so its facts determine its bytes.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from glovebox_audit import chain
from glovebox_audit.chain import EvidenceError, Head
from glovebox_audit.events import RemovalReason, SegmentRemoved, SegmentSealed
from glovebox_audit.receipts import dsse
from glovebox_audit.receipts.dsse import STATEMENT_TYPE, is_newer
from glovebox_audit.segments import files, merkle
from glovebox_audit.segments.merkle import Counts

_NUMBERS = frozenset({"segment", "lines", "bytes", "names"})


_Kind = TypeVar("_Kind", bound="_SegmentStatement")


@dataclass(frozen=True, slots=True, kw_only=True)
class _SegmentStatement:
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
        told = asdict(self)
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
            told = fields["predicate"]
            typed = all(type(value) is (int if name in _NUMBERS else str) for name, value in told.items())
            found = cls(root=root, **told)
            same = typed and found.payload() == payload
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            same = False
        if not same:
            raise EvidenceError(f"its statement is not {cls.predicate_type}")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
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
    def of(
        cls, segment: int, tree: merkle.Tree, counts: Counts, *, size: int, after: Head, last: Head, time: str = ""
    ) -> Self:
        """Return the seal of a segment with these records."""
        leaves = counts.leaves()
        return cls(
            segment=segment, root=tree.root(), time=time, lines=tree.size, bytes=size,
            after=files.anchor(after), last=files.anchor(last), names=len(leaves), names_root=counts.root(leaves),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal(_SegmentStatement):
    """The removal of a segment by retention."""

    predicate_type: ClassVar[str] = "https://glovebox.dev/attestation/segment-removed/v1"
    recorded_as: ClassVar[type[SegmentSealed] | type[SegmentRemoved]] = SegmentRemoved
    repeated: ClassVar[tuple[str, ...]] = ("segment", "seal", "root", "reason")

    seal: str
    """The record that sealed it, as ``SEQ:HASH``."""
    reason: RemovalReason


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
