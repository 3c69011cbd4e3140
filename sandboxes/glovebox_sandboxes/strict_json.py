"""JSON from untrusted sources: one meaning or none, and of a bounded size. No I/O.

Two readers of one text must never see two things. RFC 8259 leaves duplicate keys, huge numbers and lone surrogates to
the implementation, and deep nesting breaks recursive readers; I-JSON (RFC 7493) forbids the first three. So do we. The
cost of reading is judged from the bytes, before any value is made.
"""

import json
import math
from typing import Any, NoReturn

from _glovebox_guest.jsontext import bound


def check(text: bytes | str) -> Any:
    """Return the value of ``text`` if every reader would see the same one.

    Raises:
        ValueError: no JSON, a duplicate key, a number outside a double, NaN, a lone surrogate, or more levels, or
            values and keys, than ``jsontext`` allows. The message never repeats the text.
    """
    return _read(text, parse_float=_float, parse_int=_int, parse_constant=_constant)


def check_shape(text: bytes | str) -> Any:
    """Return the value of ``text`` with numbers of any size and NaN: for a reader that names their field.

    Raises:
        ValueError: as ``check``, except for numbers.
    """
    return _read(text)


def _read(text: bytes | str, **numbers: Any) -> Any:
    try:
        source = text if isinstance(text, bytes) else text.encode()
        bound(source)
        value = json.loads(source.decode(), object_pairs_hook=_object, **numbers)
        if b"\\u" in source:  # nothing else makes half a character of good UTF-8
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:  # only of what is no JSON: levels were counted
        raise ValueError("not JSON: brackets without their ends") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("the same key twice in one object")
    return result


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
