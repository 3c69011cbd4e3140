"""A receipt that does not hold says so in words that do nothing to the terminal they are read in."""

import json
from pathlib import Path

import pytest
from tests.fixtures.receipts import public, receipt_log

from glovebox_audit import chain
from glovebox_audit.receipts import statement
from glovebox_audit.receipts.dsse import NotAReceipt
from glovebox_audit.receipts.verify import verify


async def test_a_stranger_in_the_key_id_is_told_in_escapes(tmp_path: Path) -> None:
    """Found by fuzzing: nothing is proved when the reason names the key, so it may hold anything."""
    async with receipt_log(tmp_path) as one:
        await one.receipt()
        envelope = json.loads(one.content())
    assert verify(chain.canonical(envelope), public()), "control: it holds as it is"
    envelope["signatures"][0]["keyid"] = "\x1b[2J\x1b]0;owned\x07"
    with pytest.raises(NotAReceipt, match="another key") as refused:
        verify(chain.canonical(envelope), public())
    assert str(refused.value).isprintable()


def test_a_statement_with_an_endless_key_gets_a_short_reason() -> None:
    """Found by fuzzing: the reason repeated the key, whatever was in it."""
    content = json.dumps({"\x1b" * 5000: 1}).encode()
    for payload in (content, json.dumps({"predicate": {"x\n" * 3000: 1}}).encode()):
        with pytest.raises(NotAReceipt) as refused:
            statement.parse(payload)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 1500
