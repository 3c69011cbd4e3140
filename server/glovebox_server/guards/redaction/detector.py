"""Finds injected keys and markers in bytes, however they are written and wherever a read cuts them. Pure.

Of text only letters and digits count, all small: so spaces, quotes, line ends, the signs of percent-encoding and NULs
between the bytes of UTF-16 hide nothing. Each text that is sought has some forty forms, one for each way of writing it.

An allowed server knows a key, and may hand it back in a header, an error page or another encoding. ``KeyMasker``:

Rule 1  Only a whole key matches, in one of its forms. A reaction to a part of one would tell a program which of its
        guesses was right, for an honest server repeats what a program sends.
Rule 2  A stream withholds its last letters and digits, whatever they are: as many as the longest form has, rounded up
        to a power of two. That is nine times a key's length, so it depends on no character of a key.
Rule 3  At most ``MAX_HELD`` bytes are withheld; what exceeds that is released, whatever it is.
Rule 4  A server chooses the text: each byte is searched once, however much is withheld.

A marker (of a canary, a placeholder) has no such oracle: ``Detector`` reports it for either half of a form, so that of
two pieces one has a whole half.
"""

import base64
import codecs
import html
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress, product
from types import MappingProxyType
from typing import Final
from urllib.parse import quote

MAX_HELD: Final = 64 * 1024
MARKER_LENGTH: Final = 40
"""Letters and digits of a marker: 206 bits, and halves that are longer than ``_START``."""
_GRAM: Final = 8
_START: Final = 2 * _GRAM - 1
"""Every form is longer (``sources.SHORTEST``). In this many letters in a row, one aligned gram is whole."""
_LETTERS: Final = bytes(bytes((byte,)).isalnum() for byte in range(256))
_SIGNS: Final = (
    *("+", "/", "=", "+/", "+=", "/=", "+/="),
    *("&<>", "&<>'\"", "&<>'\"+", "&<>'\"+`", "&<>'\"`=", "&<>'\"`=/"),
)
"""Signs that encoders of JSON, scripts, markup and addresses escape in a value whose other signs they leave."""
_STYLES: Final = ("u{:04x}", "x{:x}", "{:d}", "{:x}")
"""Their escapes: of ``\\u002B``, ``&#x2B;``, ``&#43;`` and ``%2B`` the letters and digits."""
_NAMES: Final = {"&": "amp", "<": "lt", ">": "gt", '"': "quot"}
_BYTE_STYLES: Final = (
    *("x{:02x}", "0x{:02x}", "x{:04x}", "u{:x}", "u{:04x}", "u{:08x}", "25{:02x}"),
    *("{:d}", "{:03d}", "{:04d}", "{:o}", "{:03o}", "0o{:o}", "{:b}", "{:07b}", "{:08b}", "0b{:b}"),
)
"""Of one byte: as Python, C, JavaScript, XML and URLs have it, the last also encoded twice."""
_SMALL: Final = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")
_OTHERS: Final = bytes(set(range(256)) - set(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"))


Forms = Mapping[bytes, str]
"""The letters and digits of each way of writing a text, and the name of that text."""


class FormIndex:
    """Finds forms in letters and digits: a text without them costs one look-up for every eight letters."""

    def __init__(self, forms: Forms) -> None:
        self.names = forms
        self.longest = max(map(len, forms), default=0)
        self._starts: dict[bytes, list[bytes]] = {}
        self._grams: dict[bytes, list[bytes]] = {}
        for form in forms:
            self._starts.setdefault(form[:_START], []).append(form)
        for start in self._starts:
            for at in range(_GRAM):
                self._grams.setdefault(start[at : at + _GRAM], []).append(start)

    def spans(self, text: bytes, letters: int) -> Iterator[tuple[int, int, str]]:
        """Yield where forms stand that begin in the first ``letters``, with their names."""
        grams = {text[at : at + _GRAM] for at in range(0, letters + _GRAM - 1, _GRAM)}
        for start in {start for gram in self._grams.keys() & grams for start in self._grams[gram]}:
            if text.find(start, 0, letters + _START - 1) >= 0:
                for form in self._starts[start]:
                    for first, last in find_all(text, form, letters):
                        yield first, last, self.names[form]


def index_markers(markers: Mapping[str, str], known: Forms = MappingProxyType({})) -> FormIndex:
    """Return an index of the halves of markers' forms, beside ``known`` ones; markers are given by their name."""
    forms = dict(known)
    for name, marker in markers.items():
        for form in map(squeeze, encodings(marker)):
            middle = len(form) // 2
            forms |= {form[:middle]: name, form[middle:]: name}
    return FormIndex(forms)


class Detector:
    """Searches one stream of bytes, piece by piece; forms that span pieces are found too."""

    def __init__(self, index: FormIndex) -> None:
        self._index = index
        self._carried = b""

    def feed(self, data: bytes) -> str | None:
        """Take the next piece; return the name of the first text that is found with it."""
        text = self._carried + squeeze(data)
        self._carried = text[-self._index.longest :]
        return min(self._index.spans(text, len(text)), default=(0, 0, None))[2]


def derive_forms(name: str, value: str) -> Forms:
    """Return the forms of a key. A value of 8 KiB takes tens of milliseconds."""
    return {squeeze(form): name for form in _write_key(value)}


class KeyMasker:
    """Replaces keys in one stream of bytes, or in one complete text after another."""

    def __init__(self, wanted: Forms) -> None:
        """Take the forms to search; they may grow meanwhile."""
        self.replaced = 0
        self._forms = wanted
        self._count = -1
        self._prepare()
        self._held = b""
        self._text = b""  # the letters and digits of it
        self._done = 0  # of these, the ones of a value that has been replaced

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; return those that are released by them, with the values replaced."""
        if len(self._forms) != self._count:
            self._prepare()
        if not self._forms:
            return data
        self._held += data
        self._text += squeeze(data)
        letters = max(0, len(self._text) - self._withheld)
        end = _place(self._held, letters)
        if (excess := len(self._held) - MAX_HELD) > end:
            letters, end = len(squeeze(self._held[:excess])), excess
        return self._release(letters, end)

    def finish(self) -> bytes:
        """Return what is withheld at a normal end; what is fed next is another text."""
        return self._release(len(self._text), len(self._held))

    def whole(self, text: str) -> str:
        """Return a complete text with the values replaced; nothing may be withheld meanwhile."""
        if len(text) <= _START:
            return text
        self._held = text.encode("utf-8", "surrogatepass")
        self._text = squeeze(self._held)
        return self.finish().decode("utf-8", "surrogatepass")

    def _prepare(self) -> None:
        self._count = len(self._forms)
        self._index = FormIndex(self._forms)
        self._withheld = 1 << (max(self._index.longest, 1) - 1).bit_length()

    def _release(self, letters: int, end: int) -> bytes:
        """Return the first ``end`` bytes, of ``letters`` letters, with each value that begins in them replaced."""
        held, done, shown = self._held, self._done, 0
        pieces = list[bytes]()
        if (spans := sorted(self._index.spans(self._text, letters))) or done:
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


def squeeze(data: bytes) -> bytes:
    """Return the letters and digits of a text, small."""
    return data.translate(_SMALL, _OTHERS)


def encodings(marker: str) -> Iterator[bytes]:
    """Yield the ways of writing a text, wherever in another it stands."""
    plain = marker.encode()
    hexadecimal = plain.hex().encode()
    yield plain
    yield plain[::-1]
    yield codecs.encode(marker, "rot13").encode()
    # With the signs between, which do not count: also %67%62, 67:62, &#103;&#98; and [103, 98].
    yield hexadecimal
    for form in _BYTE_STYLES:
        yield "".join(form.format(byte) for byte in plain).encode()
    yield from _encoded(base64.b32encode, 5, 5, plain)
    yield from _encoded(base64.b64encode, 3, 6, hexadecimal)
    for once in _encoded(base64.b64encode, 3, 6, plain):
        yield once
        yield from _encoded(base64.b64encode, 3, 6, once)


def _encoded(encode: Callable[[bytes], bytes], group: int, bits: int, plain: bytes) -> Iterator[bytes]:
    """At each place that a byte can have in a group: the characters that nothing before or after has a part in."""
    for before in range(group):
        encoded = encode(bytes(before) + plain)
        yield encoded[-(-before * 8 // bits) : (before + len(plain)) * 8 // bits]


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
    """Return where the letter or digit of that number stands, or the data's end."""
    at, size = 0, 256
    while (letters := len(squeeze(data[at : at + size]))) <= number and at < len(data):
        at, size, number = at + size, size * 2, number - letters
    while size > 1:
        size //= 2
        if (letters := len(squeeze(data[at : at + size]))) <= number:
            at, number = at + size, number - letters
    return min(at, len(data))


def _escapes(value: str) -> Sequence[Mapping[int, str]]:
    """Return encoders' replacements of signs in a value, whose letters would count as the value's own.

    Returns:
        For ``str.translate``, each once.
    """
    found: dict[tuple[tuple[str, str], ...], Mapping[int, str]] = {}
    for style, signs, named in product(_STYLES, _SIGNS, ("", "&<>", '&<>"')):
        table = {sign: _NAMES[sign] if sign in named else style.format(ord(sign)) for sign in signs if sign in value}
        if table:
            found[tuple(table.items())] = str.maketrans(table)
    return tuple(found.values())


def _write_key(value: str) -> Iterator[bytes]:
    yield from encodings(value)
    for escape in _escapes(value):
        yield value.translate(escape).encode()
    for escaped in (quote(value, safe=""), html.escape(value), json.dumps(value)[1:-1]):
        yield escaped.encode()
        yield quote(escaped, safe="").encode()
