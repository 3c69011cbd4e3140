"""From a file to its model: bytes that no other user can have changed, read strictly, each value with its line.

Reads profiles and the policy alike. Pydantic's errors become sentences for an operator: line, key, problem, nearest
valid key.
"""

import difflib
import json
import os
import re
import stat
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.model import Effect, Profile
from glovebox_sandboxes.host import permissions
from glovebox_sandboxes.host.identity import changes_user

KeyPath = tuple[str | int, ...]
"""Keys and array indexes from the top of the document."""

MAX_DEPTH = 24
"""Keys and brackets around one value. A profile needs four; an example's arguments may add some. Far below Python's
recursion limit, and the bound that keeps ``tomllib`` linear."""

MAX_FILE = 64 * 1024
"""Bytes of one file: some hundred times a usual profile, and few enough to parse at once."""

_TOML = "See https://toml.io/en/v1.0.0."

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
            ProfileError: The nesting is deeper than MAX_DEPTH.
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


def set_value(data: bytes, path: Path, key: KeyPath, value: str) -> bytes:
    """Return a profile's bytes with one value set.

    Args:
        data: A file that ``loader.parse`` accepts.
        path: Its name, for errors.
        key: Of tables, and indexes of arrays of tables.
        value: TOML; anything else is a text.

    Raises:
        ProfileError: The key has no place in the file that a command could write to.
    """
    written, parsed = _read_value(value)
    values, positions = parse_toml(data, path)
    try:
        at: Any = values
        for part in key[:-1]:
            at = at.setdefault(part, {}) if isinstance(at, dict) else at[part]
        at[key[-1]] = parsed
    except (TypeError, IndexError):  # it leads through what is no table
        values = {}
    text = data.decode()
    edited = _edit(text.replace("\r\n", "\n"), positions, key, written)
    result = (edited.replace("\n", "\r\n") if "\r\n" in text else edited).encode()
    # The parser, not the edit, decides what the file now says.
    if not values or parse_toml(result, path)[0] != values:
        raise ProfileError(path, None, dotted(key), "cannot be set by a command", "Edit the file.")
    return result


def _read_value(text: str) -> tuple[str, Any]:
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        found = {}
    return (text, found["value"]) if found.keys() == {"value"} else (json.dumps(text, ensure_ascii=False), text)


def _edit(text: str, positions: Positions, key: KeyPath, value: str) -> str:
    if place := positions.values.get(key):
        return text[: place.start] + value + text[place.stop :]
    for depth in range(len(key) - 1, 0, -1):
        table, pair = key[:depth], f"{dotted(key[depth:])} = {value}"
        if table in positions.headers:
            return _insert_line(text, positions.headers[table], pair)
        if (place := positions.values.get(table)) and text[place.start] == "{":
            inside = text[place.start + 1 : place.stop - 1].rstrip()
            return f"{text[: place.start]}{{{inside}{',' if inside.strip() else ''} {pair} }}{text[place.stop :]}"
    if len(key) == 1 or key[:1] in positions.lines:
        return _insert_line(text, positions.values[("tool",)].stop, f"{dotted(key)} = {value}")
    return f"{text.rstrip()}\n\n[{dotted(key[:-1])}]\n{key[-1]} = {value}\n"


def _insert_line(text: str, at: int, line: str) -> str:
    end = text.find("\n", at)
    end = len(text) if end < 0 else end
    return f"{text[:end]}\n{line}{text[end:]}"


def read_bytes(path: Path, most: int = MAX_FILE) -> bytes:
    """Read a file that only this user, root or the owner of the package can have written.

    Everything is asked of the open file, so the answer is about the bytes that are read: at most one more than
    ``most``.

    Raises:
        ProfileError: Another user can have written it, or it cannot be read.
    """
    with _open(path, os.O_NOFOLLOW | os.O_NONBLOCK) as handle:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ProfileError(path, None, "", "not a regular file", "Put the file itself there.")
        _check_owner(path, permissions.flaw(handle))
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(most + 1)


@contextmanager
def open_directory(directory: Path, *, owned: bool, above: bool) -> Iterator[int]:
    """Open a directory to list it; raise ProfileError if another user can write it, or it cannot be read."""
    with _open(directory, os.O_DIRECTORY) as handle:
        if owned:
            _check_owner(directory, permissions.flaw(handle))
            # As for the runtime: root's server must not be led to a directory that another user can exchange.
            if above and changes_user() and (found := permissions.flaw_above(directory.absolute())):
                _check_owner(found[0], found[1:])
        yield handle


@contextmanager
def _open(path: Path, flags: int) -> Iterator[int]:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        try:
            yield handle
        finally:
            os.close(handle)
    except OSError as error:
        linked = path.is_symlink()
        problem = "a symbolic link" if linked else f"cannot be read: {error.strerror}"
        fix = "Copy the file here." if linked else "Check that it exists and its permissions."
        raise ProfileError(path, None, "", problem, fix) from None


