"""The console as its command serves it: over TCP, beside other users of the machine."""

from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import anyio.to_thread
import httpx2
import pytest
import uvicorn
from tests.fixtures.leftovers import until

from glovebox_server.console import people, serve
from glovebox_server.console.gate import cookie_of, derived
from glovebox_server.console.people import People
from glovebox_server.guards.budgets.spending import read_clocks
from glovebox_server.settings import Settings
from glovebox_server.transport import auth


async def test_a_served_console_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent strangers take no places, sessions of before are over, and `localhost` may be another user's."""
    monkeypatch.setattr(auth, "MAX_CONNECTIONS", 20)
    servers, urls = list[uvicorn.Server](), list[str]()

    class Server(uvicorn.Server):
        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            servers.append(self)

    monkeypatch.setattr(uvicorn, "Server", Server)
    (state := tmp_path / "s").mkdir(mode=0o700)
    with people.opened(state) as database:
        secret = database.transact_now(lambda db: People(db, read_clocks()).invite("anna", "viewer"))
        session, _ = database.transact_now(lambda db: People(db, read_clocks()).enter(secret))
    async with anyio.create_task_group() as tasks, AsyncExitStack() as strangers:
        tasks.start_soon(anyio.to_thread.run_sync, serve.serve_console, Settings(state_dir=state), 0, urls.append)
        try:
            await until(lambda: servers and servers[0].started)
            port = int(urls[0].rpartition(":")[2])
            for _ in range(50):
                await strangers.enter_async_context(await anyio.connect_tcp("127.0.0.1", port))
            async with httpx2.AsyncClient(base_url=urls[0]) as client:
                assert (await client.get("/enter")).status_code == 200
                cookie = {"Cookie": f"{cookie_of(place := derived(session, 'path'))}={session}"}
                assert (await client.get(f"/{place}/now", headers=cookie)).status_code == 401
                assert (await client.get("/enter", headers={"Host": f"localhost:{port}"})).status_code == 421
        finally:
            servers[0].should_exit = True
