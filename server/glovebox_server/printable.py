"""Strangers' text where a person reads it: what a terminal would obey, hide or reorder is written as an escape. Pure.

The one rule for the command line and for logs. Must never be imported here: anything but the standard library.
"""

import re

#: What a program's output may have besides: lines, tabs, and blanks that are as wide as they look (Unicode's Zs).
LAYOUT = "\n\t\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"

# ``isprintable`` says no to controls (C0, DEL, C1), format characters (bidirectional, zero-width, tags), surrogates,
# private use, unassigned and line ends. These it takes for visible, and they are not: what is left of Unicode's
# Default_Ignorable_Code_Point (DerivedCoreProperties.txt), but for the two selectors that emoji are written with, and
# the blank of Braille.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0d\uffa0\U000e0100-\U000e01ef]"
)
_SUSPECT = re.compile("[^ -~]")


def printable(text: str, kept: str = "") -> str:
    """The text with every character that a terminal might obey or hide as a backslash escape.

    Args:
        text: whatever a program, a peer, a file or a name said.
        kept: characters that stay all the same.
    """

    def shown(found: re.Match[str]) -> str:
        character = found[0]
        if character in kept or (character.isprintable() and not _UNSEEN.match(character)):
            return character
        return character.encode("unicode_escape").decode()

    return _SUSPECT.sub(shown, text)
