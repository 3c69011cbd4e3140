"""JSON from strangers: one meaning or none. No I/O; must not import anything of ours.

Two readers of one text must never see two things. RFC 8259 leaves duplicate keys, huge numbers and lone surrogates to
the implementation, and deep nesting breaks recursive readers; I-JSON (RFC 7493) forbids the first three. So do we.
"""

import json
import math
from typing import Any, NoReturn

#: Arrays and objects inside each other. MCP requests need about eight; arguments of a tool a few more.
MAX_DEPTH = 64


def check(text: bytes | str) -> Any:
    """Return the value of ``text`` if every reader would see the same one.

    Raises:
        ValueError: no JSON, a duplicate key, a number outside a double, NaN, a lone surrogate, or more than
            ``MAX_DEPTH`` levels. The message never repeats the text.
    """
    try:
        value = json.loads(
            text.decode("utf-8") if isinstance(text, bytes) else text,
            object_pairs_hook=_object,
            parse_float=_float,
            parse_int=_int,
            parse_constant=_constant,
        )
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    _walk(value)
    return value


def check_shape(text: str) -> Any:
    """Return the value of ``text``, numbers of any size and NaN included: for a reader that names the field of those.

    Raises:
        ValueError: no JSON, a duplicate key, a lone surrogate, or more than ``MAX_DEPTH`` levels.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    _walk(value)
    return value


def _walk(value: Any) -> None:
    """Look at every text, level by level: no recursion, so depth costs nothing before it is refused."""
    level: list[Any] = [value]
    for depth in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                _text(item)
            elif isinstance(item, dict | list):
                if depth == MAX_DEPTH:
                    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
                below.extend(item.values() if isinstance(item, dict) else item)
        level = below


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("the same key twice in one object")
    for key in result:
        _text(key)
    return result


def _text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("a lone surrogate") from None


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number outside of the range of a double")
    return value


def _int(text: str) -> int:
    # Longest integer a double holds has 309 digits; also below the interpreter's own limit for the conversion.
    if len(text) > 310:  # noqa: PLR2004 - explained above
        raise ValueError("a number outside of the range of a double")
    return int(text)


def _constant(_text: str) -> NoReturn:
    raise ValueError("NaN and infinities are not JSON")
