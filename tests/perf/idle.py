"""What a sandbox costs while it waits for a call: memory that is its own share, and processor time."""

import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
from mcp import Client
from tests.fixtures import leftovers
from tests.fixtures.workers import workers
from tests.perf import clients
from tests.perf.bare import CODE
from tests.perf.clients import Setup
from tests.perf.series import Series, one
from tests.perf.sides import OURS, Side

from glovebox_sandboxes.drivers.docker.engine import Engine, host_from_environment

AT_ONCE = 8  # calls before looking: after them several sandboxes wait, as on a server that is in use
SETTLED_LOOKS = 10
LOOK_SECONDS = 0.2  # the queue is full when the same sandboxes were there in so many looks, so far apart
SETTLE_SECONDS = 60.0
CPU_SECONDS = 20.0
QUICK_CPU_SECONDS = 4.0  # over which processor time is counted; the kernel counts it in nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Sandboxes that are looked at, and the rows they are for."""

    memory: str  # key of their memory
    driver: str
    preload: tuple[str, ...] | None  # modules; None for those of the shipped profile
    processor: str | None = None  # key of the processor time, where it is counted
    server: str | None = None  # key of the server's own memory, where that is a row

    @property
    def code(self) -> str:
        """A program that gets such a sandbox."""
        return CODE if self.preload == () else f"import pandas\n{CODE}"

    @property
    def keys(self) -> tuple[str, ...]:
        """Of all its rows."""
        return tuple(filter(None, (self.memory, self.processor, self.server)))


_PANDAS = ("pandas",)
LOOKS = (
    Look(memory="memory-bare", driver="bubblewrap", preload=()),
    Look(memory="memory-pandas", driver="bubblewrap", preload=_PANDAS),
    Look(
        memory="memory-shipped", driver="bubblewrap", preload=None, processor="idle-bubblewrap", server="memory-server"
    ),
    Look(memory="memory-docker", driver="docker", preload=(), processor="idle-docker"),
    Look(memory="memory-docker-pandas", driver="docker", preload=_PANDAS),
    Look(memory="memory-docker-shipped", driver="docker", preload=None),
    Look(memory="memory-gvisor", driver="gvisor", preload=(), processor="idle-gvisor"),
)

Group = tuple[int, ...]  # the processes of one sandbox


def in_namespaces(pids: Sequence[int]) -> dict[str, Group]:
    """Processes by network namespace, those of ours left out: each sandbox has one of its own."""
    ours = Path("/proc/self/ns/net").readlink()
    found: defaultdict[str, list[int]] = defaultdict(list)
    for pid in pids:
        with suppress(OSError):
            there = Path(f"/proc/{pid}/ns/net").readlink()
            if there != ours:
                found[str(there)].append(pid)
    return {name: tuple(each) for name, each in found.items()}


def waiting(server: int, driver: str) -> list[Group]:
    """The sandboxes that wait of a worker, or of a server without one; without the zygote they are forked from."""
    if driver == "docker":
        return _containers(server)
    if driver == "gvisor":
        # Its kernel and its server of files have a namespace each: here a sandbox is all below one child of ours.
        trees = [(child, *clients.family(child)) for child in clients.children(server)]
        return [tree for tree in trees if in_namespaces(tree)]
    groups = in_namespaces(clients.family(server))
    # The zygote is the one whose own child is in another namespace.
    parents = {_parent(pid) for group in groups.values() for pid in group}
    held = {name for name, group in groups.items() if any(pid in parents for pid in group) and _elsewhere(group)}
    return [group for name, group in groups.items() if name not in held]


def _elsewhere(group: Group) -> bool:
    return any(child not in group for pid in group for child in clients.family(pid))


