"""The budget of one scan, and what a look yields: findings, and parts that are scanned in their turn.

All that is unpacked of a file, at any depth, is paid from one budget: a bomb costs no more than that.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple, Protocol

MOST_DEPTH = 6
"""A file in an archive that is compressed is at 2: so many levels of archives in archives, and no more."""
MOST_PARTS = 2000
"""Files inside of one file, at all depths together."""
MOST_UNPACKED = 32 << 20
"""Bytes, of all that is unpacked of one file."""
MOST_SECONDS = 4
"""Of the processor; looked at between parts, of which one may take as long again. The call's own limit is behind it."""
_PIECE = 1 << 16


class ScannedPart(NamedTuple):
    """A file, or what lies in one."""

    name: str
    data: bytes
    is_text: bool = False
    """Whether nobody opens it by itself, so that only secrets are looked for: a part of an Office document."""


Findings = Iterator["str | ScannedPart"]


class Readable(Protocol):
    """What unpacks while it is read."""

    def read1(self, size: int, /) -> bytes:
        """So many bytes at most; none at the end, and fewer where what comes then cannot be unpacked."""


class ScanBudget:
    """What may still be spent on one file: bytes, parts and processor time."""

    def __init__(self) -> None:
        self.bytes = MOST_UNPACKED
        self.parts = MOST_PARTS
        self._until = time.process_time() + MOST_SECONDS

    def over(self) -> str:
        """Return which bound is exceeded; empty while none is."""
        if self.bytes < 0:
            return f"what unpacks to more than {MOST_UNPACKED >> 20} MiB in all"
        if self.parts < 0:
            return f"more than {MOST_PARTS} files inside"
        if time.process_time() > self._until:
            return f"what takes more than {MOST_SECONDS} seconds"
        return ""

    def read(self, file: Readable) -> tuple[bytes, str]:
        """Return what unpacks, and why that is not all of it; empty where it is."""
        out = bytearray()
        while not (why := self.over()):
            try:
                piece = file.read1(min(_PIECE, self.bytes + 1))
            except Exception as problem:  # noqa: BLE001 - hostile bytes, and whatever a library makes of them
                return bytes(out), f"what cannot be unpacked ({type(problem).__name__})"
            if not piece:
                return bytes(out), ""
            self.bytes -= len(piece)
            out += piece
        return bytes(out), why


def not_looked_into(why: str) -> str:
    """Return the finding that a part was not scanned."""
    return f"not looked into: {why}"


def shown(name: str) -> str:
    """Return the end of a name as printable ASCII."""
    return ascii(name[-80:])
