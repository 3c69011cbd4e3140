"""A server inside the test and real clients of it: over pipes, streamable HTTP and SSE, in both protocol eras."""

import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import anyio
import anyio.abc
import httpx2
import mcp.server.sse
import mcp.server.streamable_http_manager
from mcp import Client
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from tests.interaction.fakes import FakeApp, as_app, fake_app, give_tokens

from glovebox_profiles.load.loader import SHIPPED
from glovebox_sandboxes.host.owner import server_id
from glovebox_server import app as apps
from glovebox_server.settings import Settings
from glovebox_server.transport import serve as serving
from glovebox_server.transport import stdio
from glovebox_server.transport.auth import AuthMiddleware
from glovebox_server.transport.oauth.authority import Scopes, TokenAuthority
from glovebox_server.transport.oauth.issuer import OAuth
from glovebox_server.transport.processes import Seat, Seats
from glovebox_server.transport.serve import serve_http, serve_stdio

Transport = Literal["stdio", "http", "sse"]
Era = Literal["legacy", "modern"]

PAIRS: list[tuple[Transport, Era]] = [
    (transport, era) for transport in ("stdio", "http", "sse") for era in ("legacy", "modern")
]

_SERVERS = count()

#: A test that waits longer for something has failed.
TIMEOUT_SECONDS = 10.0


@dataclass(slots=True, kw_only=True)
class Served:
    """One running server."""

    app: FakeApp
    tasks: anyio.abc.TaskGroup
    url: str
    tokens: dict[str, str]
    workflow: str | None = None
    gates: list[AuthMiddleware] = field(default_factory=list)

    @property
    def gate(self) -> AuthMiddleware:
        """What requests pass."""
        return self.gates[-1]

    @property
    def authority(self) -> TokenAuthority:
        """What checks access tokens."""
        assert self.gate.authority is not None
        return self.gate.authority

    @asynccontextmanager
    async def client(
        self, transport: Transport, era: Era, name: str = "alice", **options: Any
    ) -> AsyncIterator[Client]:
        """Connect one client; ``name`` chooses its token."""
        mode = "legacy" if era == "legacy" else "auto"
        async with self._wire(transport, name) as wire, Client(wire, mode=mode, **options) as client:
            assert (client.protocol_version == "2026-07-28") == (era == "modern")
            yield client

    @asynccontextmanager
    async def _wire(self, transport: Transport, name: str) -> AsyncIterator[Any]:
        if transport == "stdio":
            to_server, to_client = os.pipe(), os.pipe()
            ended = anyio.Event()

            async def serve() -> None:
                wire = stdio.StdioFds(read=to_server[0], write=to_client[1])
                await serve_stdio(as_app(self.app), wire, workflow=self.workflow)
                os.close(to_server[0])
                os.close(to_client[1])
                ended.set()

            self.tasks.start_soon(serve)
            # Lines of JSON are the same in both directions, so the client's end can be ours, too.
            try:
                yield stdio.StdioWire(stdio.StdioFds(read=to_client[0], write=to_server[1])).streams()
            finally:
                os.close(to_server[1])
                with anyio.fail_after(TIMEOUT_SECONDS, shield=True):
                    await ended.wait()
                os.close(to_client[0])
            return
        headers = {"Authorization": f"Bearer {self.tokens[name]}"}
        if transport == "sse":
            yield sse_client(f"{self.url}/sse", headers=headers, timeout=30)
            return
        # As many connections at a time as the tests make calls. Nothing here is https: no trust store is read.
        limits, patience = httpx2.Limits(max_connections=400), httpx2.Timeout(30, read=300)
        async with httpx2.AsyncClient(headers=headers, limits=limits, timeout=patience, verify=False) as http:
            yield streamable_http_client(f"{self.url}/mcp", http_client=http)


