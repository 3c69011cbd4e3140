"""Detects the media type of a file from a sandbox by its bytes. Pure: no I/O; fed chunk by chunk in bounded memory.

The name's extension only chooses among types that the bytes allow, and a contradiction is reported. Active documents
(HTML, SVG) are reported as ``text/plain`` so that no client renders them by accident; their risk says what they are. A
``text/…`` or JSON type promises that the whole file is valid UTF-8. Types not known to be harmless are marked: readers
are too many, and too lenient, to be imitated. Must never be imported here: any decoder of images, archives or
documents, because hostile files are parsed in sandboxes only.
"""

import codecs
import re
from typing import Final, NamedTuple

from glovebox_sandboxes.contract.pictures import HEAD_BYTES, size

MAX_PIXELS: Final = 64_000_000
"""8,000 by 8,000: 256 MB once decoded as RGBA, about what a client survives; 300 bytes of PNG can claim 4e18."""

OCTETS: Final = "application/octet-stream"
TEXT: Final = "text/plain"
ZIP: Final = "application/zip"
_OFFICE: Final = "application/vnd.openxmlformats-officedocument."

_KINDS: Final[tuple[tuple[str, str, tuple[bytes, ...]], ...]] = (
    ("image/png", "png", (b"\x89PNG\r\n\x1a\n",)),
    ("image/jpeg", "jpg jpeg", (b"\xff\xd8\xff",)),
    ("image/gif", "gif", (b"GIF87a", b"GIF89a")),
    ("image/webp", "webp", ()),
    ("application/pdf", "pdf", (b"%PDF-",)),
    ("application/vnd.apache.parquet", "parquet", (b"PAR1",)),
    ("application/vnd.apache.arrow.file", "", (b"ARROW1\0\0",)),
    (ZIP, "zip npz", (b"PK\x03\x04", b"PK\x05\x06")),
    ("application/gzip", "gz", (b"\x1f\x8b\x08",)),
    ("application/x-bzip2", "bz2", (b"BZh",)),
    ("application/x-xz", "xz", (b"\xfd7zXZ\0",)),
    ("application/zstd", "zst", (b"\x28\xb5\x2f\xfd",)),
    ("application/x-7z-compressed", "7z", (b"7z\xbc\xaf\x27\x1c",)),
    ("application/vnd.sqlite3", "", (b"SQLite format 3\0",)),
    ("application/x-hdf5", "h5 hdf5", (b"\x89HDF\r\n\x1a\n",)),
    ("application/x-npy", "npy", (b"\x93NUMPY",)),
    (TEXT, "txt log md html htm svg xml yaml yml toml jsonl ndjson py", ()),
)
_PROGRAM: Final = re.compile(rb"\x7fELF|MZ|\xfe\xed\xfa|[\xcf\xce]\xfa\xed\xfe|\xca\xfe\xba\xbe|\0asm")
_PICKLE: Final = re.compile(rb"\x80[\x02-\x05]")

# Types that an extension chooses among if the bytes fit, and that it claims.
_TEXT_KINDS: Final = {"csv": "text/csv", "tsv": "text/tab-separated-values", "json": "application/json"}
_ZIP_KINDS: Final = {
    "xlsx": _OFFICE + "spreadsheetml.sheet",
    "docx": _OFFICE + "wordprocessingml.document",
    "pptx": _OFFICE + "presentationml.presentation",
}
_CLAIMS: Final = {
    **{extension: kind for kind, extensions, _ in _KINDS for extension in extensions.split()},
    **_TEXT_KINDS,
    **_ZIP_KINDS,
}
_JSON_START: Final = re.compile(rb'[\[{"tfn0-9-]')
_OFFICE_ENTRY: Final = re.compile(rb"\[Content_Types\]\.xml|_rels/|docProps/|xl/|word/|ppt/")
_HTML: Final = re.compile(
    rb"<(?:!doctype\s+html|html|head|body|script|iframe|style|img|meta|link|object|embed|form|a)\b|xhtml"
)
_SVG: Final = re.compile(rb"<(?:\w+:)?svg\b")
_BLANK: Final = "it begins with too many blanks to recognise its type"
_UNKNOWN: Final = "its content is of no kind that is known to be harmless"
# Only the header that numpy writes for numbers or texts: its reader accepts any Python literal.
# https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
_NUMBERS: Final = rb"'[<>|=]?[?bBiufcmMSU]\d{0,4}(?:\[\d{0,9}\w{1,2}\])?'"
_SHAPE: Final = rb"\((?:\d+, ?)*\d*\)"
_FIELD: Final = rb"\('\w{1,60}', %b(?:, %b)?\)" % (_NUMBERS, _SHAPE)
_ARRAY: Final = re.compile(
    rb"\x93NUMPY(?:\x01\0(..)|[\x02\x03]\0(....))"
    rb"(\{'descr': (?:%b|\[(?:%b(?:, )?)+\]), 'fortran_order': (?:True|False), 'shape': %b, \} *\n)"
    % (_NUMBERS, _FIELD, _SHAPE),
    re.DOTALL,
)
_HTML_START: Final = re.compile(rb"<(?:!doctype\s+html|html)\b")
# Bytes that are no part of these: text of only such bytes needs one fast pass (about ten times faster).
_PLAIN: Final = bytes({*range(256)} - {*range(0x09), 0x0B, 0x0C, *range(0x0E, 0x20), 0x7F, 0xC2, 0xE2, 0xF3})
_RETURN: Final = re.compile(rb"\r[^\n]")
_CONTROL: Final = "its text holds control characters"
_SOME_END: Final = "its text holds characters at which only some programs end a line"
_DECEIVING: Final = {
    # No text file has them; ESC is apart because log files of terminal output legitimately have it. HTML with a
    # library's code, such as plotly's, has some: there they are reported, except NUL.
    _CONTROL: "\x01-\x06\x0e-\x1a\x1c-\x1f",
    "its text holds terminal control characters": "\x07\x08\x1b\x7f-\x9f",
    "its text holds characters that reorder what a reader sees": "\u202a-\u202e\u2066-\u2069",
    # A space of no width, invisible operators, and tags, which can hide a second text; joiners are part of words.
    "its text holds characters that nobody sees": "\u200b\u2060-\u2064\U000e0000-\U000e007f",
    # Vertical tab, form feed, line and paragraph separator; and a carriage return without line feed (above). Only some
    # readers start a new line there; for others the text is still part of a comment.
    _SOME_END: "\x0b\x0c\u2028\u2029",
}


