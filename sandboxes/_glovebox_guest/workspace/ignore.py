"""Decides which files ``.gitignore`` excludes, as git does. Standard library only.

A file of rules becomes a few sets and regular expressions with git's verdict: see gitignore(5), and of git's sources
dir.c and wildmatch.c, whose oddities are kept. git compares bytes: here each byte is one character. As in ``glob``,
atomic groups avoid useless backtracking: no pattern takes more than a few passes over a path.
"""

from __future__ import annotations

import os
import re

from _glovebox_guest.stdlib import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Matcher = Callable[[str], re.Match[str] | None]

FILE = ".gitignore"
EXCLUDE = ".git/info/exclude"
"""A repository's own rules, in the workspace's top folder: they yield to every FILE."""
MAX_FILE = 64 * 1024
"""Bytes of one file of rules. Real ones have a few kibibytes; a larger one is ignored, and counted."""
MAX_ALL = 256 * 1024
"""Bytes of all different rule files of a call: about a second of compiling."""

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_SPECIAL = re.compile(r"[*?\[\\]")
_FOLDERS = "(?:[^/]*+/)"
_POSIX = {
    "alnum": str.isalnum,
    "alpha": str.isalpha,
    "blank": " \t".__contains__,
    "cntrl": lambda character: not character.isprintable(),
    "digit": str.isdigit,
    "graph": lambda character: character.isprintable() and character != " ",
    "lower": str.islower,
    "print": str.isprintable,
    "punct": lambda character: character.isprintable() and not character.isalnum() and character != " ",
    "space": " \t\n\r".__contains__,
    "upper": str.isupper,
    "xdigit": "0123456789abcdefABCDEF".__contains__,
}


class _NeverError(Exception):
    """Raised for a pattern that matches nothing."""


class _PatternGroup:
    """Consecutive patterns with the same verdict for one kind of entry: any of them decides."""

    __slots__ = ("_ends", "_names", "_pathnames", "_patterns", "_whole", "_wholes", "says")

    def __init__(self, *, says: bool) -> None:
        self.says = says
        """True to exclude matches, False to include them again."""
        self._names: set[str] = set()
        self._ends: tuple[str, ...] = ()
        self._patterns: list[str] = []
        self._pathnames: set[str] = set()
        self._wholes: list[str] = []
        self._whole: tuple[Matcher | None, Matcher | None] | None = None

    def add(self, pattern: str) -> None:
        """Add one pattern, without its ``!`` and its last slash."""
        literal = _SPECIAL.search(pattern) is None
        if "/" not in pattern:
            if literal:
                self._names.add(pattern)
            elif pattern[0] == "*" and _SPECIAL.search(pattern, 1) is None:
                self._ends += (pattern[1:],)
            else:
                self._patterns.append(_expression(pattern, across=False))
            return
        pattern = pattern.removeprefix("/")
        if literal:
            self._pathnames.add(pattern)
            return
        # git compares the text before the first wildcard separately, and starts anew behind it.
        found = _SPECIAL.search(pattern)
        at = found.start() if found else len(pattern)
        self._wholes.append(re.escape(pattern[:at]) + _expression(pattern[at:], across=True))

    def matches(self, name: str, path: str) -> bool:
        """Return whether any pattern matches this name or path."""
        if name in self._names or name.endswith(self._ends) or path in self._pathnames:
            return True
        if self._whole is None:
            self._whole = _any(self._patterns), _any(self._wholes)
        for match, text in zip(self._whole, (name, path), strict=True):
            if match is not None and match(text) is not None:
                return True
        return False


def _any(expressions: list[str]) -> Matcher | None:
    return re.compile("|".join(f"(?:{each})" for each in expressions)).fullmatch if expressions else None


class Rules:
    """The rules of one file. The last matching pattern decides."""

    __slots__ = ("_files", "_folders")

    def __init__(self, content: bytes) -> None:
        """Parse a file's content; git accepts any."""
        self._files: list[_PatternGroup] = []
        self._folders: list[_PatternGroup] = []
        for line in content.removeprefix(b"\xef\xbb\xbf").decode("latin-1").split("\n"):
            if not line or line.startswith("#"):
                continue
            pattern = _trimmed(line.removesuffix("\r").partition("\0")[0])
            says = not pattern.startswith("!")
            pattern = pattern.removeprefix("!")
            folders_alone = pattern.endswith("/")
            pattern = pattern.removesuffix("/")
            try:
                for runs in (self._folders,) if folders_alone else (self._folders, self._files):
                    _add(runs, pattern, says=says)
            except _NeverError:
                continue

    def __bool__(self) -> bool:
        return bool(self._folders)

    def verdict(self, name: str, path: str, *, folder: bool) -> bool | None:
        """Return whether an entry is excluded; None where no pattern matches it.

        ``name`` and ``path`` (from the folder of the file of rules) are from ``as_bytes``; a link is no folder.
        """
        for run in reversed(self._folders if folder else self._files):
            if run.matches(name, path):
                return run.says
        return None


