"""The quick way to canonical JSON gives what the slow one gives, byte for byte, for anything a record can hold."""

import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from glovebox_audit.chain import _plain, canonical, recordable

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**53 - 3, max_value=2**53 + 3)
    | st.floats()
    | st.text()
    | st.text(st.characters(codec="ascii"))
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=25)


@given(VALUES)
def test_the_quick_way_is_canonical(value: object) -> None:
    """Where the quick way answers at all, it answers what RFC 8785 says of the recordable value."""
    slow = rfc8785.dumps(recordable(value))  # type: ignore[arg-type]
    assert canonical(value) == slow
    assert _plain(value) in (None, slow)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(min_value=0, max_value=8))
def test_numbers_of_any_size_are_canonical(number: float, digits: int) -> None:
    """As they are measured, and rounded as they are recorded."""
    for each in (number, round(number, digits)):
        assert canonical([each, {"a": each}]) == rfc8785.dumps(recordable([each, {"a": each}]))  # type: ignore[arg-type]


def test_the_quick_way_is_taken() -> None:
    """Control: an ordinary record goes the quick way, numbers that are written in two ways do not."""
    assert _plain({"b": [1, True, None], "a": "text 1.5"}) == b'{"a":"text 1.5","b":[1,true,null]}'
    assert _plain({"a": 1.5, "b": [-0.001]}) == b'{"a":1.5,"b":[-0.001]}'
    assert all(_plain({"a": each}) is None for each in (1.0, -0.0, 1e22, 1e-5, 1.5e-7, 1e16, 2.5e300))
    assert all(_plain({"a": [0, each]}) is None for each in (1.0, -0.0, 1e22, -1e-5, 2**53))
    assert _plain({"a": 2**53}) is None
    assert _plain({"ä": 1}) is None


@given(st.binary(min_size=32, max_size=32))
def test_no_digest_is_taken_for_a_number(digest: bytes) -> None:
    """One of a filter or a key is in every call's records: the slow way would make each call a tenth longer."""
    assert _plain({"digests": [f"sha256:{digest.hex()}"], "digest": f"sha256:{digest.hex()}"}) is not None
    assert _plain({"digest": f"sha256:1e5{digest.hex()[3:]}"}) is not None
