"""Many callers at once over HTTP: how many calls a second go through, and what comes of a burst on a fresh server."""

import re
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import anyio
import anyio.to_thread
from tests.perf import clients
from tests.perf.bare import CODE, PANDAS_CODE, PRINTED, Bare
from tests.perf.clients import Caller, Listening, Setup, succeeded
from tests.perf.series import Series, one

CALLERS = 16  # as many as a server has at work at one time (server/glovebox_server/guards/admission/admission.py)
SECONDS = 60.0
"""Of one rate; the bare interpreter has half of it before and half of it after, for what the machine does meanwhile."""
QUICK_SECONDS = 10.0
BURST = 200
BURST_SECONDS = 300.0  # for all answers of a burst
RAMP_SECONDS = 2.0  # before calls count: callers begin at once, and no rate is one of the first second

Loop = Callable[[], Awaitable[None]]


async def rate(loops: list[Loop], seconds: float) -> float:
    """How many times a second all of them together come to an end, each over and over again."""
    done = 0
    begun = anyio.current_time() + RAMP_SECONDS
    end = begun + seconds

    async def over_and_over(loop: Loop) -> None:
        nonlocal done
        while anyio.current_time() < end:
            await loop()
            done += begun <= anyio.current_time() <= end

    async with anyio.create_task_group() as tasks:
        for loop in loops:
            tasks.start_soon(over_and_over, loop)
    return done / seconds


async def bare_rate(bare: Bare, code: str, printed: str, cwd: Path, seconds: float) -> float:
    """The bare interpreter's, by as many threads as there are callers."""
    limiter = anyio.CapacityLimiter(CALLERS)

    async def loop() -> None:
        await anyio.to_thread.run_sync(bare.milliseconds, code, printed, cwd, limiter=limiter)

    return await rate([loop] * CALLERS, seconds)


async def served_rate(listening: Listening, code: str, printed: str, seconds: float) -> float:
    """A server's, every answer looked at."""
    async with AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(listening.connected()) for _ in range(CALLERS)]
        loops = [_loop(caller, caller.request(code), printed) for caller in callers]
        with anyio.fail_after(seconds + BURST_SECONDS):
            return await rate(loops, seconds)


def _loop(caller: Caller, request: bytes, printed: str) -> Loop:
    async def loop() -> None:
        answer = await caller.call(request)
        if not succeeded(answer, printed):
            raise RuntimeError(f"a call failed: {answer[:300]!r}")

    return loop


async def throughput(
    directory: Path,
    bare: Bare,
    pandas: Bare | None,
    *,
    wanted: Collection[str],
    seconds: float,
    tick: Callable[[str], None],
) -> dict[str, Series]:
    """The programs that are wanted, each beside the bare interpreter."""
    workspace = directory / "workspace"
    found: dict[str, Series] = {}
    programs: list[tuple[str, Bare, str, str]] = [("throughput", bare, CODE, PRINTED)]
    if pandas is not None:
        programs.append(("throughput-pandas", pandas, PANDAS_CODE, pandas.run(PANDAS_CODE, workspace)))
    for key, interpreter, code, printed in programs:
        if key not in wanted:
            continue
        setup = Setup(directory=directory / key, workspace=workspace)
        async with clients.over_http(setup) as listening:
            tick(f"{key}: bare, then {seconds:g} s of calls, then bare")
            note = f"{CALLERS} callers, {seconds:g} s"
            before = await bare_rate(interpreter, code, printed, workspace, seconds / 2)
            ours = await served_rate(listening, code, printed, seconds)
            after = await bare_rate(interpreter, code, printed, workspace, seconds / 2)
            found[key] = one(key, key, "calls/s", ours, note)
            found[f"bare-{key}"] = Series(
                key=f"bare-{key}", what=f"bare {interpreter.python}", unit="calls/s", rounds=((before,), (after,)),
                note=f"{CALLERS} threads, {seconds / 2:g} s before and after",
            )  # fmt: skip
    return found


async def burst(setup: Setup) -> dict[str, Series]:
    """Calls at once, on a server that has answered none yet."""
    times: list[float] = []
    lost: list[str] = []
    async with clients.over_http(setup) as listening, AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(listening.connected()) for _ in range(BURST)]

        async def call(caller: Caller, request: bytes) -> None:
            began = time.perf_counter()
            answer = b""
            with suppress(RuntimeError, anyio.EndOfStream, anyio.BrokenResourceError):
                answer = await caller.call(request)
            times.append((time.perf_counter() - began) * 1000)
            if not succeeded(answer, PRINTED):
                lost.append(answer[:200].decode("utf-8", "replace"))

        with anyio.fail_after(BURST_SECONDS):
            async with anyio.create_task_group() as tasks:
                # Each its own program: the same call again and again is what a server takes for a client's retry.
                for number, caller in enumerate(callers):
                    tasks.start_soon(call, caller, caller.request(f"{CODE} # {number}"))
        most = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{listening.pid}/status").read_text())
    note = f"{BURST} calls at once over as many connections"
    return {
        "burst": Series(key="burst", what="from sending to the answer", unit="ms", rounds=(tuple(times),), note=note),
        "burst-lost": one("burst-lost", "calls without a result", "calls", len(lost), "; ".join(lost[:1])),
        "burst-memory": one("burst-memory", "VmHWM of the server", "MiB", int(most[1]) / 1024 if most else 0.0, note),
    }
