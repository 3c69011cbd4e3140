"""When a segment of the log ends, and which sealed ones retention removes. Reads files; whoever owns the log writes.

Nothing is removed unless a setting says so.
"""

import time
from dataclasses import dataclass
from datetime import datetime
from io import BufferedReader
from pathlib import Path

from glovebox_audit import chain, read
from glovebox_audit.chain import Head, RecordError
from glovebox_audit.events import RemovalReason, SegmentSealed
from glovebox_audit.segments import files, merkle
from glovebox_audit.segments.counts import Counts
from glovebox_audit.segments.statements import Signs

#: How long the file grows before it is sealed: some 5,000 calls. What one proof reads, a tenth of a second.
SEGMENT_BYTES = 64 << 20

#: A segment ends after a day at the latest, with the next record: so that what a daily check has verified is sealed.
SEGMENT_SECONDS = 24 * 3600.0

#: No younger segment is removed, whatever the settings say: a call that began in it may be under way. A call takes
#: ten minutes at most.
YOUNGEST_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What may be removed."""

    seconds: float | None = None
    """Segments sealed longer ago; None for no limit."""
    bytes: int | None = None
    """The oldest, as long as the log takes more; None for no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """How a log rotates."""

    signer: Signs
    """Signs seals and removals."""
    segment_bytes: int = SEGMENT_BYTES
    segment_seconds: float = SEGMENT_SECONDS
    retention: Retention = Retention()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealed:
    """A sealed segment, as its last line says; nothing is proved about it."""

    number: int
    size: int
    """Bytes of the file."""
    time: float
    """When it was sealed, in seconds since the epoch."""
    end: int
    """Offset in the log of the byte after it."""
    root: str
    seal: str
    """The record that sealed it, as ``SEQ:HASH``."""


def sealed(directory: Path, number: int) -> Sealed | None:
    """Look at the two ends of a segment; None where it does not end with a seal, or is gone."""
    try:
        with files.opened(directory / files.name(number)) as descriptor:
            size = files.length(descriptor)
            start = files.start_of(files.line_at(descriptor, 0))
            last = chain.parse(files.line_before(descriptor, size))
    except (OSError, RecordError):
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
    """What retention wants to go: the oldest segments, without a hole, up to the first that must stay.

    Args:
        directory: of the log.
        retention: what may be removed.
        current: bytes of the segment that is being written.
        needed: from this offset of the log on everything stays: calls of servers that are gone have no end yet.
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
    """The leaf of one record."""
    return merkle.leaf_hash(line.removesuffix(b"\n"))


def grow(tree: merkle.Tree, counts: Counts, file: BufferedReader, end: Head, until: int) -> Head | None:
    """Add the records of a file from where it stands to an offset where a line ends.

    Args:
        tree: over the records so far.
        counts: of them.
        file: of the log.
        end: of the chain where the file stands.
        until: where to stop.

    Returns:
        The end of the chain there; None where what is signed would not be the chain.
    """
    at = file.tell()
    gaps = read.gaps_in(file, at, until)
    file.seek(at)
    while at < until and (line := file.readline()):
        if not gaps.hold(at):
            further = chain.linked(line, end)
            if further is None:
                return None
            end = further
            tree.add(leaf(line))
            counts.line(line)
        at += len(line)
    return end
