"""Any byte of a receipt: changed, removed or added, it is noticed, with a reason and no other exception."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fixtures.receipts import KEY

from glovebox_audit.chain import EvidenceError, canonical
from glovebox_audit.receipts import dsse

PAYLOAD = b'{"_type":"https://in-toto.io/Statement/v1","subject":[{"name":"\xc3\xa9"}]}'


@cache
def envelope() -> bytes:
    """A signed envelope; its padding has bits that base64 readers ignore."""
    content = canonical(dsse.EnvelopeSigner(KEY).sign(PAYLOAD))
    assert b"=" in content
    return content


def proved(content: bytes) -> bytes:
    """The payload, if the envelope holds."""
    found = dsse.parse(content)
    dsse.check(found, KEY.public_key())
    return found.payload


def test_the_control_it_holds() -> None:
    """Unchanged."""
    assert proved(envelope()) == PAYLOAD


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_is_noticed(bit: int) -> None:
    """All of them, one after the other: also in the key's id, and in bits that base64 does not use."""
    for place in range(len(envelope())):
        changed = bytearray(envelope())
        changed[place] ^= 1 << bit
        with pytest.raises(EvidenceError):
            proved(bytes(changed))


@given(st.data())
def test_every_other_change_is_noticed(data: st.DataObject) -> None:
    """A part replaced by any bytes, the same text spelt otherwise, bytes before or after."""
    whole = envelope()
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(len(whole), start + 8)))
    changed = whole[:start] + data.draw(st.binary(max_size=8)) + whole[end:]
    if changed.removesuffix(b"\n") == whole:
        return
    with pytest.raises(EvidenceError):
        proved(changed)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    """Never another exception."""
    with pytest.raises(EvidenceError):
        proved(content)
