"""The wire's JSON reads what the standard library reads, but for white space around it, and no other exception."""

import json
import math
from typing import Any, NoReturn

from _glovebox_guest.jsontext import MAX_NODES, bound, dumps, loads


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)


def _finite(text: str) -> float:
    if math.isinf(float(text)):
        raise ValueError(text)
    return float(text)


def _read(reader: Any, source: str, **options: Any) -> tuple[bool, Any]:
    try:
        return True, reader(source, **options)
    except (ValueError, RecursionError):
        return False, None


def _nodes(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_nodes, value.values()))
    return 1 + (sum(map(_nodes, value)) if isinstance(value, list) else 0)


def _bounded(data: bytes) -> int | None:
    try:
        return bound(data)
    except ValueError:
        return None


def check(data: bytes) -> None:
    """The whole input is the text."""
    counted = _bounded(data)
    if counted is not None:
        read, value = _read(json.loads, data.decode("utf-8", "replace"))
        assert counted <= MAX_NODES
        assert not read or _nodes(value) <= counted, "more was made than was counted"
    source = data.decode("utf-8", "replace")  # both ends of the wire decode strictly
    ours, value = _read(loads, source)
    theirs, expected = _read(json.loads, source, parse_constant=_refuse, parse_float=_finite)
    if ours:
        assert theirs
        # Equal numbers of other types print differently.
        assert repr(value) == repr(expected)
        assert repr(loads(dumps(value).decode())) == repr(value)
    else:
        assert not theirs or source.strip() != source
