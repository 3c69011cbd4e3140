"""JSON for the wire: the standard library's own C scanner and encoder, without the package around them.

Strict: one value, nothing before or after it, no NaN or Infinity and no number that would be read as one, ASCII out.
Where an interpreter's C parts differ, the package is used instead.
"""

from __future__ import annotations

from _glovebox_guest.stdlib import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_INFINITE = (float("inf"), float("-inf"))


def _finite(text: str) -> float:
    number = float(text)
    if number in _INFINITE:  # 1e999: what was read could not be written again
        raise ValueError(f"{text[:20]} is too large")
    return number


def _unknown(value: object) -> object:
    raise TypeError(f"{type(value).__name__} is not JSON")


class _Context:
    """What ``json.JSONDecoder`` would hand to the scanner."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = staticmethod(_finite)
    parse_int = int
    parse_constant = staticmethod(_refuse)


try:
    from _glovebox_guest.stdlib import json as _json

    _scan = _json.make_scanner(_Context)  # type: ignore[arg-type]  # any object with these attributes
    _encode = _json.make_encoder(None, _unknown, _json.encode_basestring_ascii, None, ":", ",", False, False, False)

    def loads(text: str) -> Any:
        """The value of a JSON text. Raises ValueError or RecursionError."""
        try:
            value, end = _scan(text, 0)
        except StopIteration:
            raise ValueError("there is no JSON value") from None
        except SystemError:
            # The scanner takes its exception from json.decoder and, where nobody imported that, sets none:
            # raise_errmsg in https://github.com/python/cpython/blob/v3.11.2/Modules/_json.c
            raise ValueError("the text is not JSON") from None
        if end != len(text):
            raise ValueError("something follows the JSON value")
        return value

    def dumps(value: Any) -> bytes:
        """The value as ASCII; lone surrogates stay escaped. Raises ValueError or TypeError."""
        return "".join(_encode(value, 0)).encode("ascii")

except (ImportError, AttributeError, TypeError):  # another interpreter, or a later version of the C parts
    import json

    def loads(text: str) -> Any:
        """The value of a JSON text. Raises ValueError or RecursionError."""
        if text[:1].isspace() or text[-1:].isspace():
            raise ValueError("white space around the JSON value")
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)

    def dumps(value: Any) -> bytes:
        """The value as ASCII; lone surrogates stay escaped. Raises ValueError or TypeError."""
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
