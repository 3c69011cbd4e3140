"""Replaces injected keys in what a server answers, however they are written and wherever a read cuts them. Pure.

An allowed server knows the key, and may hand it back: in a header, an error page, another encoding. As with the
markers of canaries (``watch.markers``) only letters and digits count, so signs and blanks between them hide nothing.

Rule 1  Only a whole key matches, in one of its ways of writing. A reaction to a part of one would tell a program which
        of its guesses was right, for an honest server repeats what a program sends.
Rule 2  A stream withholds its last letters and digits, whatever they are: as many as the longest way of writing has,
        rounded up to a power of two. That is nine times a key's length, so it depends on no character of a key.
Rule 3  At most ``MAX_HELD`` bytes are withheld; what exceeds that is released, whatever it is.
Rule 4  A server chooses the text: each byte is searched once, however much is withheld.
"""

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, product
from typing import Final
from urllib.parse import quote

from glovebox_server.guards.watch.markers import encodings, squeezed

MAX_HELD: Final = 64 * 1024
"""Bytes of a stream that are withheld at most."""
_GRAM: Final = 8
_START: Final = 2 * _GRAM - 1
"""Every form is longer (``sources.SHORTEST``). Of so many letters in a row, one aligned gram is whole."""
_LETTERS: Final = bytes(bytes((byte,)).isalnum() for byte in range(256))
_SIGNS: Final = (
    *("+", "/", "=", "+/", "+=", "/=", "+/="),
    *("&<>", "&<>'\"", "&<>'\"+", "&<>'\"+`", "&<>'\"`=", "&<>'\"`=/"),
)
"""What encoders of JSON, scripts, markup and addresses escape of a value whose other signs they leave."""
_STYLES: Final = ("u{:04x}", "x{:x}", "{:d}", "{:x}")
"""How they write it: of ``\\u002B``, ``&#x2B;``, ``&#43;`` and ``%2B`` the letters and digits."""
_NAMES: Final = {"&": "amp", "<": "lt", ">": "gt", '"': "quot"}


Forms = Mapping[bytes, str]
"""The letters and digits of each way of writing, and the name of its credential."""


def forms(name: str, value: str) -> Forms:
    """Return the ways of writing a value that are looked for. A value of 8 KiB takes tens of milliseconds."""
    return {squeezed(form): name for form in _written(value)}


class KeyMasker:
    """Replaces the values of some credentials in one stream of bytes."""

    def __init__(self, wanted: Forms) -> None:
        """Take what is looked for; it may grow meanwhile."""
        self.replaced = 0
        """Values that were replaced so far."""
        self._forms = wanted
        self._count = -1
        self._prepare()
        self._held = b""
        self._text = b""  # the letters and digits of it
        self._done = 0  # of which so many belong to a value that has been replaced

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; return those that are released by them, with the values replaced."""
        if len(self._forms) != self._count:
            self._prepare()
        if not self._forms:
            return data
        self._held += data
        self._text += squeezed(data)
        letters = max(0, len(self._text) - self._withheld)
        end = _place(self._held, letters)
        if (excess := len(self._held) - MAX_HELD) > end:
            letters, end = len(squeezed(self._held[:excess])), excess
        return self._release(letters, end)

    def finish(self) -> bytes:
        """Return what is withheld at a normal end; what is fed next is another text."""
        return self._release(len(self._text), len(self._held))

    def whole(self, text: str) -> str:
        """Return a complete text with the values replaced; nothing may be withheld meanwhile."""
        if len(text) <= _START:
            return text
        self._held = text.encode("utf-8", "surrogatepass")
        self._text = squeezed(self._held)
        return self.finish().decode("utf-8", "surrogatepass")

    def _prepare(self) -> None:
        """Make the tables of all that is looked for by now."""
        self._count = len(self._forms)
        self._withheld = 1 << (max(map(len, self._forms), default=1) - 1).bit_length()
        self._starts: dict[bytes, list[bytes]] = {}
        self._grams: dict[bytes, list[bytes]] = {}
        for form in self._forms:
            self._starts.setdefault(form[:_START], []).append(form)
        for start in self._starts:
            for at in range(_GRAM):
                self._grams.setdefault(start[at : at + _GRAM], []).append(start)

    def _release(self, letters: int, end: int) -> bytes:
        """Return the first ``end`` bytes, which have so many letters, with each value that begins in them replaced."""
        held, done, shown = self._held, self._done, 0
        pieces = list[bytes]()
        if (spans := sorted(self._spans(letters))) or done:
            places = list(compress(range(len(held)), held.translate(_LETTERS)))
            shown = places[done - 1] + 1 if done else 0
            for first, last, name in spans:
                if first >= done:
                    pieces += [held[shown : places[first]], b"[credential %b]" % name.encode()]
                    self.replaced += 1
                done = max(done, last)
                shown = places[done - 1] + 1
        pieces.append(held[shown:end])
        self._held, self._text, self._done = held[end:], self._text[letters:], max(0, done - letters)
        return b"".join(pieces)

    def _spans(self, letters: int) -> Iterator[tuple[int, int, str]]:
        """Yield where values stand that begin in the first ``letters``; the grams make most texts cheap."""
        text = self._text
        grams = {text[at : at + _GRAM] for at in range(0, letters + _GRAM - 1, _GRAM)}
        for start in {start for gram in self._grams.keys() & grams for start in self._grams[gram]}:
            if text.find(start, 0, letters + _START - 1) >= 0:
                for form in self._starts[start]:
                    for first, last in find_all(text, form, letters):
                        yield first, last, self._forms[form]


def find_all(text: bytes, form: bytes, letters: int) -> Iterator[tuple[int, int]]:
    """Yield where a form stands that begins in the first ``letters``; those that overlap are one."""
    size, at, begin = len(form), 0, 2 * _START
    while begin < size and at >= 0:  # the search for a long form begins with a table of all of it
        at = text.find(form[:begin], at, letters + begin - 1)
        begin *= 2
    at = at if at < 0 else text.find(form, at, letters + size - 1)
    while at >= 0:
        first, last = at, at + size
        while (at := text.rfind(form, at + 1, min(at + size, letters) + size - 1)) >= 0:
            last = at + size
        yield first, last
        at = text.find(form, last, letters + size - 1)


def _place(data: bytes, number: int) -> int:
    """Return where the letter or digit of that number stands; the data's end where it has no more than so many."""
    at, size = 0, 256
    while (letters := len(squeezed(data[at : at + size]))) <= number and at < len(data):
        at, size, number = at + size, size * 2, number - letters
    while size > 1:
        size //= 2
        if (letters := len(squeezed(data[at : at + size]))) <= number:
            at, number = at + size, number - letters
    return min(at, len(data))


def _escapes(value: str) -> Sequence[Mapping[int, str]]:
    """Return what some encoder puts in the place of signs that a value has: the letters in it would count as its own.

    Returns:
        For ``str.translate``, each once.
    """
    found: dict[tuple[tuple[str, str], ...], Mapping[int, str]] = {}
    for style, signs, named in product(_STYLES, _SIGNS, ("", "&<>", '&<>"')):
        table = {sign: _NAMES[sign] if sign in named else style.format(ord(sign)) for sign in signs if sign in value}
        if table:
            found[tuple(table.items())] = str.maketrans(table)
    return tuple(found.values())


def _written(value: str) -> Iterator[bytes]:
    yield from encodings(value)
    for escape in _escapes(value):
        yield value.translate(escape).encode()
    for escaped in (quote(value, safe=""), html.escape(value), json.dumps(value)[1:-1]):
        yield escaped.encode()
        yield quote(escaped, safe="").encode()
