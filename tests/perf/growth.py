"""What much behind it costs a server: roles and tokens a call and a request, sessions memory, records a query."""

import json
import re
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from tests.fixtures.callers import give_token
from tests.perf import clients, query
from tests.perf.bare import CODE, PRINTED
from tests.perf.clients import Listening, Setup, succeeded
from tests.perf.governance import EXAMPLE, ROLE
from tests.perf.idle import pss_mib
from tests.perf.series import Series, one

from glovebox_audit.query import ask

ROLES, TOKENS, SESSIONS, RECORDS = 64, 1000, 200, query.RECORDS
COMMITTED = 20_000  # records, in one write for each call: three segments are sealed on the way
CALLS, ROUNDS, QUICK_PART = 200, 5, 20
REST_SECONDS = 0.05  # in which the next sandbox is made
SETTLE_SECONDS = 2.0
KIB = 1024
_OPENING: dict[str, Any] = {
    "jsonrpc": "2.0", "id": 1, "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"}},
}  # fmt: skip


async def measured(directory: Path, *, quick: bool, tick: Callable[[str], None]) -> dict[str, Series]:
    """All of it, each beside the same with one role, one token, or no session."""
    found: dict[str, Series] = {}
    async with AsyncExitStack() as stack:
        tick(f"{ROLES} roles and {TOKENS} tokens, beside one of each")
        one_of_each, many = [
            await stack.enter_async_context(clients.over_http(_setup(directory / f"growth-{roles}", roles, tokens)))
            for roles, tokens in ((1, 0), (ROLES, TOKENS))
        ]
        found |= await _beside(one_of_each, many, CALLS // QUICK_PART if quick else CALLS)
        tick(f"{SESSIONS} sessions")
        found |= await _sessions(one_of_each)
    tick(f"{RECORDS:,} records")
    state = directory / "growth-records"
    count = RECORDS // QUICK_PART if quick else RECORDS
    found |= await anyio.to_thread.run_sync(partial(_records, state, count))
    return found


def _setup(directory: Path, roles: int, tokens: int) -> Setup:
    """A server with so many roles, the first for everybody, and so many tokens beside the one that is used."""
    workspace = directory / "workspace"
    workspace.mkdir(parents=True, mode=0o755)
    more = ""
    for n in range(1, roles):
        more += f'[roles.r{n}]\ntools = ["run_python"]\nnarrow.run_python.limits.wall_seconds = {1 + n % 30}\n'
    (directory / "policy.toml").write_text(ROLE + more + EXAMPLE)
    for number in range(tokens):
        give_token(directory / "state", f"t{number}")
    return Setup(directory=directory, workspace=workspace)


async def _beside(few: Listening, many: Listening, count: int) -> dict[str, Series]:
    times: dict[str, list[float]] = {key: [] for key in ("roles-one", "roles", "tokens-one", "tokens")}
    async with few.connected() as one_caller, many.connected() as other:
        for number in range(count + count // 10):
            for name, caller in (("-one", one_caller), ("", other))[:: 1 if number % 2 else -1]:
                for key, request in ((f"roles{name}", caller.request(CODE)), (f"tokens{name}", caller.listing())):
                    await anyio.sleep(REST_SECONDS)
                    began = time.perf_counter()
                    answer = await caller.call(request)
                    times[key].append((time.perf_counter() - began) * 1000)
                    if key.startswith("roles") and not succeeded(answer, PRINTED):
                        raise RuntimeError(f"a call failed: {answer[:300]!r}")
    return {
        key: Series(key=key, what=key, unit="ms", rounds=(tuple(values[count // 10 :]),), note=f"{count} in turns")
        for key, values in times.items()
    }


async def _sessions(listening: Listening) -> dict[str, Series]:
    before = pss_mib([listening.pid])
    async with AsyncExitStack() as stack:
        for _ in range(SESSIONS):
            await _open(listening, stack)
        await anyio.sleep(SETTLE_SECONDS)
        more = (pss_mib([listening.pid]) - before) * KIB / SESSIONS
    return {"session": one("session", "PSS of the server", "KiB", more, f"{SESSIONS} with a stream each")}


async def _open(listening: Listening, stack: AsyncExitStack) -> None:
    """Open a session of the handshake era, and the stream of its server's messages."""
    body = json.dumps(_OPENING)
    host = f"Host: 127.0.0.1:{listening.port}\r\nAuthorization: Bearer {listening.token}\r\n"
    accept = "Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n"
    async with listening.connected() as caller:
        await caller.call(f"POST /mcp HTTP/1.1\r\n{host}{accept}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    session = re.search(rb"mcp-session-id: (\S+)", caller.head)
    if session is None:
        raise RuntimeError(f"no session was opened: {caller.head!r}")
    stream = await stack.enter_async_context(await anyio.connect_tcp("127.0.0.1", listening.port))
    await stream.send(f"GET /mcp HTTP/1.1\r\n{host}{accept}Mcp-Session-Id: {session[1].decode()}\r\n\r\n".encode())
    if b" 200 " not in await stream.receive():
        raise RuntimeError("a stream was not opened")


def _records(state: Path, count: int) -> dict[str, Series]:
    longest = query.write(state.with_name("growth-commits"), COMMITTED, 1) * 1000
    query.write(state, count)
    told = ask.Told(say=lambda _: None, progress=lambda _done, _most: None)
    rounds: list[tuple[float, ...]] = []
    for _ in range(ROUNDS + 1):
        asked = [partial(ask.ask, state / "audit", filters, 20, told) for filters in query.QUESTIONS.values()]
        rounds.append(tuple(query.timed(each) * 1000 for each in asked))
    note = f"{count:,} records, {len(query.QUESTIONS)} questions, the index made before"
    asked_of = Series(key="query", what="`audit query`", unit="ms", rounds=tuple(rounds[1:]), note=note)
    return {"query": asked_of, "commit": one("commit", "the longest write", "ms", longest, f"{COMMITTED:,} records")}
