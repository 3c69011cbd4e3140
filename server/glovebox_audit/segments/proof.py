"""Inclusion proofs: one call's records, their audit paths, and the signed seals. No other call's records.

Anyone with the public key can check it offline. It proves that these records were in the log when the key's holder
sealed it; not that they are all of the call's. A proof has one form only, its canonical JSON.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Record
from glovebox_audit.events import CallDecided, SegmentSealed
from glovebox_audit.read import Gaps, Snapshot
from glovebox_audit.receipts.names import is_newer
from glovebox_audit.segments import merkle
from glovebox_audit.segments.counts import Counts
from glovebox_audit.segments.rotation import leaf
from glovebox_audit.segments.statements import Seal, signed

TYPE = "https://glovebox.dev/inclusion-proof/v1"
"""A name, never fetched. It changes when a field changes its meaning."""

MAX_BYTES = 64 << 20
"""Longest proof: a call with many large records; most take 20 KB."""


class NotSealedError(Exception):
    """Records of the call are in the current segment, which is not signed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    """The content of a verified proof."""

    call_id: str
    records: tuple[Record, ...]
    seals: tuple[Seal, ...]
    """Of the segments with these records."""
    key_id: str


def prove(directory: Path, call_id: str) -> bytes | None:
    """Return the proof of a call's records; None if the log has none.

    Raises:
        NotSealedError: some are not sealed yet.
        EvidenceError: a segment is not what was sealed.
        AuditError: the log cannot be read.
    """
    with read.opened(directory) as snapshot:
        if snapshot.log is not None and any(read.records_in(snapshot.log, snapshot.size, call_id)):
            raise NotSealedError
        found: list[dict[str, Any]] = []
        for number in reversed(snapshot.sealed):
            try:
                with snapshot.segment(number) as (log, size):
                    kinds = {record.kind for record in read.records_in(log, size, call_id)}
            except FileNotFoundError:  # removed in this moment
                break
            if kinds:
                found.insert(0, part(snapshot, number, call_id, partial(_is_of, call_id))[0])
            if CallDecided.kind in kinds:
                break
    return chain.canonical({"type": TYPE, "call_id": call_id, "segments": found}) + b"\n" if found else None


def part(
    snapshot: Snapshot, number: int, needle: str, wanted: Callable[[Record], bool], counts: Counts | None = None
) -> tuple[dict[str, Any], Record, Seal]:
    """Return a segment's part of a proof, the record that seals it, and its seal.

    The part has the wanted records and their paths. Each contains the text ``needle``. ``counts`` counts every record.

    Raises:
        EvidenceError: the segment is not what was sealed.
        FileNotFoundError: it was removed since.
    """
    with snapshot.segment(number) as (log, size):
        gaps = read.gaps_in(log, 0, size)
        leaves, records, last = _leaves(log, needle, wanted, gaps, counts=counts)
        try:
            seal = chain.parse(last)
            said = signed(seal.data, Seal, {})
        except EvidenceError as problem:
            raise EvidenceError(f"segment {number} has no seal: {problem}") from None
        tree = merkle.levels(leaves[:-1])
        if said.lines != len(tree[0]):  # sealed when what lay in a gap had leaves too
            leaves, records, _ = _leaves(log, needle, wanted, gaps, all_lines=True)
            tree = merkle.levels(leaves[:-1])
    if seal.kind != SegmentSealed.kind or said.root != "sha256:" + tree[-1][0].hex():
        raise EvidenceError(f"segment {number} is not what was sealed; see `glovebox audit verify --all`")
    found = [
        {"index": index, "path": [each.hex() for each in merkle.path(tree, index)], "record": text}
        for index, text in records
    ]
    return {"seal": seal.data["envelope"], "records": found}, seal, said


def _leaves(
    log: BinaryIO,
    needle: str,
    wanted: Callable[[Record], bool],
    gaps: Gaps,
    *,
    all_lines: bool = False,
    counts: Counts | None = None,
) -> tuple[list[bytes], list[tuple[int, str]], bytes]:
    """Return a segment's leaves, the wanted records with their places among them, and its last line."""
    leaves: list[bytes] = []
    records: list[tuple[int, str]] = []
    text, at, before, line = needle.encode(), 0, b"", b""
    log.seek(0)
    for line in log:
        if counts is not None and before:
            counts.line(before)  # not the seal, which comes last
        before = b""
        lost = gaps.hold(at)
        at += len(line)
        if not lost and text in line and _of(line, wanted):
            records.append((len(leaves), line.removesuffix(b"\n").decode()))
        if all_lines or not lost:
            leaves.append(leaf(line))
        if not lost:
            before = line
    return leaves, records, line


