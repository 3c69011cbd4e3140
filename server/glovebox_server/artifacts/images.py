"""Reads how many pixels an image claims from its header, without decoding it. Pure: no I/O, no image library ever."""

import re
from typing import Final

MAX_PIXELS: Final = 64_000_000
"""8,000 by 8,000: 256 MB once decoded as RGBA, about what a client survives; 300 bytes of PNG can claim 4e18."""

# https://www.w3.org/TR/png-3/#11IHDR: the first chunk, big-endian
_PNG: Final = re.compile(rb".{12}IHDR(.{4})(.{4})", re.DOTALL)
# logical screen descriptor behind the six-byte signature, little-endian
_GIF: Final = re.compile(rb".{6}(.{2})(.{2})", re.DOTALL)
# https://developers.google.com/speed/webp/docs/riff_container: three kinds of first chunk, little-endian
_WEBP_EXTENDED: Final = re.compile(rb".{12}VP8X.{8}(.{3})(.{3})", re.DOTALL)
_WEBP_LOSSY: Final = re.compile(rb".{12}VP8 .{4}.{3}\x9d\x01\x2a(.{2})(.{2})", re.DOTALL)
_WEBP_LOSSLESS: Final = re.compile(rb".{12}VP8L.{4}\x2f(.{4})", re.DOTALL)
_FOURTEEN_BITS: Final = 0x3FFF
# One segment: fill bytes, marker, length. Start-of-frame markers carry height and width; C4, C8 and CC in their range
# are something else, and 01 and D0 to D8 stand alone. ITU-T T.81 table B.1.
_JPEG_SEGMENT: Final = re.compile(rb"\xff+([^\xff])(.{2})", re.DOTALL)
_JPEG_FRAME: Final = re.compile(rb".(.{2})(.{2})", re.DOTALL)
_JPEG_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_BARE: Final = frozenset({0x01, *range(0xD0, 0xD9)})


def pixels(head: bytes, media_type: str) -> int | None:
    """Return width times height as the header claims it, or None when the head does not hold it.

    Args:
        head: The beginning of the file, hostile.
        media_type: ``image/png``, ``image/jpeg``, ``image/gif`` or ``image/webp``, as its magic bytes say.
    """
    if media_type == "image/png":
        found = _PNG.match(head)
        return int.from_bytes(found[1], "big") * int.from_bytes(found[2], "big") if found else None
    if media_type == "image/gif":
        found = _GIF.match(head)
        return int.from_bytes(found[1], "little") * int.from_bytes(found[2], "little") if found else None
    return _webp(head) if media_type == "image/webp" else _jpeg(head)


def _webp(head: bytes) -> int | None:
    if found := _WEBP_EXTENDED.match(head):  # stored less one
        return (int.from_bytes(found[1], "little") + 1) * (int.from_bytes(found[2], "little") + 1)
    if found := _WEBP_LOSSY.match(head):  # the two bits above the fourteen are a scale
        width, height = int.from_bytes(found[1], "little"), int.from_bytes(found[2], "little")
        return (width & _FOURTEEN_BITS) * (height & _FOURTEEN_BITS)
    if found := _WEBP_LOSSLESS.match(head):  # stored less one
        bits = int.from_bytes(found[1], "little")
        return ((bits & _FOURTEEN_BITS) + 1) * ((bits >> 14 & _FOURTEEN_BITS) + 1)
    return None


def _jpeg(head: bytes) -> int | None:
    at = len(b"\xff\xd8")
    while segment := _JPEG_SEGMENT.match(head, at):
        marker = segment[1][0]
        if marker in _JPEG_FRAMES:
            frame = _JPEG_FRAME.match(head, segment.end())
            return int.from_bytes(frame[1], "big") * int.from_bytes(frame[2], "big") if frame else None
        # the length counts its own two bytes, so a lie of 0 or 1 must not send us backwards
        at = segment.end(1) + (0 if marker in _JPEG_BARE else max(2, int.from_bytes(segment[2], "big")))
    return None
