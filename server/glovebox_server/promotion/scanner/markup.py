"""Pages and drawings: active content in a browser, regardless of the file's name."""

import html
import re
from collections.abc import Iterator

_ELEMENT = rb"<(?:[^\s<>/:]+:)?"
"""Start of an element, with any XML prefix."""
_IS = rb"\s*=\s*(?:[\"']\s*)?"
_AWAY = rb"(?:h\s*t\s*t\s*p\s*(?:s\s*)?:|[\\/]\s*[\\/])"
"""Start of an external address. Browsers drop line ends and tabs, and take a backslash for a slash, see
https://url.spec.whatwg.org/#concept-basic-url-parser."""


def _css(name: bytes) -> bytes:
    """Match a CSS name, whose letters may be escaped: see https://www.w3.org/TR/css-syntax-3/#escaping."""
    each = (b"(?:%c|\\\\0{0,4}%x\\s?|\\\\0{0,4}%x\\s?)" % (sign, sign, sign ^ 32) for sign in name)
    return b"".join(each)


def _form(*forms: bytes) -> re.Pattern[bytes]:
    return re.compile(b"|".join(forms), re.IGNORECASE)


_MARKUP = (
    ("a script", _form(_ELEMENT + rb"script\b")),
    ("a handler of events", _form(rb"<[^<]*[\s/\"']on[a-z]{3,60}\s*=")),
    ("a javascript: address", _form(rb"j\s*a\s*v\s*a\s*s\s*c\s*r\s*i\s*p\s*t\s*:")),
    ("a frame or an embedded object", _form(_ELEMENT + rb"(?:iframe|frame|fencedframe|object|embed|applet|portal)\b")),
    ("other markup inside a drawing", _form(_ELEMENT + rb"foreignObject\b")),
    ("a page that leads elsewhere by itself", _form(rb"[\s/\"']http-equiv" + _IS + rb"refresh\b")),
    ("an address that is told when a link is followed", _form(_ELEMENT + rb"(?:a|area)\b[^<]*[\s/\"']ping\s*=")),
    ("a form that sends", _form(_ELEMENT + rb"form\b", rb"[\s/\"']formaction\s*=")),
    (
        "what is loaded from elsewhere",
        _form(
            rb"\b(?:src|data|poster|background)" + _IS + _AWAY,
            rb"srcset\s*=[^<>]{0,1000}" + _AWAY,
            _ELEMENT + rb"(?:link|image|feImage|use|base)\b(?:[^<]*|[^>]{0,300})\bhref" + _IS + _AWAY,
            _css(b"url") + rb"\(\s*(?:[\"']\s*)?" + _AWAY,
            rb"image-set\([^()]{0,1000}" + _AWAY,
            rb"@" + _css(b"import"),
        ),
    ),
    ("an entity of XML", _form(rb"<!ENTITY")),
    ("a style sheet that makes another page of it", _form(rb"<\?xml-stylesheet\b")),
)
_SHIFT = re.compile(rb"\x1b[ -/]*[0-~]")
"""Change of the character set, which a reader of ISO 2022 drops: see ECMA-35, 13.2."""


def markup(data: bytes) -> Iterator[str]:
    """Yield the active content of a page or a drawing."""
    if b"<" not in data:
        return
    text = told(data)
    for what, form in _MARKUP:
        if form.search(text):
            yield f"markup: {what}"


def told(data: bytes) -> bytes:
    """Return markup as readers decode it: UTF-16 without zeros, character references resolved."""
    text = data.replace(b"\0", b"")
    if b"\x1b" in text:
        text += _SHIFT.sub(b"", text)
    if b"&" not in text:
        return text
    return text + html.unescape(text.decode("latin-1")).encode("latin-1", "replace")
