"""Finding a canary's marker in bytes, however they are written: in another encoding, broken up, cut in two. Pure.

Rule 1  Of text only letters and digits count, all small: so spaces, quotes, line ends, the signs of percent-encoding
        and NULs between the bytes of UTF-16 make no difference.
Rule 2  For each encoding there are two needles, the halves of the encoded marker: one of two pieces has a whole half.
Rule 3  Every ``_STEP``-th gram of ``_STEP`` characters is looked up in one set of all needles' grams: the time does not
        depend on how many needles there are. A needle of twice that length has one of these wherever it lies.
"""

import base64
import codecs
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

MARKER_LENGTH: Final = 40
"""Letters and digits of a marker: 206 bits, and halves that are long enough for rule 3."""

_STEP: Final = 10
_GRAM: Final = re.compile(rb"[a-z0-9]{%d}" % _STEP)
_FORMS: Final = (
    *("x{:02x}", "0x{:02x}", "x{:04x}", "u{:x}", "u{:04x}", "u{:08x}", "25{:02x}"),
    *("{:d}", "{:03d}", "{:04d}", "{:o}", "{:03o}", "0o{:o}", "{:b}", "{:07b}", "{:08b}", "0b{:b}"),
)
"""Of one byte among its like: as Python, C, JavaScript, XML and URLs have it, the last also encoded twice."""
_SMALL: Final = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"abcdefghijklmnopqrstuvwxyz")
_OTHERS: Final = bytes(set(range(256)) - set(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Needles:
    """What is looked for."""

    halves: Mapping[bytes, str]
    """From half of an encoded marker to its canary's id."""
    grams: frozenset[bytes]
    """All their grams."""
    longest: int
    """Length of the longest."""

    @classmethod
    def of(cls, markers: Mapping[str, str]) -> Self:
        """Make the needles of markers, given by their canary's id."""
        halves = {
            half: canary
            for canary, marker in markers.items()
            for encoded in encodings(marker)
            for half in _halves(squeezed(encoded))
        }
        grams = frozenset(half[at : at + _STEP] for half in halves for at in range(len(half) - _STEP + 1))
        return cls(halves=halves, grams=grams, longest=max(map(len, halves), default=0))

    def with_these(self, others: Self) -> Self:
        """Return the needles of both."""
        longest = max(self.longest, others.longest)
        return replace(self, halves={**self.halves, **others.halves}, grams=self.grams | others.grams, longest=longest)

    def __bool__(self) -> bool:
        """Whether anything is looked for."""
        return bool(self.halves)


class Scanner:
    """Looks through one stream of bytes, piece by piece: what lies across two pieces is found too."""

    def __init__(self, needles: Needles) -> None:
        """Take what is looked for."""
        self._needles = needles
        self._carried = b""

    def feed(self, data: bytes) -> str | None:
        """Take the next piece; returns the id of a canary that is found by it."""
        text = self._carried + squeezed(data)
        self._carried = text[-self._needles.longest :]
        if self._needles.grams.isdisjoint(_GRAM.findall(text)):
            return None
        return next((canary for half, canary in self._needles.halves.items() if half in text), None)


def squeezed(data: bytes) -> bytes:
    """What counts of a text: see rule 1."""
    return data.translate(_SMALL, _OTHERS)


def encodings(marker: str) -> Iterator[bytes]:
    """The ways of writing a marker that are looked for, wherever in a text it stands."""
    plain = marker.encode()
    hexadecimal = plain.hex().encode()
    yield plain
    yield plain[::-1]
    yield codecs.encode(marker, "rot13").encode()
    # With the signs between, which do not count: also %67%62, 67:62, &#103;&#98; and [103, 98].
    yield hexadecimal
    for form in _FORMS:
        yield "".join(form.format(byte) for byte in plain).encode()
    yield from _base32(plain)
    yield from _base64(hexadecimal)
    for once in _base64(plain):
        yield once
        yield from _base64(once)


def _base64(plain: bytes) -> Iterator[bytes]:
    """At each place that a byte can have among three: the characters that nothing before or after has a part in."""
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + plain)
        yield encoded[-(-before * 8 // 6) : (before + len(plain)) * 8 // 6]


def _base32(plain: bytes) -> Iterator[bytes]:
    for before in range(5):
        encoded = base64.b32encode(bytes(before) + plain)
        yield encoded[-(-before * 8 // 5) : (before + len(plain)) * 8 // 5]


def _halves(encoded: bytes) -> tuple[bytes, bytes]:
    middle = len(encoded) // 2
    return encoded[:middle], encoded[middle:]
