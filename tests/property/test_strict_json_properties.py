"""Arbitrary bytes and arbitrary values at the door for JSON."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from _glovebox_guest.jsontext import MAX_DEPTH, bound
from glovebox_sandboxes import strict_json

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


def _nodes(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_nodes, value.values()))
    return 1 + (sum(map(_nodes, value)) if isinstance(value, list) else 0)


# Marks in texts, among quotes and backslashes, are what could be taken for structure.
TEXTS = st.text('[]{},:"\\ae', max_size=30)
TRICKY: st.SearchStrategy[Any] = st.recursive(
    TEXTS | st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


@given(TRICKY)
def test_values_and_keys_are_counted_before_anything_is_made_of_them(value: Any) -> None:
    """Never fewer than there are; with texts left out, only an empty object or array counts for one more."""
    # The control: a limit below the true count refuses.
    text, exact = json.dumps(value).encode(), _nodes(value)
    assert exact <= bound(text, 2 * exact) <= 2 * exact
    assert exact <= bound(text)
    with pytest.raises(ValueError, match="more than"):
        bound(text, exact - 1)


@given(TRICKY, st.lists(st.sampled_from(["[", '{"[":', '{"]\\"":']), max_size=MAX_DEPTH + 20))
def test_levels_are_counted_exactly(value: Any, around: list[str]) -> None:
    """Whatever stands in texts and keys; one level more than there may be is refused."""
    text = "".join(around) + json.dumps(value) + "".join("]" if each == "[" else "}" for each in reversed(around))
    level, depth = [json.loads(text)], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [item for each in level for item in (each.values() if isinstance(each, dict) else each)]
    if depth <= MAX_DEPTH:
        assert bound(text.encode())
    else:
        with pytest.raises(ValueError, match="deeper than"):
            bound(text.encode())
