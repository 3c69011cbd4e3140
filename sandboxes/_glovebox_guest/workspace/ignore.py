"""Decides which files ``.gitignore`` excludes, as git does. Standard library only.

A file of rules becomes a few sets and regular expressions with git's verdict: see gitignore(5), and dir.c of git's
sources. git compares bytes: here each byte is one character.
"""

from __future__ import annotations

import os
import re

from _glovebox_guest.stdlib import Callable
from _glovebox_guest.workspace import glob, hidden

FILE = ".gitignore"
EXCLUDE = ".git/info/exclude"
"""A repository's own rules, in the workspace's top folder: they yield to every FILE."""
MAX_FILE = 64 * 1024
"""Bytes of one file of rules. Real ones have a few kibibytes; a larger one is ignored, and counted."""
MAX_ALL = 256 * 1024
"""Bytes of all different rule files of a call: about a second of compiling."""

_SPECIAL = re.compile(r"[*?\[\\]")


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
        found = _SPECIAL.search(pattern)
        try:
            if found is None:
                self._names.add(pattern if of_name else f"/{pattern}")
            elif not of_name:
                # git compares the text before the first wildcard separately, and starts anew behind it.
                at = found.start()
                self._wholes.append(re.escape(pattern[:at]) + glob.expression(pattern[at:], lenient=True))
            elif pattern[0] == "*" and _SPECIAL.search(pattern, 1) is None:
                self._ends += (pattern[1:],)
            else:
                self._patterns.append(glob.expression(pattern, across=False, lenient=True))
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

    __slots__ = ("_files", "_folders")

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
        rules = self._known.get(content)
        if rules is None:
            if len(content) > min(MAX_FILE, self._left):
                self.unread += 1
                return None
            self._left -= len(content)
            rules = self._known[content] = Rules(content)
        return rules


def as_bytes(text: str) -> str:
    """Return a name or path with one character for each of its bytes."""
    return text if text.isascii() else os.fsencode(text).decode("latin-1")
