"""The messages beside a call never become its result."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from glovebox_server.audit.subscription import Subscription
from glovebox_server.mcp import delivery


class Silent:
    """A log in which nothing can be written: its disk is full."""

    offered = True
    """Whether it was not full yet when the call was decided."""

    @asynccontextmanager
    async def subscribe(self, call_id: str) -> AsyncIterator[Subscription]:
        """A subscription that stays empty and is closed at the end, as the log's own."""
        subscription = Subscription(call_id, None)
        subscription.offered = self.offered
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


@pytest.mark.parametrize("offered", [True, False])
async def test_only_records_of_a_call_that_has_some_are_waited_for(
    offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose arguments are wrong, or for which the server is too busy, has none."""
    monkeypatch.setattr(delivery, "hears_audit", lambda *_: True)
    monkeypatch.setattr(delivery, "FLUSH_SECONDS", 0.2)
    monkeypatch.setattr(Silent, "offered", offered)
    context: Any = SimpleNamespace(meta={}, session=None)
    log: Any = Silent()
    began = anyio.current_time()
    async with delivery.listening(context, log, "c_1", "info", {}):
        pass
    assert (anyio.current_time() - began >= 0.2) == offered
