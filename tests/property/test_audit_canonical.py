"""The quick way to canonical JSON gives what the slow one gives, byte for byte, for anything a record can hold."""

import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from server.audit.chain import _plain, canonical, recordable

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


def test_the_quick_way_is_taken() -> None:
    """Control: an ordinary record goes the quick way, a number with a fraction does not."""
    assert _plain({"b": [1, True, None], "a": "text 1.5"}) == b'{"a":"text 1.5","b":[1,true,null]}'
    assert _plain({"a": 1.5}) is None
    assert _plain({"a": 2**53}) is None
    assert _plain({"ä": 1}) is None
