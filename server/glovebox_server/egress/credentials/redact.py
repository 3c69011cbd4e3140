"""Replaces lent values in what a server answers, however they are written and wherever a read cuts them. Pure.

An allowed server knows the value, and may hand it back: in a header, an error page, another encoding. As with the
markers of canaries (``watch.markers``) only letters and digits count, so signs and blanks between them hide nothing.
A server chooses the text: whatever it sends is looked at once, and little of it is held back.
"""

import html
import json
from collections.abc import Iterator, Mapping
from typing import Final
from urllib.parse import quote

from glovebox_server.governance.watch.markers import encodings, squeezed

LEAST: Final = 7
"""So many letters and digits are taken for the beginning of a value: fewer may leave, and tell nothing."""
MAX_HELD: Final = 64 * 1024
"""Bytes that may stand between the letters of a value before no more of the answer is passed on."""

Forms = Mapping[bytes, str]
"""From each way of writing a value, squeezed, to the name of its credential."""


class ValueSpread(Exception):  # noqa: N818 - what was found, not what failed
    """What may be a value is spread over more bytes than are held back; nothing more may be passed on."""


def forms(name: str, value: str) -> Forms:
    """Return the ways of writing a value that are looked for."""
    return {squeezed(form): name for form in _written(value)}


class Redactor:
    """What stands in for the values of some credentials, in one stream of bytes."""

    def __init__(self, wanted: Forms) -> None:
        """Take what is looked for."""
        self._forms = wanted
        self._held = b""
        self._passed = b""  # the last letters and digits that were returned: a value may have begun in them

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; return those that cannot be the beginning of a value, with the values replaced.

        Raises:
            ValueSpread: nothing may follow what was returned so far.
        """
        data = _replaced(self._held + data, self._forms, self._passed)
        text = squeezed(data)
        begun = max((_begun(self._passed + text, form) for form in self._forms), default=0)
        # Of a beginning, at most LEAST - 1 have been returned: all that is in this data is held.
        cut = _places(data)[-min(begun, len(text))] if begun and text else len(data)
        if len(data) - cut > MAX_HELD:
            raise ValueSpread
        self._held = data[cut:]
        self._passed = (self._passed + squeezed(data[:cut]))[1 - LEAST :]
        return data[:cut]

    def finish(self) -> bytes:
        """Return what was held back at the end."""
        held, self._held = self._held, b""
        return held


def redacted(text: str, wanted: Forms) -> str:
    """Return a text that is all there, such as a header, with the values replaced."""
    return _replaced(text.encode("latin-1", "replace"), wanted).decode("latin-1")


def _replaced(data: bytes, wanted: Forms, before: bytes = b"") -> bytes:
    """Replace what stands in the data, or began in the letters and digits before it."""
    text = before + squeezed(data)
    spans = sorted(span for form, name in wanted.items() for span in _spans(text, form, name))
    if not spans:
        return data
    places, pieces, done = [0] * len(before) + _places(data), list[bytes](), 0
    for first, end, name in spans:
        start = places[first]
        if start >= done:
            pieces += [data[done:start], b"[credential %b]" % name.encode()]
        done = max(done, places[end - 1] + 1)
    return b"".join((*pieces, data[done:]))


def _spans(text: bytes, form: bytes, name: str) -> Iterator[tuple[int, int, str]]:
    at = text.find(form)
    while at >= 0:
        yield at, at + len(form), name
        at = text.find(form, at + len(form))


def _begun(text: bytes, form: bytes) -> int:
    """How many letters and digits at the end of a text are the beginning of a form."""
    at = text.find(form[:LEAST], max(0, len(text) - len(form) + 1))
    while at >= 0:
        if form.startswith(text[at:]):
            return len(text) - at
        at = text.find(form[:LEAST], at + 1)
    return 0


def _places(data: bytes) -> list[int]:
    """Where the letters and digits stand."""
    return [at for at, byte in enumerate(data) if bytes((byte,)).isalnum()]


def _written(value: str) -> Iterator[bytes]:
    yield from encodings(value)
    for escaped in (quote(value, safe=""), html.escape(value), json.dumps(value)[1:-1]):
        yield escaped.encode()
        yield quote(escaped, safe="").encode()