@asynccontextmanager
async def served(
    directory: Path,
    transport: Transport,
    *names: str,
    oauth: OAuth | None = None,
    scopes: Scopes | None = None,
    allowed_hosts: tuple[str, ...] = (),
    trusted_proxies: tuple[str, ...] = (),
    opened: AbstractAsyncContextManager[Any] | None = None,
    workflow: str | None = None,
    metrics: str | None = None,
) -> AsyncIterator[Served]:
    """Run a server for ``transport``; over HTTP with a token for each name (``alice`` and ``bob`` where none is given).

    ``oauth`` says whose access tokens are accepted besides, ``scopes`` what those stand for, ``allowed_hosts``
    which names of its own the server has, ``trusted_proxies`` who may name the address of a client, and ``opened``
    which app it serves, if not one without sandboxes; ``metrics`` who may read those. It is ended by SIGTERM, as a
    supervisor would.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    opened = opened or fake_app(directory, shared=transport != "stdio")
    async with opened as app, anyio.create_task_group() as tasks:
        if transport == "stdio":
            yield Served(app=app, tasks=tasks, url="", tokens={}, workflow=workflow)
            return
        tokens = give_tokens(directory, names or ("alice", "bob"))
        ready, url, ended = anyio.Event(), "", anyio.Event()
        gates: list[AuthMiddleware] = []

        def listen(found: str) -> None:
            nonlocal url
            url = found
            ready.set()

        async def serve() -> None:
            kept = partial(_noted, gates)
            told = patch.object(serving, "Scopes", lambda **own: scopes or Scopes(**own))
            with patch.object(serving, "AuthMiddleware", kept), told:
                served_by = serve_http(
                    as_app(app),
                    on_ready=listen,
                    oauth=oauth,
                    allowed_hosts=allowed_hosts,
                    trusted_proxies=trusted_proxies,
                    workflow=workflow,
                    metrics=metrics,
                )
                assert await served_by == "SIGTERM"
            ended.set()

        tasks.start_soon(serve)
        with anyio.fail_after(TIMEOUT_SECONDS):
            await ready.wait()
        yield Served(app=app, tasks=tasks, url=url, tokens=tokens, gates=gates)
        signal.raise_signal(signal.SIGTERM)
        with anyio.fail_after(TIMEOUT_SECONDS):
            await ended.wait()


@contextmanager
def first_of_two() -> Iterator[list[Seats]]:
    """Serve HTTP as the first of two processes, of which no other runs; of each server, what they share."""
    made: list[Seats] = []

    async def serve(*arguments: Any, **options: Any) -> str:
        made.append(Seats(2, serving.open_listener("127.0.0.1", 0)))
        with ExitStack() as stack:
            for each in chain.from_iterable(made[-1].inboxes):
                stack.enter_context(each)
            for module in (mcp.server.sse, mcp.server.streamable_http_manager):
                stack.enter_context(patch.object(module, "uuid4"))  # which a seat replaces
            return await serving.serve_http(*arguments, seat=Seat(number=0, seats=made[-1]), **options)

    with patch(f"{__name__}.serve_http", serve):
        yield made


def plain_profile(**changes: str) -> str:
    """The shipped profile of programs without what a server loads ahead, and with ``changes`` of its keys' values."""
    text = (SHIPPED / "run_python.toml").read_text().partition("[python]")[0]
    for key, value in changes.items():
        text, times = re.subn(rf"(?m)^{key} = .*$", f"{key} = {value}", text)
        assert times == 1, key
    return text


@asynccontextmanager
async def whole_server(options: Sequence[str], transport: Transport, *names: str) -> AsyncIterator[Served]:
    """Run a server with sandboxes in this process, as ``glovebox serve`` would with these options.

    Programs have ``plain_profile`` if no directory of profiles is named.
    """
    given = {key[2:].replace("-", "_"): value for key, value in zip(options[::2], options[1::2], strict=True)}
    workflow, state = given.pop("workflow", None), Path(given["state_dir"])
    if "profiles_dir" not in given:
        place = state.with_name("config") / "profiles"
        place.mkdir(mode=0o755, parents=True, exist_ok=True)
        (place / "run_python.toml").write_text(plain_profile())
        given["profiles_dir"] = str(place)
    opened = apps.opened(Settings.model_validate(given), "stdio" if transport == "stdio" else "http")
    # A process is one server, elsewhere; the operator's commands are another.
    with patch.object(apps, "server_id", lambda: f"{server_id()}{next(_SERVERS)}"):
        async with served(state, transport, *names, opened=opened, workflow=workflow) as server:
            yield server


@asynccontextmanager
async def connected(transport: Transport, era: Era, options: Sequence[str], **abilities: Any) -> AsyncIterator[Client]:
    """One client of such a server; ``abilities`` are callbacks of the client's."""
    async with (
        whole_server(options, transport, "default") as server,
        server.client(transport, era, "default", **abilities) as client,
    ):
        yield client


def _noted(gates: list[AuthMiddleware], *arguments: Any, **options: Any) -> AuthMiddleware:
    gates.append(AuthMiddleware(*arguments, **options))
    return gates[-1]


@dataclass(slots=True)
class Logs:
    """What came as ``notifications/message``."""

    seen: list[Any] = field(default_factory=list)

    async def __call__(self, params: Any) -> None:
        """Remember one."""
        self.seen.append(params)


async def until(condition: Callable[[], bool], within: float = TIMEOUT_SECONDS) -> None:
    """Let others run until something is so; fails after ``within`` seconds."""
    with anyio.fail_after(within):
        while not condition():  # noqa: ASYNC110 - what is awaited is the state of another party
            await anyio.sleep(0.005)
