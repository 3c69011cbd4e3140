"""Escape what a terminal would obey, hide or reorder in strangers' text. Pure.

The one rule for the command line and for logs. Import nothing but the standard library.
"""

import json
import re
from itertools import islice

#: Allowed besides in a program's output: lines, tabs, and blanks as wide as they look (Unicode's Zs).
LAYOUT = "\n\t\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"

#: Marks, letters and symbols that show nothing but that ``isprintable`` accepts. It rejects controls (C0, DEL, C1),
#: format characters (bidirectional, zero-width, tags), surrogates, private use, unassigned and line ends. These are the
#: rest of Default_Ignorable_Code_Point (https://www.unicode.org/Public/UCD/latest/ucd/DerivedCoreProperties.txt),
#: except the two selectors of emoji; the blank of Braille; the joiners of Tifinagh and of Brahmi's numbers; Khitan's
#: filler; and the note without a head (NamesList.txt in the same place).
UNSEEN = frozenset(
    {0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, *range(0x180B, 0x1810), 0x3164, *range(0xFE00, 0xFE0E), 0xFFA0}
    | {*range(0xE0100, 0xE01F0), 0x2800, 0x2D7F, 0x1107F, 0x16FE4, 0x1D159}
)
_SUSPECT = re.compile("[^ -~]")

MAX_COUNTED = 10_000
"""Most invisible characters counted in one text: a program may print nothing else."""
#: Soft hyphen, joiners, directions, selectors (not of emoji), tags. More would slow down non-Latin text five times.
_INVISIBLE = re.compile(
    "[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0d\ufeff\U000e0000-\U000e0fff]"
)


def invisible(text: str) -> int:
    """Return the number of invisible or reordering characters, at most ``MAX_COUNTED``."""
    return 0 if text.isascii() else sum(1 for _ in islice(_INVISIBLE.finditer(text), MAX_COUNTED))


def printable(text: str, kept: str = "") -> str:
    """Escape each character that a terminal might obey or hide, except those ``kept``."""

    def shown(found: re.Match[str]) -> str:
        character = found[0]
        if character in kept or (character.isprintable() and ord(character) not in UNSEEN):
            return character
        return character.encode("unicode_escape").decode()

    return _SUSPECT.sub(shown, text)


def cell(value: object) -> str:
    """Return a value for a table or a line: a text as it is, another as JSON, nothing for None."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
