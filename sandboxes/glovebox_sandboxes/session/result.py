"""Reading what a job handed back: the frames of the guest's ``program.emit``, bounded, every byte hostile. Sans-I/O."""

import json
import math
from typing import Any

from _glovebox_guest.program.emit import BLOB, HEADER, VALUE
from glovebox_sandboxes.contract.outcome import Blob

MAX_VALUE = 1024 * 1024
"""Bytes of JSON: above what any job of ours returns, and small enough to parse without thought."""
MAX_BLOB = 8 * 1024 * 1024
"""Bytes of one picture: a 4,000 × 3,000 plot is about 1 MiB."""
MAX_BLOBS = 16
"""Pictures of one job."""
MAX_BLOB_BYTES = 16 * 1024 * 1024
"""All pictures of one job together: they are held in memory until the call has its answer."""
MAX_FRAMES = 64
"""Frames of one job. Ours send one value and a few pictures; a frame costs five bytes to write and far more to read."""
IMAGE_TYPES = {
    "image/png": b"\x89PNG\r\n\x1a\n",
    "image/jpeg": b"\xff\xd8\xff",
    "image/gif": b"GIF8",
    "image/webp": b"RIFF",
}
"""Media types a job may claim, and the bytes such a picture begins with."""


class ResultReader:
    """Collects the frames of one job. What does not fit the format is left out and said in ``problems``."""

    def __init__(self) -> None:
        self.value: Any = None
        self.blobs: list[Blob] = []
        self.problems: list[str] = []
        self._buffer = bytearray()
        self._broken = False
        self._frames = 0
        self._room = MAX_BLOB_BYTES

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._broken:
            return
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            kind, length = HEADER.unpack_from(self._buffer)
            believable = kind in (VALUE, BLOB) and length <= (MAX_VALUE if kind == VALUE else MAX_BLOB)
            if not believable or self._frames == MAX_FRAMES:
                # Without a believable length there is no next frame to look for.
                self._broken = True
                self._buffer.clear()
                self.problems.append("the program wrote to the descriptor its results go through; the rest is dropped")
                return
            if len(self._buffer) < HEADER.size + length:
                return
            self._frames += 1
            payload = bytes(self._buffer[HEADER.size : HEADER.size + length])
            del self._buffer[: HEADER.size + length]
            if kind == VALUE:
                self._take_value(payload)
            else:
                self._take_blob(payload)

    def _take_value(self, payload: bytes) -> None:
        try:
            # Decoded here: `json` would take other encodings, and surrogates that are no UTF-8.
            value = json.loads(payload.decode(), parse_constant=_refuse, parse_float=_finite)
            if b"\\u" in payload:
                # Half a surrogate pair is a str that nothing can encode: it becomes a question mark here, once.
                value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        except (ValueError, RecursionError):
            self.problems.append("the value is not JSON")
        else:
            self.value = value

    def _take_blob(self, payload: bytes) -> None:
        head, _, data = payload.partition(b"\0")
        media_type = head.decode("ascii", "replace")
        magic = IMAGE_TYPES.get(media_type)
        if magic is None or not data.startswith(magic):
            self.problems.append("a picture is not of the type it claims")
        elif len(self.blobs) == MAX_BLOBS or len(data) > self._room:
            self.problems.append(f"more than {MAX_BLOBS} pictures or {MAX_BLOB_BYTES} bytes of them")
        else:
            self._room -= len(data)
            self.blobs.append(Blob(media_type=media_type, data=data))


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    """A number that JSON can carry on: 1e999 would be read as infinity, which is not JSON."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is too large")
    return number
