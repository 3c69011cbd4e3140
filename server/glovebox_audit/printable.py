"""Strangers' text where a person reads it: what a terminal would obey, hide or reorder is written as an escape. Pure.

The one rule for the command line and for logs. Must never be imported here: anything but the standard library.
"""

import re
from itertools import islice

#: What a program's output may have besides: lines, tabs, and blanks that are as wide as they look (Unicode's Zs).
LAYOUT = "\n\t\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"

#: Marks, letters and symbols that show nothing, and that ``isprintable`` takes for visible; it says no to controls (C0,
#: DEL, C1), format characters (bidirectional, zero-width, tags), surrogates, private use, unassigned and line ends.
#: What is left of Default_Ignorable_Code_Point (https://www.unicode.org/Public/UCD/latest/ucd/DerivedCoreProperties.txt),
#: but for the two selectors that emoji are written with; then the blank of Braille, the joiners of Tifinagh and of
#: Brahmi's numbers, Khitan's filler, and the note without a head (NamesList.txt in the same place).
UNSEEN = frozenset(
    {0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), 0x3164, *range(0xFE00, 0xFE0E), 0xFFA0}
    | {*range(0xE0100, 0xE01F0), 0x2800, 0x2D7F, 0x1107F, 0x16FE4, 0x1D159}
)
_SUSPECT = re.compile("[^ -~]")

MAX_COUNTED = 10_000
"""Invisible characters that are counted in one text: a program may print nothing else."""
#: Soft hyphen, joiners, directions, selectors and tags; not the selectors of emoji. No more, or text that is not Latin
#: takes five times as long.
_INVISIBLE = re.compile(
    "[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0d\ufeff\U000e0000-\U000e0fff]"
)


def invisible(text: str) -> int:
    """How many characters of a text show nothing or turn what is shown around, at most ``MAX_COUNTED``."""
    return 0 if text.isascii() else sum(1 for _ in islice(_INVISIBLE.finditer(text), MAX_COUNTED))


def printable(text: str, kept: str = "") -> str:
    """The text with every character that a terminal might obey or hide as a backslash escape.

    Args:
        text: whatever a program, a peer, a file or a name said.
        kept: characters that stay all the same.
    """

    def shown(found: re.Match[str]) -> str:
        character = found[0]
        if character in kept or (character.isprintable() and ord(character) not in UNSEEN):
            return character
        return character.encode("unicode_escape").decode()

    return _SUSPECT.sub(shown, text)
