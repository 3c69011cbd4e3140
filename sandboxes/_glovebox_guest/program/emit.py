"""Writes a job's value and its pictures as frames to a pipe of the child's own.

The host parses them (``session.result``) and trusts nothing: user code runs in the process that writes them. A frame is
``kind: u8, length: u32`` and the payload: ``J`` one JSON value, ``B`` media type, NUL, bytes, ``S`` one JSON object
about a smaller copy, NUL, its bytes.
"""

from __future__ import annotations

import struct
from os import getpid, write  # a program may replace them

from _glovebox_guest.jsontext import dumps
from _glovebox_guest.stdlib import Any

HEADER = struct.Struct("!BI")
VALUE = ord("J")
BLOB = ord("B")
SHOWN = ord("S")


class Emit:
    """Writes frames to a descriptor, for the process that made it: a fork that runs to its end sends nothing."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._process = getpid()

    def value(self, value: Any) -> None:
        """Send the job's one JSON-compatible value."""
        self._frame(VALUE, dumps(value))

    def blob(self, media_type: str, data: bytes) -> None:
        """Send one picture."""
        self._frame(BLOB, media_type.encode("ascii") + b"\0" + data)

    def shown(self, about: dict[str, Any], data: bytes = b"") -> None:
        """Send a smaller copy of a picture: of the one before, or of the file that ``about`` names."""
        self._frame(SHOWN, dumps(about) + b"\0" + data)

    def _frame(self, kind: int, payload: bytes) -> None:
        if getpid() != self._process:
            return
        view = memoryview(HEADER.pack(kind, len(payload)) + payload)
        while view:
            view = view[write(self._descriptor, view) :]