def parse_toml(data: bytes, path: Path) -> tuple[dict[str, Any], Positions]:
    """Parse the bytes of one file into values and their positions.

    Raises:
        ProfileError: They are too many, or not strict TOML; names ``path``.
    """
    if len(data) > MAX_FILE:
        reason = f"larger than {MAX_FILE // 1024} KiB"
        raise ProfileError(path, None, "", reason, "Write less: a page of text is usual.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ProfileError(path, line, "", "not UTF-8 text", "Save the file as UTF-8.") from None
    try:
        positions = Positions(text, path)
    except ValueError:
        _values(text, path)
        raise ProfileError(path, None, "", "not TOML", _TOML) from None
    return _values(text, path), positions


def _values(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        sentence, _, place = str(error).rpartition(" (at ")
        found = re.match(r"line (\d+)", place)
        line = int(found[1]) if found else text.count("\n") + 1
        raise ProfileError(path, line, "", f"not TOML: {sentence}", _TOML) from None
    except ValueError as error:  # an integer with thousands of digits
        raise ProfileError(path, None, "", f"not TOML: {error}", "Write a smaller number.") from None


def _check_owner(path: Path, flaw: tuple[str, str] | None) -> None:
    if flaw is not None:
        problem, command = flaw
        hint = f"Who can change it decides what tools may do. Review it, then: {command} {path}"
        raise ProfileError(path, None, "", problem, hint)


_Model = TypeVar("_Model", bound=BaseModel)
Mistake = tuple[KeyPath, str, str]
"""The key, what is wrong with it, and what to do."""

ANY = "NAME"
"""In the path of a key, a name that the writer chooses."""
RULES = ("network", "allow")
"""Place of the egress rules. They are data of ``egress``, so the model knows each only as a whole."""

#: A misspelt key comes before a wrong one (1), and that before a missing one: often one causes the other.
_RANKS = {"extra_forbidden": 0, "missing": 2}

_NAMES = "[key]"
"""Pydantic's suffix to the place of a name that is wrong itself."""


def parse_model(data: bytes, path: Path, model: type[_Model], page: str) -> tuple[_Model, Positions]:
    """Return the bytes of a file as its model, and their positions; ``page`` of the documentation describes it.

    Raises:
        ProfileError: All errors of the file as one, the one to correct first before the others; it names ``path``.
    """
    values, positions = parse_toml(data, path)
    try:
        return model.model_validate(values), positions
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
    lines = positions.lines
    details.sort(key=lambda detail: (_RANKS.get(detail["type"], 1), line_of(_key(detail), lines)))
    found = ((key, *_sentences(detail, key, model, page)) for detail in details for key in (_key(detail),))
    raise _combined(found, len(details), path, lines)


def raise_mistakes(found: Iterable[Mistake], path: Path, lines: Mapping[KeyPath, int]) -> None:
    """Raise all mistakes of a file as one ProfileError, if there are any."""
    if mistakes := list(found):
        raise _combined(mistakes, len(mistakes), path, lines)


def _combined(found: Iterable[Mistake], total: int, path: Path, lines: Mapping[KeyPath, int]) -> ProfileError:
    errors = (ProfileError(path, line_of(key, lines), dotted(key), *rest) for key, *rest in found)
    return ProfileError.combine(errors, total)


def failing_examples(examples: Iterable[tuple[Any, tuple[Effect, str]]], answers: str) -> Iterator[Mistake]:
    """Yield a mistake for each example that is decided otherwise than it expects; ``answers`` names what decided."""
    for index, (example, (effect, rule)) in enumerate(examples):
        if effect != example.expect or example.rule not in (None, rule):
            wanted = f"{example.expect} by {example.rule}" if example.rule else example.expect
            reason = f"expects {wanted}, but the {answers} answers {effect} by {rule}"
            yield ("example", index), reason, "Change what is above it, or the example if its expectation was wrong."


def _key(detail: ErrorDetails) -> KeyPath:
    return detail["loc"][:-1] if detail["loc"][-1:] == (_NAMES,) else detail["loc"]


def line_of(key: KeyPath, lines: Mapping[KeyPath, int]) -> int:
    """Return the line of the nearest place that stands in the file: a missing key has its table's line."""
    while key and key not in lines:
        key = key[:-1]
    return lines.get(key, 1)


def _sentences(detail: ErrorDetails, key: KeyPath, model: type[BaseModel], page: str) -> tuple[str, str]:
    match detail["type"]:
        case "extra_forbidden":
            return "unknown key", _nearest(key, model)
        case "missing":
            return "required, and missing", f"See {page} for its values."
        case "value_error":
            return str(detail["ctx"]["error"]).rstrip("."), f"See {page}."
        case "model_type" | "dict_type":
            return "must be a table", f"Write it as [{dotted(key)}]."
        case "too_short" | "string_too_short":
            return "must not be empty", f"See {page} for its values."
    sentence = detail["msg"]
    return f"{sentence[:1].lower()}{sentence[1:]}", f"See {page} for its type and bounds."


def _nearest(key: KeyPath, model: type[BaseModel]) -> str:
    """Return the valid key that was probably meant: in the same table first, then anywhere."""
    *table, name = (part for part in key if isinstance(part, str))
    keys = {dotted(each): each for each in valid_keys(model)}
    same = {each[-1]: dotted((*table, each[-1])) for each in keys.values() if _same(each[:-1], table)}
    anywhere = {each[-1]: full for full, each in reversed(keys.items())}
    for names in (same, anywhere):
        if close := difflib.get_close_matches(name, names, n=1):
            return f'The nearest valid key is "{names[close[0]]}".'
    return f"Valid keys here: {', '.join(same) or 'none'}."


def _same(valid: tuple[str, ...], table: list[str]) -> bool:
    return len(valid) == len(table) and all(one in (ANY, other) for one, other in zip(valid, table, strict=True))


def valid_keys(model: type[BaseModel] = Profile, table: tuple[str, ...] = ()) -> tuple[tuple[str, ...], ...]:
    """Return the path of every key and table a file may have, in the order of the model; arrays count as tables.

    In tables with freely chosen names, ``ANY`` stands for each.
    """
    keys: list[tuple[str, ...]] = []
    for name, field in model.model_fields.items():
        keys.append((*table, name))
        below = (*table, name, *([ANY] if get_origin(field.annotation) is dict else []))
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                keys.extend(valid_keys(inner, below))
    return tuple(keys)
