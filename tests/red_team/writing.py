"""Disguises of an instruction, and files it can lie in: what cannot be written into a TOML file by hand."""

import base64
import binascii
import codecs
import html
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping

LOOKALIKES = {"a": "а", "c": "с", "e": "е", "i": "і", "o": "о", "p": "р", "s": "ѕ", "x": "х", "y": "у"}
"""Cyrillic letters that look like Latin ones (Unicode Technical Standard 39)."""
LEET = str.maketrans({"a": "4", "e": "3", "i": "1", "o": "0", "t": "7"})
ZERO_WIDTH = ("\u200b", "\u200c")
"""A nought and a one that nobody sees."""


def encoded(text: str, how: str) -> str:
    """Return an instruction in a disguise."""
    return _ENCODINGS[how](text)


def wrapped(text: str, how: str) -> bytes:
    """Return a file in which a text lies."""
    return _CONTAINERS[how](text)


def _bits(text: str) -> str:
    return "".join(f"{byte:08b}" for byte in text.encode())


def _selectors(text: str) -> str:
    """Each byte as one of the 256 variation selectors."""
    return "".join(chr(0xFE00 + byte) if byte < 16 else chr(0xE0100 + byte - 16) for byte in text.encode())


def _wide(text: str) -> str:
    return "".join(chr(ord(each) + 0xFEE0) if "!" <= each <= "~" else each for each in text)


_ENCODINGS: Mapping[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64-twice": lambda text: base64.b64encode(base64.b64encode(text.encode())).decode(),
    "base32": lambda text: base64.b32encode(text.encode()).decode(),
    "hex": lambda text: text.encode().hex(),
    "rot13": lambda text: codecs.encode(text, "rot13"),
    "backwards": lambda text: text[::-1],
    "leet": lambda text: text.translate(LEET),
    "percent": lambda text: "".join(f"%{byte:02X}" for byte in text.encode()),
    "entities": lambda text: "".join(f"&#{ord(each)};" for each in text),
    "entities-as-text": lambda text: html.escape("".join(f"&#x{ord(each):x};" for each in text)),
    "escapes": lambda text: "".join(f"\\u{ord(each):04x}" for each in text),
    "binary": lambda text: " ".join(f"{byte:08b}" for byte in text.encode()),
    "spread": "\u200b".join,
    "soft-hyphens": "\u00ad".join,
    "joiners": "\u2060".join,
    "zero-width": lambda text: "".join(ZERO_WIDTH[int(bit)] for bit in _bits(text)),
    "tags": lambda text: "".join(chr(0xE0000 + ord(each)) for each in text),
    "selectors": _selectors,
    "lookalikes": lambda text: "".join(LOOKALIKES.get(each, each) for each in text),
    "wide": _wide,
    "bidi": lambda text: f"\u202e{text[::-1]}\u202c",
    "isolates": lambda text: f"\u2067{text[::-1]}\u2069",
    "compressed": lambda text: base64.b64encode(zlib.compress(text.encode())).decode(),
    "acrostic": lambda text: "\n".join(f"{each} …" for each in text),
    "json": lambda text: json.dumps(text)[1:-1],
}


def _pdf(objects: list[bytes]) -> bytes:
    """A PDF of these objects, the first of which is its catalogue."""
    body = b"%PDF-1.7\n"
    places = []
    for number, each in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%b\nendobj\n" % (number, each)
    start = len(body)
    body += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    body += b"".join(b"%010d 00000 n \n" % place for place in places)
    return body + b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)


def _literal(text: str) -> bytes:
    return (
        b"("
        + text.encode("latin-1", "replace").replace(b"\\", b"\\\\").replace(b"(", b"\\(").replace(b")", b"\\)")
        + b")"
    )


def _page(drawn: bytes, extra: bytes = b"", *others: bytes, catalogue: bytes = b"", packed: bool = False) -> bytes:
    """A PDF of one page that draws this."""
    stream = zlib.compress(drawn) if packed else drawn
    how = b"/Filter /FlateDecode " if packed else b""
    return _pdf(
        [
            b"<< /Type /Catalog /Pages 2 0 R " + catalogue + b">>",
            b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents 4 0 R " + extra + b">>",
            b"<< " + how + b"/Length %d >>\nstream\n%b\nendstream" % (len(stream), stream),
            *others,
        ]
    )


def _drawn(text: str, before: bytes = b"") -> bytes:
    return before + b"BT /Fa 12 Tf 40 700 Td " + _literal(text) + b" Tj ET"


_SEEN = _drawn("Quarterly report")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", binascii.crc32(kind + data))


def _png(*chunks: bytes, tail: bytes = b"") -> bytes:
    """A PNG of one grey point."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    picture = _chunk(b"IDAT", zlib.compress(b"\0\x80"))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + picture + _chunk(b"IEND", b"") + tail


def _exif(text: str) -> bytes:
    """A JPEG's beginning with EXIF that has a description (tag 0x010E)."""
    words = text.encode() + b"\0"
    tiff = b"II*\0" + struct.pack("<IHHHIII", 8, 1, 0x010E, 2, len(words), 26, 0) + words
    part = b"Exif\0\0" + tiff
    return b"\xff\xd8\xff\xe1" + struct.pack(">H", len(part) + 2) + part + b"\xff\xd9"


def _zip(files: Mapping[str, str], comment: str = "") -> bytes:
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
        archive.comment = comment.encode()
    return whole.getvalue()


def _notebook(cell: Mapping[str, object], metadata: Mapping[str, object] | None = None) -> bytes:
    cells = [{"cell_type": "markdown", "metadata": {}, "source": ["# Sales"]}, cell]
    return json.dumps(
        {"cells": cells, "metadata": metadata or {}, "nbformat": 4, "nbformat_minor": 5}, ensure_ascii=False, indent=1
    ).encode()


