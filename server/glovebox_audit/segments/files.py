"""Names and places of the log's files: ``audit.jsonl`` is written, ``segments/`` holds the sealed ones.

The log is all of them, one after the other. An offset in the log counts from its first byte, over all files.
"""

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from glovebox_audit import chain
from glovebox_audit.chain import EvidenceError, Head, Record
from glovebox_audit.events import SegmentBegun

LOG_NAME = "audit.jsonl"
HEAD_NAME = "head.json"
DIRECTORY = "segments"

#: The next ``audit.jsonl`` is made under this name, so that it is never there half written.
NEXT_NAME = "audit.next"

#: Bytes read of a file to find its last line: longer than most lines.
_MOST_LINES = 8192

_NAME = re.compile(r"(\d{6,9})\.jsonl", re.ASCII)


def name(number: int) -> str:
    """Return the path of a sealed segment, below the log's directory."""
    return f"{DIRECTORY}/{number:06}.jsonl"


def listed(directory: Path) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the numbers of the sealed segments, in order, and other paths among them.

    Raises OSError unless the folder is missing.
    """
    try:
        names = os.listdir(directory / DIRECTORY)  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        return (), ()
    numbers = {f"{DIRECTORY}/{each}": int(match[1]) for each in names if (match := _NAME.fullmatch(each))}
    found = sorted(number for path, number in numbers.items() if number > 0 and name(number) == path)
    ours = set(map(name, found))
    return tuple(found), tuple(sorted({f"{DIRECTORY}/{each}" for each in names} - ours))


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStart:
    """The beginning of a segment, from its first line."""

    number: int = 1
    """1 for a log that never rotated, which has no such line."""
    before: Head = field(default_factory=Head)
    """The end of the chain before it; its size is the offset of this segment in the log."""
    time: float = 0.0
    """Unix time of its first record in seconds; 0 if unknown."""


def start_of(line: bytes) -> SegmentStart:
    """Parse the first line of a segment; raises EvidenceError if a newer Glovebox wrote it."""
    try:
        first = chain.parse(line)
    except EvidenceError as problem:
        if problem.kind == "newer":
            raise
        return SegmentStart()
    time = datetime.fromisoformat(first.time).timestamp()
    return begun(first, time) or SegmentStart(time=time)


def begun(record: Record, time: float = 0.0) -> SegmentStart | None:
    """Return the segment start in a record, None for others; raises EvidenceError if a newer Glovebox wrote it."""
    if record.kind != SegmentBegun.kind:
        return None
    version, number, offset = (record.data.get(key) for key in ("format", "segment", "offset"))
    if type(version) is int and version > chain.FORMAT:
        raise chain.newer_format(version)
    if type(number) is not int or type(offset) is not int or number < 1 or offset < 0:
        return None
    return SegmentStart(number=number, before=Head(seq=record.seq - 1, hash=record.prev, size=offset), time=time)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file of the log for reading, and only a regular file; raises OSError."""
    # O_NONBLOCK: a FIFO in the place of the file must not hang a reader.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def line_at(descriptor: int, offset: int) -> bytes:
    """Return the line that begins at this offset, line feed included; at most ``MAX_LINE_BYTES``."""
    block = os.pread(descriptor, 4096, offset)
    if b"\n" not in block:
        block = os.pread(descriptor, chain.MAX_LINE_BYTES, offset)
    return block[: block.find(b"\n") + 1] or block


def line_before(descriptor: int, end: int) -> bytes:
    """Return the line that ends at this offset of the file."""
    for length in (_MOST_LINES, chain.MAX_LINE_BYTES + 1):
        start = max(0, end - length)
        block = os.pread(descriptor, end - start, start)
        if (before := block.rfind(b"\n", 0, -1)) >= 0:
            return block[before + 1 :]
    return block


def anchor(end: Head | Record) -> str:
    """Return a record, or the end of a chain, as ``SEQ:HASH``."""
    return f"{end.seq}:{end.hash}"
