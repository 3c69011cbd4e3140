"""Reading what a job handed back: the frames of the guest's ``program.emit``, bounded, every byte hostile. Sans-I/O.

A program writes to the same pipe, so nobody can say whose words they are; but it can say little, and once: one value,
and so many pictures. The first frame beyond that ends the reading.
"""

import json
import math
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from _glovebox_guest.jsontext import MAX_LISTED, bound
from _glovebox_guest.program.emit import BLOB, HEADER, SHOWN, VALUE
from glovebox_sandboxes.contract import pictures
from glovebox_sandboxes.contract.outcome import Blob, Shown

MAX_VALUE = 1024 * 1024
"""Bytes of JSON: above what any job of ours returns, and small enough to parse without thought."""
MAX_BLOB = 8 * 1024 * 1024
"""Bytes of one picture: a 4,000 × 3,000 plot is about 1 MiB."""
MAX_BLOBS = 16
"""Pictures of one job."""
MAX_BLOB_BYTES = 16 * 1024 * 1024
"""All pictures of one job together: they are held in memory until the call has its answer."""
MAX_ABOUT = 4096
"""Bytes of JSON about a smaller copy: a name, and a few words."""
IMAGE_TYPES = {
    "image/png": b"\x89PNG\r\n\x1a\n",
    "image/jpeg": b"\xff\xd8\xff",
    "image/gif": b"GIF8",
    "image/webp": b"RIFF",
}
"""Media types a job may claim, and the bytes such a picture begins with."""


_Pixels = Annotated[int, Field(ge=1, le=2**31)]


class _About(BaseModel):
    """What is said of a smaller copy."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(max_length=512)
    media_type: str = ""
    of: tuple[_Pixels, _Pixels] | None = None
    reason: str = Field(default="", max_length=200)


class ResultReader:
    """Collects the frames of one job. What does not fit the format is left out and said in ``problems``."""

    def __init__(self) -> None:
        self.value: Any = None
        self.blobs: list[Blob] = []
        self.shown: list[Shown] = []
        self.problems: list[str] = []
        self._buffer = bytearray()
        self._passing = 0  # bytes of a picture that is left out, still to come
        self._broken = False
        self._valued = False
        self._pictures = 0
        self._copies = 0
        self._whole = False  # whether the picture that came last was taken, so that a copy may be of it
        self._room = MAX_BLOB_BYTES

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._broken:
            return
        self._buffer += data
        while True:
            passed = min(self._passing, len(self._buffer))
            del self._buffer[:passed]
            self._passing -= passed
            if len(self._buffer) < HEADER.size:
                return
            kind, length = HEADER.unpack_from(self._buffer)
            if not self._expected(kind, length):
                # Without a believable length there is no next frame to look for.
                self._broken = True
                self._buffer.clear()
                self.problems.append("the program wrote to the descriptor its results go through; the rest is dropped")
                return
            if kind == BLOB and length > self._room:
                self._pictures += 1
                self._whole = False
                self._passing = HEADER.size + length
                self.problems.append(f"more than {MAX_BLOB_BYTES} bytes of pictures")
                continue
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            with memoryview(self._buffer) as view:
                payload = bytes(view[HEADER.size : end])
            del self._buffer[:end]
            if kind == VALUE:
                self._take_value(payload)
            elif kind == SHOWN:
                self._take_shown(payload)
            else:
                self._take_blob(payload)

    def _expected(self, kind: int, length: int) -> bool:
        """Whether a frame, told from its head alone, may be one of ours."""
        if kind == VALUE:
            return length <= MAX_VALUE and not self._valued
        if kind == SHOWN:
            return length <= pictures.MAX_BYTES + MAX_ABOUT and self._copies < MAX_BLOBS
        return kind == BLOB and length <= MAX_BLOB and self._pictures < MAX_BLOBS

    def _take_value(self, payload: bytes) -> None:
        self._valued = True
        try:
            bound(payload, MAX_LISTED)
            # Decoded here: `json` would take other encodings, and surrogates that are no UTF-8.
            value = json.loads(payload.decode(), parse_constant=_refuse, parse_float=_finite)
            if b"\\u" in payload:
                # Half a surrogate pair is a str that nothing can encode: it becomes a question mark here, once.
                value = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
        except (ValueError, RecursionError):
            self.problems.append("the value is not JSON of ordinary size")
        else:
            self.value = value

    def _take_blob(self, payload: bytes) -> None:
        self._pictures += 1
        head, _, data = payload.partition(b"\0")
        media_type = head.decode("ascii", "replace")
        magic = IMAGE_TYPES.get(media_type)
        if magic is None or not data.startswith(magic):
            self.problems.append("a picture is not of the type it claims")
            self._whole = False
        else:
            self._whole = True
            self._room -= len(payload)
            self.blobs.append(Blob(media_type=media_type, data=data))

    def _take_shown(self, payload: bytes) -> None:
        self._copies += 1
        about, _, data = payload.partition(b"\0")
        shown = _copy(about, data)
        if shown is None:
            self.problems.append("a smaller copy of a picture is not what it claims")
        elif self._whole and not shown.name:
            self.blobs[-1] = replace(self.blobs[-1], shown=shown)
        else:
            self.shown.append(shown)


def _copy(about: bytes, data: bytes) -> Shown | None:
    """A smaller copy, whose own size its header has to say; None for what is none."""
    try:
        said = _About.model_validate_json(about[: MAX_ABOUT + 1])
    except ValidationError:
        return None
    if not (said.name + said.reason).isprintable() or bool(data) == bool(said.reason):
        return None
    if not data:
        return Shown(name=said.name, reason=said.reason)
    head = data[: pictures.HEAD_BYTES]
    size = pictures.size(head, said.media_type) if pictures.kind(head) == said.media_type else None
    if size is None or said.of is None or not pictures.fits(head, said.media_type, len(data), pictures.MAX_BYTES):
        return None
    return Shown(name=said.name, media_type=said.media_type, data=data, size=size, of=said.of)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    """A number that JSON can carry on: 1e999 would be read as infinity, which is not JSON."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is too large")
    return number
