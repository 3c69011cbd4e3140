"""Sets one value in the text of a profile; every other character stays, comments included. Pure."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.positions import KeyPath, Positions, dotted
from glovebox_profiles.load.reading import parse_toml


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
    wanted = _with_value(values, key, parsed)
    text = data.decode()
    edited = _edit(text.replace("\r\n", "\n"), positions, key, written)
    result = (edited.replace("\n", "\r\n") if "\r\n" in text else edited).encode()
    # The parser, not the edit, decides what the file now says.
    if wanted is None or parse_toml(result, path)[0] != wanted:
        raise ProfileError(path, None, dotted(key), "cannot be set by a command", "Edit the file.")
    return result


def _read_value(text: str) -> tuple[str, Any]:
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        found = {}
    return (text, found["value"]) if found.keys() == {"value"} else (json.dumps(text, ensure_ascii=False), text)


def _with_value(values: Any, key: KeyPath, value: Any) -> Any:
    """Return a copy of parsed TOML with one value set; None if the key leads through a non-table."""
    name, rest = key[0], key[1:]
    if isinstance(values, list) and isinstance(name, int):
        inner = _with_value(values[name], rest, value)
        return None if inner is None else [*values[:name], inner, *values[name + 1 :]]
    if not isinstance(values, Mapping):
        return None
    inner = _with_value(values.get(str(name), {}), rest, value) if rest else value
    return None if inner is None else {**values, name: inner}


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
