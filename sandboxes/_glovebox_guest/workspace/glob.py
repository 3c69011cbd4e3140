"""File-name patterns as regular expressions of bounded cost. Standard library only; pure.

``*`` and ``?`` stay within one name, ``**`` is any number of folders, ``[a-z]`` and ``[!a-z]`` one character, and a
backslash makes the next one itself. See gitignore(5), and wildmatch.c of git's sources, whose oddities are kept. The
text between two stars has a fixed length, so its earliest match is as good as any later one: an atomic group keeps the
engine from trying the others, and no pattern takes more than a few passes over a path.
"""

from __future__ import annotations

import re

MAX_ALTERNATIVES = 64
"""Patterns that one pattern with braces may expand to."""
SPECIAL = frozenset("*?[{")
"""Characters that make a name a pattern."""
_BRACES = re.compile(r"\{([^{}]*,[^{}]*)\}")
_TOKEN = re.compile(
    r"(?P<deep>(?<![^/])\*\*+(?:(?P<slash>\\?/)|\Z))|(?P<stars>\*+)|(?P<any>\?)|\\(?P<escaped>.)|(?P<plain>[^\\\[])",
    re.DOTALL,
)
_MEMBER = re.compile(r"\[:(?P<named>[^\]]*):\]|\\?+(?P<first>.)(?:-(?!\])\\?+(?P<last>.))?", re.DOTALL)
_FOLDERS = "(?:[^/]*+/)"
# git has the letters of ASCII alone.
_POSIX = {
    "alnum": "a-zA-Z0-9", "alpha": "a-zA-Z", "blank": " \\t", "cntrl": "\\x00-\\x1f\\x7f", "digit": "0-9",
    "graph": "!-~", "lower": "a-z", "print": " -~", "punct": "!-/:-@\\[-`{-~", "space": " \\t\\n\\r",
    "upper": "A-Z", "xdigit": "0-9a-fA-F",
}  # fmt: skip


def alternatives(pattern: str) -> list[str]:
    """Expand ``{a,b}``, innermost braces first; raises ValueError for more than MAX_ALTERNATIVES."""
    done: list[str] = []
    open_ = [pattern]
    while open_:
        current = open_.pop()
        found = _BRACES.search(current)
        if found is None:
            done.append(current)
            continue
        head, tail = current[: found.start()], current[found.end() :]
        choices = found[1].split(",")
        if len(done) + len(open_) + len(choices) > MAX_ALTERNATIVES:
            raise ValueError(f"more than {MAX_ALTERNATIVES} alternatives in braces")
        open_.extend(head + choice + tail for choice in choices)
    return done


def expression(pattern: str, *, across: bool = True, lenient: bool = False) -> str:
    """Return the regular expression of a pattern without braces, for a whole path, or a name: not ``across`` folders.

    Raises ValueError for a pattern that matches nothing, and for a range from the end to the beginning unless
    ``lenient``, as git is.
    """
    # Of each stretch between folders in any number: the pieces between stars.
    stretches = [[""]]
    between: list[str] = []
    tail = ""
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None:
            text, at = _set(pattern, at, lenient=lenient)
            stretches[-1][-1] += text
            continue
        at = token.end()
        if token["deep"] and across and token["slash"]:
            # Behind an escaped slash git does not try zero folders for the stars.
            between.append("*" if token["slash"] == "/" else "+")
            stretches.append([""])
        elif token["deep"] and across:
            tail = "(?s:.*)"
        elif token["deep"] or token["stars"]:
            stretches[-1].append("")
        else:
            stretches[-1][-1] += "[^/]" if token["any"] else re.escape(token["escaped"] or token["plain"])
    first, *others = map(_between_stars, stretches)
    expression = first
    for number, (times, stretch) in enumerate(zip(between, others, strict=True), 1):
        last = number == len(between)
        expression += f"{_FOLDERS}{times}{stretch}" if last else f"(?>{_FOLDERS}{times}?{stretch})"
    return expression + tail


def _between_stars(pieces: list[str]) -> str:
    """Join pieces of fixed length with stars."""
    first, *rest = pieces
    if not rest:
        return first
    *middle, last = rest
    return first + "".join(f"(?>[^/]*?{piece})" for piece in middle) + "[^/]*" + last


def _set(pattern: str, at: int, *, lenient: bool) -> tuple[str, int]:
    """Return the regular expression of ``[…]``, which begins at ``at``, and the index behind it."""
    negated = pattern[at + 1 : at + 2] in ("!", "^")
    begin = at = at + 1 + negated
    members = ""
    while at == begin or pattern[at : at + 1] != "]":
        member = _MEMBER.match(pattern, at)
        if member is None:
            raise ValueError("it ends within [ or behind a backslash")
        at = member.end()
        first, last = member["first"], member["last"]
        if first is None:
            if member["named"] not in _POSIX:
                raise ValueError(f"[:{member['named']}:] is no class of characters")
            members += _POSIX[member["named"]]
        elif last is None or first <= last:
            members += re.escape(first) + (f"-{re.escape(last)}" if last else "")
        elif lenient:
            members += re.escape(first)
        else:
            raise ValueError(f"{first}-{last} is no range of characters")
    return (f"[^/{members}]" if negated else f"(?!/)[{members}]"), at + 1
