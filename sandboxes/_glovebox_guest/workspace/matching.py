"""File-name patterns as regular expressions of bounded cost, and what ``.gitignore`` excludes. Standard library only.

``*`` and ``?`` stay within one name, ``**`` is any number of folders, ``[a-z]`` and ``[!a-z]`` one character, and a
backslash makes the next one itself. See gitignore(5), and wildmatch.c and dir.c of git's sources, whose oddities are
kept. The text between two stars has a fixed length, so its earliest match is as good as any later one: an atomic group
keeps the engine from trying the others, and no pattern takes more than a few passes over a path.

A file of rules becomes a few sets and regular expressions with git's verdict. git compares bytes: here each byte is one
character.
"""

from __future__ import annotations

import os
import re

from _glovebox_guest.stdlib import Callable
from _glovebox_guest.workspace import hidden

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


FILE = ".gitignore"
EXCLUDE = ".git/info/exclude"
"""A repository's own rules, in the workspace's top folder: they yield to every FILE."""
MAX_FILE = 64 * 1024
"""Bytes of one file of rules. Real ones have a few kibibytes; a larger one is ignored, and counted."""
MAX_ALL = 256 * 1024
"""Bytes of all different rule files of a call: about a second of compiling."""

_WILD = re.compile(r"[*?\[\\]")


class _PatternGroup:
    """Consecutive patterns with the same verdict for one kind of entry: any of them decides."""

    __slots__ = ("_ends", "_matchers", "_names", "_patterns", "_wholes", "says")

    def __init__(self, *, says: bool) -> None:
        self.says = says
        """True to exclude matches, False to include them again."""
        self._names: set[str] = set()
        """Names, and paths behind a slash: a set finds one among thousands, an expression tries them all."""
        self._ends: tuple[str, ...] = ()
        self._patterns: list[str] = []
        self._wholes: list[str] = []
        self._matchers: list[Callable[[str], object]] = []

    def add(self, pattern: str) -> None:
        """Add one pattern, without its ``!`` and its last slash; one that matches nothing has no effect."""
        of_name = "/" not in pattern
        pattern = pattern.removeprefix("/")
        found = _WILD.search(pattern)
        try:
            if found is None:
                self._names.add(pattern if of_name else f"/{pattern}")
            elif not of_name:
                # git compares the text before the first wildcard separately, and starts anew behind it.
                at = found.start()
                self._wholes.append(re.escape(pattern[:at]) + expression(pattern[at:], lenient=True))
            elif pattern[0] == "*" and _WILD.search(pattern, 1) is None:
                self._ends += (pattern[1:],)
            else:
                self._patterns.append(expression(pattern, across=False, lenient=True))
        except ValueError:
            return

    def matches(self, name: str, path: str) -> bool:
        """Return whether any pattern matches this name or path."""
        if name in self._names or f"/{path}" in self._names or name.endswith(self._ends):
            return True
        if not self._matchers:
            both = self._patterns, self._wholes
            self._matchers = [re.compile("|".join(f"(?:{each})" for each in some) or "(?!)").fullmatch for some in both]
        of_name, of_path = self._matchers
        return bool(of_name(name) or of_path(path))


class Rules:
    """The rules of one file. The last matching pattern decides."""

    def __init__(self, content: bytes) -> None:
        """Parse a file's content; git accepts any."""
        self._files: list[_PatternGroup] = []
        self._folders: list[_PatternGroup] = []
        for line in content.removeprefix(b"\xef\xbb\xbf").decode("latin-1").split("\n"):
            if not line or line.startswith("#"):
                continue
            whole = line.removesuffix("\r").partition("\0")[0]
            # Trailing blanks do not count, but for one with a backslash before it.
            pattern = whole.rstrip(" ")
            escapes = len(pattern) - len(pattern.rstrip("\\"))
            pattern += " " * (escapes % 2 and pattern != whole)
            says = not pattern.startswith("!")
            pattern = pattern.removeprefix("!")
            for groups in (self._folders,) if pattern.endswith("/") else (self._folders, self._files):
                if not groups or groups[-1].says != says:
                    groups.append(_PatternGroup(says=says))
                groups[-1].add(pattern.removesuffix("/"))

    def __bool__(self) -> bool:
        """Return whether there are any: git's own EXCLUDE has comments alone, and need not be asked of every entry."""
        return bool(self._folders)

    def verdict(self, name: str, path: str, *, folder: bool) -> bool | None:
        """Return whether an entry is excluded; None where no pattern matches it.

        ``name`` and ``path`` (from the folder of the file of rules) are from ``as_bytes``; a link is no folder.
        """
        for group in reversed(self._folders if folder else self._files):
            if group.matches(name, path):
                return group.says
        return None


class RuleReader:
    """Finds and reads the files of rules of one workspace, within bounds."""

    def __init__(self) -> None:
        self.unread = 0
        """Files of rules that are not obeyed: too large, too many, or unreadable."""
        self._known: dict[bytes, Rules] = {}
        self._left = MAX_ALL

    def read(self, path: str) -> Rules | None:
        """Return the rules of a file; None if it is missing or not obeyed."""
        try:
            with open(path, "rb", opener=lambda name, _: os.open(name, hidden.FLAGS)) as file:
                content = file.read(MAX_FILE + 1) or b""
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            self.unread += 1
            return None
        if content not in self._known:
            if len(content) > min(MAX_FILE, self._left):
                self.unread += 1
                return None
            self._left -= len(content)
            self._known[content] = Rules(content)
        return self._known[content]


def as_bytes(text: str) -> str:
    """Return a name or path with one character for each of its bytes."""
    return text if text.isascii() else os.fsencode(text).decode("latin-1")