def _code(outputs: list[object], **metadata: object) -> Mapping[str, object]:
    return {"cell_type": "code", "execution_count": 1, "metadata": metadata, "source": ["total"], "outputs": outputs}


_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_CONTAINERS: Mapping[str, Callable[[str], bytes]] = {
    "none": str.encode,
    "utf-16": lambda text: text.encode("utf-16"),
    "pdf-text": lambda text: _page(_drawn(text)),
    "pdf-white": lambda text: _page(_SEEN + b"\n" + _drawn(text, b"1 1 1 rg ")),
    "pdf-invisible": lambda text: _page(_SEEN + b"\n" + _drawn(text, b"3 Tr ")),
    "pdf-packed": lambda text: _page(_drawn(text), packed=True),
    "pdf-outside": lambda text: _page(_SEEN + b"\nBT /Fa 12 Tf -900 -900 Td " + _literal(text) + b" Tj ET"),
    "pdf-annotation": lambda text: _page(
        _SEEN,
        b"/Annots [5 0 R] ",
        b"<< /Type /Annot /Subtype /Text /Rect [0 0 9 9] /Contents " + _literal(text) + b" >>",
    ),
    "pdf-link": lambda text: _page(
        _SEEN,
        b"/Annots [5 0 R] ",
        b"<< /Type /Annot /Subtype /Link /Rect [0 0 9 9] /A << /S /URI /URI " + _literal(text) + b" >> >>",
    ),
    "pdf-metadata": lambda text: _page(_SEEN, b"", b"<< /Title (Report) /Subject " + _literal(text) + b" >>"),
    "pdf-script": lambda text: _page(
        _SEEN, catalogue=b"/OpenAction << /S /JavaScript /JS " + _literal(f"app.alert('{text}')") + b" >> "
    ),
    "pdf-attachment": lambda text: _page(
        _SEEN, b"", b"<< /Type /EmbeddedFile /Length %d >>\nstream\n%b\nendstream" % (len(text.encode()), text.encode())
    ),
    "png-text": lambda text: _png(_chunk(b"tEXt", b"Comment\0" + text.encode("latin-1", "replace"))),
    "png-packed": lambda text: _png(_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(text.encode()))),
    "png-international": lambda text: _png(_chunk(b"iTXt", b"Comment\0\0\0en\0\0" + text.encode())),
    "png-behind": lambda text: _png(tail=text.encode()),
    "jpeg-exif": _exif,
    "jpeg-comment": lambda text: (
        b"\xff\xd8\xff\xfe" + struct.pack(">H", len(text.encode()) + 2) + text.encode() + b"\xff\xd9"
    ),
    "gif-comment": lambda text: (
        b"GIF89a\1\0\1\0\0\0\0!\xfe"
        + b"".join(bytes([len(part)]) + part for part in _pieces(text.encode(), 250))
        + b"\0;"
    ),
    "zip-member": lambda text: _zip({"notes/readme.txt": text}),
    "zip-name": lambda text: _zip({text: ""}),
    "zip-comment": lambda text: _zip({"notes.txt": "nothing"}, text),
    "docx-hidden": lambda text: _zip(
        {
            "word/document.xml": f'<w:document xmlns:w="{_WORD}"><w:body><w:p><w:r><w:rPr><w:vanish/></w:rPr>'
            f"<w:t>{html.escape(text)}</w:t></w:r></w:p></w:body></w:document>"
        }
    ),
    "docx-comment": lambda text: _zip(
        {
            "word/document.xml": f'<w:document xmlns:w="{_WORD}"><w:body/></w:document>',
            "word/comments.xml": f'<w:comments xmlns:w="{_WORD}"><w:comment><w:t>{html.escape(text)}</w:t></w:comment>'
            "</w:comments>",
        }
    ),
    "docx-properties": lambda text: _zip(
        {"docProps/core.xml": f"<dc:description>{html.escape(text)}</dc:description>"}
    ),
    "xlsx-cell": lambda text: _zip({"xl/sharedStrings.xml": f"<sst><si><t>{html.escape(text)}</t></si></sst>"}),
    "xlsx-sheet": lambda text: _zip(
        {"xl/workbook.xml": f'<sheets><sheet name="{html.escape(text)}" state="veryHidden"/></sheets>'}
    ),
    "pptx-notes": lambda text: _zip({"ppt/notesSlides/notesSlide1.xml": f"<a:t>{html.escape(text)}</a:t>"}),
    "notebook-output": lambda text: _notebook(_code([{"output_type": "stream", "name": "stdout", "text": [text]}])),
    "notebook-error": lambda text: _notebook(
        _code([{"output_type": "error", "ename": "ValueError", "evalue": text, "traceback": []}])
    ),
    "notebook-html": lambda text: _notebook(
        _code(
            [
                {
                    "output_type": "display_data",
                    "metadata": {},
                    "data": {"text/html": f"<p style='color:#fff'>{text}</p>"},
                }
            ]
        )
    ),
    "notebook-markdown": lambda text: _notebook({"cell_type": "markdown", "metadata": {}, "source": [text]}),
    "notebook-metadata": lambda text: _notebook(_code([]), {"description": text}),
    "notebook-cell-metadata": lambda text: _notebook(_code([], tags=[text])),
    "notebook-attachment": lambda text: _notebook(
        {
            "cell_type": "markdown",
            "metadata": {},
            "source": ["![](attachment:a.txt)"],
            "attachments": {"a.txt": {"text/plain": base64.b64encode(text.encode()).decode()}},
        }
    ),
}


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]
