"""Read and prove evidence: an inclusion proof, or a bundle's ``evidence.json``. Bytes in, data out.

Rule 1  Each segment's seal is signed, and names the seal before it: from the first to the last there is no hole.
Rule 2  A seal counts the records of each call and run in its segment (``audit.segments.counts``). A bundle holds
        exactly as many, so one left out is detected.
Rule 3  Each record lies below the root that its seal signed, so none was changed or inserted.
Rule 4  Profiles and policies are those that the records name, and each text has its digest. That one is absent, since
        it changed, is the claim of the bundle's maker.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from glovebox_audit import chain
from glovebox_audit.chain import EvidenceError, Record
from glovebox_audit.events import CallDecided, ReceiptSigned, SegmentSealed
from glovebox_audit.receipts import dsse
from glovebox_audit.receipts.names import is_newer
from glovebox_audit.segments import counts, files, proof
from glovebox_audit.segments.statements import Seal, recorded

TYPE = "https://glovebox.dev/bundle/v1"
"""A name, never fetched. It changes when a field changes its meaning."""

try:
    _INSTALLED = version("glovebox-mcp")
except PackageNotFoundError:  # whoever verifies may have this package alone
    _INSTALLED = "unknown"
VERSION: Final = f"{_INSTALLED}+page.2"
"""Of the maker of bundles. Raise its number when the same evidence gets another page."""

_KEYS = {"type", "version", "of", "id", "segments", "profiles", "policies"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The content of a bundle."""

    of: str
    """``call`` or ``run``."""
    id: str
    version: str
    """Version of the Glovebox that made it; not proved."""
    seals: tuple[Seal, ...]
    records: tuple[Record, ...]
    """In the order of the log."""
    receipts: Mapping[str, bytes]
    profiles: Mapping[str, Mapping[str, Any] | None]
    """By digest; None if the maker says that it is no longer in effect."""
    policies: Mapping[str, Mapping[str, Any] | None]
    """Likewise."""
    keys: tuple[str, ...]
    """Ids of the keys that signed it, as checked; empty if unknown."""


def is_of(of: str, identity: str, record: Record) -> bool:
    """Return whether a record belongs to the call or the run."""
    return record.call_id == identity if of == "call" else record.data.get("run") == identity


def named(records: Iterable[Record]) -> tuple[set[str], set[str]]:
    """Return the digests of the profiles and policies that decided the calls."""
    decided = [each.data for each in records if each.kind == CallDecided.kind]
    profiles, policies = (
        {digest for data in decided if isinstance(digest := data.get(name), str) and digest}
        for name in ("profile_digest", "policy_digest")
    )
    return profiles, policies


def read(content: bytes, keys: Mapping[str, Ed25519PublicKey]) -> Evidence:
    """Prove the content of an ``evidence.json``.

    Get ``keys``, by id, by a way that the bundle's sender does not control. With none, signatures stay unchecked.

    Raises:
        EvidenceError: it does not hold; the message is the exact reason.
    """
    fields = _fields(content)
    of, identity = fields["of"], fields["id"]
    seals: list[Seal] = []
    records: list[Record] = []
    signers: set[str] = set()
    before: Record | None = None
    for place, part in enumerate(fields["segments"], 1):
        record, seal = _seal(part, place, keys)
        follows = before is None or (seal.after == files.anchor(before) and seal.segment == seals[-1].segment + 1)
        if not follows:
            raise EvidenceError(
                f"segment {seal.segment} does not follow the one before it: one was left out or exchanged"
            )
        found = proof.included(part["records"], seal, lambda each: is_of(of, identity, each))
        _complete(part["counts"], seal, counts.name_of(of, identity), len(found))
        before, seals, records = record, [*seals, seal], [*records, *found]
        signers.add(record.data["key"])
    if any(one.seq >= other.seq for one, other in itertools.pairwise(records)):
        raise EvidenceError("its records are not in the order of the log, each once")
    if not records:
        raise EvidenceError(f"it has no record of {of} {identity}")
    profiles, policies = named(records)
    receipts = _receipts(records, keys)
    signers |= {dsse.parse(each).key_id for each in receipts.values()}
    return Evidence(
        of=of,
        id=identity,
        version=fields["version"],
        seals=tuple(seals),
        records=tuple(records),
        receipts=receipts,
        profiles=_texts(fields["profiles"], profiles, "profile"),
        policies=_texts(fields["policies"], policies, "policy"),
        keys=tuple(sorted(signers)) if keys else (),
    )