class RuleReader:
    """Finds and reads the files of rules of one workspace, within bounds."""

    def __init__(self) -> None:
        self.unread = 0
        """Files of rules that are not obeyed: too large, too many, or unreadable."""
        self._known: dict[bytes, Rules] = {}
        self._left = MAX_ALL

    def read(self, path: str) -> Rules | None:
        """Return the rules of a file; None if it is missing or has no rules."""
        try:
            descriptor = os.open(path, _FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError:
            self.unread += 1
            return None
        try:
            content = _content(descriptor)
        except OSError:
            content = None
        finally:
            os.close(descriptor)
        if content is None:
            self.unread += 1
            return None
        rules = self._known.get(content)
        if rules is None:
            if len(content) > self._left:
                self.unread += 1
                return None
            self._left -= len(content)
            rules = self._known[content] = Rules(content)
        return rules or None


def as_bytes(text: str) -> str:
    """Return a name or path with one character for each of its bytes."""
    return text if text.isascii() else os.fsencode(text).decode("latin-1")


def _content(descriptor: int) -> bytes | None:
    content = b""
    while data := os.read(descriptor, MAX_FILE + 1 - len(content)):
        content += data
        if len(content) > MAX_FILE:
            return None
    return content


def _add(runs: list[_PatternGroup], pattern: str, *, says: bool) -> None:
    if not runs or runs[-1].says != says:
        runs.append(_PatternGroup(says=says))
    runs[-1].add(pattern)


def _trimmed(line: str) -> str:
    """Remove trailing blanks that have no backslash before them."""
    kept = line.rstrip(" ")
    if kept == line:
        return line
    escapes = len(kept) - len(kept.rstrip("\\"))
    return kept + " " if escapes % 2 else kept


def _expression(pattern: str, *, across: bool) -> str:
    """Return a pattern's regular expression, for a whole name, or for a path ``across`` folders.

    Raises _NeverError where git's reading of the pattern matches nothing.
    """
    chains: list[list[list[str]]] = [[[]]]
    between: list[str] = []
    tail = ""
    at = 0
    while at < len(pattern):
        symbol = pattern[at]
        if symbol == "*":
            end = at
            while pattern[end : end + 1] == "*":
                end += 1
            rest = pattern[end : end + 2]
            deep = across and end - at > 1 and (at == 0 or pattern[at - 1] == "/")
            if deep and not rest:
                tail = "(?s:.*)"
            elif deep and (rest[0] == "/" or rest == "\\/"):
                # Behind an escaped slash git does not try zero folders for the stars.
                between.append("*" if rest[0] == "/" else "+")
                chains.append([[]])
                end += 1 if rest[0] == "/" else 2
            else:
                chains[-1].append([])
            at = end
            continue
        if symbol == "[":
            text, at = _set(pattern, at + 1)
        elif symbol == "?":
            text, at = "[^/]", at + 1
        else:
            at += symbol == "\\"
            if at == len(pattern):
                raise _NeverError
            text, at = re.escape(pattern[at]), at + 1
        chains[-1][-1].append(text)
    first, *rest_of = [_chain(["".join(piece) for piece in pieces]) for pieces in chains]
    expression = first
    for number, (times, chain) in enumerate(zip(between, rest_of, strict=True), 1):
        last = number == len(between)
        expression += f"{_FOLDERS}{times}{chain}" if last else f"(?>{_FOLDERS}{times}?{chain})"
    return expression + tail


def _chain(pieces: list[str]) -> str:
    """Join pieces of fixed length with stars: the earliest place for a piece is as good as any later one."""
    first, *rest = pieces
    if not rest:
        return first
    *middle, last = rest
    return first + "".join(f"(?>[^/]*?{piece})" for piece in middle) + "[^/]*" + last


def _set(pattern: str, at: int) -> tuple[str, int]:
    """Return the regular expression of ``[…]``, whose inside begins at ``at``, and the index behind it."""
    negated = pattern[at : at + 1] in ("!", "^")
    at += negated
    members: set[int] = set()
    before = ""
    begun = False
    while not begun or pattern[at : at + 1] != "]":
        begun = True
        symbol = pattern[at : at + 1]
        if symbol == "-" and before and pattern[at + 1 : at + 2] not in ("", "]"):
            at += 1
            at += pattern[at] == "\\"
            end = _one(pattern, at)
            members.update(range(ord(before), ord(end) + 1))
            before = ""
        elif pattern.startswith("[:", at) and (named := _named(pattern, at)) is not None:
            members |= _class(named)
            at += len(named) + 3
            before = ""
        else:
            at += symbol == "\\"
            before = _one(pattern, at)
            members.add(ord(before))
        at += 1
    chosen = (members ^ set(range(256))) if negated else members
    chosen -= {ord("/")}
    return _characters(chosen), at + 1


def _characters(chosen: set[int]) -> str:
    """Return the expression of one of these characters, in few ranges: each takes time to compile."""
    text = ""
    for first in sorted(number for number in chosen if number - 1 not in chosen):
        last = first
        while last + 1 in chosen:
            last += 1
        text += f"\\x{first:02x}-\\x{last:02x}"
    return f"[{text}]" if text else "(?!)"


def _one(pattern: str, at: int) -> str:
    if at >= len(pattern):
        raise _NeverError
    return pattern[at]


def _named(pattern: str, at: int) -> str | None:
    """Return the name between ``[:`` and ``:]``; None where the next ``]`` ends something else."""
    end = pattern.find("]", at + 2)
    if end < 0:
        raise _NeverError
    return pattern[at + 2 : end - 1] if end > at + 2 and pattern[end - 1] == ":" else None


def _class(name: str) -> set[int]:
    holds = _POSIX.get(name)
    if holds is None:
        raise _NeverError
    # git has the letters of ASCII alone.
    return {number for number in range(128) if holds(chr(number))}
