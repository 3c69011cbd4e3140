"""The messages beside a call never become its result."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import anyio
import mcp_types as types
import pytest
from starlette.requests import Request
from tests.fixtures.audit_logs import decided

from glovebox_audit import chain
from glovebox_audit.chain import draft
from glovebox_audit.subscription import Subscription
from glovebox_server.guards.approvals.question import Question
from glovebox_server.mcp import delivery
from glovebox_server.mcp.server import session_of


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


def test_a_record_is_spelled_in_one_way_on_the_wire() -> None:
    """``call_id`` as in the log and in results; control: the SDK's own fields are ``camelCase``."""
    record = chain.seal(draft(decided("c_1")), seq=1, time="2026-11-20T12:00:00.000001Z", server="s", prev="f" * 64)
    assert delivery.show_record(record).keys() == {"seq", "kind", "time", "call_id", "data", "hash"}
    assert types.ResourceTemplate.model_fields["uri_template"].serialization_alias == "uriTemplate"


async def nobody(_question: Question) -> None:
    """A client that cannot be asked."""


async def test_a_call_without_a_last_record_ends_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the soak: on a full disk a client that hears of records got a task group's error, not the reason."""
    monkeypatch.setattr(delivery, "levels_of", lambda _: {"alert"})
    monkeypatch.setattr(delivery, "FLUSH_SECONDS", 0.01)
    context: Any = SimpleNamespace(meta={}, session=None)
    log: Any = Silent()
    outcome = ""
    async with delivery.deliver_messages(context, log, "c_1", {}, nobody):
        outcome = "Audit unavailable"
    assert outcome == "Audit unavailable"


@pytest.mark.parametrize("offered", [True, False])
async def test_only_records_of_a_call_that_has_some_are_waited_for(
    offered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose arguments are wrong, or for which the server is too busy, has none."""
    monkeypatch.setattr(delivery, "levels_of", lambda _: {"alert"})
    monkeypatch.setattr(delivery, "FLUSH_SECONDS", 0.2)
    monkeypatch.setattr(Silent, "offered", offered)
    context: Any = SimpleNamespace(meta={}, session=None)
    log: Any = Silent()
    began = anyio.current_time()
    async with delivery.deliver_messages(context, log, "c_1", {}, nobody):
        pass
    assert (anyio.current_time() - began >= 0.2) == offered


@pytest.mark.parametrize(
    ("path", "query", "named"),
    [
        ("/messages/", "session_id=0123456789abcdef0123456789ABCDEF", "0123456789abcdef0123456789abcdef"),
        ("/messages/", "session_id={01234567-89ab-cdef-0123-456789abcdef---}", "0123456789abcdef0123456789abcdef"),
        ("/mcp", "session_id=0123456789abcdef0123456789abcdef", "made-up"),
    ],
)
def test_a_session_has_the_one_name_that_its_transport_checked(path: str, query: str, named: str) -> None:
    """Over SSE that is the address's, in one spelling, and no header; over streamable HTTP it is the header's."""
    scope = {
        "type": "http", "method": "POST", "scheme": "http", "server": ("127.0.0.1", 80), "path": path,
        "query_string": query.encode(), "headers": [(b"mcp-session-id", b"made-up")],
    }  # fmt: skip
    context: Any = SimpleNamespace(request=Request(scope), protocol_version="2025-11-25")
    assert session_of(context) == named
    context.protocol_version = "2026-07-28"
    assert session_of(context) is None
