"""``glovebox serve`` as operators start it, with real sandboxes, and our client. Others: test_foreign_clients."""

import contextlib
import json
import re
import subprocess  # noqa: TID251 - the server is a process of its own, as in real life
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import mcp_types as types
import psutil
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from tests.fixtures.brokered import write_shipped
from tests.fixtures.callers import give_token
from tests.interaction.served import PAIRS, Era, Logs, Transport, until

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

GLOVEBOX = str(Path(sys.executable).with_name("glovebox"))
CODE = "print('hi')\nopen('/output/a.txt', 'w').write('kept')\n6 * 7"
ENDLESS = "while True: pass"


@pytest.fixture
def directories(tmp_path: Path) -> list[str]:
    """Return the options for a server with a small workspace and a state of its own."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "data.csv").write_text("a,b\n1,2\n")
    tmp_path.chmod(0o755)
    return ["--workspace", str(workspace), "--state-dir", str(tmp_path / "state")]


@contextmanager
def over_http(options: list[str], directory: Path, program: Sequence[str] = (GLOVEBOX,)) -> Iterator[tuple[str, str]]:
    """Run a server on a free port; give its base URL, read where an operator finds it, and a token."""
    log = directory / f"log-{len([*directory.glob('log-*')])}"
    token = give_token(directory / "state")
    command = [*program, "serve", "--transport", "http", "--port", "0", *options]
    with log.open("wb") as sink, subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=sink) as process:
        try:
            with anyio.from_thread.start_blocking_portal() as portal:
                portal.call(until, lambda: re.search(rb"url=(\S+)", log.read_bytes()) is not None, 60.0)
            found = re.search(r"url=(\S+)", log.read_text())
            assert found is not None
            assert token not in log.read_text()
            yield found[1], token
        finally:
            process.terminate()
            assert process.wait(timeout=30) == 0


@asynccontextmanager
async def connected(
    transport: Transport, era: Era, options: list[str], directory: Path, **abilities: Any
) -> AsyncIterator[Client]:
    """A client of a server that was started for it; ``abilities`` are callbacks of the client's."""
    mode = "legacy" if era == "legacy" else "auto"
    if transport == "stdio":
        server = StdioServerParameters(command=GLOVEBOX, args=["serve", *options])
        async with Client(server, mode=mode, **abilities) as client:
            yield client
        return
    with over_http(options, directory) as (url, token):
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx2.AsyncClient(headers=headers, timeout=60, verify=False) as http:
            wire = sse_client(f"{url}/sse", headers=headers)
            wire = wire if transport == "sse" else streamable_http_client(f"{url}/mcp", http_client=http)
            async with Client(wire, mode=mode, **abilities) as client:
                yield client


@pytest.mark.parametrize("transport", ["stdio", "http"])
async def test_a_first_call_without_a_runtime_names_the_command_that_builds_one(
    transport: Transport, directories: list[str], tmp_path: Path
) -> None:
    """By its path where no PATH has it, but to whoever is elsewhere; none is built unasked."""
    empty, profiles = tmp_path / "data", tmp_path / "profiles"
    profiles.mkdir()
    write_shipped(profiles, "bubblewrap")  # an Engine whose image was built for others would do as well
    options = [*directories, "--data-dir", str(empty), "--profiles-dir", str(profiles)]
    async with connected(transport, "modern", options, tmp_path) as client:
        (said,) = (await client.call_tool("run_python", {"code": "1"})).content
    assert isinstance(said, types.TextContent)
    assert f"Run `{GLOVEBOX if transport == 'stdio' else 'glovebox'} setup`" in said.text
    assert not empty.exists()


def _at_work() -> int:
    """Count the processes in sandboxes below this test that are running; those that stand ready sleep."""
    found = 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended while we looked
            inside = any("bwrap" in parent.name() for parent in child.parents())
            found += inside and child.status() == psutil.STATUS_RUNNING
    return found


@pytest.mark.parametrize(
    ("transport", "era", "processes"),
    [*((*pair, 1) for pair in PAIRS), *((*pair, 2) for pair in PAIRS if pair[0] != "stdio")],
)
async def test_a_whole_session(
    transport: Transport, era: Era, processes: int, directories: list[str], tmp_path: Path
) -> None:
    """Run, keep a file, use it in the next call, read the workspace, be refused, give up an endless loop."""
    options = [*directories, *(() if transport == "stdio" else ("--processes", str(processes)))]
    async with connected(transport, era, options, tmp_path) as client:
        digest = ((await client.list_tools()).meta or {})["dev.glovebox/digest"]
        ran = await client.call_tool("run_python", {"code": CODE})
        assert not ran.is_error
        assert ran.structured_content["value"] == "42"
        assert ran.structured_content["stdout"]["text"] == "hi\n"
        assert ran.structured_content["isolation"]["verified"] is True
        (link,) = [block for block in ran.content if isinstance(block, types.ResourceLink)]
        (content,) = (await client.read_resource(link.uri)).contents
        assert isinstance(content, types.TextResourceContents)
        assert content.text == "kept"
        again = await client.call_tool("run_python", {"code": "open('/input/a.txt').read()", "inputs": [link.uri]})
        assert again.structured_content["value"] == "'kept'"
        table = await client.call_tool("read_workspace_file", {"path": "data.csv"})
        assert "1,2" in str(table.content)
        refused = await client.call_tool("fetch_url", {"url": "http://169.254.169.254/latest/meta-data/"})
        assert refused.is_error
        assert refused.structured_content["refused"]["rule"]
        with anyio.CancelScope() as waiting:

            async def runs(progress: float, total: float | None, message: str | None) -> None:
                if (message or "").startswith("Running"):
                    waiting.cancel()

            await client.call_tool("run_python", {"code": ENDLESS}, progress_callback=runs)
        await until(lambda: _at_work() == 0, within=15.0)  # by itself it ends after 20 seconds of a processor
    log = (tmp_path / "state" / "audit" / "audit.jsonl").read_text()
    assert f'"tools_digest":"{digest}"' in log  # of the list as this client was told it
    assert log.count('"kind":"call.decided"') == log.count('"kind":"call.finished"') + log.count(
        '"kind":"call.cancelled"'
    ) + log.count('"effect":"deny"')
    assert log.count('"kind":"call.cancelled"') == 1


async def test_a_trivial_call_costs_a_client_less_than_a_kilobyte_of_messages(
    directories: list[str], tmp_path: Path
) -> None:
    """All log messages of a call in one JSON text, with the protocol's own words; all three records are told."""
    logs = Logs()
    command = StdioServerParameters(command=GLOVEBOX, args=["serve", *directories])
    async with Client(command, mode="legacy", logging_callback=logs) as client:
        await client.call_tool("run_python", {"code": "6 * 7"})
        await until(lambda: len(logs.seen) == 3)
    kinds = [message.data["kind"] for message in logs.seen]
    assert kinds == ["call.decided", "sandbox.started", "call.finished"]
    sent = [types.LoggingMessageNotification(params=message) for message in logs.seen]
    sizes = [
        len(json.dumps({"jsonrpc": "2.0", **each.model_dump(mode="json", by_alias=True, exclude_none=True)}))
        for each in sent
    ]
    assert sum(sizes) <= 1000
