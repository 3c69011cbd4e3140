"""The pictures that clients accept as they are: guest and host must judge them alike, by headers alone. No I/O."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from _glovebox_guest.files.output import MAX_PICTURES
from _glovebox_guest.pictures.header import HEAD_BYTES, MAX_BYTES, fits, kind, size
from _glovebox_guest.pictures.smaller import share
from glovebox_sandboxes.contract.outcome import Shown

__all__ = ["HEAD_BYTES", "IMAGE_TYPES", "MAX_ABOUT", "MAX_BYTES", "MAX_PICTURES", "fits", "parse_copy", "share", "size"]

MAX_ABOUT = 4096
"""Bytes of JSON about a smaller copy: a name, and a few words."""
IMAGE_TYPES = {
    "image/png": b"\x89PNG\r\n\x1a\n",
    "image/jpeg": b"\xff\xd8\xff",
    "image/gif": b"GIF8",
    "image/webp": b"RIFF",
}
"""Media types a job may claim, and the first bytes of such a picture."""
_Pixels = Annotated[int, Field(ge=1, le=2**31)]


class _AboutCopy(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(max_length=512)
    media_type: str = ""
    of: tuple[_Pixels, _Pixels] | None = None
    reason: str = Field(default="", max_length=200)


def parse_copy(about: bytes, data: bytes) -> Shown | None:
    """Return a smaller copy whose header confirms its size, or None."""
    try:
        said = _AboutCopy.model_validate_json(about[: MAX_ABOUT + 1])
    except ValidationError:
        return None
    if not (said.name + said.reason).isprintable() or bool(data) == bool(said.reason):
        return None
    if not data:
        return Shown(name=said.name, reason=said.reason)
    head = data[:HEAD_BYTES]
    pixels = size(head, said.media_type) if kind(head) == said.media_type else None
    if pixels is None or said.of is None or not fits(head, said.media_type, len(data), MAX_BYTES):
        return None
    return Shown(name=said.name, media_type=said.media_type, data=data, size=pixels, of=said.of)
