"""Rotation and retention: when a segment ends, and which sealed ones to remove. Reads files; the log's owner writes.

Nothing is removed unless a setting says so.
"""

import time
from dataclasses import dataclass
from datetime import datetime
from io import BufferedReader
from pathlib import Path

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Head
from glovebox_audit.events import RemovalReason, SegmentSealed
from glovebox_audit.receipts.dsse import EnvelopeSigner
from glovebox_audit.segments import files, merkle
from glovebox_audit.segments.merkle import Counts

#: File size before it is sealed: about 5,000 calls. One proof reads it in a tenth of a second.
SEGMENT_BYTES = 64 << 20

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
            size = files.length(descriptor)
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
    for number in files.sealed(directory):
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


def leaf(line: bytes) -> bytes:
    """Return the leaf of one record."""
    return merkle.leaf_hash(line.removesuffix(b"\n"))


def grow(tree: merkle.Tree, counts: Counts, file: BufferedReader, end: Head, until: int) -> Head | None:
    """Add the records of a file from its position to ``until``, where a line ends.

    Return the end of the chain there, or None if what is signed would not be the chain. ``end`` is that at the file's
    position.
    """
    for _, line, free in read.raw_lines(file, file.tell(), until):
        if free:
            further = chain.linked(line, end)
            if further is None:
                return None
            end = further
            tree.add(leaf(line))
            counts.line(line)
    return end
