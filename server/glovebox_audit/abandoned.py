"""Finds the calls that servers left without an end when they were killed: from their files, the log is read. No lock.

They write no more, so what is read does not change. Segments that were sealed since are read as far as needed.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from glovebox_audit import chain, read
from glovebox_audit.chain import Head, NotARecord
from glovebox_audit.events import CallLost
from glovebox_audit.segments import files
from glovebox_audit.segments.files import Start
from glovebox_audit.underway import UnderWay
from glovebox_audit.writers import Writer


class Log:
    """The log as one process has it open: the file it writes to, and the sealed ones before."""

    def __init__(self, directory: Path, descriptor: int, start: Start, tail: Head) -> None:
        """Take what the writer knows; the descriptor stays its own."""
        self._directory = directory
        self._descriptor = descriptor
        self._start = start
        self._tail = tail

    def under_way(self, gone: Sequence[Writer]) -> dict[str, UnderWay]:
        """What these servers may have left open, from where their files say or else from the beginning."""
        known = [writer.since for writer in gone if writer.since is not None and self._holds(writer.since)]
        start = min(head.size for head in known) if len(known) == len(gone) else 0
        found = {writer.server: UnderWay() for writer in gone}
        names = [server.encode() for server in found]
        for at, line in self._lines(start):
            # Parsing is what costs, and most of what follows a crash is other servers'.
            if any(name in line for name in names):
                with contextlib.suppress(NotARecord):
                    record = chain.parse(line)
                    lost = record.kind == CallLost.kind  # told of by another server, that did not get further
                    ran = record.data.get("run_by") if lost else record.server
                    if ran in found:
                        found[ran].note(record, Head(seq=record.seq - 1, hash=record.prev, size=at))
        return found

    def _lines(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Lines from an offset of the log to its tail, each with its offset."""
        for descriptor, base in self._files(start):
            at = max(start, base)
            with os.fdopen(os.dup(descriptor), "rb") as file:
                gaps = read.gaps_in(file, at - base, min(files.length(descriptor), self._tail.size - base))
                file.seek(at - base)
                while at < self._tail.size and (line := file.readline(chain.MAX_LINE_BYTES)):
                    if not gaps.hold(at - base):
                        yield at, line
                    at += len(line)

    def _files(self, start: int) -> Iterator[tuple[int, int]]:
        """The files from that which holds this offset on, each with its own offset."""
        for name, base in files.since(self._directory, self._start, start):
            with files.opened(self._directory / name) as descriptor:
                yield descriptor, base
        yield self._descriptor, self._start.before.size

    def _holds(self, head: Head) -> bool:
        """Whether this is an end that the chain had."""
        if head.size == 0 or head.size > self._tail.size:
            return head == Head()
        for descriptor, base in self._files(head.size - 1):
            if base >= head.size:
                return False  # its segment was removed
            try:
                record = chain.parse(files.line_before(descriptor, head.size - base))
            except NotARecord:
                return False
            return (record.seq, record.hash) == (head.seq, head.hash)
        return False
