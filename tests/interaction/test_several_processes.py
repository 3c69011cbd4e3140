"""Several server processes behind one socket: real processes and clients; only sandboxes are missing."""

import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx2
import psutil
import pytest
from mcp import Client
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from tests.fixtures.audit_logs import log_lines
from tests.interaction.node import ROOT, fake_server
from tests.interaction.served import TIMEOUT_SECONDS

ENDS = {"call.finished", "call.cancelled", "call.lost"}


@dataclass(slots=True, kw_only=True)
class Several:
    """A running parent of two processes."""

    url: str
    tokens: dict[str, str]
    parent: psutil.Process

    def headers(self, name: str = "alice") -> dict[str, str]:
        """What names a caller."""
        return {"Authorization": f"Bearer {self.tokens[name]}"}


@asynccontextmanager
async def several(directory: Path) -> AsyncIterator[Several]:
    """Run two processes; SIGTERM to their parent ends all in good order, and every call has one end."""
    process = await anyio.open_process(fake_server("http*2", directory, "alice", "bob"), cwd=ROOT, stderr=None)
    try:
        assert process.stdout is not None
        found = json.loads(await process.stdout.receive())
        parent = psutil.Process(process.pid)
        yield Several(url=found["url"], tokens=found["tokens"], parent=parent)
        children = parent.children()
        process.terminate()
        with anyio.fail_after(TIMEOUT_SECONDS):
            assert await process.wait() == 0
        assert not [each for each in children if each.is_running()]
    finally:
        await process.aclose()
    records = [json.loads(line) for line in log_lines(directory / "audit")]
    begun = Counter(each["call_id"] for each in records if each["kind"] == "call.decided")
    assert begun == Counter(each["call_id"] for each in records if each["kind"] in ENDS)


@pytest.mark.parametrize("transport", ["http", "sse"])
async def test_requests_reach_the_process_of_their_session(transport: str, tmp_path: Path) -> None:
    """Eight sessions in both processes, over connections they share and over one for each request."""
    ids: list[str] = []

    async def note(response: httpx2.Response) -> None:
        ids.extend([response.headers["mcp-session-id"]] if "mcp-session-id" in response.headers else [])

    async def note_sent(request: httpx2.Request) -> None:
        ids.extend([request.url.params["session_id"]] if "session_id" in request.url.params else [])

    async with several(tmp_path) as server, AsyncExitStack() as stack:

        def http(*, most: int | None = None, **_: Any) -> httpx2.AsyncClient:
            return httpx2.AsyncClient(
                headers=server.headers(), event_hooks={"response": [note], "request": [note_sent]}, timeout=30,
                limits=httpx2.Limits(max_keepalive_connections=most),
            )  # fmt: skip

        def wire(number: int) -> Any:
            if transport == "sse":
                factory: Any = http
                return sse_client(f"{server.url}/sse", httpx_client_factory=factory)
            return streamable_http_client(f"{server.url}/mcp", http_client=(kept, fresh)[number % 2])

        kept, fresh = [await stack.enter_async_context(http(most=most)) for most in (None, 0)]
        clients = [await stack.enter_async_context(Client(wire(n), mode="legacy")) for n in range(8)]

        async def call(number: int, turn: int) -> None:
            tag = f"{number} {turn}"
            found = await clients[number].call_tool("run_python", {"code": "1", "tag": tag})
            assert found.structured_content["tag"] == tag

        for turn in range(4):
            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(call, number, turn)
    assert {each[:2] for each in ids} == {"00", "01"}