class Content(NamedTuple):
    """The type and risks of one file's bytes."""

    media_type: str
    risks: tuple[str, ...]


class Sniffer:
    """The inspection of a streamed file: keeps its head, and whether all of it is text."""

    __slots__ = ("_decoder", "_head", "_risky", "_tail", "_text")

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = b""
        self._text = True
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._risky: set[str] = set()

    def feed(self, chunk: bytes) -> None:
        """Inspect the next bytes, any number, in the order of the file."""
        if len(self._head) < HEAD_BYTES:
            self._head += chunk[: HEAD_BYTES - len(self._head)]
        if not self._text or not chunk:
            return
        try:
            text = self._decoder.decode(chunk)
        except UnicodeDecodeError:
            self._text = False
            return
        window = self._tail + chunk  # a character of up to four bytes may span two chunks
        self._tail = window[-3:]
        if _SOME_END not in self._risky and b"\r" in window and _RETURN.search(window):
            self._risky.add(_SOME_END)
        if b"\0" in chunk:
            self._text = False
        elif window.translate(None, _PLAIN):
            self._look_through(text)

    def _look_through(self, text: str) -> None:
        """Find the risks of a text in one pass for all that remain: each alone would take as long."""
        at = 0
        while left := _DECEIVING.keys() - self._risky:
            found = re.compile(f"[{''.join(_DECEIVING[risk] for risk in sorted(left))}]").search(text, at)
            if found is None:
                return
            self._risky.update(risk for risk in left if re.match(f"[{_DECEIVING[risk]}]", found[0]))
            at = found.end()

    def finish(self, name: str) -> Content:
        """Return type and risks of the whole file; only the extension of its accepted name is used."""
        head = bytes(self._head)
        extension = name.rsplit("/", 1)[-1].rpartition(".")[2].casefold() if "." in name else ""
        if self._is_text():
            media_type, risks = _text_type(head, extension)
            if self._tail.endswith(b"\r"):
                self._risky.add(_SOME_END)
            risks += sorted(self._risky)
        else:
            media_type, risks = _binary_type(head, extension)
        claimed = _CLAIMS.get(extension)
        if claimed and claimed != media_type:
            risks.append(f"it is named .{extension} but holds {media_type if head else 'nothing'}")
        return Content(media_type=media_type, risks=tuple(risks))

    def _is_text(self) -> bool:
        if not self._text or self._head.startswith((b"%PDF-", b"PAR1", b"PK\x03\x04", b"PK\x05\x06")):
            return False
        if _CONTROL in self._risky and not _HTML_START.match(_start(bytes(self._head))):
            return False
        try:
            self._decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            return False
        return True


def _start(head: bytes) -> bytes:
    return head.removeprefix(codecs.BOM_UTF8).lstrip().lower()


def _text_type(head: bytes, extension: str) -> tuple[str, list[str]]:
    start = _start(head)
    if start.startswith(b"<"):
        kind = "SVG" if _SVG.search(start) else "HTML" if _HTML.search(start) else "markup"
        return TEXT, [f"it is {kind}, which can run scripts when it is opened"]
    if start.startswith(b"#!"):
        return TEXT, ["it is a script that names its own interpreter"]
    if not start and len(head) == HEAD_BYTES:
        return TEXT, [_BLANK]
    if extension == "json" and not _JSON_START.match(start):
        return TEXT, []
    return _TEXT_KINDS.get(extension, TEXT), []


def _binary_type(head: bytes, extension: str) -> tuple[str, list[str]]:
    if _PROGRAM.match(head):
        return OCTETS, ["it is a program or a library"]
    if _PICKLE.match(head):
        return OCTETS, ["it looks like a Python pickle, which runs code when it is loaded"]
    media_type = next((kind for kind, _, magics in _KINDS if head.startswith(magics)), OCTETS)
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        media_type = "image/webp"
    risks: list[str] = []
    if media_type.startswith("image/"):
        found = size(head, media_type)
        if found is None:
            risks.append("its width and height are not where they should be")
        elif (pixels := found[0] * found[1]) > MAX_PIXELS:
            risks.append(f"it unpacks to {pixels} pixels, more than {MAX_PIXELS}")
    elif media_type == "application/x-npy" and not _is_plain_array(head):
        risks.append("its array may hold pickled objects, which run code when they are loaded")
    elif media_type == ZIP and extension in _ZIP_KINDS and _OFFICE_ENTRY.match(head, 30):
        media_type = _ZIP_KINDS[extension]  # 30 bytes of local header, then the first entry's name: APPNOTE.TXT 4.3.7
    elif media_type == OCTETS:
        risks.append(_UNKNOWN)
    return media_type, risks


def _is_plain_array(head: bytes) -> bool:
    found = _ARRAY.match(head)
    return found is not None and int.from_bytes(found[1] or found[2], "little") == len(found[3])
