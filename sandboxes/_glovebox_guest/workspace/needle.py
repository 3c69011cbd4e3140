"""Finds text that every match of a pattern holds: files without it need no search. Standard library only."""

from __future__ import annotations

import re
import warnings

from _glovebox_guest.stdlib import Any, Iterable

_ENDS = frozenset("\r\n\ufffd")
"""Characters that a line does not have, or that stand for undecodable bytes."""


def needle(pattern: re.Pattern[str]) -> str:
    """Return a text that stands in every matching line, as in the file; empty where none is known."""
    try:
        # The parser behind re.compile: private, but the same from Python 3.11 on.
        from re import _parser  # type: ignore[attr-defined]  # private, so no stub has it

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = _parser.parse(pattern.pattern, pattern.flags)
        if tree.state.flags & re.IGNORECASE:
            return ""
        return max(_texts(tree), key=len, default="")
    except (ImportError, AttributeError, TypeError, ValueError, LookupError, RecursionError, re.error):
        return ""


def _texts(items: Iterable[tuple[Any, Any]]) -> list[str]:
    """Return the texts that every match of these items holds, one after the other."""
    found = [""]
    for operation, argument in items:
        name = str(operation)
        if name == "LITERAL":
            character = chr(argument)
            if character in _ENDS or "\ud800" <= character <= "\udfff":
                found.append("")
            else:
                found[-1] += character
        elif name == "SUBPATTERN" and not argument[1] and not argument[2]:
            found += [*_texts(argument[3]), ""]
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") and argument[0]:
            found += [*_texts(argument[2]), ""]
        elif name != "AT":  # an anchor takes no room
            found.append("")
    return found
