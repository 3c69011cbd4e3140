"""A call that waits for a person: what its client hears meanwhile, what it holds, and what is left when it goes."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import mcp_types as types
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from tests.interaction.served import Era, Served, Transport, connected, until, whole_server
from tests.interaction.test_asking import CODE, kinds, operate, options

from glovebox_server.mcp import delivery

__all__ = ["options"]

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

SECONDS = 60.0
WAITING = re.compile(r"Waiting for somebody to approve it: (a_\w{26})( \(\d+ s\))?")

ONE_TURN = """\
version = 1
default = "all"
[roles.all]
tools = ["run_python", "list_workspace_files"]
turns = 1
[[example]]
principal = "token:default"
call = { tool = "list_workspace_files", arguments = {} }
expect = "allow"
"""


@pytest.mark.parametrize(("transport", "era"), [("stdio", "modern"), ("http", "legacy")])
async def test_who_waits_hears_what_for_and_holds_no_turn(
    transport: Transport, era: Era, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the sentence and with every heartbeat; another call of a caller with one turn passes; a yes lets it go on."""
    assert delivery.HEARTBEAT_SECONDS == 5
    monkeypatch.setattr(delivery, "HEARTBEAT_SECONDS", 0.3)
    (tmp_path / "policy.toml").write_text(ONE_TURN)
    heard: list[str] = []
    results: list[types.CallToolResult] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message or "")

    async def call(client: Client) -> None:
        results.append(await client.call_tool("run_python", {"code": CODE}, progress_callback=hear))

    async with connected(transport, era, options) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(call, client)
        await until(lambda: sum("approve it" in message for message in heard) >= 3, SECONDS)
        identifiers = [
            re.fullmatch(r"Waiting for somebody to approve it: (a_\w{26})( \(\d+ s\))?", each) for each in heard
        ]
        (identifier,) = {found[1] for found in identifiers if found}
        assert len([found for found in identifiers if found and found[2]]) >= 2
        assert not (await client.call_tool("list_workspace_files", {})).is_error
        assert not results
        operate(["approvals", "allow", identifier], options)
        await until(lambda: bool(results), SECONDS)
    assert (results[0].structured_content or {})["stdout"]["text"] == "42\n"


@pytest.mark.parametrize("era", ["legacy", "modern"])
@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_of_a_caller_that_goes_nothing_is_left_pending(
    how: str, era: Era, options: list[str], tmp_path: Path
) -> None:
    """Cancelled, or its connection gone, while it waits: the question is withdrawn, and no answer counts any more."""
    async with whole_server(options, "http", "alice") as server:
        async with leaving(server, era, how):
            await until(lambda: kinds(tmp_path) == ["approval.requested"], SECONDS)
        await until(lambda: kinds(tmp_path)[-1:] == ["approval.withdrawn"], SECONDS)
    assert kinds(tmp_path) == ["approval.requested", "approval.withdrawn"]
    assert operate(["approvals", "list"], options) == "No call waits for approval.\n"


async def test_of_a_caller_that_goes_while_its_person_is_asked_nothing_is_left(
    options: list[str], tmp_path: Path
) -> None:
    """The form is open, and the client leaves: as above."""
    asked = anyio.Event()

    async def ponder(_context: Any, _params: types.ElicitRequestParams) -> types.ElicitResult:
        asked.set()
        await anyio.sleep_forever()
        raise AssertionError

    async with whole_server(options, "http", "alice") as server:
        async with leaving(server, "legacy", "closed", elicitation_callback=ponder):
            await until(asked.is_set, SECONDS)
        await until(lambda: kinds(tmp_path)[-1:] == ["approval.withdrawn"], SECONDS)


@asynccontextmanager
async def leaving(server: Served, era: Era, how: str, **abilities: Any) -> AsyncIterator[None]:
    """Connect and call; go where the block ends."""

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        """A client that hears progress waits."""

    try:
        async with (
            httpx2.AsyncClient(headers={"Authorization": f"Bearer {server.tokens['alice']}"}, timeout=60) as http,
            Client(
                streamable_http_client(f"{server.url}/mcp", http_client=http),
                mode="legacy" if era == "legacy" else "auto",
                **abilities,
            ) as client,
            anyio.create_task_group() as calls,
        ):

            async def call() -> None:
                await client.call_tool("run_python", {"code": CODE}, progress_callback=hear)

            calls.start_soon(call)
            yield
            if how == "closed":
                await http.aclose()
            calls.cancel_scope.cancel()
    except* httpx2.TransportError:
        assert how == "closed"
