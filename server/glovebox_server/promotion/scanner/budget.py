"""The budget of one scan, and the results of a look: findings, and parts that are scanned in turn.

All bytes unpacked of a file, at any depth, are charged to one budget, which bounds a decompression bomb.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

MOST_DEPTH = 6
"""Levels of nesting; a file in a compressed archive is at 2."""
MOST_PARTS = 2000
"""Files inside one file, at all depths."""
MOST_UNPACKED = 32 << 20
MOST_SECONDS = 4
"""Processor time, checked between parts; one part may take as long again. The call has its own limit."""
_PIECE = 1 << 16


class ScannedPart(NamedTuple):
    """A file, or a part of one."""

    name: str
    data: bytes
    is_text: bool = False
    """True for a part of an Office document that opens only with it: it is searched only for secrets."""


Findings = Iterator["str | ScannedPart"]


class ScanBudget:
    """The remaining budget of one file: bytes, parts and processor time."""

    def __init__(self) -> None:
        self.bytes = MOST_UNPACKED
        self.parts = MOST_PARTS
        self._until = time.process_time() + MOST_SECONDS

    def over(self) -> str:
        """Return the exceeded bound; empty if none is."""
        if self.bytes < 0:
            return f"what unpacks to more than {MOST_UNPACKED >> 20} MiB in all"
        if self.parts < 0:
            return f"more than {MOST_PARTS} files inside"
        if time.process_time() > self._until:
            return f"what takes more than {MOST_SECONDS} seconds"
        return ""

    def read(self, read1: Callable[[int], bytes]) -> tuple[bytes, str]:
        """Return the unpacked data, and why it is incomplete; empty if it is not.

        ``read1`` unpacks up to a number of bytes: none at the end, fewer before data that cannot be unpacked.
        """
        out = bytearray()
        while not (why := self.over()):
            try:
                piece = read1(min(_PIECE, self.bytes + 1))
            except Exception as problem:  # noqa: BLE001 - a library raises anything on hostile bytes
                return bytes(out), f"what cannot be unpacked ({type(problem).__name__})"
            if not piece:
                return bytes(out), ""
            self.bytes -= len(piece)
            out += piece
        return bytes(out), why


def missed(why: str) -> str:
    """Return the finding that a part was not scanned."""
    return f"not scanned: {why}"


def shown(name: str) -> str:
    """Return the end of a name as printable ASCII."""
    return ascii(name[-80:])
