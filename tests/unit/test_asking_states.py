"""What clients carry between a question and its answer is sealed: for one caller and request, by one key, for a day.

And who is asked at all: by what the client declared, and by how long the question is.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import mcp.server.request_state as sdk
import mcp_types as types
import pytest
from mcp.shared.exceptions import MCPError

from glovebox_server.calls import Principal
from glovebox_server.mcp import asking
from glovebox_server.mcp.asking import MAX_ASKED_BYTES, STATE_SECONDS, ClientMustAnswerError

KEY = b"k" * 32
CALL = {"name": "run_python", "arguments": {"code": "1"}}
ID = "a_" + "0" * 26
QUESTION: Any = SimpleNamespace(asked=SimpleNamespace(reach="call"), id=ID)


@dataclass(frozen=True)
class Request:
    params: dict[str, Any]
    caller: str = "token:a"
    method: str = "tools/call"


async def given(request: Request, key: bytes = KEY) -> str:
    async def ask(_ctx: object) -> types.InputRequiredResult:
        return types.InputRequiredResult(input_requests={}, request_state=ID)

    found: Any = await asking.seal_states(key, _identify)(_context(request), ask)
    return str(found.request_state)


async def taken(request: Request, key: bytes = KEY) -> str | None:
    found: list[str | None] = []

    async def look(ctx: Any) -> types.CallToolResult:
        found.append(ctx.params.get("requestState"))
        return types.CallToolResult(content=[])

    await asking.seal_states(key, _identify)(_context(request), look)
    return found[0]


def _identify(ctx: Any) -> Principal:
    return Principal(id=ctx.caller, transport="http")


def _context(request: Request) -> Any:
    return request


@pytest.mark.parametrize(
    ("changed", "caller", "key"),
    [
        ({}, "token:b", KEY), ({}, "token:a", b"o" * 32), ({"name": "fetch_url"}, "token:a", KEY),
        ({"arguments": {"code": "2"}}, "token:a", KEY), ({"requestState": ID}, "token:a", KEY),
    ],
    ids=["another caller", "another state directory", "another tool", "other arguments", "the question's id"],
)  # fmt: skip
async def test_a_state_is_for_its_caller_and_request_alone(changed: dict[str, Any], caller: str, key: bytes) -> None:
    """Refused, and the same state where it belongs still names its question (the control)."""
    state = await given(Request(CALL))
    assert ID not in state
    with pytest.raises(MCPError, match="requestState") as refused:
        await taken(Request({**CALL, "requestState": state, **changed}, caller), key)
    assert refused.value.error.data["reason"] == "invalid_request_state"
    assert await taken(Request({**CALL, "requestState": state})) == ID


async def test_a_state_is_good_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second before its end it is (the control)."""
    monkeypatch.setattr(sdk, "time", SimpleNamespace(time=lambda: 1000.0))
    state = await given(Request(CALL))
    monkeypatch.setattr(sdk, "time", SimpleNamespace(time=lambda: 1000.0 + 24 * 3600 - 1))
    assert await taken(Request({**CALL, "requestState": state})) == ID
    assert STATE_SECONDS == 24 * 3600
    monkeypatch.setattr(sdk, "time", SimpleNamespace(time=lambda: 1000.0 + 24 * 3600))
    with pytest.raises(MCPError, match="requestState"):
        await taken(Request({**CALL, "requestState": state}))


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
