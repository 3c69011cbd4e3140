"""Requests that never become a call: counted by caller and rule, in the log and in /health, on every way in."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from mcp.shared.exceptions import MCPError
from tests.fixtures.audit_logs import log_lines
from tests.interaction.fakes import as_app, fake_app
from tests.interaction.served import PAIRS, Era, Served, Transport, served

from glovebox_server.mcp.delivery import CALL_META_KEY
from glovebox_server.mcp.server import RUN_META_KEY
from glovebox_server.requests import Runs
from glovebox_server.transport import stdio
from glovebox_server.transport.serve import serve_stdio


def counted(directory: Path) -> Counter[tuple[str | None, str]]:
    """What the log says, by caller and rule."""
    found: Counter[tuple[str | None, str]] = Counter()
    for line in log_lines(directory / "audit"):
        record = json.loads(line)
        if record["kind"] == "requests.refused":
            for row in record["data"]["refused"]:
                found[row.get("principal"), row["rule"]] += row["count"]
    return found


@pytest.mark.parametrize(("transport", "era"), PAIRS)
async def test_what_a_client_gets_wrong_is_counted_on_every_way_in(
    transport: Transport, era: Era, tmp_path: Path
) -> None:
    """An unknown tool, bad arguments, an address of nothing, a method there is not; the control is a call that runs."""
    async with served(tmp_path, transport) as server, server.client(transport, era) as client:
        assert not (await client.call_tool("run_python", {"code": "1"})).is_error
        for _ in range(3):
            with pytest.raises(MCPError):
                await client.call_tool("rm", {})
        wrong = await client.call_tool("run_python", {"code": 7})
        assert (wrong.meta or {})[CALL_META_KEY]["principal"]
        with pytest.raises(MCPError):
            await client.read_resource("artifact://" + "0" * 32)
    ((caller, _), *_) = counted(tmp_path)
    assert caller is not None
    assert counted(tmp_path) == {
        (caller, "tool.unknown"): 3,
        (caller, "arguments"): 1,
        (caller, "artifacts.unknown"): 1,
    }


async def test_what_the_gate_turns_away_is_counted_by_who_it_was(tmp_path: Path) -> None:
    """Strangers as strangers, callers by name; SIGTERM writes the last counts, and /health tells who has a token."""
    async with served(tmp_path, "http") as server, httpx2.AsyncClient() as http:
        url, alice = f"{server.url}/mcp", {"Authorization": f"Bearer {server.tokens['alice']}"}
        for _ in range(20):
            assert (
                await http.post(url, headers={"Authorization": "Bearer \x1b]0;evil"}, content=b"{")
            ).status_code == 401
        assert (await http.post(url, headers={**alice, "Host": "evil.example"})).status_code == 421
        assert (await http.post(url, headers={**alice, "Origin": "https://evil.example"})).status_code == 403
        assert (await http.post(url, headers=alice, content=b"{" * 9)).status_code == 400
        assert (await http.post(url, headers=alice, content=b"0" * (2 << 20))).status_code == 413
        nothing = await http.get(f"{server.url}/artifacts/{'0' * 32}", headers=alice)
        assert nothing.status_code == 404
        told = (await http.get(f"{server.url}/health", headers=alice)).json()
        stranger = (await http.get(f"{server.url}/health")).json()
    expected = {
        "http.token": 20,
        "http.host": 1,
        "http.origin": 1,
        "message": 1,
        "message.size": 1,
        "artifacts.unknown": 1,
    }
    assert told["refused_requests"] == expected
    assert stranger == {"status": "ok"}
    assert counted(tmp_path) == {
        (None, "http.token"): 20,
        (None, "http.host"): 1,
        (None, "http.origin"): 1,
        ("token:alice", "message"): 1,
        ("token:alice", "message.size"): 1,
        ("token:alice", "artifacts.unknown"): 1,
    }
    assert all(b"evil" not in line.encode() for line in map(str, log_lines(tmp_path / "audit")))


async def post(
    server: Served, http: httpx2.AsyncClient, name: str, meta: dict[str, Any], *more: tuple[str, str]
) -> dict[str, Any]:
    """One call over HTTP in the modern era, as bytes on the wire."""
    about = {
        "io.modelcontextprotocol/protocolVersion": "2026-07-28",
        "io.modelcontextprotocol/clientInfo": {"name": "raw", "version": "1"},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    params = {"name": "run_python", "arguments": {"code": "1"}, "_meta": {**about, **meta}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    headers = {
        "Authorization": f"Bearer {server.tokens[name]}",
        "Accept": "application/json, text/event-stream",
        "MCP-Protocol-Version": "2026-07-28",
        "Mcp-Method": "tools/call",
        "Mcp-Name": "run_python",
    }
    answer = await http.post(f"{server.url}/mcp", headers=[*headers.items(), *more], json=body)
    text = answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        text = [line for line in text.splitlines() if line.startswith("data: ")][-1].removeprefix("data: ")
    result: dict[str, Any] = json.loads(text)["result"]
    return result


async def test_twenty_forged_handles_name_no_run_and_the_true_one_still_does(tmp_path: Path) -> None:
    """Another's, cut, grown, changed, of another key, of another type: each refused by name and counted."""
    async with served(tmp_path, "http") as server, httpx2.AsyncClient() as http:
        first = await post(server, http, "alice", {})
        handle = first["_meta"][RUN_META_KEY]
        run, _, proof = handle.partition(".")
        theirs = (await post(server, http, "bob", {}))["_meta"][RUN_META_KEY]
        forged: list[object] = [
            theirs, run, proof, f"{run}.", f".{proof}", f"{run}.{theirs.partition('.')[2]}",
            f"{theirs.partition('.')[0]}.{proof}", handle[:-1], f"{handle}=", f"{handle}\0", f" {handle}",
            handle.upper(), handle[::-1], f"{run[:-1]}{'0' if run[-1] != '0' else '1'}.{proof}",
            Runs(b"o" * 32).handle("token:alice", run), Runs(b"k" * 32).handle("token:bob", run), "", 7, [handle],
            {"run": handle}, True, "r_" + "0" * 10_000,
        ]  # fmt: skip
        assert len(forged) >= 20
        for each in forged:
            refused = await post(server, http, "alice", {RUN_META_KEY: each})
            assert refused["isError"], each
            assert refused["structuredContent"]["refused"]["rule"] == "run.handle"
            assert refused["_meta"][CALL_META_KEY]["principal"] == "token:alice"
            assert RUN_META_KEY not in refused["_meta"]
        again = await post(server, http, "alice", {RUN_META_KEY: handle})
        assert not again.get("isError")
        assert again["_meta"][RUN_META_KEY] == handle
    assert counted(tmp_path) == {("token:alice", "run.handle"): len(forged)}


async def test_a_line_that_is_no_message_is_counted_over_stdio(tmp_path: Path) -> None:
    """Broken JSON, and a line that is too long; the connection goes on."""
    async with fake_app(tmp_path) as app, anyio.create_task_group() as tasks:
        to_server, to_client = os.pipe(), os.pipe()
        tasks.start_soon(serve_stdio, as_app(app), stdio.StdioFds(read=to_server[0], write=to_client[1]))
        for line in (b"{\n", b"[]\n", b"x" * (stdio.MAX_LINE_BYTES + 2) + b"\n"):
            await anyio.to_thread.run_sync(os.write, to_server[1], line[:-1])
            await anyio.to_thread.run_sync(os.write, to_server[1], b"\n")
        with anyio.fail_after(10):
            while app.refusals.totals.total() < 3:  # noqa: ASYNC110 - what is awaited is another's count
                await anyio.sleep(0.01)
        os.close(to_server[1])
    assert counted(tmp_path) == {(f"local:{os.getuid()}", "message"): 2, (f"local:{os.getuid()}", "message.size"): 1}
