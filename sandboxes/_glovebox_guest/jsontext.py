"""JSON for the wire: the standard library's C scanner and encoder, without the package around them.

Strict: one value, nothing before or after it, no NaN or Infinity and no number that would be read as one, ASCII out.
Where an interpreter's C parts differ, the package is used instead.

Both sides call ``bound`` before they parse a stranger's JSON: bytes cost next to nothing until they become objects.
"""

from __future__ import annotations

from _glovebox_guest.stdlib import Any

MAX_NODES = 8_192
"""Values and keys of one text: objects parsed before a rejection cost less than 20 ms. A request has some 20."""
MAX_LISTED = 32_768
"""The same for long lists: a search's longest answer has 23,000, a head full of headers 25,000."""
MAX_DEPTH = 64
"""Nested arrays and objects. MCP requests need about eight; arguments of a tool a few more."""

_OTHER = bytes(set(range(256)) - set(b"[]{}"))
_AS_ARRAYS = bytes.maketrans(b"{}", b"[]")


def bound(text: bytes, most: int = MAX_NODES) -> int:
    """Return an upper bound of the values and keys in ``text``, from its bytes alone.

    Invalid JSON may pass: its reader stops at the first error, and until there has made no more than was counted.
    Raises ValueError for possibly more than ``most``, or than ``MAX_DEPTH`` levels.
    """
    nodes, opened = _marks(text)
    if nodes <= most and opened <= MAX_DEPTH:
        return nodes
    # The content of strings does not count. A quote ends one unless an odd number of backslashes stands before it.
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
    quotes = bare.count(b'"')
    if quotes > 2 * most:
        raise ValueError(f"more than {most} values and keys")
    bare = b"".join(bare.split(b'"')[::2])
    nodes, opened = _marks(bare)
    if opened - bare.count(b"]") - bare.count(b"}") > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if nodes > most:
        raise ValueError(f"more than {most} values and keys")
    if opened > MAX_DEPTH:
        _bound_depth(bare.translate(_AS_ARRAYS, _OTHER))
    return nodes


def _marks(text: bytes) -> tuple[int, int]:
    """Count values and keys if all marks are structure, and arrays and objects: each but the first follows one."""
    opened = text.count(b"[") + text.count(b"{")
    return 1 + opened + text.count(b",") + text.count(b":"), opened


def _bound_depth(brackets: bytes) -> None:
    """Remove the innermost level repeatedly: of MAX_DEPTH levels, or of invalid JSON, nothing is left."""
    for _ in range(MAX_DEPTH):
        if b"[]" not in brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


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
        """Return the value of a JSON text. Raises ValueError or RecursionError."""
        try:
            value, end = _scan(text, 0)
        except StopIteration:
            raise ValueError("there is no JSON value") from None
        except SystemError:
            # The scanner takes its exception from json.decoder and, where that is not imported, sets none:
            # raise_errmsg in https://github.com/python/cpython/blob/v3.11.2/Modules/_json.c
            raise ValueError("the text is not JSON") from None
        if end != len(text):
            raise ValueError("something follows the JSON value")
        return value

    def dumps(value: Any) -> bytes:
        """Return the value as ASCII; lone surrogates stay escaped. Raises ValueError or TypeError."""
        return "".join(_encode(value, 0)).encode("ascii")

except (ImportError, AttributeError, TypeError):  # another interpreter, or a later version of the C parts
    import json

    def loads(text: str) -> Any:
        if text[:1].isspace() or text[-1:].isspace():
            raise ValueError("white space around the JSON value")
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)

    def dumps(value: Any) -> bytes:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")
