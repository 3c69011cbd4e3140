"""SIGTERM over HTTP: calls end, streams end, the process ends, in good order and soon."""

import contextlib
import json
import os
import re
import signal
import subprocess  # noqa: TID251 - a whole server process is what is tested
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import httpx2
import pytest
from mcp import Client
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from tests.fixtures import leftovers
from tests.interaction.fakes import as_app, fake_app, give_tokens
from tests.interaction.node import ROOT, fake_server
from tests.interaction.served import until

from glovebox_server.transport import serve

#: The promise: SIGTERM to exit with calls and streams open, on a busy machine.
SECONDS = 5.0


@pytest.mark.parametrize("processes", ["http", "http*2"])
async def test_sigterm_ends_calls_streams_and_process(processes: str, tmp_path: Path) -> None:
    """Four clients with a call, and in the modern era a listen stream, on both transports and in both eras."""
    command = fake_server(processes, tmp_path, "alice")
    process = await anyio.open_process(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    found = json.loads(await process.stdout.receive())
    headers = {"Authorization": f"Bearer {found['tokens']['alice']}"}
    log = tmp_path / "audit" / "audit.jsonl"
    told: list[str] = []

    # How a connection looks that is cut is the client library's affair.
    async def calling(client: Client) -> None:
        try:
            await client.call_tool("run_python", {"code": "wait"})
        except Exception as problem:  # noqa: BLE001 - a cut connection is the library's affair
            told.append(str(problem))

    async def listening(client: Client) -> None:
        with contextlib.suppress(Exception):
            async with client.listen(tools_list_changed=True) as events:
                async for _ in events:
                    pass

    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        for mode in ("legacy", "auto"):
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=30))
            for wire in (
                streamable_http_client(f"{found['url']}/mcp", http_client=http),
                sse_client(f"{found['url']}/sse", headers=headers),
            ):
                client = await stack.enter_async_context(Client(wire, mode=mode))
                tasks.start_soon(calling, client)
                if mode == "auto":  # the handshake era has no such stream
                    tasks.start_soon(listening, client)
        await until(lambda: log.read_bytes().count(b"call.decided") == 4)
        process.send_signal(signal.SIGTERM)
        with anyio.fail_after(SECONDS):
            assert await process.wait() == 0
        tasks.cancel_scope.cancel()
    await process.aclose()
    assert sum("was ended: server stopping." in each for each in told) == 4, told
    ended = re.findall(r"SIGTERM cancelled=(\d)\n", (tmp_path / "ended").read_text())
    assert (len(ended), sum(map(int, ended))) == (2 if "*" in processes else 1, 4)
    assert log.read_bytes().count(b"call.cancelled") == 4


async def test_a_server_without_clients_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for when nobody is there: the hour that clients would have never passes."""
    monkeypatch.setattr(serve, "GRACE_SECONDS", 3600)
    give_tokens(tmp_path, ("alice",))
    with anyio.fail_after(leftovers.TIMEOUT_SECONDS):
        async with fake_app(tmp_path) as app:
            why = await serve.serve_http(as_app(app), on_ready=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert why == "SIGTERM"
