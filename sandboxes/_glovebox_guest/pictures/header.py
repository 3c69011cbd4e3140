"""Reads a picture's kind and size from a file's first bytes, and whether clients take it. Nothing is decoded.

The host uses it too, on bytes from sandboxes: no image library, ever. Without ``re``, whose import would delay a
sandbox started for its call.
"""

from __future__ import annotations

from struct import error as struct_error
from struct import unpack_from

HEAD_BYTES = 16 * 1024
"""Bytes of a file's beginning that are read: enough for a JPEG's size behind its metadata."""
MAX_EDGE = 1568
"""Pixels on the longer side. Providers of models scale down beyond it; some end a conversation with more than 2,000."""
MAX_BYTES = 96 * 1024
"""Bytes of all pictures of one kind (figures, files) in one result: half of it, once they are base64.
Claude Desktop rejects a result of 1 MiB."""
_MAGIC = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
# Start-of-frame markers carry height and width; C4, C8 and CC in their range are something else, and 01 and D0 to D8
# stand alone, without a length. ITU-T T.81 table B.1.
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE = frozenset({0x01, *range(0xD0, 0xD9)})
_FOURTEEN_BITS = 0x3FFF


def kind(head: bytes) -> str | None:
    """Return the media type of a PNG, JPEG, GIF or WebP picture, None for anything else."""
    for magic, media_type in _MAGIC:
        if head.startswith(magic):
            return media_type
    return "image/webp" if head[:4] == b"RIFF" and head[8:12] == b"WEBP" else None


def size(head: bytes, media_type: str) -> tuple[int, int] | None:
    """Return width and height in pixels as the hostile header claims them, None where it lacks them."""
    try:
        if media_type == "image/png":  # https://www.w3.org/TR/png-3/#11IHDR: the first chunk
            return unpack_from(">II", head, 16) if head[12:16] == b"IHDR" else None
        if media_type == "image/gif":  # logical screen descriptor behind the signature
            return unpack_from("<HH", head, 6)
        return _webp(head) if media_type == "image/webp" else _jpeg(head)
    except struct_error:  # the head ends before
        return None


def fits(head: bytes, media_type: str, length: int, most: int) -> bool:
    """Return whether clients take a picture of ``length`` bytes as it is, by its hostile header."""
    found = size(head, media_type)
    return length <= most and found is not None and 0 < min(found) <= max(found) <= MAX_EDGE


def _webp(head: bytes) -> tuple[int, int] | None:
    """Return the size in one of three kinds of first chunk, little-endian.

    https://developers.google.com/speed/webp/docs/riff_container
    """
    chunk = head[12:16]
    if chunk == b"VP8X":  # stored less one
        low, high, narrow, tall = unpack_from("<HBHB", head, 24)
        return low + (high << 16) + 1, narrow + (tall << 16) + 1
    if chunk == b"VP8 " and head[23:26] == b"\x9d\x01\x2a":  # the two bits above the fourteen are a scale
        width, height = unpack_from("<HH", head, 26)
        return width & _FOURTEEN_BITS, height & _FOURTEEN_BITS
    if chunk == b"VP8L" and head[20:21] == b"\x2f":  # stored less one
        (bits,) = unpack_from("<I", head, 21)
        return (bits & _FOURTEEN_BITS) + 1, (bits >> 14 & _FOURTEEN_BITS) + 1
    return None


def _jpeg(head: bytes) -> tuple[int, int] | None:
    at = len(b"\xff\xd8")
    while head[at : at + 1] == b"\xff":
        while head[at : at + 1] == b"\xff":  # fill bytes
            at += 1
        marker = head[at : at + 1]
        length = head[at + 1 : at + 3]
        if not marker or len(length) < 2:
            return None
        if marker[0] in _JPEG_FRAMES:  # length, precision, height, width
            height, width = unpack_from(">HH", head, at + 4)
            return width, height
        # the length counts its own two bytes, so a false 0 or 1 must not move us backwards
        at += 1 + (0 if marker[0] in _JPEG_BARE else max(2, int.from_bytes(length, "big")))
    return None
