"""The evidence from one segment: the records of this call or run with their audit paths, and the signed seal."""

from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Record
from glovebox_audit.events import SegmentSealed
from glovebox_audit.read import Gaps, Snapshot
from glovebox_audit.segments import merkle
from glovebox_audit.segments.counts import Counts
from glovebox_audit.segments.rotation import leaf
from glovebox_audit.segments.statements import Seal, signed


def part(
    snapshot: Snapshot, number: int, needle: str, wanted: Callable[[Record], bool], counts: Counts
) -> tuple[dict[str, Any], Record, Seal]:
    """Return a segment's part of a proof, the record that seals it, and its seal.

    The part has the wanted records and their paths. Each contains the text ``needle``. ``counts`` counts every record.

    Raises:
        EvidenceError: the segment is not what was sealed.
        FileNotFoundError: it was removed since.
    """
    with snapshot.segment(number) as (log, size):
        leaves, records, last = _leaves(log, needle, wanted, read.gaps_in(log, 0, size), counts)
        try:
            seal = chain.parse(last)
            said = signed(seal.data, Seal, {})
        except EvidenceError as problem:
            raise EvidenceError(f"segment {number} has no seal: {problem}") from None
        if said.lines != len(leaves) - 1:  # sealed when what lay in a gap had leaves too
            log.seek(0)
            leaves = [leaf(line) for line in log]
    tree = merkle.levels(leaves[:-1])
    if seal.kind != SegmentSealed.kind or said.root != "sha256:" + tree[-1][0].hex():
        raise EvidenceError(f"segment {number} is not what was sealed; see `glovebox audit verify --all`")
    if said.names_root is None and records:
        reason = "was sealed by an earlier Glovebox, which did not count records"
        raise EvidenceError(f"segment {number} {reason}: nothing shows that there are no others")
    found = [
        {"index": index, "path": [each.hex() for each in merkle.path(tree, index)], "record": text}
        for index, text in records
    ]
    return {"records": found}, seal, said


def _leaves(
    log: BinaryIO, needle: str, wanted: Callable[[Record], bool], gaps: Gaps, counts: Counts
) -> tuple[list[bytes], list[tuple[int, str]], bytes]:
    """Return a segment's leaves, the wanted records with their places among them, and its last line."""
    leaves: list[bytes] = []
    records: list[tuple[int, str]] = []
    text, at, before, line = needle.encode(), 0, b"", b""
    log.seek(0)
    for line in log:
        if before:
            counts.line(before)  # not the seal, which comes last
        before = b"" if gaps.hold(at) else line
        at += len(line)
        if before:
            if text in line and _of(line, wanted):
                records.append((len(leaves), line.removesuffix(b"\n").decode()))
            leaves.append(leaf(line))
    return leaves, records, line


def _of(line: bytes, wanted: Callable[[Record], bool]) -> bool:
    try:
        return wanted(chain.parse(line))
    except EvidenceError:
        return False


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
