"""Read the log by offset. Offsets count over all files: rotation moves none."""

import contextlib
from bisect import bisect_right
from collections.abc import Iterator
from typing import BinaryIO, Self

from glovebox_audit.read import Snapshot
from glovebox_audit.segments import files


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
        """Yield each file from ``offset`` on, its offset and length; nothing if none holds it."""
        first = bisect_right(self._numbers, offset, key=self._base) - 1
        for number in self._numbers[first:] if first >= 0 else ():
            file, size = self._file(number)
            yield file, self._base(number), size

    def line(self, offset: int) -> bytes:
        """Return the line that begins there; empty if there is none."""
        for file, base, size in self.files_from(offset):
            line = files.line_at(file.fileno(), offset - base) if offset - base < size else b""
            return line if line.endswith(b"\n") else b""
        return b""

    def line_before(self, offset: int) -> bytes:
        """Return the line that ends there; empty if there is none."""
        for file, base, size in self.files_from(max(0, offset - 1)):
            return files.line_before(file.fileno(), offset - base) if 0 < offset - base <= size else b""
        return b""

    def _file(self, number: int) -> tuple[BinaryIO, int]:
        if number not in self._files:
            self._files[number] = self._opened.enter_context(self._snapshot.segment(number))
        return self._files[number]

    def _base(self, number: int) -> int:
        if number not in self._bases:
            file, _ = self._file(number)
            line = files.line_at(file.fileno(), 0)
            self._bases[number] = files.start_of(line).before.size if b'"kind":"segment.begun"' in line else 0
        return self._bases[number]
