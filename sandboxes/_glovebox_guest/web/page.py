"""Turns a fetched, hostile response into text a model can read. Runs in the guest's child.

The guest itself has the response from the host's egress policy; here is no network.
"""

from __future__ import annotations

import re

from _glovebox_guest import wording
from _glovebox_guest.stdlib import Any
from _glovebox_guest.workspace.paths import JobRefusedError

_MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
_META = re.compile(rb"""<meta[^>]{0,200}?charset\s{0,20}=\s{0,20}["']?\s{0,20}([\w:.-]{1,40})""", re.IGNORECASE)
_PROLOGUE = re.compile(rb"""<\?xml[^>]{0,100}?encoding\s{0,20}=\s{0,20}["']([\w:.-]{1,40})""")
_CHARSET = re.compile(r"""charset\s*=\s*["']?([\w:.-]{1,40})""", re.IGNORECASE)
_META_WITHIN = 4096
"""Bytes in which a page has to name its encoding; the standard has 1024, not every page complies."""
_KNOWN = re.compile(
    r"utf-8|utf-16-[lb]e|windows-(874|125[0-8])|iso-8859-([2-9]|1[03-6])|koi8-[ru]|macintosh|shift_jis|euc-jp|"
    r"iso-2022-jp|gbk|gb18030|big5|euc-kr"
)
# Only encodings of the web: Python's other codecs are no character sets, and some are slow on hostile input.
# https://encoding.spec.whatwg.org/#names-and-labels
# Labels of an encoding with another name: the common part of the standard's table.
_SAME = {
    "utf8": "utf-8", "latin1": "windows-1252", "iso-8859-1": "windows-1252", "us-ascii": "windows-1252",
    "ascii": "windows-1252", "iso-8859-9": "windows-1254", "gb2312": "gbk", "x-gbk": "gbk", "sjis": "shift_jis",
    "shift-jis": "shift_jis", "ks_c_5601-1987": "euc-kr", "x-sjis": "shift_jis", "utf-16": "utf-16-le",
    "utf-16le": "utf-16-le", "utf-16be": "utf-16-be",
}  # fmt: skip
# Python's names, where they differ.
_PYTHON = {"windows-874": "cp874", "macintosh": "mac_roman", "shift_jis": "cp932", "euc-kr": "cp949"}


def decoded(body: bytes, content_type: str) -> tuple[str, str]:
    """Return the text of a response and its encoding; invalid bytes become U+FFFD.

    A byte order mark counts most, then the Content-Type, then the document's own declaration, then UTF-8.
    """
    for mark, name in _MARKS:
        if body.startswith(mark):
            return body[len(mark) :].decode(name, "replace"), name
    declared = _CHARSET.search(content_type)
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


MAX_BODY = 8 * 1024 * 1024
"""Bytes that are parsed; the egress policy lets no more through by default."""
_NOT_TEXT = ("image/", "audio/", "video/", "font/", "model/", "application/pdf", "application/zip", "application/gzip")
_MAGIC = (
    b"%PDF-", b"PK\x03\x04", b"\x1f\x8b", b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BZh", b"\xfd7zXZ\x00",
    b"\x28\xb5\x2f\xfd",
)  # fmt: skip
_HTML = ("text/html", "application/xhtml+xml")
_LOOKS_LIKE_HTML = (b"<!doctype html", b"<html")


def describe(payload: dict[str, Any]) -> dict[str, Any]:
    """Return title and text of ``body``, at most ``max_chars`` characters; HTML unconverted if ``raw``."""
    body: bytes = payload["body"]
    declared = next((value for key, value in payload["headers"].items() if key.lower() == "content-type"), "")
    media_type = declared.partition(";")[0].strip().lower()[:100]
    most = payload["max_chars"]
    if not body:  # to HEAD, or without content
        lines = [f"{name}: {value}" for name, value in payload["headers"].items()]
        return _shown(media_type, "", "", "\n".join(lines), most, cut=False)
    beginning = body[:512].lstrip().lower()
    is_html = media_type in _HTML or (not media_type and beginning.startswith(_LOOKS_LIKE_HTML))
    if body.startswith(_MAGIC) or media_type.startswith(_NOT_TEXT) or wording.is_binary(body):
        reason = f"The response is {media_type or 'binary data'} of {len(body)} bytes, not text."
        hint = "Look for a page that describes it, or for a text version."
        return JobRefusedError("page.binary", reason, hint).value()
    text, charset = decoded(body[:MAX_BODY], declared)
    title, cut = "", len(body) > MAX_BODY
    if is_html and not payload.get("raw", False):
        from _glovebox_guest.web.readable import readable

        title, text, more = readable(text, payload["url"], most)
        cut = cut or more
    return _shown(media_type or ("text/html" if is_html else "text/plain"), charset, title, text, most, cut=cut)


def _shown(media_type: str, charset: str, title: str, text: str, most: int, *, cut: bool) -> dict[str, Any]:
    text = wording.printable(text)
    kept = wording.clipped(text, most)
    cut = cut or len(kept) < len(text)
    return {
        "media_type": media_type,
        "charset": charset,
        "title": title,
        "text": kept,
        "truncated": f"first {len(kept)} characters" if cut else None,
    }
