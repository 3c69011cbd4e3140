"""PDF: scripts, actions, programs and files, in plain text and in streams. ISO 32000-1."""

import base64
import re
import zlib
from collections.abc import Callable

from glovebox_server.promotion.scanner.budget import Findings, ScanBudget, ScannedPart

MOST_STREAMS = 2000
_MOST_FILTERS = 3
_MOST_SLOW = 4 << 20
"""Bytes of a stream decoded in Python: two seconds at most."""
_ZLIB_HEAD = 2
_PIECE = 4096
"""Bytes unpacked at once: of a broken stream, the pieces before the error are scanned."""

_ACTS = (
    ("a script", rb"/(?:JavaScript|JS)\b"), ("an action when it is opened", rb"/(?:OpenAction|AA)\b"),
    ("a program to start", rb"/Launch\b"), ("a file inside", rb"/(?:EmbeddedFiles?|Filespec)\b"),
    ("a form that sends", rb"/(?:SubmitForm|ImportData|XFA)\b"),
    ("film or sound", rb"/(?:RichMedia|Screen|Movie|Sound|Rendition|Subtype\s*/3D)\b"), ("an address", rb"/URI\b"),
    ("a way to another file", rb"/GoTo[RE]\b"), ("encryption", rb"/Encrypt\b"),
)  # fmt: skip
_STREAM = re.compile(rb"\bstream[ \t]*(?:\r\n|\n|\r)")
_FILTER = re.compile(rb"/(?:Filter|F)\s*(\[[^\]]{0,500}\]|/[^\s/<>\[\]()]{1,100}|\d+\s+\d+\s+R)")
_COMMENT = re.compile(rb"%[^\r\n]*")
_NO_STREAM = re.compile(rb"/(?:Standard|Adobe\.|ETSI\.|Entrust)")
"""Filters of encryption and signatures, which are never those of a stream."""
_NAME = re.compile(rb"/([^\s/<>\[\]()]{1,100})")
_PICTURES = frozenset((b"DCTDecode", b"DCT", b"JPXDecode", b"CCITTFaxDecode", b"CCF", b"JBIG2Decode"))

_FLATE = ([b"FlateDecode"], [b"Fl"])
_PREDICTED = re.compile(rb"/Predictor\s*(?!1\b)\d")
_NO_TEXT = re.compile(rb"/XRef\b|/Image\b")
_OBJECTS = re.compile(rb"/(?:ObjStm|First)\b")
_FORM = "a stream in a form that was not scanned"
_BROKEN = "a stream that is broken, and was not scanned"
_NOT_ALL = "a stream that was not scanned to its end"

_Unpacked = tuple[bytes, bool]


def pdf(part: ScannedPart, budget: ScanBudget) -> Findings:
    """Yield the active content of what readers take for a PDF, and the files inside."""
    if b"%PDF-" not in part.data[:1024]:
        return
    texts, untold = [_named(part.data)], {""}
    files: list[ScannedPart] = []
    before = 0
    for number, begin in enumerate(_STREAM.finditer(part.data)):
        if (why := budget.over()) or number >= MOST_STREAMS:
            yield f"PDF: not all of its streams were scanned: {why or f'more than {MOST_STREAMS}'}"
            break
        head = _named(part.data[before : begin.start()])
        # Not closer: a string in the dictionary may contain any delimiter of objects.
        head, before = head[max(0, head.find(b"endstream")) if number else 0 :], begin.end()
        text, problem = _unpacked(memoryview(part.data)[begin.end() :], head, budget)
        if problem not in untold:
            untold.add(problem)
            yield f"PDF: {problem}"
        budget.bytes -= len(text)
        texts.append(_named(text))
        if re.search(rb"/EmbeddedFile\b", head):
            files.append(ScannedPart(f"file {len(files) + 1}", text))
    for what, form in _ACTS:
        if any(re.search(form, text) for text in texts):
            yield f"PDF: {what}"
    yield ScannedPart("its streams", b"\n".join(texts[1:]), is_text=True)
    yield from files


def _named(text: bytes) -> bytes:
    """Return the text with hexadecimal escapes in names resolved: /J#61vaScript. 7.3.5."""
    return re.sub(rb"#([0-9A-Fa-f]{2})", lambda found: bytes((int(found[1], 16),)), text) if b"#" in text else text


def _filters(head: bytes) -> list[list[bytes]]:
    """Return the filter lists of a stream; more than one if its head is ambiguous."""
    said = {
        tuple(_NAME.findall(each) or [each]): None
        for text in (head, _COMMENT.sub(b" ", head))
        for each in _FILTER.findall(text)
        if not _NO_STREAM.match(each)
    }
    return [list(each) for each in said]


