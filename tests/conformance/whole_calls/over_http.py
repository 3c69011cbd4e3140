"""Makes a case's call as a client does over HTTP: through the server's own gate and MCP surface, without a socket."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from copy import copy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
from starlette.types import ASGIApp
from tests.conformance.whole_calls import issuing
from tests.conformance.whole_calls.case import TrialCall
from tests.conformance.whole_calls.seen import Seen

from glovebox_audit.event import Event
from glovebox_audit.events import RequestsRefused
from glovebox_audit.log import AuditLog
from glovebox_server.app import App
from glovebox_server.calls import CallResult, Text
from glovebox_server.core.broker import Broker
from glovebox_server.mcp.server import RUN_META_KEY, McpServer
from glovebox_server.requests import Refusals
from glovebox_server.transport import tokens
from glovebox_server.transport.auth import AuthMiddleware
from glovebox_server.transport.serve import by_token, http_application
from glovebox_server.transport.tokens import Callers

_HOST = "glovebox.proof"
_VERSION = "2026-07-28"
_ISSUED = ("issued", "issued for another", "issued long ago", "signed by another", "unsigned")
_ABOUT: Mapping[str, Any] = {
    "io.modelcontextprotocol/protocolVersion": _VERSION,
    "io.modelcontextprotocol/clientInfo": {"name": "proof", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}


class OverHttp:
    """One server, and a client of it. Make it with ``opened``."""

    def __init__(self, gate: ASGIApp, token: str | None, refusals: Refusals, audit: AuditLog) -> None:
        """Take the server, what its client comes with, and where what it refuses is counted and recorded."""
        self._client = httpx2.AsyncClient(transport=httpx2.ASGITransport(gate), base_url=f"http://{_HOST}", timeout=60)
        self._token = token
        self._refusals = refusals
        self._audit = audit
        self._recorded: list[RequestsRefused] = []

    @classmethod
    @asynccontextmanager
    async def opened(cls, app: App, broker: Broker, call: TrialCall, place: Path) -> AsyncIterator["OverHttp"]:
        """A server with this broker, and what a caller of this case has of a token there.

        Args:
            app: the server's parts.
            broker: instead of its own.
            call: whose token is whose, and what is wrong with it.
            place: where the case's tokens are.
        """
        refusals = Refusals()
        directory = place / tokens.DIRECTORY
        tokens.revoke(directory, call.caller)
        lifetime = timedelta(seconds=-1) if call.token == "expired" else None  # noqa: S105 - a word of the cases
        made = tokens.create(directory, call.caller, lifetime=lifetime)
        if made is None:
            raise AssertionError(call.caller)
        files = tokens.TokenFiles(directory)
        callers = Callers(files.tokens)
        own = copy(app)
        own.broker, own.refusals = broker, refusals
        surface = McpServer(own, partial(by_token, workflow=None))
        application, sessions = http_application(surface, callers)
        if call.token == "revoked":  # noqa: S105 - another word
            # What a server does within a second: it looks at the files.
            tokens.revoke(directory, call.caller)
            files.look()
            callers.replace(files.tokens)
        token: str | None = made[1]
        authority = None
        if call.token == "forged":  # noqa: S105 - and another
            token = made[1][:-1] + ("A" if made[1][-1] != "A" else "B")
        async with AsyncExitStack() as opened:
            if call.token in _ISSUED:
                authority, sign = await opened.enter_async_context(issuing.opened(_HOST))
                token = sign(call.token, call.caller)
            await opened.enter_async_context(sessions.run())
            gate = AuthMiddleware(application, hosts=[_HOST], callers=callers, authority=authority, refusals=refusals)
            way = cls(gate, None if call.token == "none" else token, refusals, app.audit)  # noqa: S105 - the last
            async with way._client:
                yield way

    async def make(self, call: TrialCall, arguments: Mapping[str, Any], handle: str, seen: Seen) -> None:
        """Make the call, and keep what is answered."""
        meta = {**_ABOUT, **({RUN_META_KEY: handle} if handle else {})}
        params = {"name": call.tool, "arguments": dict(arguments), "_meta": meta}
        headers = {
            "Accept": "application/json, text/event-stream",
            "MCP-Protocol-Version": _VERSION,
            "Mcp-Method": "tools/call",
            "Mcp-Name": call.tool,
            **({"Authorization": f"Bearer {self._token}"} if self._token else {}),
        }
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        answer = await self._client.post("/mcp", headers=headers, json=body)
        text = answer.text
        if not answer.is_success:
            seen.how, seen.told = str(answer.status_code), text
            return
        if answer.headers["content-type"].startswith("text/event-stream"):
            text = [line for line in text.splitlines() if line.startswith("data: ")][-1].removeprefix("data: ")
        found = json.loads(text)
        if "result" not in found:
            seen.how, seen.told = "protocol", text
            return
        result = found["result"]
        content = tuple(Text(text=each["text"]) for each in result["content"] if each["type"] == "text")
        structured, meta = result.get("structuredContent") or {}, result.get("_meta") or {}
        seen.call_id = structured.get("call_id", "")
        seen.result = CallResult(structured=structured, content=content, failed=result.get("isError", False), meta=meta)
        seen.handle = meta.get(RUN_META_KEY, "")

    async def counted(self) -> list[RequestsRefused]:
        """The records of what was refused before it became a call, written now."""
        await self._refusals.record(self)
        return self._recorded

    async def append(self, event: Event) -> None:
        """Write a record, and keep what it says."""
        if isinstance(event, RequestsRefused):
            self._recorded.append(event)
        await self._audit.append(event)
