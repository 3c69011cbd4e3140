"""Replaces lent values in what a server answers, however they are written and wherever a read cuts them. Pure.

An allowed server knows the value, and may hand it back: in a header, an error page, another encoding. As with the
markers of canaries (``watch.markers``) only letters and digits count, so signs and blanks between them hide nothing.

Rule 1  What may be the beginning of a value is held back until the rest has come, from so many characters of the value
        on (``least``) that nobody finds them by trying: what is held back shows, and an honest server repeats what a
        program sends. Were two letters enough, a program could find a value letter by letter.
Rule 2  A server chooses the text: each byte is looked at once, however much is held, and little is.
"""

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, product
from typing import Final
from urllib.parse import quote

from glovebox_server.egress.credentials.shapes import known_prefix
from glovebox_server.governance.watch.markers import encodings, squeezed

UNKNOWN: Final = 12
"""Characters of a value, behind a prefix that everybody knows, that are held back: of hexadecimal digits 2**48."""
MAX_HELD: Final = 64 * 1024
"""Bytes that may stand between the letters of a value before no more of the answer is passed on."""
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


class ValueSpread(Exception):  # noqa: N818 - what was found, not what failed
    """What may be a value is spread over more bytes than are held back; nothing more may be passed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way of writing a value, of which only letters and digits count."""

    name: str
    """Of its credential."""
    least: int
    """So many letters are taken for the beginning of it; fewer may leave."""


Forms = Mapping[bytes, Form]
"""What is looked for."""


