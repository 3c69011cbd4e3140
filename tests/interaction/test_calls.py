"""What a client sees of calls, over every transport and in both protocol eras, with the SDK's own client."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx2
import mcp_types as types
import pytest
from mcp import MCPError
from tests.interaction.served import PAIRS, TIMEOUT_SECONDS, Era, Logs, Transport, served, until

from glovebox_server.mcp import delivery
from glovebox_server.mcp.delivery import CALL_META_KEY, MAX_MESSAGE_BYTES
from glovebox_server.mcp.server import _refuse_cursor

pairs = pytest.mark.parametrize(("transport", "era"), PAIRS)


def _plain(result: types.CallToolResult) -> str:
    return "\n".join(block.text for block in result.content if isinstance(block, types.TextContent))


@pairs
async def test_tools_are_listed_the_same_every_time(transport: Transport, era: Era, tmp_path: Path) -> None:
    """M9: the list has a digest, hints and schemas, and does not change from one request to the next."""
    async with served(tmp_path, transport) as server, server.client(transport, era) as client:
        first = await client.list_tools(cache_mode="bypass")
        second = await client.list_tools(cache_mode="bypass")
    assert first.tools == second.tools
    assert first.meta is not None
    assert second.meta is not None
    assert first.meta["dev.glovebox/digest"] == second.meta["dev.glovebox/digest"]
    (tool,) = first.tools
    assert tool.input_schema["additionalProperties"] is False
    assert tool.output_schema is not None
    assert tool.annotations is not None
    assert tool.annotations.destructive_hint is False
    assert tool.annotations.open_world_hint is False


@pairs
async def test_a_result_is_complete_in_both_forms(transport: Transport, era: Era, tmp_path: Path) -> None:
    """M8: text, picture and link in content; the same facts in structured content; the call's id in _meta."""
    async with served(tmp_path, transport) as server, server.client(transport, era) as client:
        result = await client.call_tool("run_python", {"code": "plot", "tag": "t"})
        assert not result.is_error
        assert [block.type for block in result.content] == ["text", "image", "resource_link"]
        assert result.structured_content["stdout"] == "echo plot"
        assert result.meta is not None
        assert result.meta[CALL_META_KEY]["call_id"] == result.structured_content["call_id"]
        link = result.content[2]
        assert isinstance(link, types.ResourceLink)
        (content,) = (await client.read_resource(link.uri)).contents
        assert isinstance(content, types.TextResourceContents)
        assert content.text == "made for t"


@pairs
async def test_an_unknown_tool_is_a_protocol_error(transport: Transport, era: Era, tmp_path: Path) -> None:
    """The specification's -32602, in both eras; it names the tools there are."""
    async with served(tmp_path, transport) as server, server.client(transport, era) as client:
        with pytest.raises(MCPError, match="Unknown tool: run_shell") as raised:
            await client.call_tool("run_shell", {"command": "id"})
        assert raised.value.error.code == types.INVALID_PARAMS
        assert raised.value.error.data == {"tools": [tool.name for tool in (await client.list_tools()).tools]}


BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"code": "1", "sandbox_config": {"network": True}}, ["sandbox_config", "unknown argument"]),
    ({"code": "1", "env": {"A": "B"}, "timeout": 1e9}, ["env", "timeout", "unknown argument"]),
    ({"code": "1", "timeout_seconds": 1e9}, ["timeout_seconds", "120"]),
    ({"code": "1", "timeout_seconds": "5"}, ["timeout_seconds", "number"]),
    ({"code": "1", "timeout_seconds": -1}, ["timeout_seconds", "greater than 0"]),
    ({"code": "1", "timeout_seconds": True}, ["timeout_seconds", "number"]),
    ({"code": "x" * 1001}, ["code", "1000"]),
    ({"code": {"print": 1}}, ["code", "string"]),
    ({"code": "1", "inputs": '["a"]'}, ["inputs", "array"]),
    ({}, ["code", "missing"]),
]


@pairs
async def test_bad_arguments_are_named_and_nothing_starts(transport: Transport, era: Era, tmp_path: Path) -> None:
    """M4: each error names the field and the bound; text that looks like JSON is not read as JSON."""
    async with served(tmp_path, transport) as server, server.client(transport, era) as client:
        for arguments, words in BAD:
            result = await client.call_tool("run_python", arguments)
            assert result.is_error
            assert "nothing was started" in _plain(result)
            assert all(word in _plain(result) for word in words), (arguments, _plain(result))
            told = result.structured_content
            assert (told["refused"]["rule"], told["error"]) == ("arguments", None)
            assert words[0] in told["refused"]["fields"]
            assert words[-1] in told["refused"]["reason"]
            assert told["refused"]["hint"]
        assert not server.app.broker.started.is_set()
        # The control: the same tool with sound arguments runs, and text that looks like JSON arrives as text.
        result = await client.call_tool("run_python", {"code": '{"a": 1}', "timeout_seconds": 5})
        assert result.structured_content["stdout"] == 'echo {"a": 1}'


