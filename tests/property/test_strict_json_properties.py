"""Arbitrary bytes and arbitrary values at the door for JSON."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from glovebox_server import strict_json

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_a_value_error(data: bytes) -> None:
    """Nothing but ValueError ever comes out, and what is taken can be written down again."""
    try:
        value = strict_json.check(data)
    except ValueError:
        return
    json.dumps(value, allow_nan=False).encode()


@given(VALUES)
def test_whatever_a_sound_writer_writes_is_read_back(value: Any) -> None:
    """The gate takes nothing away from sound clients."""
    assert strict_json.check(json.dumps(value)) == value
    assert strict_json.check(json.dumps(value, ensure_ascii=False).encode()) == value


@given(VALUES, st.sampled_from(["NaN", "1e999", '"\\ud800"', '{"k":1,"k":1}']))
def test_one_bad_part_anywhere_refuses_the_whole(value: Any, bad: str) -> None:
    """A sound value next to, or around, something with two meanings does not help."""
    for text in (f"[{json.dumps(value)},{bad}]", f'{{"a":{json.dumps(value)},"b":[{bad}]}}'):
        try:
            strict_json.check(text)
        except ValueError:
            continue
        raise AssertionError(text)
