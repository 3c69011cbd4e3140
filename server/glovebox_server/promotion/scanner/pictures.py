"""Pictures: invisible content, such as comments, places and trailing data."""

import re
import zlib
from collections.abc import Generator

from glovebox_server.promotion.scanner.budget import Findings, ScanBudget, ScannedPart, shown

_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_SHOWN = frozenset(
    b"IHDR PLTE IDAT tRNS cHRM gAMA iCCP sBIT sRGB bKGD hIST pHYs sPLT tIME acTL fcTL fdAT cICP mDCV cLLI".split()
)
"""Chunks of appearance. https://www.w3.org/TR/png-3/#11Chunks"""
_PNG_TEXTS = frozenset((b"tEXt", b"zTXt", b"iTXt"))
_MATPLOTLIB = re.compile(rb"Software\0Matplotlib version[0-9.]{1,20}, https://matplotlib\.org/")
_JPEG_SHOWN = {0xE0: (b"JFIF\0", b"JFXX\0"), 0xE2: (b"ICC_PROFILE\0",), 0xEE: (b"Adobe",)}
"""Application segments of appearance. ITU-T T.81, B.1.1.3."""
_JPEG_NEXT = re.compile(rb"\xff+[^\0\xff\xd0-\xd7]")
_GIF_SHOWN = (b"NETSCAPE2.0", b"ANIMEXTS1.0", b"ICCRGBG1012")
_WEBP_SHOWN = frozenset((b"VP8 ", b"VP8L", b"VP8X", b"ANIM", b"ANMF", b"ALPH", b"ICCP"))
_WHERE = "where and with what it was made (EXIF)"
_TEXT = "text of programs (XMP)"
_Walk = Generator["str | ScannedPart", None, int | None]
"""Findings; returns where the picture ends, None if it does not end as it should."""


def picture(part: ScannedPart, budget: ScanBudget) -> Findings:
    """Yield the invisible content of a PNG, JPEG, GIF or WebP picture."""
    for magic, look in _LOOKS:
        if magic.match(part.data):
            for each in _whole(look(part.data, budget), part.data):
                yield f"picture: {each}" if isinstance(each, str) else each


def _whole(walk: _Walk, data: bytes) -> Findings:
    end = yield from walk
    if end is None:
        yield "it does not end as it should, and was not scanned to its end"
    elif end < len(data):
        yield f"data behind its end ({len(data) - end} bytes)"
        yield ScannedPart("behind its end", data[end:])


def _png(data: bytes, budget: ScanBudget) -> _Walk:
    at = len(_PNG)
    while at + 12 <= len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        content = data[at + 8 : at + 8 + length]
        at += 12 + length
        if at > len(data):
            break
        if kind == b"IEND":
            if length:
                yield f"{length} bytes in its end"
            return at
        if kind in _PNG_TEXTS and not _MATPLOTLIB.fullmatch(content):
            yield from _png_text(kind, content, budget)
        elif kind == b"eXIf":
            yield _WHERE
        elif kind not in _PNG_SHOWN | _PNG_TEXTS:
            yield f"a chunk that nobody has to know ({shown(kind.decode('latin-1'))})"
    return None


def _png_text(kind: bytes, content: bytes, budget: ScanBudget) -> Findings:
    word, _, rest = content.partition(b"\0")
    yield f"text beside what one sees ({shown(word.decode('latin-1'))})"
    packed = (
        rest[1:] if kind == b"zTXt" else rest[2:].split(b"\0", 2)[-1] if kind == b"iTXt" and rest[:1] == b"\1" else b""
    )
    if packed and not budget.over():
        try:
            text = zlib.decompressobj().decompress(packed, budget.bytes + 1)
        except zlib.error:
            return
        budget.bytes -= len(text)
        yield ScannedPart(word.decode("latin-1"), text)


def _jpeg(data: bytes, _: ScanBudget) -> _Walk:
    at = 2
    while found := _JPEG_NEXT.search(data, at):
        marker, at = data[found.end() - 1], found.end()
        if marker == 0xD9:
            return at
        length = int.from_bytes(data[at : at + 2], "big")
        content = data[at + 2 : at + min(length, 300)]
        if marker == 0xFE:
            yield "a comment"
        elif 0xE0 <= marker <= 0xEF and not content.startswith(_JPEG_SHOWN.get(marker, ())):
            of_programs = _TEXT if b"ns.adobe.com/" in content else f"data of programs (APP{marker - 0xE0})"
            yield _WHERE if content.startswith(b"Exif\0") else of_programs
        at += max(2, length) if marker != 1 else 0
    return None


def _gif(data: bytes, _: ScanBudget) -> _Walk:
    at = 13 + _colours(data[10:11])
    while at < len(data):
        kind = data[at]
        if kind == 0x3B:
            return at + 1
        if kind == 0x2C:
            at = _blocks_end(data, at + 11 + _colours(data[at + 9 : at + 10]))
        elif kind == 0x21:
            label = data[at + 1 : at + 2]
            if label == b"\xfe":
                yield "a comment"
            elif label == b"\x01":
                yield "a text that is hardly ever shown"
            elif label == b"\xff" and (by := data[at + 3 : at + 14]) not in _GIF_SHOWN:
                yield _TEXT if by == b"XMP DataXMP" else f"data of programs ({shown(by.decode('latin-1'))})"
            at = _blocks_end(data, at + 2)
        else:
            break
    return None


def _colours(flags: bytes) -> int:
    return 3 << (flags[0] & 7) + 1 if flags and flags[0] & 0x80 else 0


def _blocks_end(data: bytes, at: int) -> int:
    while at < len(data) and data[at]:
        at += 1 + data[at]
    return at + 1


def _webp(data: bytes, _: ScanBudget) -> _Walk:
    end = 8 + int.from_bytes(data[4:8], "little")
    at = 12
    while at + 8 <= min(end, len(data)):
        kind, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if kind == b"EXIF":
            yield _WHERE
        elif kind == b"XMP ":
            yield _TEXT
        elif kind not in _WEBP_SHOWN:
            yield f"a chunk that nobody has to know ({shown(kind.decode('latin-1'))})"
        at += 8 + length + length % 2
    return None if end > len(data) or at > end + 1 else end + end % 2


_LOOKS = (
    (re.compile(re.escape(_PNG)), _png),
    (re.compile(rb"\xff\xd8\xff"), _jpeg),
    (re.compile(rb"GIF8[79]a"), _gif),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), _webp),
)
