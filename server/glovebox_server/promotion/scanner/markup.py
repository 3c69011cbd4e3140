"""Pages and drawings: what acts where a browser shows them, whatever they are called."""

import html
import re
from collections.abc import Iterator

_MARKUP = (
    ("a script", re.compile(rb"<(?:\w+:)?script\b", re.IGNORECASE)),
    ("a handler of events", re.compile(rb"<[^<]*[\s/\"']on[a-z]{3,20}\s*=", re.IGNORECASE)),
    ("a javascript: address", re.compile(rb"j\s*a\s*v\s*a\s*s\s*c\s*r\s*i\s*p\s*t\s*:", re.IGNORECASE)),
    ("a frame or an embedded object", re.compile(rb"<(?:iframe|frame|object|embed|applet|portal)\b", re.IGNORECASE)),
    ("other markup inside a drawing", re.compile(rb"<(?:\w+:)?foreignObject\b", re.IGNORECASE)),
    ("a page that leads elsewhere by itself", re.compile(rb"<meta\b[^>]{0,300}\brefresh\b", re.IGNORECASE)),
    ("an address that is told when a link is followed",
     re.compile(rb"<(?:\w+:)?(?:a|area)\b[^<]*[\s/\"']ping\s*=", re.IGNORECASE)),
    ("a form that sends", re.compile(rb"<form\b", re.IGNORECASE)),
    ("what is loaded from elsewhere",
     re.compile(rb"(?:\b(?:src|srcset|data|poster|background)|<(?:link|image|use|base)\b[^>]{0,300}\bhref)\s*=\s*[\"']?"
                rb"\s*(?:https?:)?//|url\(\s*[\"']?(?:https?:)?//|@import", re.IGNORECASE)),
    ("an entity of XML", re.compile(rb"<!ENTITY", re.IGNORECASE)),
    ("a style sheet that makes another page of it", re.compile(rb"<\?xml-stylesheet\b", re.IGNORECASE)),
)  # fmt: skip


def markup(data: bytes) -> Iterator[str]:
    """What acts in a page or a drawing."""
    if b"<" not in data:
        return
    text = told(data)
    for what, form in _MARKUP:
        if form.search(text):
            yield f"markup: {what}"


def told(data: bytes) -> bytes:
    """Markup as its readers take it: in UTF-16 too, without zeros, and with its character references resolved."""
    text = data.replace(b"\0", b"")
    if b"&" not in text:
        return text
    return text + html.unescape(text.decode("latin-1")).encode("latin-1", "replace")
