"""From pydantic's errors to sentences for an operator: line, key, problem, nearest valid key. Pure."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.reading import KeyPath, Positions, dotted, parse_toml
from glovebox_profiles.model import Effect, Profile

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