def _fields(content: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(content)
        same = chain.canonical(fields) + b"\n" == content
        kind = fields["type"]
        if is_newer(kind, TYPE):
            raise EvidenceError(f"made by a newer Glovebox ({kind}): upgrade to check it")
        shaped = (
            fields.keys() == _KEYS
            and kind == TYPE
            and fields["of"] in {"call", "run"}
            and all(isinstance(fields[name], str) for name in ("id", "version"))
            and all(isinstance(fields[name], dict) for name in ("profiles", "policies"))
            and isinstance(fields["segments"], list)
            and all(each.keys() == {"seal", "counts", "records"} for each in fields["segments"])
            and all(isinstance(each[name], list) for each in fields["segments"] for name in ("counts", "records"))
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise EvidenceError("its evidence.json is none") from None
    if not (same and shaped):
        raise EvidenceError("its evidence.json is not in canonical form, or does not have its fields")
    return dict(fields)


def _seal(part: Mapping[str, Any], place: int, keys: Mapping[str, Ed25519PublicKey]) -> tuple[Record, Seal]:
    try:
        record = chain.parse(part["seal"].encode() + b"\n")
        seal = recorded(record.data, Seal, keys) if record.kind == SegmentSealed.kind else None
    except EvidenceError as problem:
        raise EvidenceError(f"seal {place}: {problem}") from None
    except (AttributeError, UnicodeError):
        raise EvidenceError(f"seal {place}: it is no record") from None
    if seal is None:
        raise EvidenceError(f"seal {place}: it is another record")
    if seal.last != f"{record.seq - 1}:{record.prev}":
        raise EvidenceError(f"seal {place}: it does not stand where it was signed for")
    return record, seal


def _complete(told: Sequence[Any], seal: Seal, name: str, found: int) -> None:
    try:
        there = counts.counted(told, name, seal.names, seal.names_root)
    except ValueError as problem:
        raise EvidenceError(f"segment {seal.segment}: {problem}") from None
    if there != found:
        raise EvidenceError(
            f"segment {seal.segment} has {there} of its records, and the bundle {found}: some were left out"
        )


def _receipts(records: Sequence[Record], keys: Mapping[str, Ed25519PublicKey]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for before, record in zip([None, *records], records, strict=False):
        if record.kind != ReceiptSigned.kind or record.call_id is None:
            continue
        content = chain.canonical(record.data.get("envelope"))
        try:
            envelope = dsse.parse(content)
            if keys:
                dsse.check(envelope, keys.get(envelope.key_id) or next(iter(keys.values())))
            told = json.loads(envelope.payload)["predicate"]
            place = (told["audit"]["seq"], told["audit"]["hash"], told["call"]["id"])
        except EvidenceError as problem:
            raise EvidenceError(f"the receipt of {record.call_id}: {problem}") from None
        except (ValueError, LookupError, TypeError, RecursionError):
            raise EvidenceError(f"the receipt of {record.call_id}: it is none") from None
        if before is None or place != (record.seq - 1, record.prev, record.call_id):
            raise EvidenceError(f"the receipt of {record.call_id} is not of the record before it")
        found[record.call_id] = content
    return found


def _texts(told: Mapping[str, Any], digests: set[str], what: str) -> dict[str, Mapping[str, Any] | None]:
    if wrong := sorted(told.keys() ^ digests):
        whose = "is named by its records, and left out" if wrong[0] in digests else "is named by none of its records"
        raise EvidenceError(f"the {what} {wrong[0][:80]} {whose}")
    for digest, text in told.items():
        if text is not None and (not isinstance(text, dict) or chain.digest(text) != digest):
            raise EvidenceError(f"the {what} {digest[:80]} has another digest")
    return dict(told)