def _parent(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _containers(server: int) -> list[Group]:
    engine = Engine(host_from_environment())
    try:
        found = []
        for name in leftovers.containers(server):
            with suppress(Exception):  # it has just gone
                pid: int = engine.api.inspect_container(name)["State"]["Pid"]
                found.append((pid, *clients.family(pid)))
        return found
    finally:
        engine.close()


def pss_mib(pids: Sequence[int]) -> float:
    """Proportional set size, see proc_pid_smaps(5): what is shared by two counts half for each."""
    return _smaps(pids, r"(?m)^Pss:\s+(\d+)")


def own_mib(pids: Sequence[int]) -> float:
    """Memory that nobody else has mapped: what would be free without them."""
    return _smaps(pids, r"(?m)^Private_(?:Clean|Dirty):\s+(\d+)")


def _smaps(pids: Sequence[int], pattern: str) -> float:
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += sum(map(int, re.findall(pattern, Path(f"/proc/{pid}/smaps_rollup").read_text())))
    return total / 1024


def processor_seconds(pids: Sequence[int]) -> dict[str, float]:
    """Spent so far, by thread: the first number of /proc/PID/task/TID/schedstat is in nanoseconds."""
    found: dict[str, float] = {}
    for pid in pids:
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


async def settled(server: int, driver: str) -> list[Group]:
    """The sandboxes that wait once nothing changes any more."""
    same, before = 0, set[Group]()
    with anyio.fail_after(SETTLE_SECONDS):
        while same < SETTLED_LOOKS:
            await anyio.sleep(LOOK_SECONDS)
            now = set(waiting(server, driver))
            same, before = (same + 1 if now == before else 0), now
    if not before:
        raise RuntimeError("no sandbox waits")
    return sorted(before)


async def _waiting_after_calls(client: Client, server: int, look: Look) -> list[Group]:
    # A call before has started what they are forked from, which else would import all modules side by side.
    async with anyio.create_task_group() as tasks:
        for _ in range(AT_ONCE):
            tasks.start_soon(clients.answered, client, "run_python", {"code": look.code}, look.driver)
    return await settled(server, look.driver)


def _has_pandas(group: Group) -> bool:
    for pid in group:
        with suppress(OSError):
            if "/pandas/" in Path(f"/proc/{pid}/maps").read_text():
                return True
    return False


async def _share(groups: Sequence[Group], seconds: float) -> float:
    """Processor seconds that each of them spends in a second."""
    pids = [pid for group in groups for pid in group]
    before, began = processor_seconds(pids), anyio.current_time()
    await anyio.sleep(seconds)
    after, seconds = processor_seconds(pids), anyio.current_time() - began
    # One that was taken away meanwhile has not spent less than nothing.
    spent = sum(after[thread] - before.get(thread, 0.0) for thread in after)
    return spent / seconds / len(groups)


async def measured(directory: Path, look: Look, seconds: float, side: Side = OURS) -> dict[str, Series]:
    """The rows of one look."""
    setup = Setup(
        side=side,
        directory=directory / f"{side.name}-idle-{look.memory}",
        workspace=directory / "workspace",
        driver=look.driver,
        preload=look.preload,
    )
    async with clients.over_stdio(setup) as client:
        server = _server(setup)
        await clients.answered(client, "run_python", {"code": look.code}, look.driver)
        holder = next(iter(workers(setup.directory / "state")), server)  # earlier revisions have no worker
        everyone = await _waiting_after_calls(client, holder, look)
        # Beside those with modules there is one without, for a program that wants none.
        groups = [each for each in everyone if _has_pandas(each) == (look.preload != ())]
        if not groups:
            raise RuntimeError("no such sandbox waits")
        share = await _share(groups, seconds) if look.processor else 0.0
        memory = tuple(pss_mib(group) for group in groups)
        own = sum(own_mib(group) for group in groups) / len(groups)
        waiting_pids = {pid for group in everyone for pid in group}
        own_server = pss_mib([server])
        rest = pss_mib(sorted({*clients.family(holder), *({holder} - {server})} - waiting_pids))
    note = (
        f"PSS of one of {len(groups)} that wait; nobody else has {own:.1f} MiB of it; what they are made from and held "
        f"by takes {rest:.1f} MiB once"
    )
    found = {look.memory: Series(key=look.memory, what="PSS", unit="MiB", rounds=(memory,), note=note)}
    if look.processor:
        told = f"{len(groups)} that wait, over {seconds:g} s, {_preloaded(look.preload)} preloaded"
        found[look.processor] = one(look.processor, "processor time of one", "% of a core", share * 100, told)
    if look.server:
        found[look.server] = one(
            look.server, "PSS of the server", "MiB", own_server, f"{len(everyone)} sandboxes ready"
        )
    return found


def _preloaded(modules: tuple[str, ...] | None) -> str:
    return "the shipped profile's modules" if modules is None else ", ".join(modules) or "nothing"


def _server(setup: Setup) -> int:
    """The process of ours that serves this setup."""
    needle = str(setup.directory / "state").encode()
    for pid in clients.family(int(Path("/proc/self").readlink().name)):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if needle in words and b"serve" in words:
                return pid
    raise RuntimeError("the server's process cannot be found")
