"""Turns a fetched, hostile response into text a model can read. Runs in the guest's child.

The guest itself has the response from the host's egress policy; here is no network.
"""

from __future__ import annotations

from _glovebox_guest import wording
from _glovebox_guest.stdlib import Any, Mapping
from _glovebox_guest.web import charsets
from _glovebox_guest.workspace.paths import JobRefusedError

MAX_BODY = 8 * 1024 * 1024
"""Bytes that are parsed; the egress policy lets no more through by default."""
_NOT_TEXT = ("image/", "audio/", "video/", "font/", "model/", "application/pdf", "application/zip", "application/gzip")
_MAGIC = (
    b"%PDF-",
    b"PK\x03\x04",
    b"\x1f\x8b",
    b"\x89PNG",
    b"\xff\xd8\xff",
    b"GIF8",
    b"BZh",
    b"\xfd7zXZ\x00",
    b"\x28\xb5\x2f\xfd",
)
_HTML = ("text/html", "application/xhtml+xml")
_LOOKS_LIKE_HTML = (b"<!doctype html", b"<html")


def describe(payload: dict[str, Any]) -> dict[str, Any]:
    """Return title and text of ``body``, at most ``max_chars`` characters; HTML unconverted if ``raw``."""
    try:
        return _value(payload)
    except JobRefusedError as problem:
        return problem.value()


def _value(payload: dict[str, Any]) -> dict[str, Any]:
    body: bytes = payload["body"]
    declared = _header(payload["headers"], "content-type")
    media_type = declared.partition(";")[0].strip().lower()[:100]
    most = payload["max_chars"]
    if not body:  # to HEAD, or without content
        lines = [f"{name}: {value}" for name, value in payload["headers"].items()]
        return _shown(media_type, "", "", "\n".join(lines), most, cut=False)
    beginning = body[:512].lstrip().lower()
    is_html = media_type in _HTML or (not media_type and beginning.startswith(_LOOKS_LIKE_HTML))
    if body.startswith(_MAGIC) or media_type.startswith(_NOT_TEXT) or wording.is_binary(body):
        reason = f"The response is {media_type or 'binary data'} of {len(body)} bytes, not text."
        raise JobRefusedError("page.binary", reason, "Look for a page that describes it, or for a text version.")
    text, charset = charsets.decoded(body[:MAX_BODY], declared)
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


def _header(headers: Mapping[str, str], name: str) -> str:
    return next((value for key, value in headers.items() if key.lower() == name), "")
