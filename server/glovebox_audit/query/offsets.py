"""Read the log by offset. Offsets count over all files: rotation moves none."""

import contextlib
from bisect import bisect_right
from collections.abc import Iterator
from typing import BinaryIO, Self

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Record
from glovebox_audit.events import ReceiptSigned
from glovebox_audit.query import calls
from glovebox_audit.read import Snapshot
from glovebox_audit.segments import files


class StaleIndexError(Exception):
    """The log does not match the index at a place."""


class OffsetReader:
    """The files of a snapshot as one. Raises FileNotFoundError if retention removes one meanwhile."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._opened = contextlib.ExitStack()
        self._files: dict[int, tuple[BinaryIO, int]] = {}
        self._bases: dict[int, int] = {}
        self._numbers = list(snapshot.sealed)
        if snapshot.log is not None:
            self._numbers.append(snapshot.sealed[-1] + 1 if snapshot.sealed else 1)
            self._files[self._numbers[-1]] = (snapshot.log, snapshot.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    @property
    def start(self) -> int:
        """Return the offset of the oldest byte that is still there."""
        return self._base(self._numbers[0])

    @property
    def end(self) -> int:
        """Return the offset of the byte after the newest."""
        return self._base(self._numbers[-1]) + self._file(self._numbers[-1])[1]

    def files_from(self, offset: int) -> Iterator[tuple[BinaryIO, int, int]]:
        """Yield each file from ``offset`` on, its offset and length; raises StaleIndexError if none holds it."""
        first = bisect_right(self._numbers, offset, key=self._base) - 1
        if first < 0:
            raise StaleIndexError
        for number in self._numbers[first:]:
            file, size = self._file(number)
            yield file, self._base(number), size

    def line(self, offset: int) -> bytes:
        """Return the line that begins there; raises StaleIndexError."""
        file, base, size = next(self.files_from(offset))
        line = files.line_at(file.fileno(), offset - base)
        if not 0 <= offset - base < size or not line.endswith(b"\n"):
            raise StaleIndexError
        return line

    def line_before(self, offset: int) -> bytes:
        """Return the line that ends there; raises StaleIndexError."""
        file, base, size = next(self.files_from(max(0, offset - 1)))
        if not 0 < offset - base <= size:
            raise StaleIndexError
        return files.line_before(file.fileno(), offset - base)

    def records_of(self, call_id: str, first: int, last: int | None) -> Iterator[Record]:
        """Yield the records of a call, its receipt included; raises StaleIndexError.

        ``first`` and ``last`` are where its first and its last record begin; None for a call without an end.
        """
        until = self.end if last is None else last + len(self.line(last))
        for file, base, size in self.files_from(first):
            if base >= until:
                break
            yield from read.records_in(file, min(until - base, size), call_id, max(first - base, 0))
        with contextlib.suppress(StaleIndexError, EvidenceError):
            if last is not None and calls.label(self.line(until)) == (ReceiptSigned.kind, call_id):
                yield chain.parse(self.line(until))

    def _file(self, number: int) -> tuple[BinaryIO, int]:
        if number not in self._files:
            self._files[number] = self._opened.enter_context(self._snapshot.segment(number))
        return self._files[number]

    def _base(self, number: int) -> int:
        if number not in self._bases:
            file, _ = self._file(number)
            self._bases[number] = files.start_of(files.line_at(file.fileno(), 0)).before.size
        return self._bases[number]
