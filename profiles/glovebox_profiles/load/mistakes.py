"""From what pydantic found to the one sentence an operator needs: line, key, problem, nearest valid key. Pure."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.positions import KeyPath, dotted
from glovebox_profiles.model import RULE_KEYS, Profile, RuleKeyError

RULES = ("network", "allow")
"""Where egress rules stand. They are data of ``egress``, so the model knows each only as a whole."""

#: A misspelt key comes before what is wrong, and that before what is missing: often one is the other's cause.
_UNKNOWN, _WRONG, _MISSING = range(3)


def first_mistake(found: ValidationError, path: Path, lines: Mapping[KeyPath, int]) -> ProfileError:
    """Return the one mistake to repair first.

    Args:
        found: What pydantic found in the profile's values.
        path: The file, for the message.
        lines: Line of each key that stands in the file.
    """
    details = found.errors(include_url=False, include_input=False)
    first = min(details, key=lambda each: (_rank(each), _line(_key(each), lines)))
    key = _key(first)
    problem, hint = _sentences(first, key)
    return ProfileError(path, _line(key, lines), dotted(key), problem, hint)


def _key(detail: ErrorDetails) -> KeyPath:
    cause = detail.get("ctx", {}).get("error")
    return (*detail["loc"], cause.key) if isinstance(cause, RuleKeyError) else detail["loc"]


def _rank(detail: ErrorDetails) -> int:
    if detail["type"] == "extra_forbidden" or isinstance(detail.get("ctx", {}).get("error"), RuleKeyError):
        return _UNKNOWN
    return _MISSING if detail["type"] == "missing" else _WRONG


def _line(key: KeyPath, lines: Mapping[KeyPath, int]) -> int:
    """Find the nearest place that stands in the file: a missing key has its table's line."""
    while key and key not in lines:
        key = key[:-1]
    return lines.get(key, 1)


def _sentences(detail: ErrorDetails, key: KeyPath) -> tuple[str, str]:
    if _rank(detail) == _UNKNOWN:
        return "unknown key", _nearest(key)
    match detail["type"]:
        case "missing":
            return "required, and missing", "See docs/use/profiles.md for its values."
        case "value_error":
            return str(detail["ctx"]["error"]).rstrip("."), "See docs/use/profiles.md."
        case "model_type" | "dict_type":
            return "must be a table", f"Write it as [{dotted(key)}]."
        case "too_short" | "string_too_short":
            return "must not be empty", "See docs/use/profiles.md for its values."
    sentence = detail["msg"]
    return f"{sentence[:1].lower()}{sentence[1:]}", "See docs/use/profiles.md for its type and bounds."


def _nearest(key: KeyPath) -> str:
    """Name the valid key the writer probably meant: in the same table first, then anywhere."""
    *table, name = (part for part in key if isinstance(part, str))
    keys = {dotted(each): each for each in valid_keys()}
    same = {each[-1]: full for full, each in keys.items() if list(each[:-1]) == table}
    anywhere = {each[-1]: full for full, each in reversed(keys.items())}
    for names in (same, anywhere):
        if close := difflib.get_close_matches(name, names, n=1):
            return f'The nearest valid key is "{names[close[0]]}".'
    return f"Valid keys here: {', '.join(same) or 'none'}."


def valid_keys(model: type[BaseModel] = Profile, table: tuple[str, ...] = ()) -> tuple[tuple[str, ...], ...]:
    """Return the path of every key and table a profile may have, in the order of the model; arrays count as tables."""
    keys: list[tuple[str, ...]] = []
    for name, field in model.model_fields.items():
        keys.append((*table, name))
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                keys.extend(valid_keys(inner, (*table, name)))
        if keys[-1] == RULES:
            keys.extend((*table, name, key) for key in RULE_KEYS)
    return tuple(keys)
