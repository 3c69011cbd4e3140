"""Positions of the keys of a TOML text, so that an error can name a line. Pure.

``tomllib`` gives values without positions, and a long dotted key costs it memory quadratic in the key's length. So this
scanner runs first. It reads structure only (keys, brackets, whole strings), in linear time, under a depth bound, and
leaves values to ``tomllib``.
"""

import re
import tomllib
from bisect import bisect_left
from pathlib import Path

from glovebox_profiles.errors import ProfileError

KeyPath = tuple[str | int, ...]
"""Keys and array indexes from the top of the document."""

MAX_DEPTH = 24
"""Keys and brackets around one value. A profile needs four; an example's arguments may add some. Far below Python's
recursion limit, and the bound that keeps ``tomllib`` linear."""

_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR = re.compile(r"[^,\]}\n#]+")
# A multi-line string may end in up to five quotes: two of its own and the three that close it.
_STRING = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'", re.DOTALL)
_KEY_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'")


def dotted(path: KeyPath) -> str:
    """Write a key path as a person would: ``network.allow[0].host``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


class Positions:
    """Positions in one TOML text, whose line ends are line feeds."""

    def __init__(self, text: str, path: Path) -> None:
        """Scan a text; ``path`` is only named in errors.

        Raises:
            ProfileError: a key is given twice, the nesting is deeper than MAX_DEPTH, or the text is not TOML. The last
                has no fix, because ``tomllib`` has the better message.
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
        self._skip(_BLANK)
        while self._at < len(self._text):
            if self._take("[["):
                table = self._array_header()
            elif self._take("["):
                table = self._table_header()
            else:
                self._pair(table)
            self._skip(_BLANK)

    def _array_header(self) -> KeyPath:
        line = self._line()
        array = self._resolve(self._key())
        self._expect("]]")
        index = self.headed.get(array, 0)
        self.headed[array] = index + 1
        self._record((*array, index), line)
        return (*array, index)

    def _table_header(self) -> KeyPath:
        line = self._line()
        table = self._resolve(self._key())
        self._expect("]")
        self._once(self._tables, table, line)
        self._record(table, line)
        self.headers[table] = self._at
        return table

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
        self._expect("=")
        self._once(self._given, path, line)
        self._record(path, line)
        self._skip(_SPACE)
        begin = self._at
        self._value(path)
        self.values[path] = slice(begin, begin + len(self._text[begin : self._at].rstrip()))

    def _key(self) -> KeyPath:
        parts: list[str] = []
        while True:
            self._skip(_SPACE)
            if bare := _BARE.match(self._text, self._at):
                parts.append(bare.group())
                self._at = bare.end()
            elif quoted := _KEY_STRING.match(self._text, self._at):
                parts.append(self._unquote(quoted.group()))
                self._at = quoted.end()
            else:
                raise self._unreadable("a key")
            self._bound(len(parts), parts[0])
            self._skip(_SPACE)
            if not self._take("."):
                return tuple(parts)

    def _unquote(self, raw: str) -> str:
        try:
            return str(tomllib.loads(f"k = {raw}")["k"])
        except tomllib.TOMLDecodeError:
            raise self._unreadable("a key") from None

    def _value(self, path: KeyPath) -> None:
        self._bound(len(path), dotted(path[:3]))
        self._skip(_SPACE)
        if self._take("["):
            self._items(path, "]")
        elif self._take("{"):
            self._items(path, "}")
        else:
            match = _STRING.match(self._text, self._at) or _SCALAR.match(self._text, self._at)
            if match is None:
                raise self._unreadable("a value")
            self._at = match.end()

    def _items(self, path: KeyPath, close: str) -> None:
        index = 0
        self._skip(_BLANK)
        while not self._take(close):
            if close == "}":
                self._pair(path)
            else:
                self._record((*path, index), self._line())
                self._value((*path, index))
                index += 1
            self._skip(_BLANK)
            if not self._take(","):
                self._expect(close)
                return
            self._skip(_BLANK)

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

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        self._at = match.end() if match else self._at

    def _take(self, token: str) -> bool:
        if not self._text.startswith(token, self._at):
            return False
        self._at += len(token)
        return True

    def _expect(self, token: str) -> None:
        self._skip(_SPACE)
        if not self._take(token):
            raise self._unreadable(f"'{token}'")

    def _line(self) -> int:
        return bisect_left(self._breaks, self._at) + 1

    def _unreadable(self, wanted: str) -> ProfileError:
        return ProfileError(self._path, self._line(), "", f"not TOML: {wanted} is missing here", "")
