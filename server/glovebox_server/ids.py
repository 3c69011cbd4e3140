"""Names for calls: unique, sortable by time. No I/O; must not import anything of ours."""

import secrets
import time

#: Crockford's base 32 in lower case: no letter that is mistaken for a digit (https://www.crockford.com/base32.html).
_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"

_TIME_DIGITS = 10
_RANDOM_DIGITS = 16


def new_call_id() -> str:
    """Return ``c_``, ten characters of Unix time in milliseconds and sixteen (80 bits) of randomness."""
    now = _encode(time.time_ns() // 1_000_000, _TIME_DIGITS)
    return f"c_{now}{_encode(secrets.randbits(5 * _RANDOM_DIGITS), _RANDOM_DIGITS)}"


def _encode(number: int, digits: int) -> str:
    return "".join(_DIGITS[(number >> (5 * place)) & 31] for place in reversed(range(digits)))
