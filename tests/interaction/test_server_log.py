"""The server's log with real clients: whatever a peer or a library says, a line is one line and harmless."""

import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch
from urllib.parse import quote

import anyio
import httpx2
import pytest
import structlog
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.shared.exceptions import MCPError
from tests.interaction.served import served, until

from glovebox_audit.printable import printable
from glovebox_sandboxes.host.owner import server_id
from glovebox_server.transport import logs

FORGED = "x\n2026-11-23T09:59:59Z [info     ] listening url=http://evil\r\x1b[2J\x9b2J\u202e"


@contextmanager
def own_process(form: Literal["text", "json"] = "text") -> Iterator[None]:
    """Leave logging to the server, as in a process of its own: pytest has handlers on the root logger, too."""
    with patch.object(logging.getLogger(), "handlers", []):
        logs.to_stderr(form=form)
        yield


async def test_no_peer_forges_a_line_after_an_sse_client_has_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The SDK calls ``logging.debug`` when such a client leaves, which must not install another handler.

    The control is the first attempt, before any client has left.
    """
    with own_process():
        await _forge(tmp_path)
    lines = [line for line in capsys.readouterr().err.splitlines() if "listening" in line]
    assert len(lines) == 3
    assert all(printable(line) == line and "Received invalid session ID: x\\n" in line for line in lines[:2])
    assert lines[2].count("listening: bad request: %d") == 1


async def _forge(directory: Path) -> None:
    async with served(directory, "sse") as server, httpx2.AsyncClient() as http:
        headers = {"Authorization": f"Bearer {server.tokens['bob']}"}
        address = f"{server.url}/messages/?session_id={quote(FORGED)}"
        assert (await http.post(address, headers=headers, json={})).status_code == 400
        async with server.client("sse", "legacy") as client:
            await client.list_tools()
        await until(lambda: not server.gate._requests)
        assert (await http.post(address, headers=headers, json={})).status_code == 400
        logging.getLogger("uvicorn.error").error("listening: bad request: %d", FORGED)


@pytest.mark.parametrize("form", ["text", "json"])
async def test_each_call_is_one_line_that_nothing_of_its_arguments_is_in(
    form: Literal["text", "json"], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Time, level, tool, outcome, caller, id, seconds; the tool's name too is the caller's where there is no such."""
    with own_process(form):
        async with served(tmp_path, "http") as server, server.client("http", "modern") as client:
            await client.call_tool("run_python", {"code": "print('/etc/SECRET http://SECRET')"})
            await client.call_tool("run_python", {"code": 7, "SECRET": 1})
            with pytest.raises(MCPError):
                await client.call_tool("SECRET", {})
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(client.call_tool, "run_python", {"code": "wait"})
                await until(lambda: bool(server.app.broker.running))
                tasks.cancel_scope.cancel()
            await until(lambda: len(server.app.broker.cancelled) == 1)
        structlog.get_logger("ours").warning(FORGED + "\x7f", value=FORGED, exc_info=ValueError(FORGED))
        logging.getLogger("httpx2").info("GET http://SECRET")
    written = capsys.readouterr().err
    assert "SECRET" not in written
    assert all(printable(line) == line for line in written.splitlines())
    calls = [_read(line, form) for line in written.splitlines() if "run_python" in line or "unknown" in line]
    told = [(call["level"], call["tool"], call["outcome"], call["caller"]) for call in calls]
    outcomes = ["succeeded", "denied", "denied", "cancelled"]
    tools = ["run_python", "run_python", "unknown", "run_python"]
    assert told == [("info", tool, outcome, "token:alice") for tool, outcome in zip(tools, outcomes, strict=True)]
    for call in calls:
        keys = {"timestamp", "level", "event", "tool", "outcome", "caller", "call_id", "run", "seconds"}
        assert call.keys() == (keys | {"server"} if form == "json" else keys)
        assert re.fullmatch(r"2\d{3}-\d\d-\d\dT\d\d:\d\d:\d\dZ", call["timestamp"])


def _read(line: str, form: str) -> dict[str, Any]:
    if form == "json":
        found: dict[str, Any] = json.loads(line)
        return found
    time, level, event, values = re.fullmatch(r"(\S+) \[(\w+) *\] (\w+) +(.*)", line).groups()  # type: ignore[union-attr]
    return {"timestamp": time, "level": level, "event": event, **dict(pair.split("=") for pair in values.split())}


async def test_whatever_is_logged_of_a_call_has_the_ids_of_its_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what a part of us, or a library, logs on its behalf; what belongs to no call has its server's (control)."""
    with own_process("json"):
        async with served(tmp_path, "http") as server, server.client("http", "modern") as client:
            submit = type(server.app.broker).submit

            async def telling(*given: Any, **named: Any) -> Any:
                logging.getLogger("glovebox_server.guards.budgets").warning("of a guard")
                await anyio.to_thread.run_sync(structlog.get_logger("ours").warning, "of a thread")
                return await submit(*given, **named)

            with patch.object(type(server.app.broker), "submit", telling):
                result = await client.call_tool("run_python", {"code": "print(1)"})
            logging.getLogger("library").warning("of none")
        records = [json.loads(line) for line in (tmp_path / "audit/audit.jsonl").read_bytes().splitlines()]
    told = {each["event"]: each for each in map(json.loads, capsys.readouterr().err.splitlines())}
    (decided,) = [each for each in records if each["kind"] == "call.decided"]
    assert (result.structured_content or {})["call_id"] == decided["call_id"]
    for event in ("of a guard", "of a thread", "call"):
        assert (told[event]["call_id"], told[event]["run"]) == (decided["call_id"], told["call"]["run"]), event
    assert re.fullmatch("r_[0-9a-z]{26}", told["call"]["run"])
    assert {each["server"] for each in told.values()} == {server_id()}
    assert not {"call_id", "run"} & told["of none"].keys()


async def test_a_server_logs_in_the_form_that_it_was_started_with(tmp_path: Path) -> None:
    """The installed program, over stdio with the SDK's client."""
    log = tmp_path / "log"
    words = ["serve", "--workspace", str(tmp_path), "--state-dir", str(tmp_path.with_name("state"))]
    words += ["--log-format", "json", "--log-level", "info"]
    command = StdioServerParameters(command=str(Path(sys.executable).with_name("glovebox")), args=words)
    with log.open("w") as sink:
        async with Client(stdio_client(command, errlog=sink)) as client:
            await client.call_tool("run_python", {"code": 7})
    told = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["outcome"] for line in told if line["event"] == "call"] == ["denied"]
    records = (tmp_path.with_name("state") / "audit/audit.jsonl").read_text().splitlines()
    started = json.loads(records[0])
    assert {line["server"] for line in told} == {started["server"]}


def test_nothing_below_the_level_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither ours nor a library's; the control is what is on it."""
    with own_process():
        logs.to_stderr("error")
        structlog.get_logger("ours").warning("below")
        logging.getLogger("library").warning("below")
        structlog.get_logger("ours").error("above")
        logging.getLogger("library").error("above")
    written = capsys.readouterr().err
    assert "below" not in written
    assert written.count("above") == 2