def _of(line: bytes, wanted: Callable[[Record], bool]) -> bool:
    try:
        return wanted(chain.parse(line))
    except EvidenceError:
        return False


def verify(content: bytes, key: Ed25519PublicKey, key_id: str) -> Proved:
    """Check a proof offline.

    Get the server's public key by a way that the proof's sender does not control.

    Raises:
        EvidenceError: it proves nothing.
    """
    fields = _fields(content)
    call_id, seals, records = fields["call_id"], [], []
    for place, each in enumerate(fields["segments"], 1):
        try:
            data = {"envelope": each["seal"], "key": each["seal"]["signatures"][0]["keyid"]}
            seal = signed(data, Seal, {key_id: key})
        except EvidenceError as problem:
            raise EvidenceError(f"seal {place}: {problem}") from None
        except (LookupError, TypeError):
            raise EvidenceError(f"seal {place}: it is not a DSSE envelope with one signature") from None
        seals.append(seal)
        records += included(each["records"], seal, partial(_is_of, call_id))
    if not _ascending([seal.segment for seal in seals]) or not _ascending([record.seq for record in records]):
        raise EvidenceError("its records are not in the order of the log, each once")
    return Proved(call_id=call_id, records=tuple(records), seals=tuple(seals), key_id=key_id)


def _is_of(call_id: str, record: Record) -> bool:
    return record.call_id == call_id


def _fields(content: bytes) -> Mapping[str, Any]:
    if len(content) > MAX_BYTES:
        raise EvidenceError(f"it is longer than {MAX_BYTES} bytes")
    try:
        fields = json.loads(content)
        same = chain.canonical(fields) + b"\n" == content
        kind = fields["type"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise EvidenceError("it is not an inclusion proof") from None
    if is_newer(kind, TYPE):
        raise EvidenceError(f"made by a newer Glovebox ({kind}): upgrade to check it")
    if not same:
        raise EvidenceError("it is not in canonical form, so it was changed or written by something else")
    shaped = (
        fields.keys() == {"type", "call_id", "segments"}
        and kind == TYPE
        and isinstance(fields["call_id"], str)
        and isinstance(fields["segments"], list)
        and len(fields["segments"]) > 0
        and all(isinstance(part, dict) and part.keys() == {"seal", "records"} for part in fields["segments"])
        and all(isinstance(part["records"], list) and len(part["records"]) > 0 for part in fields["segments"])
    )
    if not shaped:
        raise EvidenceError("it does not have the fields of an inclusion proof")
    return dict(fields)


def included(told: Sequence[Any], seal: Seal, wanted: Callable[[Record], bool]) -> list[Record]:
    """Return the records of one segment, each by its path to the signed root.

    Raises:
        EvidenceError: one does not lead there, is no record, or is not wanted.
    """
    found: list[Record] = []
    for place, each in enumerate(told, 1):
        where = f"record {place} of segment {seal.segment}"
        try:
            if each.keys() != {"index", "path", "record"} or type(each["index"]) is not int:
                raise EvidenceError(f"{where}: it does not have the fields of a record in a proof")
            line = each["record"].encode() + b"\n"
            way = [bytes.fromhex(node) for node in each["path"]]
            plain = all(node.hex() == text for node, text in zip(way, each["path"], strict=True))
        except (AttributeError, TypeError, ValueError):
            raise EvidenceError(f"{where}: it does not have the fields of a record in a proof") from None
        root = merkle.root_of(leaf(line), each["index"], seal.lines, way) if plain else None
        if root is None or "sha256:" + root.hex() != seal.root:
            raise EvidenceError(f"{where}: its path does not lead to the root that was signed")
        try:
            record = chain.parse(line)
        except EvidenceError as problem:
            why = problem if problem.kind == "newer" else f"it is no record: {problem}"
            raise EvidenceError(f"{where}: {why}") from None
        if not wanted(record):
            raise EvidenceError(f"{where}: it is another call's")
        found.append(record)
    return found


def _ascending(numbers: Sequence[int]) -> bool:
    return all(one < other for one, other in itertools.pairwise(numbers))
