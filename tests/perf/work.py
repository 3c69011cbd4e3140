"""What one call makes the whole machine do, from its client to kernel threads; and how soon nothing is left of it.

Processor time and page faults are the machine's counters before and after some calls: who measures, the server, its
worker, the sandboxes and the kernel. So nothing else may run; the bare interpreter beside is counted in the same way.
"""

import os
import re
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from mcp import Client
from tests.fixtures.leftovers import until
from tests.fixtures.workers import workers
from tests.perf import clients
from tests.perf.bare import CODE, PRINTED, Bare
from tests.perf.clients import Setup
from tests.perf.latency import Way

from glovebox_sandboxes.conformance.trial import processes

CALLS, QUICK_CALLS = 40, 5  # between two looks at a counter: with less, what the machine does by itself would show
WARM_CALLS = 30  # before all
IDLE_MS = 100.0  # of processor time a second, at which a machine does nothing
SETTLE_SECONDS = 0.3  # before and after them: what a call leaves to be made or removed belongs to it
STOPS = 3  # each round
ENDLESS = "import ctypes\nctypes.CDLL(None).prctl(15, b'{name}')\nwhile True:\n    pass\n"
_SCHEDSTAT, _CPUACCT = Path("/proc/schedstat"), Path("/sys/fs/cgroup/cpuacct")


def processor_ms() -> float:
    """Milliseconds that every processor has run so far; OSError where no counter of nanoseconds is the machine's."""
    if _SCHEDSTAT.exists():
        return sum(int(each) for each in re.findall(r"(?m)^cpu\d+(?: \d+){6} (\d+)", _SCHEDSTAT.read_text())) / 1e6
    if not (_CPUACCT / "release_agent").exists():  # only the root of all groups has one
        raise FileNotFoundError("the machine's processor time cannot be read: no /proc/schedstat, no root cpuacct")
    return int((_CPUACCT / "cpuacct.usage").read_text()) / 1e6


def page_faults() -> float:
    """Page faults of the machine so far."""
    return int(Path("/proc/vmstat").read_text().partition("\npgfault ")[2].partition("\n")[0])


COUNTERS: dict[str, tuple[str, Callable[[], float]]] = {
    "processor": ("ms", processor_ms),
    "faults": ("faults", page_faults),
}


async def _quiet() -> bool:
    """Whether the machine does next to nothing for a moment; of one whose counter cannot be read, nobody knows."""
    with suppress(OSError):
        before = processor_ms()
        await anyio.sleep(SETTLE_SECONDS)
        return processor_ms() - before < SETTLE_SECONDS * IDLE_MS
    return True


async def _counted(counter: Callable[[], float], once: Callable[[], Awaitable[Any]], calls: int) -> float:
    """How far a counter goes for one call, between two moments in which the machine does nothing else."""
    await anyio.sleep(SETTLE_SECONDS)
    for _ in range(int(clients.END_SECONDS / SETTLE_SECONDS)):
        if await _quiet():
            before = counter()
            for _ in range(calls):
                await once()
            await anyio.sleep(SETTLE_SECONDS)
            spent = (counter() - before) / calls
            if await _quiet():
                return spent
    raise RuntimeError("the machine is busy with something else")


async def ways(stack: AsyncExitStack, setup: Setup, bare: Bare, reasons: dict[str, str], *, quick: bool) -> list[Way]:
    """Count and cancel a server's calls, and count the bare interpreter's; what cannot be read is a reason."""
    client = await stack.enter_async_context(clients.over_stdio(setup))
    once = partial(clients.printed, client, CODE, PRINTED, "bubblewrap")
    for _ in range(WARM_CALLS):
        await once()

    async def plain() -> None:
        bare.milliseconds(CODE, PRINTED)

    calls, found = QUICK_CALLS if quick else CALLS, list[Way]()
    for key, (unit, read) in COUNTERS.items():
        try:
            read()
        except OSError as problem:
            reasons[key] = str(problem)
            continue
        note = f"of {calls} calls in a row, each round"
        for name, call in ((f"bare-{key}", plain), (key, once)):
            found.append(Way(key=name, what=name, once=partial(_counted, read, call, calls), unit=unit, note=note))
    for key, hung in (("stop", False), ("stop-hung", True)):
        ended = partial(_ended, client, setup.directory / "state", hung=hung)
        found.append(Way(key=key, what=key, once=ended, block=STOPS, rest=SETTLE_SECONDS))
    return found


async def _ended(client: Client, state: Path, *, hung: bool) -> float:
    """Milliseconds from the cancelling of an endless program to the end of all that was in its sandbox."""
    name, hanging = f"gbx{secrets.token_hex(5)}", workers(state) if hung else []
    if hung and not hanging:
        raise RuntimeError("there is no worker that could hang")
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.call_tool, "run_python", {"code": ENDLESS.format(name=name)})
            await until(lambda: _named(name))
            namespace = Path(f"/proc/{_named(name)}/ns/pid").stat().st_ino
            for worker in hanging:
                os.kill(worker, signal.SIGSTOP)
            began = time.perf_counter()
            tasks.cancel_scope.cancel()
        await until(lambda: not processes({"pid": namespace}))
        return (time.perf_counter() - began) * 1000
    finally:
        for worker in hanging:
            os.kill(worker, signal.SIGCONT)


def _named(name: str) -> int:
    """The number of the process of that name; 0 while there is none."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (place / "comm").read_text().strip() == name:
                return int(place.name)
    return 0
