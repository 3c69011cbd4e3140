"""The evidence from one segment: the records of this call or run with their audit paths, and the signed seal."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Record
from glovebox_audit.events import SegmentSealed
from glovebox_audit.read import Snapshot
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
        leaves, records, last = _leaves(read.raw_lines(log, 0, size), needle.encode(), wanted, counts)
        try:
            seal = chain.parse(last)
            said = signed(seal.data, Seal, {})
        except EvidenceError as problem:
            raise EvidenceError(f"segment {number} has no seal: {problem}") from None
    tree = merkle.levels(leaves)
    if seal.kind != SegmentSealed.kind or said.root != "sha256:" + tree[-1][0].hex():
        raise EvidenceError(f"segment {number} is not what was sealed; see `glovebox audit verify`")
    found = [
        {"index": index, "path": [each.hex() for each in merkle.path(tree, index)], "record": text}
        for index, text in records
    ]
    return {"records": found}, seal, said


def _leaves(
    lines: Iterable[tuple[int, bytes, bool]], text: bytes, wanted: Callable[[Record], bool], counts: Counts
) -> tuple[list[bytes], list[tuple[int, str]], bytes]:
    """Return a segment's leaves, the wanted records with their places among them, and its last record, the seal."""
    leaves: list[bytes] = []
    records: list[tuple[int, str]] = []
    last = b""
    for _, line, free in lines:
        if not free:
            continue
        if last:
            counts.line(last)
            if text in last and _of(last, wanted):
                records.append((len(leaves), last.removesuffix(b"\n").decode()))
            leaves.append(leaf(last))
        last = line
    return leaves, records, last


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
