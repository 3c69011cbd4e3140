"""Make and prove evidence: an inclusion proof, or a bundle's ``evidence.json``, from bytes or from a log.

Rule 1  Each segment's seal is signed, and names the seal before it: from the first to the last there is no hole.
Rule 2  A seal counts the records of each call and run in its segment (``segments.merkle``). A bundle holds
        exactly as many, so one left out is detected.
Rule 3  Each record lies below the root that its seal signed, so none was changed or inserted.
Rule 4  Profiles, policies and tables of sandboxes are those that the records name, and each text has its digest. That
        one is absent, since it changed, is the claim of the bundle's maker.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import Field, ValidationError

from glovebox_audit import chain
from glovebox_audit import read as reading
from glovebox_audit.chain import EvidenceError, Record
from glovebox_audit.events import CallDecided, ReceiptSigned, SandboxStarted, SandboxTable, SegmentSealed
from glovebox_audit.read import Snapshot
from glovebox_audit.receipts import dsse
from glovebox_audit.receipts.dsse import is_newer
from glovebox_audit.segments import files, merkle
from glovebox_audit.segments.merkle import CountProof, Node, ProofPart
from glovebox_audit.segments.rotation import Seal, recorded, signed

TYPE = "https://glovebox.dev/bundle/v2"
"""A name, never fetched. It changes when an older reader would miss something; the first had no tables."""

try:
    _INSTALLED = version("glovebox-mcp")
except PackageNotFoundError:  # whoever verifies may have this package alone
    _INSTALLED = "unknown"
VERSION: Final = f"{_INSTALLED}+page.3"
"""Of the maker of bundles. Raise its number when the same evidence gets another page."""

Texts = Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]]
"""Profiles and policies in effect now, by digest."""


class _IncludedRecord(ProofPart):
    index: int
    path: list[Node]
    record: str


class _SegmentPart(ProofPart):
    seal: str
    counts: list[CountProof]
    records: list[_IncludedRecord]


class _Bundle(ProofPart):
    type: Literal["https://glovebox.dev/bundle/v1", "https://glovebox.dev/bundle/v2"]
    version: str
    of: Literal["call", "run"]
    id: str
    segments: list[_SegmentPart]
    profiles: dict[str, dict[str, Any] | None]
    policies: dict[str, dict[str, Any] | None]
    tables: dict[str, dict[str, Any] | None] = Field(default_factory=dict)


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
    tables: Mapping[str, Mapping[str, Any] | None]
    """By digest: what sandboxes of a plan had in common. None if its maker says that the log no longer has it."""
    keys: tuple[str, ...]
    """Ids of the keys that signed it, as checked; empty if unknown."""


def is_of(of: str, identity: str, record: Record) -> bool:
    """Return whether a record belongs to the call or the run."""
    return record.call_id == identity if of == "call" else record.data.get("run") == identity


def named(records: Iterable[Record]) -> list[set[str]]:
    """Return the digests of profiles and policies that decided the calls, and of tables of their sandboxes."""
    wanted = {"profile_digest": CallDecided.kind, "policy_digest": CallDecided.kind, "table": SandboxStarted.kind}
    told = [(each.kind, each.data) for each in records]
    return [
        {digest for kind, data in told if kind == of and isinstance(digest := data.get(name), str) and digest}
        for name, of in wanted.items()
    ]


def read(content: bytes, keys: Mapping[str, Ed25519PublicKey]) -> Evidence:
    """Prove the content of an ``evidence.json``.

    Get ``keys``, by id, by a way that the bundle's sender does not control. With none, signatures stay unchecked.

    Raises:
        EvidenceError: it does not hold; the message is the exact reason.
    """
    told = _parsed(content)
    of, identity = told.of, told.id
    seals: list[Seal] = []
    records: list[Record] = []
    signers: set[str] = set()
    before: Record | None = None
    for place, part in enumerate(told.segments, 1):
        record, seal = _seal(part.seal, place, keys)
        if before and (seal.after != files.anchor(before) or seal.segment != seals[-1].segment + 1):
            raise EvidenceError(
                f"segment {seal.segment} does not follow the one before it: one was left out or exchanged"
            )
        records += _included(part, seal, of, identity)
        seals.append(seal)
        signers.add(record.data["key"])
        before = record
    if any(one.seq >= other.seq for one, other in itertools.pairwise(records)):
        raise EvidenceError("its records are not in the order of the log, each once")
    if not records:
        raise EvidenceError(f"it has no record of {of} {identity}")
    profiles, policies, tables = named(records)
    receipts = _receipts(records, keys)
    signers |= {dsse.parse(each).key_id for each in receipts.values()}
    return Evidence(
        of=of,
        id=identity,
        version=told.version,
        seals=tuple(seals),
        records=tuple(records),
        receipts=receipts,
        profiles=_texts(told.profiles, profiles, "profile"),
        policies=_texts(told.policies, policies, "policy"),
        tables=_texts(told.tables, tables, "table"),
        keys=tuple(sorted(signers)) if keys else (),
    )


def _parsed(content: bytes) -> _Bundle:
    try:
        fields = json.loads(content)
        if isinstance(fields, dict) and is_newer(fields.get("type"), TYPE):
            raise EvidenceError(f"made by a newer Glovebox ({fields['type']}): upgrade to check it")
        found = _Bundle.model_validate(fields)
        same = chain.canonical(fields) + b"\n" == content
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ascii(".".join(str(part) for part in first["loc"])[:200])[1:-1]
        raise EvidenceError(f"its evidence.json does not have its fields: {where}: {first['type']}") from None
    except (ValueError, RecursionError):
        raise EvidenceError("its evidence.json is none") from None
    if not same:
        raise EvidenceError("its evidence.json is not in canonical form")
    return found


def _seal(line: str, place: int, keys: Mapping[str, Ed25519PublicKey]) -> tuple[Record, Seal]:
    try:
        record = chain.parse(line.encode("utf-8", "replace") + b"\n")
        seal = recorded(record.data, Seal, keys) if record.kind == SegmentSealed.kind else None
    except EvidenceError as problem:
        raise EvidenceError(f"seal {place}: {problem}") from None
    if seal is None or seal.last != f"{record.seq - 1}:{record.prev}":
        raise EvidenceError(f"seal {place}: it is none, or does not stand where it was signed for")
    return record, seal


def _included(part: _SegmentPart, seal: Seal, of: str, identity: str) -> list[Record]:
    """Return the records of one segment, each by its path to the signed root; raises EvidenceError."""
    found: list[Record] = []
    for place, each in enumerate(part.records, 1):
        where = f"record {place} of segment {seal.segment}"
        line = each.record.encode("utf-8", "replace") + b"\n"
        if merkle.root_of(merkle.leaf_hash(line), each.index, seal.lines, each.path) != seal.root:
            raise EvidenceError(f"{where}: its path does not lead to the root that was signed")
        try:
            found.append(chain.parse(line))
        except EvidenceError as problem:
            why = problem if problem.kind == "newer" else f"it is no record: {problem}"
            raise EvidenceError(f"{where}: {why}") from None
        if not is_of(of, identity, found[-1]):
            raise EvidenceError(f"{where}: it is another call's")
    try:
        there = merkle.counted(part.counts, merkle.name_of(of, identity), seal.names, seal.names_root)
    except ValueError as problem:
        raise EvidenceError(f"segment {seal.segment}: {problem}") from None
    if there != len(found):
        few = f"has {there} of its records, and the bundle {len(found)}: some were left out"
        raise EvidenceError(f"segment {seal.segment} {few}")
    return found


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


def _texts(
    told: Mapping[str, Mapping[str, Any] | None], digests: set[str], what: str
) -> Mapping[str, Mapping[str, Any] | None]:
    if wrong := sorted(told.keys() ^ digests):
        whose = "is named by its records, and left out" if wrong[0] in digests else "is named by none of its records"
        raise EvidenceError(f"the {what} {wrong[0][:80]} {whose}")
    for digest, text in told.items():
        if text is not None and chain.digest(text) != digest:
            raise EvidenceError(f"the {what} {digest[:80]} has another digest")
    return told


def prove(directory: Path, of: str, identity: str, texts: Texts) -> bytes:
    """Return the evidence of a ``call`` or ``run``, as ``read`` takes it.

    Raises:
        EvidenceError: the log has no record of it; a segment is not what was sealed, or its seal counts no records; of
            kind ``unsealed`` if some of its records are in the current segment.
        AuditError: the log cannot be read.
    """
    with reading.opened(directory) as snapshot:
        current = () if snapshot.log is None else reading.records_with(snapshot.log, snapshot.size, [identity])
        if any(is_of(of, identity, record) for record in current):
            raise EvidenceError("its records are still being written: try again once the run is over", kind="unsealed")
        segments, tables = [], dict[str, Any]()
        for number in snapshot.sealed if of == "run" else _of_call(snapshot, identity):
            with suppress(FileNotFoundError):  # removed in this moment, the oldest first
                segments.append(_part(snapshot, number, of, identity, tables))
    if not any(each["records"] for each in segments):
        hint = "`glovebox audit query` finds calls, and shows their runs"
        raise EvidenceError(f"there is no record of {of} {identity}: {hint}")
    lines = (each["record"].encode() + b"\n" for part in segments for each in part["records"])
    profiles, policies, names = named(map(chain.parse, lines))
    now = texts()
    told = chain.canonical(
        {
            "type": TYPE,
            "version": VERSION,
            "of": of,
            "id": identity,
            "segments": segments,
            "profiles": {digest: now[0].get(digest) for digest in profiles},
            "policies": {digest: now[1].get(digest) for digest in policies},
            "tables": {digest: tables.get(digest) for digest in names},
        }
    )
    return told + b"\n"


def _part(snapshot: Snapshot, number: int, of: str, identity: str, tables: dict[str, Any]) -> dict[str, Any]:
    """Return a segment's part of the evidence: its seal, the counts, and the wanted records with their paths.

    Tables of sandboxes are added to ``tables``.
    """
    contents, leaves, records = merkle.Contents(), list[bytes](), list[tuple[int, str]]()
    last, text, table = b"", identity.encode(), reading.TABLE.encode()
    with snapshot.segment(number) as (log, size):
        for _, line, free in reading.raw_lines(log, 0, size):
            if free and last:
                if text in last and (record := reading.parsed(last)[0]) is not None and is_of(of, identity, record):
                    records.append((len(leaves), last.removesuffix(b"\n").decode()))
                elif table in last and (record := reading.parsed(last)[0]) and record.kind == SandboxTable.kind:
                    data = dict(record.data)
                    tables[str(data.pop("digest", ""))] = data
                leaves.append(contents.add(last))
            last = line if free else last
    try:
        seal = signed(chain.parse(last).data, Seal, {})
    except EvidenceError as problem:
        raise EvidenceError(f"segment {number} has no seal: {problem}") from None
    tree, counted = merkle.levels(leaves), contents.leaves()
    if (seal.root, seal.names_root) != (contents.tree.root(), merkle.root_of_counts(counted)):
        raise EvidenceError(f"segment {number} is not what was sealed; see `glovebox audit verify`")
    return {
        "seal": last.removesuffix(b"\n").decode(),
        "counts": [each.model_dump() for each in merkle.shown(counted, merkle.name_of(of, identity))],
        "records": [{"index": index, "path": merkle.path(tree, index), "record": record} for index, record in records],
    }


def _of_call(snapshot: Snapshot, call_id: str) -> Iterable[int]:
    """Return the segments from a call's first record to its last."""
    holding: list[int] = []
    for number in reversed(snapshot.sealed):
        try:
            with snapshot.segment(number) as (log, size):
                kinds = {record.kind for record in reading.records_in(log, size, call_id)}
        except FileNotFoundError:  # removed in this moment, the oldest first
            break
        holding += [number] if kinds else []
        if CallDecided.kind in kinds:
            break
    return range(holding[-1], holding[0] + 1) if holding else ()
