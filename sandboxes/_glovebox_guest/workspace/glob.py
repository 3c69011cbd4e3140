"""File-name patterns as regular expressions of bounded cost. Standard library only; pure.

``*`` and ``?`` stay within one name, ``**`` is any number of folders, ``[a-z]`` and ``[!a-z]`` one character, ``{a,b}``
alternatives. The text between two stars has a fixed length, so its earliest match is as good as any later one: an
atomic group keeps the engine from trying the others, and matching stays linear in practice.
"""

from __future__ import annotations

import re

MAX_ALTERNATIVES = 64
"""Patterns that one pattern with braces may expand to."""
SPECIAL = frozenset("*?[{")
"""Characters that make a name a pattern."""
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")


def alternatives(pattern: str) -> list[str]:
    """Expand ``{a,b}``, innermost braces first; raises ValueError for more than MAX_ALTERNATIVES."""
    done: list[str] = []
    open_ = [pattern]
    while open_:
        if len(done) + len(open_) > MAX_ALTERNATIVES:
            raise ValueError(f"more than {MAX_ALTERNATIVES} alternatives in braces")
        current = open_.pop()
        found = _BRACES.search(current)
        if found is None:
            done.append(current)
            continue
        head, tail = current[: found.start()], current[found.end() :]
        choices = found[1].split(",")
        if len(choices) > MAX_ALTERNATIVES:
            raise ValueError(f"more than {MAX_ALTERNATIVES} alternatives in braces")
        open_.extend(head + choice + tail for choice in choices)
    return done


def expression(parts: list[str]) -> str:
    """Return the regular expression of a pattern without braces, for a whole relative path."""
    groups: list[list[str]] = [[]]
    for part in parts:
        if part == "**":
            groups.append([])
        else:
            groups[-1].append(_name(part))
    first, *rest = ["/".join(group) for group in groups]
    if not rest:
        return first
    *middle, last = rest
    head = f"{first}/" if first else ""
    between = "".join(f"(?>(?:[^/]++/)*?{group}/)" for group in middle if group)
    return f"{head}{between}" + (f"(?:[^/]++/)*{last}" if last else "(?s:.+)")


def _name(part: str) -> str:
    """Return the expression of one part of a path: pieces of fixed length between stars."""
    first, *rest = [_piece(piece) for piece in _split_at_stars(part)]
    if not rest:
        return first
    *middle, last = rest
    # A star alone does not match an empty name.
    least = "(?=[^/])" if not first else ""
    return least + first + "".join(f"(?>[^/]*?{piece})" for piece in middle if piece) + "[^/]*" + last


def _split_at_stars(part: str) -> list[list[str]]:
    """Return the pieces between stars, each as a list of ``?``, ``[…]`` and single characters."""
    pieces: list[list[str]] = [[]]
    at = 0
    while at < len(part):
        close = _end_of_class(part, at) if part[at] == "[" else -1
        symbol = part[at : close + 1] if close > 0 else part[at]
        at += len(symbol)
        if symbol == "*":
            pieces.append([])
        else:
            pieces[-1].append(symbol)
    return pieces


def _end_of_class(part: str, at: int) -> int:
    """Return where the class that opens at ``at`` closes, -1 for never; its first member may be a ``]``."""
    start = at + 2 if part[at + 1 : at + 2] in ("!", "^") else at + 1
    return part.find("]", start + 1)


def _piece(symbols: list[str]) -> str:
    return "".join(_symbol(symbol) for symbol in symbols)


def _symbol(symbol: str) -> str:
    if symbol == "?":
        return "[^/]"
    if len(symbol) == 1:
        return re.escape(symbol)
    body = symbol[1:-1]
    negated = body[0] in "!^"
    members = "".join("-" if character == "-" else re.escape(character) for character in body[negated:])
    return f"(?!/)[{'^' if negated else ''}{members}]"
