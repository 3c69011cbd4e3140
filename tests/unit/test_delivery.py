"""Messages beside a call never become its result; what clients carry between a question and its answer is sealed.

And who is asked at all: by what the client declared, and by how long the question is.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import anyio
import mcp.server.request_state as sdk
import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError
from starlette.requests import Request
from tests.fixtures.audit_logs import decided

from glovebox_audit import chain
from glovebox_audit.chain import draft
from glovebox_audit.subscription import Subscription
from glovebox_server.calls import Principal
from glovebox_server.guards.approvals.question import Question
from glovebox_server.mcp import asking, delivery
from glovebox_server.mcp.asking import MAX_ASKED_BYTES, STATE_SECONDS, ClientMustAnswerError
from glovebox_server.mcp.server import session_of


class Silent:
    """A log in which nothing can be written: its disk is full."""

    offered = True
    """Whether it was not full yet when the call was decided."""

    @asynccontextmanager
    async def subscribe(self, call_id: str) -> AsyncIterator[Subscription]:
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
async def test_only_a_call_that_has_records_is_waited_for(offered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


KEY = b"k" * 32
CALL = {"name": "run_python", "arguments": {"code": "1"}}
ID = "a_" + "0" * 26
QUESTION: Any = SimpleNamespace(asked=SimpleNamespace(reach="call"), id=ID)


@dataclass(frozen=True)
class Carried:
    params: dict[str, Any]
    caller: str = "token:a"
    method: str = "tools/call"


async def given(request: Carried, key: bytes = KEY) -> str:
    async def ask(_ctx: object) -> types.InputRequiredResult:
        return types.InputRequiredResult(input_requests={}, request_state=ID)

    found: Any = await asking.seal_states(key, _identify)(_context(request), ask)
    return str(found.request_state)


async def taken(request: Carried, key: bytes = KEY) -> str | None:
    found: list[str | None] = []

    async def look(ctx: Any) -> types.CallToolResult:
        found.append(ctx.params.get("requestState"))
        return types.CallToolResult(content=[])

    await asking.seal_states(key, _identify)(_context(request), look)
    return found[0]


def _identify(ctx: Any) -> Principal:
    return Principal(id=ctx.caller, transport="http")


def _context(request: Carried) -> Any:
    return request


@pytest.mark.parametrize(
    ("changed", "caller", "key"),
    [
        ({}, "token:b", KEY),
        ({}, "token:a", b"o" * 32),
        ({"name": "fetch_url"}, "token:a", KEY),
        ({"arguments": {"code": "2"}}, "token:a", KEY),
        ({"requestState": ID}, "token:a", KEY),
    ],
    ids=["another caller", "another state directory", "another tool", "other arguments", "the question's id"],
)
async def test_a_state_is_for_its_caller_and_request_alone(changed: dict[str, Any], caller: str, key: bytes) -> None:
    """Refused, and the same state where it belongs still names its question (the control)."""
    state = await given(Carried(CALL))
    assert ID not in state
    with pytest.raises(MCPError, match="requestState") as refused:
        await taken(Carried({**CALL, "requestState": state, **changed}, caller), key)
    assert refused.value.error.data["reason"] == "invalid_request_state"
    assert await taken(Carried({**CALL, "requestState": state})) == ID


async def test_a_state_is_good_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second before its end it is (the control)."""
    monkeypatch.setattr(sdk, "time", SimpleNamespace(time=lambda: 1000.0))
    state = await given(Carried(CALL))
    monkeypatch.setattr(sdk, "time", SimpleNamespace(time=lambda: 1000.0 + 24 * 3600 - 1))
    assert await taken(Carried({**CALL, "requestState": state})) == ID
    assert STATE_SECONDS == 24 * 3600
    monkeypatch.setattr(sdk, "time", SimpleNamespace(time=lambda: 1000.0 + 24 * 3600))
    with pytest.raises(MCPError, match="requestState"):
        await taken(Carried({**CALL, "requestState": state}))


async def asks(capabilities: types.ClientCapabilities | None, text: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(asking, "shown", lambda _question: text)
    session = SimpleNamespace(client_capabilities=capabilities)
    ctx: Any = SimpleNamespace(session=session, protocol_version="2026-07-28")
    params = types.CallToolRequestParams(name="run_python")
    try:
        return await asking.ask_client(ctx, Principal(id="token:a", transport="http"), params, QUESTION) is not None
    except ClientMustAnswerError as must:
        return text in must.result.model_dump_json()


FORMS = types.ClientCapabilities(elicitation=types.ElicitationCapability(form=types.FormElicitationCapability()))
URLS = types.ClientCapabilities(elicitation=types.ElicitationCapability(url=types.UrlElicitationCapability()))
EMPTY = types.ClientCapabilities(elicitation=types.ElicitationCapability())


@pytest.mark.parametrize(
    ("declared", "asked"),
    [(None, False), (types.ClientCapabilities(), False), (URLS, False), (FORMS, True), (EMPTY, True)],
    ids=["nothing", "no elicitation", "addresses alone", "forms", "elicitation as in 2025-06-18"],
)
async def test_a_client_that_does_not_show_forms_is_not_asked(
    declared: types.ClientCapabilities | None, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await asks(declared, "?", monkeypatch) == asked


async def test_what_is_too_long_to_be_read_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its bytes; as long as the bound it is asked whole (the control)."""
    assert await asks(FORMS, "x" * MAX_ASKED_BYTES, monkeypatch)
    assert not await asks(FORMS, "x" * (MAX_ASKED_BYTES + 1), monkeypatch)
    assert not await asks(FORMS, "é" * (MAX_ASKED_BYTES // 2 + 1), monkeypatch)
