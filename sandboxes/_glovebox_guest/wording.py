"""Bytes to text, and text to the bound of one answer. Standard library only."""

from __future__ import annotations

import json
import re

MAX_ANSWER = 16 * 1024
"""Bytes of UTF-8 of one answer's texts: about 5,000 tokens, in content and again in structured content."""
MAX_PAGE = 100 * 1024
"""Bytes of JSON of a web page, whose length its caller chooses. A result holds it twice.
It must stay below 256 KiB, which clients are known to take (``glovebox_server.mcp.delivery``)."""
_SNIFFED = 8192
"""Bytes searched for a NUL, the mark of a binary file; git searches as many."""

UTF8_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")

# Controls do nothing for a reader and much to a terminal; tab and line feed stay.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Remove control characters from a stranger's text; lines end in a line feed alone."""
    return _CONTROLS.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def cost(text: str) -> int:
    """Return the bytes of a text in UTF-8."""
    return len(text.encode("utf-8", "surrogatepass"))


def is_binary(head: bytes) -> bool:
    """Return whether a file with this beginning is not text in any encoding this module reads."""
    return head.find(b"\0", 0, _SNIFFED) >= 0 and not head.startswith(UTF16_MARKS)


def lenient(data: bytes) -> str | None:
    """Decode what looks like text, with replacement characters where it is not; None for binary data."""
    if data.startswith(UTF16_MARKS):
        return data.decode("utf-16", "replace")
    if is_binary(data):
        return None
    return data.removeprefix(UTF8_MARK).decode("utf-8", "replace")


def clipped(text: str, characters: int, budget: int = MAX_PAGE) -> str:
    """Return roughly the longest beginning of at most ``characters`` and ``budget`` bytes of JSON."""
    text = text[:characters]
    while (spent := len(json.dumps(text))) > budget:
        # The beginning may be denser than the whole: a second round then removes the rest.
        text = text[: min(len(text) - 1, len(text) * budget // spent)]
    return text