def forms(name: str, value: str) -> Forms:
    """Return the ways of writing a value that are looked for. A value of 8 KiB takes tens of milliseconds."""
    letters = [at for at, character in enumerate(value) if character.isalnum()]
    known = sum(map(str.isalnum, value[: known_prefix(value)]))
    least = letters[min(known + UNKNOWN, len(letters) // 2) - 1] + 1
    escapes = _escapes(value)
    pairs = zip(_written(value, escapes), _written(value[:least], escapes), strict=True)
    return {squeezed(form): Form(name=name, least=max(1, len(squeezed(first)))) for form, first in pairs}


class Redactor:
    """What stands in for the values of some credentials, in one stream of bytes."""

    def __init__(self, wanted: Forms) -> None:
        """Take what is looked for; it may grow meanwhile."""
        self._forms = wanted
        self._count = -1
        self._know()
        self._open: list[tuple[int, bytes]] = []  # where in the text what may be a value begins
        self._text = b""  # the letters of what is held, and before them some that have left
        self._left = 0  # how many have
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; return those that cannot be the beginning of a value, with the values replaced.

        Raises:
            ValueSpread: nothing may follow what was returned so far.
        """
        if len(self._forms) != self._count:
            self._know()
        if not self._forms:
            return data
        old = len(self._text)
        text = self._text = self._text + squeezed(data)
        self._held += data
        spans = sorted(self._advance(old))
        holding = [at for at, form in self._open if len(text) - at >= self._forms[form].least]
        end = len(text)
        holding += [end - size for size in range(1, _START) if text[end - size :] in self._short]
        cut = min(holding, default=end)
        out = self._pass(spans, cut)
        if len(self._held) > MAX_HELD:
            raise ValueSpread
        return out

    def finish(self) -> bytes:
        """Return what was held back at the end; what is fed next is another text."""
        held = self._held
        self._held, self._text, self._left, self._open = b"", b"", 0, []
        return held

    def whole(self, text: str) -> str:
        """Return a text that is all there, such as a header, with the values replaced."""
        if len(text) <= _START:
            return text
        return (self.feed(text.encode("latin-1", "replace")) + self.finish()).decode("latin-1")

    def _know(self) -> None:
        """Prepare what is compared, of all that is looked for by now."""
        self._count = len(self._forms)
        self._starts: dict[bytes, list[bytes]] = {}
        self._grams: dict[bytes, list[bytes]] = {}
        self._short: set[bytes] = set()
        for form, its in self._forms.items():
            self._starts.setdefault(form[:_START], []).append(form)
            self._short.update(form[:end] for end in range(its.least, _START))
        for first in self._starts:
            for at in range(_GRAM):
                self._grams.setdefault(first[at : at + _GRAM], []).append(first)

    def _advance(self, old: int) -> Iterator[tuple[int, int, str]]:
        """Follow what has begun, and find what begins, in the letters from ``old`` on; yield what is whole."""
        text, still = self._text, list[tuple[int, bytes]]()
        for at, form in self._open:
            if len(text) - at >= len(form):
                if text.startswith(form[old - at :], old):
                    yield at, at + len(form), self._forms[form].name
            elif form.startswith(text[old:], old - at):
                still.append((at, form))
        start = max(0, old - _START + 1)
        for form in self._present(start):
            for at, end in _standing(text, form, start):
                if end <= len(text):
                    yield at, end, self._forms[form].name
                else:
                    still.append((at, form))
        self._open = still

    def _present(self, start: int) -> Iterator[bytes]:
        """Yield the forms whose first letters stand in the text from ``start`` on; the gram makes most texts cheap."""
        text = self._text
        grams = [text[at : at + _GRAM] for at in range(start, len(text) - _GRAM + 1, _GRAM)]
        if self._grams.keys().isdisjoint(grams):
            return
        for first in {first for gram in self._grams.keys() & grams for first in self._grams[gram]}:
            if text.find(first, start) >= 0:
                yield from self._starts[first]

    def _pass(self, spans: list[tuple[int, int, str]], cut: int) -> bytes:
        """Return what stands before the letter ``cut``, with the values replaced."""
        data, places = self._held, list[int]()
        if spans or self._left < cut < len(self._text):
            places = list(compress(range(len(data)), data.translate(_LETTERS)))
        pieces, done = list[bytes](), 0
        held = cut
        for first, end, name in spans:
            # Inside what may be another value nothing is shown of that one either.
            start = places[max(0, (min(first, held) if end > held else first) - self._left)]
            if start >= done:
                pieces += [data[done:start], b"[credential %b]" % name.encode()]
            done = max(done, places[end - 1 - self._left] + 1)
            cut = max(cut, end)
        until = len(data) if cut >= len(self._text) else places[cut - self._left] if cut > self._left else 0
        pieces.append(data[done:until])
        self._held = data[max(until, done) :]
        # What has begun is followed although its first letters have left.
        keep = min([at for at, _ in self._open] + [max(0, len(self._text) - _START + 1), max(cut, self._left)])
        self._text = self._text[keep:]
        self._left = max(cut, self._left) - keep
        self._open = [(at - keep, form) for at, form in self._open]
        return b"".join(pieces)


def _standing(text: bytes, form: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Yield where a form stands, from ``start`` on, with its end: the text's, or behind it where more has to come.

    A server can repeat how a form begins, so beginnings are not compared one by one: whole ones are searched for, and
    of those at the end of the text few can have a given size, however often a shorter one is repeated. Whole ones that
    overlap are one.
    """
    size, at = _START, start
    while size < len(form):
        at = text.find(form[:size], at)
        if at < 0:
            return
        last = max(at, len(text) - min(2 * size, len(form)) + 1)
        while (last := text.find(form[:size], last)) >= 0:
            if form.startswith(text[last + size :], size):
                yield last, last + len(form)
            last += 1
        size *= 2
    while (at := text.find(form, at)) >= 0:
        first = at
        while (again := text.find(form, at + 1, at + 2 * len(form) - 1)) >= 0:
            at = again
        at += len(form)
        yield first, at


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


def _written(value: str, escapes: Sequence[Mapping[int, str]]) -> Iterator[bytes]:
    yield from encodings(value)
    for escape in escapes:
        yield value.translate(escape).encode()
    for escaped in (quote(value, safe=""), html.escape(value), json.dumps(value)[1:-1]):
        yield escaped.encode()
        yield quote(escaped, safe="").encode()
