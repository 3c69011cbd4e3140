"""Strangers' JSON: one value that every reader sees, or ValueError."""

import json
import math
from typing import Any

from tests.fuzz.harness import bounded

from _glovebox_guest.jsontext import MAX_DEPTH
from glovebox_sandboxes.strict_json import check as strict
from glovebox_sandboxes.strict_json import check_shape


def _depth(value: Any) -> int:
    deepest, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        deepest += 1
        level = [each for item in level for each in (item.values() if isinstance(item, dict) else item)]
    return deepest


def check(data: bytes) -> None:
    """The whole input is the text."""
    refused: str | None = None
    with bounded():
        try:
            value = strict(data)
        except ValueError as error:
            refused = str(error)
    if refused is not None:
        assert len(refused) < 200, "a refusal repeats the text"
        return
    assert repr(json.loads(data)) == repr(value)
    assert repr(check_shape(data.decode())) == repr(value)
    # I-JSON: what is written again is read as the same, by a reader that knows UTF-8 and doubles only.
    assert repr(strict(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())) == repr(value)
    assert _depth(value) <= MAX_DEPTH
    assert not isinstance(value, float) or math.isfinite(value)