def _unpacked(packed: memoryview, head: bytes, budget: ScanBudget) -> tuple[bytes, str]:
    """Return the content of a stream, and the problem to report; empty if complete, or a picture."""
    filters = _filters(head)
    # Tried whatever the head says: a reader may take the filter from elsewhere.
    is_zlib = True
    try:
        text, whole = _inflated(packed, budget.bytes + 1)
    except ValueError:
        text, whole, is_zlib = b"", True, False
    out, problem = b"", _FORM if len(filters) > _MOST_FILTERS else ""
    for names in filters[:_MOST_FILTERS] or [[]]:
        if not names or names[:1] in _FLATE:
            rest, why = _decoded(text, names[1:], budget)
            why = _NOT_ALL if not whole else _BROKEN if names and not is_zlib else why
        else:
            rest, why = _decoded(bytes(packed[:_MOST_SLOW]), names, budget)
            rest += text if whole else b""
        out, problem = out + rest, problem or why
    # Rows stored as differences: they have no text, or none that can be read here.
    if _PREDICTED.search(head) and (_OBJECTS.search(head) or not _NO_TEXT.search(head)):
        problem = problem or _FORM
    return out, problem


def _decoded(data: bytes, names: list[bytes], budget: ScanBudget) -> tuple[bytes, str]:
    problem = ""
    for name in names:
        if name in _PICTURES:
            return b"", problem
        if name not in _FILTERS:
            return data, _FORM
        try:
            data, whole = _FILTERS[name](data, budget.bytes + 1)
        except ValueError:
            return data, _BROKEN
        problem = problem if whole else _NOT_ALL
    return data, problem


def _inflated(packed: memoryview | bytes, most: int) -> _Unpacked:
    """Inflate a stream; raise ``ValueError`` if it is not zlib data."""
    # The checksum is ignored, as readers ignore a wrong one.
    if len(packed) < _ZLIB_HEAD or packed[0] & 0xF != zlib.DEFLATED or (packed[0] << 8 | packed[1]) % 31:
        raise ValueError("no zlib")
    unpacker, out, at = zlib.decompressobj(-zlib.MAX_WBITS), bytearray(), _ZLIB_HEAD
    try:
        while not unpacker.eof and at < len(packed) and len(out) < most:
            out += unpacker.decompress(packed[at : at + _PIECE], most - len(out))
            at += _PIECE
    except zlib.error:
        return bytes(out), False
    return bytes(out), unpacker.eof


def _ascii85(packed: bytes, _: int) -> _Unpacked:
    text, end, _rest = packed.partition(b"~>")
    text = re.sub(rb"[\0\s]+", b"", text)[:_MOST_SLOW].removeprefix(b"<~")
    good = re.sub(rb"[^!-uz].*", b"", text, flags=re.DOTALL)
    return base64.a85decode(good), bool(end) and good == text


def _hex(packed: bytes, _: int) -> _Unpacked:
    text, end, _rest = packed.partition(b">")
    text = re.sub(rb"[\0\s]+", b"", text)
    good = re.sub(rb"[^0-9A-Fa-f].*", b"", text, flags=re.DOTALL)
    return bytes.fromhex((good + b"0" * (len(good) % 2)).decode("ascii")), bool(end) and good == text


def _run_lengths(packed: bytes, most: int) -> _Unpacked:
    """Decode run lengths, 7.4.5: a length and that number of bytes, or one byte and its count."""
    out, at = bytearray(), 0
    while at < len(packed) and len(out) < most:
        length = packed[at]
        if length == 128:
            return bytes(out), True
        if length < 128:
            out += packed[at + 1 : at + 2 + length]
            at += 2 + length
        else:
            out += packed[at + 1 : at + 2] * (257 - length)
            at += 2
    return bytes(out[:most]), False


def _lzw(packed: bytes, most: int) -> _Unpacked:
    """Decode LZW, 7.4.4: codes of 9 to 12 bits, each for a text that occurred before."""
    clear, end = 256, 257
    table = [bytes((each,)) for each in range(256)] + [b"", b""]
    out, last, bits, held = bytearray(), b"", 0, 0
    width = 9
    for byte in packed:
        held, bits = held << 8 | byte, bits + 8
        if bits < width:
            continue
        bits -= width
        code, held = held >> bits, held & (1 << bits) - 1
        if code == end or len(out) > most:
            return bytes(out[:most]), code == end
        if code == clear:
            table, last, width = table[:258], b"", 9
            continue
        if code > len(table) or (code == len(table) and not last):
            return bytes(out), False
        text = table[code] if code < len(table) else last + last[:1]
        out += text
        if last and len(table) < 4096:
            table.append(last + text[:1])
        last = text
        width = min(12, max(9, (len(table) + 1).bit_length()))  # one code early: EarlyChange is 1 by default
    return bytes(out), False


_FILTERS: dict[bytes, Callable[[bytes, int], _Unpacked]] = {
    b"FlateDecode": _inflated, b"Fl": _inflated,
    b"ASCII85Decode": _ascii85, b"A85": _ascii85,
    b"ASCIIHexDecode": _hex, b"AHx": _hex,
    b"RunLengthDecode": _run_lengths, b"RL": _run_lengths,
    b"LZWDecode": _lzw, b"LZW": _lzw,
}  # fmt: skip
