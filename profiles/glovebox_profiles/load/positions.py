"""Where each key of a TOML text stands, so that an error can name a line. Pure.

``tomllib`` gives values without positions, and a long dotted key costs it memory quadratic in the key's length. So this
scanner runs first: it reads structure only (keys, brackets, strings as wholes), in linear time, under a depth bound.
What the values mean stays with ``tomllib``.
"""

import re
import tomllib
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from glovebox_profiles.errors import ProfileError

KeyPath = tuple[str | int, ...]
"""Keys and array indexes from the top of the document."""

MAX_DEPTH = 24
"""Keys and brackets around one value. A profile needs four; an example's arguments may bring some of their own. Far
below Python's recursion limit, and the bound that keeps ``tomllib`` linear."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Where things stand in one TOML text."""

    lines: Mapping[KeyPath, int]
    """Line of every key, table and array element, counted from 1."""
    headed: frozenset[KeyPath]
    """Arrays whose elements stand below ``[[headers]]`` of their own."""
    values: Mapping[KeyPath, slice]
    """Characters of the value of each key that is given; of the text with ``\\n`` as its line ends."""
    headers: Mapping[KeyPath, int]
    """Character behind each ``[header]``; likewise."""


def scan(text: str, path: Path) -> Positions:
    """Find every key, table and array element of a TOML text.

    Raises:
        ProfileError: a key is given twice, the nesting is deeper than MAX_DEPTH, or, without a fix, the text is not
            TOML: ``tomllib`` knows the better sentence.
    """
    scanner = _TomlScanner(text.replace("\r\n", "\n"), path)
    scanner.document()
    return Positions(
        lines=scanner.lines, headed=frozenset(scanner.arrays), values=scanner.values, headers=scanner.headers
    )


class _TomlScanner:
    def __init__(self, text: str, path: Path) -> None:
        self.path = path
        self.text = text
        self.at = 0
        self.breaks = [match.start() for match in re.finditer("\n", text)]
        self.lines: dict[KeyPath, int] = {}
        self.given: dict[KeyPath, int] = {}
        self.tables: dict[KeyPath, int] = {}
        self.arrays: dict[KeyPath, int] = {}
        self.values: dict[KeyPath, slice] = {}
        self.headers: dict[KeyPath, int] = {}

    def document(self) -> None:
        table: KeyPath = ()
        self.skip(_BLANK)
        while self.at < len(self.text):
            if self.take("[["):
                table = self.array_header()
            elif self.take("["):
                table = self.table_header()
            else:
                self.pair(table)
            self.skip(_BLANK)

    def array_header(self) -> KeyPath:
        line = self.line()
        array = self.resolve(self.key())
        self.expect("]]")
        index = self.arrays.get(array, 0)
        self.arrays[array] = index + 1
        self.record((*array, index), line)
        return (*array, index)

    def table_header(self) -> KeyPath:
        line = self.line()
        table = self.resolve(self.key())
        self.expect("]")
        self.once(self.tables, table, line)
        self.record(table, line)
        self.headers[table] = self.at
        return table

    def resolve(self, key: KeyPath) -> KeyPath:
        """Point ``[a.b]`` into the newest element of ``[[a]]``."""
        path: KeyPath = ()
        for part in key:
            if count := self.arrays.get(path):
                path = (*path, count - 1)
            path = (*path, part)
        return path

    def pair(self, table: KeyPath) -> None:
        line = self.line()
        path = (*table, *self.key())
        self.expect("=")
        self.once(self.given, path, line)
        self.record(path, line)
        self.skip(_SPACE)
        begin = self.at
        self.value(path)
        self.values[path] = slice(begin, begin + len(self.text[begin : self.at].rstrip()))

    def key(self) -> KeyPath:
        parts: list[str] = []
        while True:
            self.skip(_SPACE)
            if bare := _BARE.match(self.text, self.at):
                parts.append(bare.group())
                self.at = bare.end()
            elif quoted := _KEY_STRING.match(self.text, self.at):
                parts.append(self.unquote(quoted.group()))
                self.at = quoted.end()
            else:
                raise self.unreadable("a key")
            self.bound(len(parts), parts[0])
            self.skip(_SPACE)
            if not self.take("."):
                return tuple(parts)

    def unquote(self, raw: str) -> str:
        try:
            return str(tomllib.loads(f"k = {raw}")["k"])
        except tomllib.TOMLDecodeError:
            raise self.unreadable("a key") from None

    def value(self, path: KeyPath) -> None:
        self.bound(len(path), dotted(path[:3]))
        self.skip(_SPACE)
        if self.take("["):
            self.array(path)
        elif self.take("{"):
            self.inline_table(path)
        else:
            match = _STRING.match(self.text, self.at) or _SCALAR.match(self.text, self.at)
            if match is None:
                raise self.unreadable("a value")
            self.at = match.end()

    def array(self, path: KeyPath) -> None:
        index = 0
        self.skip(_BLANK)
        while not self.take("]"):
            self.record((*path, index), self.line())
            self.value((*path, index))
            index += 1
            self.skip(_BLANK)
            if not self.take(","):
                self.expect("]")
                return
            self.skip(_BLANK)

    def inline_table(self, path: KeyPath) -> None:
        self.skip(_BLANK)
        while not self.take("}"):
            self.pair(path)
            self.skip(_BLANK)
            if not self.take(","):
                self.expect("}")
                return
            self.skip(_BLANK)

    def record(self, path: KeyPath, line: int) -> None:
        self.bound(len(path), dotted(path[:3]))
        for length in range(1, len(path) + 1):
            self.lines.setdefault(path[:length], line)

    def once(self, seen: dict[KeyPath, int], path: KeyPath, line: int) -> None:
        if first := seen.get(path):
            raise ProfileError(
                self.path, line, dotted(path), f"given twice, first on line {first}", "Keep one of the two."
            )
        seen[path] = line

    def bound(self, depth: int, key: str) -> None:
        if depth > MAX_DEPTH:
            raise ProfileError(
                self.path, self.line(), key, f"nested deeper than {MAX_DEPTH} levels", "Write it flatter."
            )

    def skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def take(self, token: str) -> bool:
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        return True

    def expect(self, token: str) -> None:
        self.skip(_SPACE)
        if not self.take(token):
            raise self.unreadable(f"'{token}'")

    def line(self) -> int:
        return bisect_left(self.breaks, self.at) + 1

    def unreadable(self, wanted: str) -> ProfileError:
        return ProfileError(self.path, self.line(), "", f"not TOML: {wanted} is missing here", "")
