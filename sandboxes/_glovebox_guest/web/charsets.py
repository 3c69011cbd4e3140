"""Decodes web pages: detects the encoding and returns the text. Standard library only; pure.

Only encodings of the web are tried: Python's other codecs are no character sets, and some are slow on hostile input.
https://encoding.spec.whatwg.org/#names-and-labels
"""

from __future__ import annotations

import re

_MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
_META = re.compile(rb"""<meta[^>]{0,200}?charset\s{0,20}=\s{0,20}["']?\s{0,20}([\w:.-]{1,40})""", re.IGNORECASE)
_PROLOGUE = re.compile(rb"""<\?xml[^>]{0,100}?encoding\s{0,20}=\s{0,20}["']([\w:.-]{1,40})""")
_HEADER = re.compile(r"""charset\s*=\s*["']?([\w:.-]{1,40})""", re.IGNORECASE)
_META_WITHIN = 4096
"""Bytes in which a page has to name its encoding; the standard has 1024, not every page complies."""
_KNOWN = re.compile(
    r"utf-8|utf-16-[lb]e|windows-(874|125[0-8])|iso-8859-([2-9]|1[03-6])|koi8-[ru]|macintosh|shift_jis|euc-jp|"
    r"iso-2022-jp|gbk|gb18030|big5|euc-kr"
)
# Labels of an encoding with another name: the common part of the standard's table.
_SAME = {
    "utf8": "utf-8",
    "latin1": "windows-1252",
    "iso-8859-1": "windows-1252",
    "us-ascii": "windows-1252",
    "ascii": "windows-1252",
    "iso-8859-9": "windows-1254",
    "gb2312": "gbk",
    "x-gbk": "gbk",
    "sjis": "shift_jis",
    "shift-jis": "shift_jis",
    "ks_c_5601-1987": "euc-kr",
    "x-sjis": "shift_jis",
    "utf-16": "utf-16-le",
    "utf-16le": "utf-16-le",
    "utf-16be": "utf-16-be",
}
# Python's names, where they differ.
_PYTHON = {"windows-874": "cp874", "macintosh": "mac_roman", "shift_jis": "cp932", "euc-kr": "cp949"}


def decoded(body: bytes, content_type: str) -> tuple[str, str]:
    """Return the text of a response and its encoding; invalid bytes become U+FFFD.

    A byte order mark counts most, then the Content-Type, then the document's own declaration, then UTF-8.
    """
    for mark, name in _MARKS:
        if body.startswith(mark):
            return body[len(mark) :].decode(name, "replace"), name
    declared = _HEADER.search(content_type)
    name = _known(declared[1]) if declared else ""
    if not name:
        within = body[:_META_WITHIN]
        found = _META.search(within) or _PROLOGUE.search(within)
        name = _known(found[1].decode("ascii", "replace")) if found else ""
        # A page whose meta tag could be read is not UTF-16.
        name = "utf-8" if name.startswith("utf-16") else name
    name = name or "utf-8"
    return body.decode(_PYTHON.get(name, name), "replace"), name


def _known(label: str) -> str:
    label = label.strip().lower()
    label = _SAME.get(label, label)
    return label if _KNOWN.fullmatch(label) else ""
