"""Several server processes: what two are worth beside one, and what others notice while one is killed."""

import json
import os
import signal
import time
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import anyio
from tests.perf import clients, load
from tests.perf.bare import CODE, PRINTED
from tests.perf.clients import Caller, Listening, Setup, children, succeeded
from tests.perf.series import Series

ROUNDS = 4
OTHERS = 4
"""Callers in the process that is not killed, each over one connection; as many take a new one for each call."""
KILL_SECONDS = 2.0
"""Between two kills: a process serves again half a second after one."""


async def measured(
    directory: Path, *, wanted: Collection[str], seconds: float, tick: Callable[[str], None]
) -> dict[str, Series]:
    """Both rows, as far as they are wanted."""
    found: list[Series] = []
    if "processes" in wanted:
        tick(f"`--processes 2` beside 1: {ROUNDS} times {seconds / ROUNDS:g} s of each")
        found += await _two(directory, seconds / ROUNDS)
    if "killed" in wanted:
        tick(f"a server process is killed: {ROUNDS} times {seconds / ROUNDS:g} s, and as long without")
        found += await _killed(directory, seconds / ROUNDS)
    return {each.key: each for each in found}


def _setup(directory: Path, name: str, processes: int) -> Setup:
    return Setup(directory=directory / name, workspace=directory / "workspace", processes=processes)


async def _two(directory: Path, seconds: float) -> list[Series]:
    rates: dict[int, list[tuple[float, ...]]] = {1: [], 2: []}
    async with AsyncExitStack() as stack:
        servers = {
            count: await stack.enter_async_context(clients.over_http(_setup(directory, f"processes-{count}", count)))
            for count in rates
        }
        await _up(servers[2])
        for _ in range(ROUNDS):
            for count, listening in servers.items():
                rates[count].append((await load.served_rate(listening, CODE, PRINTED, seconds),))
    note = f"{load.CALLERS} callers, by turns"
    return [
        Series(key=key, what=f"calls by {count}", unit="calls/s", rounds=tuple(rates[count]), note=note)
        for key, count in (("processes", 2), ("processes-one", 1))
    ]


async def _killed(directory: Path, seconds: float) -> list[Series]:
    rounds: dict[bool, list[list[float]]] = {False: [], True: []}
    times: list[float] = []
    async with clients.over_http(_setup(directory, "killed", 2)) as listening, AsyncExitStack() as stack:
        await _up(listening)
        kept = children(listening.pid)[1]
        others: list[Caller] = []
        while len(others) < OTHERS:
            caller = await stack.enter_async_context(listening.connected())
            others += [caller] if (await _health(caller, listening))["process"] == 1 else []
        tasks = await stack.enter_async_context(anyio.create_task_group())
        for caller in others:
            tasks.start_soon(_timed, caller, times)
            tasks.start_soon(_anew, listening)
        for killing in [False, True] * ROUNDS:
            await anyio.sleep(load.RAMP_SECONDS)
            times.clear()
            end = anyio.current_time() + seconds
            while anyio.current_time() < end:
                for pid in set(children(listening.pid)) - {kept} if killing else ():
                    os.kill(pid, signal.SIGKILL)
                await anyio.sleep(KILL_SECONDS)
            rounds[killing].append(times.copy())
        tasks.cancel_scope.cancel()
    note = f"{OTHERS} callers in the other process, as many anywhere; a kill every {KILL_SECONDS:g} s"
    return [
        Series(key=key, what="calls of others", unit="ms", rounds=tuple(map(tuple, rounds[killing])), note=note)
        for key, killing in (("killed", True), ("not-killed", False))
    ]


async def _up(listening: Listening) -> None:
    """Wait until both processes serve."""
    while True:
        async with listening.connected() as caller:
            if (await _health(caller, listening))["processes"] == 2:
                return
        await anyio.sleep(0.05)


async def _health(caller: Caller, listening: Listening) -> dict[str, int]:
    head = (
        f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{listening.port}\r\nAuthorization: Bearer {listening.token}\r\n\r\n"
    )
    found: dict[str, int] = json.loads(await caller.call(head.encode()))
    return found


async def _timed(caller: Caller, times: list[float]) -> None:
    request = caller.request(CODE)
    while True:
        began = time.perf_counter()
        answer = await caller.call(request)
        times.append((time.perf_counter() - began) * 1000)
        if not succeeded(answer, PRINTED):
            raise RuntimeError(f"a call of another's failed: {answer[:300]!r}")


async def _anew(listening: Listening) -> None:
    while True:
        with suppress(RuntimeError, anyio.EndOfStream, anyio.BrokenResourceError, OSError):
            async with listening.connected() as caller:
                await caller.call(caller.request(CODE))
