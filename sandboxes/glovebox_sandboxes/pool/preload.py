"""Tells from a program's text whether it may need the modules that sandboxes preload. Pure.

What was imported ahead costs a program that does not use it milliseconds. A wrong guess costs time and nothing else:
every program can import everything in either kind of sandbox. So the text is not parsed; a parser that reads strangers'
programs on the host would be something to attack (https://docs.python.org/3/library/ast.html#ast.parse).
"""

import re
import sys
from collections.abc import Iterator, Sequence

MAX_SCANNED = 16 * 1024
"""Characters that are looked at: a millisecond. A longer program is taken to want them."""

_STATEMENT = re.compile(r"\b(?:from[ \t\f]+(\S+)[ \t\f]+import\b|import[ \t\f]+([^\n;#]*))")
_ELSEWHERE = ("exec(", "pickle", "runpy", "shelve")
"""What runs other code of which the text says nothing, or makes objects of modules that it does not name."""


def needs_preload(code: str, preload: Sequence[str]) -> bool:
    """Whether ``code`` names one of these modules, or imports or runs what is not in view and may need them."""
    words = (*_ELSEWHERE, *(module.partition(".")[0] for module in preload))
    if len(code) > MAX_SCANNED or any(word in code for word in words):
        return True
    return any(name not in sys.stdlib_module_names for name in _imported(code.replace("\\\n", " ")))


def _imported(code: str) -> Iterator[str]:
    """First names of what is imported, also in strings and comments; empty for what is relative or not understood."""
    for statement in _STATEMENT.finditer(code):
        package, listed = statement.groups()
        for each in [package] if package else listed.split(","):
            words = each.split()
            yield words[0].partition(".")[0] if words else ""
