"""The messages beside a call never become its result."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from glovebox_server.audit.subscription import Subscription
from glovebox_server.mcp import delivery


class Silent:
    """A log in which nothing can be written: its disk is full."""

    @asynccontextmanager
    async def subscribe(self, call_id: str) -> AsyncIterator[Subscription]:
        """A subscription that stays empty and is closed at the end, as the log's own."""
        subscription = Subscription(call_id, None)
        try:
            yield subscription
        finally:
            await subscription.aclose()


async def test_a_call_without_a_last_record_ends_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the soak: on a full disk a client that hears of records got a task group's error, not the reason."""
    monkeypatch.setattr(delivery, "hears_audit", lambda *_: True)
    monkeypatch.setattr(delivery, "FLUSH_SECONDS", 0.01)
    context: Any = SimpleNamespace(meta={}, session=None)
    log: Any = Silent()
    outcome = ""
    async with delivery.listening(context, log, "c_1", "info", {}):
        outcome = "Audit unavailable"
    assert outcome == "Audit unavailable"
