"""Positions of the keys of a TOML text, so that an error can name a line. Pure.

``tomllib`` gives values without positions, and a long dotted key costs it memory quadratic in the key's length. So this
scanner runs first. It reads structure only (keys, brackets, whole strings), in linear time, under a depth bound, and
leaves values to ``tomllib``.
"""

import re
import tomllib
from bisect import bisect_left
from itertools import count
from pathlib import Path

from glovebox_profiles.errors import ProfileError

KeyPath = tuple[str | int, ...]
"""Keys and array indexes from the top of the document."""

MAX_DEPTH = 24
"""Keys and brackets around one value. A profile needs four; an example's arguments may add some. Far below Python's
recursion limit, and the bound that keeps ``tomllib`` linear."""

_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_QUOTED = r'"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'"
_PART = re.compile(rf"[ \t]*([A-Za-z0-9_-]+|{_QUOTED})[ \t]*(\.?)")
_EQUALS = re.compile(r"=[ \t]*")
# A multi-line string may end in up to five quotes: two of its own and the three that close it.
_SINGLE = re.compile(rf'"""(?:\\.|[^\\])*?"{{3,5}}|\'\'\'.*?\'{{3,5}}|{_QUOTED}|[^,\]}}\n#]+', re.DOTALL)
_HEADER = re.compile(r"\[\[?")
_CLOSING = {each: re.compile(re.escape(close)) for each, close in (("[[", "]]"), ("[", "]"), ("{", "}"))}


def dotted(path: KeyPath) -> str:
    """Write a key path as a person would: ``network.allow[0].host``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


class Positions:
    """Positions in one TOML text, whose line ends are line feeds."""

    def __init__(self, text: str, path: Path) -> None:
        """Scan a text; ``path`` is only named in errors.

        Raises:
            ProfileError: a key is given twice, or the nesting is deeper than MAX_DEPTH.
            ValueError: the text is not TOML; ``tomllib`` has the better message.
        """
        self._path = path
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._breaks = [match.start() for match in re.finditer("\n", self._text)]
        self.lines: dict[KeyPath, int] = {}
        """Line of every key, table and array element, counted from 1."""
        self.headed: dict[KeyPath, int] = {}
        """Number of elements of each array that stand below ``[[headers]]`` of their own."""
        self.values: dict[KeyPath, slice] = {}
        """Characters of the value of each key that is given."""
        self.headers: dict[KeyPath, int] = {}
        """Character behind each ``[header]``."""
        self._given: dict[KeyPath, int] = {}
        self._tables: dict[KeyPath, int] = {}
        self._document()

    def _document(self) -> None:
        table: KeyPath = ()
        self._take(_BLANK)
        while self._at < len(self._text):
            line = self._line()
            if header := _HEADER.match(self._text, self._at):
                self._at = header.end()
                table = self._resolve(self._key())
                self._take(_CLOSING[header[0]])
                if header[0] == "[[":
                    self.headed[table] = self.headed.get(table, 0) + 1
                    table = (*table, self.headed[table] - 1)
                else:
                    self._once(self._tables, table, line)
                    self.headers[table] = self._at
                self._record(table, line)
            else:
                self._pair(table)
            self._take(_BLANK)

    def _resolve(self, key: KeyPath) -> KeyPath:
        """Point ``[a.b]`` into the newest element of ``[[a]]``."""
        path: KeyPath = ()
        for part in key:
            if count := self.headed.get(path):
                path = (*path, count - 1)
            path = (*path, part)
        return path

    def _pair(self, table: KeyPath) -> None:
        line = self._line()
        path = (*table, *self._key())
        self._take(_EQUALS)
        self._once(self._given, path, line)
        self._record(path, line)
        begin = self._at
        self._value(path)
        self.values[path] = slice(begin, begin + len(self._text[begin : self._at].rstrip()))

    def _key(self) -> KeyPath:
        parts: list[str] = []
        while True:
            part, more = self._take(_PART).groups()
            parts.append(str(tomllib.loads(f"k = {part}")["k"]) if part[0] in "'\"" else part)
            self._bound(len(parts), parts[0])
            if not more:
                return tuple(parts)

    def _value(self, path: KeyPath) -> None:
        self._bound(len(path), dotted(path[:3]))
        opening = self._text[self._at : self._at + 1]
        if opening not in _CLOSING:
            self._take(_SINGLE)
            return
        self._at += 1
        self._take(_BLANK)
        for index in count():
            if self._text.startswith(("]", "}"), self._at):
                break
            if opening == "{":
                self._pair(path)
            else:
                self._record((*path, index), self._line())
                self._value((*path, index))
            self._take(_BLANK)
            if not self._text.startswith(",", self._at):
                break
            self._at += 1
            self._take(_BLANK)
        self._take(_CLOSING[opening])

    def _record(self, path: KeyPath, line: int) -> None:
        self._bound(len(path), dotted(path[:3]))
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], line)

    def _once(self, seen: dict[KeyPath, int], path: KeyPath, line: int) -> None:
        if first := seen.get(path):
            reason, fix = f"given twice, first on line {first}", "Keep one of the two."
            raise ProfileError(self._path, line, dotted(path), reason, fix)
        seen[path] = line

    def _bound(self, depth: int, key: str) -> None:
        if depth > MAX_DEPTH:
            reason = f"nested deeper than {MAX_DEPTH} levels"
            raise ProfileError(self._path, self._line(), key, reason, "Write it flatter.")

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise ValueError("not TOML")
        self._at = match.end()
        return match

    def _line(self) -> int:
        return bisect_left(self._breaks, self._at) + 1