@pairs
async def test_a_call_that_is_not_begun_is_answered_at_once(
    transport: Transport, era: Era, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no record to wait for; of one that is begun all records come (the control)."""
    monkeypatch.setattr(delivery, "FLUSH_SECONDS", 2 * TIMEOUT_SECONDS)
    logs = Logs()
    async with (
        served(tmp_path, transport) as server,
        server.client(transport, era, logging_callback=logs, log_level="debug") as client,
    ):
        with anyio.fail_after(TIMEOUT_SECONDS):
            assert (await client.call_tool("run_python", {"code": 1})).is_error
            with pytest.raises(MCPError, match="Unknown tool"):
                await client.call_tool("run_shell", {})
            await client.call_tool("run_python", {"code": "1"})
        await until(lambda: [message.data["kind"] for message in logs.seen] == ["call.decided", "call.finished"])


@pairs
async def test_a_refusal_names_rule_reason_and_hint(transport: Transport, era: Era, tmp_path: Path) -> None:
    """A refusal by policy is a result the model can read, in both forms."""
    async with served(tmp_path, transport) as server, server.client(transport, era) as client:
        result = await client.call_tool("run_python", {"code": "refuse"})
    assert result.is_error
    assert result.structured_content["refused"] == {"rule": "test.rule", "reason": "No.", "hint": "Ask."}
    assert "test.rule" in _plain(result)


@pairs
async def test_our_own_failures_say_what_to_do(transport: Transport, era: Era, tmp_path: Path) -> None:
    """M12: what we know how to explain is explained; what nobody foresaw is not repeated to the caller."""
    async with served(tmp_path, transport) as server, server.client(transport, era) as client:
        result = await client.call_tool("run_python", {"code": "no sandbox"})
        assert result.is_error
        assert "Sandbox unavailable" in _plain(result)
        assert "apt-get install bubblewrap" in _plain(result)
        assert result.structured_content["error"]["kind"] == "SandboxError"
        result = await client.call_tool("run_python", {"code": "no audit"})
        assert "Audit unavailable" in _plain(result)
        assert result.structured_content["error"]["kind"] == "AuditError"
        with pytest.raises(MCPError, match="Internal error in call c_") as raised:
            await client.call_tool("run_python", {"code": "bug"})
        assert "canary" not in str(raised.value.error)


@pairs
async def test_a_large_result_is_cut_in_the_middle(transport: Transport, era: Era, tmp_path: Path) -> None:
    """No message is larger than clients take; what was left out is counted in both forms."""
    async with served(tmp_path, transport) as server, server.client(transport, era) as client:
        result = await client.call_tool("run_python", {"code": "big"})
    assert len(json.dumps(result.model_dump(mode="json", by_alias=True))) <= MAX_MESSAGE_BYTES + 1024
    assert "characters left out" in _plain(result)
    assert "characters left out" in result.structured_content["stdout"]


@pairs
async def test_live_output_and_progress_reach_a_client_that_asked(
    transport: Transport, era: Era, tmp_path: Path
) -> None:
    """Progress grows, is bounded in size and rate, and ends with the call."""
    heard: list[tuple[float, str]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, message or ""))

    async with (
        served(tmp_path, transport) as server,
        server.client(transport, era) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(lambda: client.call_tool("run_python", {"code": "print"}, progress_callback=hear))
        await until(lambda: any("line 999" in message for _, message in heard))
        server.app.broker.release.set()
    assert "sandbox started" in heard[0][1]
    assert [progress for progress, _ in heard] == sorted(progress for progress, _ in heard)
    assert all(len(message) <= 4200 for _, message in heard)
    assert len(heard) < 10


@pairs
async def test_a_silent_call_gives_signs_of_life(
    transport: Transport, era: Era, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M7: clients give up a call that says nothing; ours says what it does, to whoever gave a progress token."""
    monkeypatch.setattr(delivery, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(delivery, "PAUSE_SECONDS", 0.01)
    heard: list[str] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message or "")

    async with (
        served(tmp_path, transport) as server,
        server.client(transport, era) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(lambda: client.call_tool("run_python", {"code": "wait"}, progress_callback=hear))
        await until(lambda: sum(message == "sandbox started (0 s)" for message in heard) >= 3)
        server.app.broker.release.set()


@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_a_reader_that_stops_reading_does_not_slow_its_call(era: Era, tmp_path: Path) -> None:
    """Over HTTP a client that reads nothing gets nothing; its call runs to its end and is recorded all the same."""
    meta: dict[str, Any] = {"progressToken": 1}
    headers = {"Mcp-Protocol-Version": "2025-11-25"}
    if era == "modern":
        meta["io.modelcontextprotocol/protocolVersion"] = "2026-07-28"
        meta |= {"io.modelcontextprotocol/clientCapabilities": {}, "io.modelcontextprotocol/logLevel": "debug"}
        headers = {"Mcp-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "run_python"}
    params = {"name": "run_python", "arguments": {"code": "flood"}, "_meta": meta}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    async with served(tmp_path, "http") as server:
        headers |= {
            "Authorization": f"Bearer {server.tokens['alice']}",
            "Accept": "application/json, text/event-stream",
        }
        async with httpx2.AsyncClient(headers=headers, base_url=server.url) as http:
            if era == "legacy":
                info = {"name": "raw", "version": "1"}
                opening = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": info}
                begin = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": opening}
                answer = await http.post("/mcp", json=begin)
                http.headers["Mcp-Session-Id"] = answer.headers["mcp-session-id"]
            async with http.stream("POST", "/mcp", json=body) as response:
                assert response.status_code == 200
                await until(lambda: len(server.app.broker.finished) == 1)
    assert not server.app.broker.cancelled


@pairs
async def test_cancelling_kills_the_call_within_a_second(transport: Transport, era: Era, tmp_path: Path) -> None:
    """M6: the client gives up one call; that call ends, another of the same client runs on."""
    async with served(tmp_path, transport) as server, server.client(transport, era) as client:
        broker = server.app.broker
        async with anyio.create_task_group() as tasks:
            kept: list[types.CallToolResult] = []

            async def keep() -> None:
                kept.append(await client.call_tool("run_python", {"code": "wait", "tag": "kept"}))

            tasks.start_soon(keep)
            await until(lambda: len(broker.running) == 1)
            with anyio.CancelScope() as giving_up:
                async with anyio.create_task_group() as doomed:
                    doomed.start_soon(lambda: client.call_tool("run_python", {"code": "wait", "tag": "given up"}))
                    await until(lambda: len(broker.running) == 2)
                    giving_up.cancel()
            await until(lambda: len(broker.running) == 1)
            assert len(broker.cancelled) == 1
            assert [call.arguments["tag"] for call in broker.running.values()] == ["kept"]
            broker.release.set()
        assert kept[0].structured_content["tag"] == "kept"


@pairs
async def test_a_client_that_leaves_takes_its_calls_with_it(transport: Transport, era: Era, tmp_path: Path) -> None:
    """M6: closing the connection is enough; no cancellation has to arrive."""
    async with served(tmp_path, transport) as server:
        broker = server.app.broker
        with anyio.CancelScope() as leaving:
            async with server.client(transport, era) as client, anyio.create_task_group() as tasks:
                tasks.start_soon(lambda: client.call_tool("run_python", {"code": "wait"}))
                await until(lambda: len(broker.running) == 1)
                leaving.cancel()
        await until(lambda: not broker.running)
        assert len(broker.cancelled) == 1


@pairs
async def test_a_cursor_that_nobody_gave_out_is_refused(transport: Transport, era: Era, tmp_path: Path) -> None:
    """Every list is one page: with a cursor it is an invalid parameter, without one the whole list (control)."""
    async with served(tmp_path, transport) as server, server.client(transport, era) as client:
        for listed in (client.list_tools, client.list_resources, client.list_resource_templates, client.list_prompts):
            with pytest.raises(MCPError) as problem:
                await listed(cursor="bogus", cache_mode="bypass")
            assert problem.value.error.code == -32602
            assert await listed(cache_mode="bypass")


async def test_a_cursor_is_refused_of_lists_alone() -> None:
    """Another method that is called a list is none of ours: the SDK answers that it does not exist."""

    async def passed(_ctx: Any) -> None:
        raise MCPError(types.METHOD_NOT_FOUND, "Method not found")

    for method, code in (("tools/list", -32602), ("roots/list", -32601)):
        ctx: Any = SimpleNamespace(method=method, params={"cursor": "bogus"})
        with pytest.raises(MCPError) as problem:
            await _refuse_cursor(ctx, passed)
        assert problem.value.error.code == code
