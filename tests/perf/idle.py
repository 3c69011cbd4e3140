"""What a sandbox costs while it waits for a call: memory that is its own share, and processor time."""

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import anyio
from mcp import Client

from sandboxes.docker.engine import Engine, host_from_environment
from tests import leftovers
from tests.perf import clients
from tests.perf.bare import CODE
from tests.perf.clients import Setup
from tests.perf.series import Series, one

AT_ONCE = 8
"""Calls before looking: after them several sandboxes wait, as on a server that is in use."""
SETTLED_LOOKS = 10
LOOK_SECONDS = 0.2
"""The shelf is full when the same sandboxes were there in so many looks, so far apart."""
SETTLE_SECONDS = 60.0
CPU_SECONDS = 20.0
QUICK_CPU_SECONDS = 4.0
"""Over which processor time is counted; the kernel counts it in nanoseconds."""

#: Driver, and whether modules are preloaded.
LOOKED_AT = (("bubblewrap", False), ("bubblewrap", True), ("docker", False), ("docker", True), ("gvisor", False))

Group = tuple[int, ...]
"""The processes of one sandbox."""


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
    """The sandboxes of a server that wait; without the zygote they are forked from."""
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
    """The sandboxes that wait once nothing changes any more.

    Raises:
        TimeoutError: that was never so.
        RuntimeError: none wait.
    """
    same, before = 0, set[Group]()
    with anyio.fail_after(SETTLE_SECONDS):
        while same < SETTLED_LOOKS:
            await anyio.sleep(LOOK_SECONDS)
            now = set(waiting(server, driver))
            same, before = (same + 1 if now == before else 0), now
    if not before:
        raise RuntimeError("no sandbox waits")
    return sorted(before)


async def _looked_at(client: Client, server: int, driver: str, seconds: float) -> tuple[list[Group], float]:
    """The sandboxes that wait after some calls, and processor seconds that each spent in each second."""
    async with anyio.create_task_group() as tasks:
        for _ in range(AT_ONCE):
            tasks.start_soon(clients.answered, client, "run_python", {"code": CODE}, driver)
    groups = await settled(server, driver)
    pids = [pid for group in groups for pid in group]
    before, began = processor_seconds(pids), anyio.current_time()
    await anyio.sleep(seconds)
    after, seconds = processor_seconds(pids), anyio.current_time() - began
    # One that was taken away meanwhile has not spent less than nothing.
    spent = sum(after[thread] - before.get(thread, 0.0) for thread in after)
    return groups, spent / seconds / len(groups)


async def measured(
    directory: Path, driver: str, *, preload: bool, seconds: float, tick: Callable[[str], None]
) -> dict[str, Series]:
    """One driver, with the shipped profile's modules preloaded or without any."""
    name = f"idle-{driver}{'-pandas' if preload else ''}"
    tick(name)
    setup = Setup(directory=directory / name, workspace=directory / "workspace", driver=driver, preload=preload)
    async with clients.over_stdio(setup) as client:
        server = _server(setup)
        groups, share = await _looked_at(client, server, driver, seconds)
        memory = tuple(pss_mib(group) for group in groups)
        own = sum(own_mib(group) for group in groups) / len(groups)
        everything = {pid for group in groups for pid in group} | set(clients.family(server))
        rest = pss_mib(sorted(everything - {pid for group in groups for pid in group}))
    key = memory_key(driver, preload=preload)
    note = (
        f"PSS of one of {len(groups)} that wait; nobody else has {own:.1f} MiB of it; what they are made from and held "
        f"by takes {rest:.1f} MiB once"
    )
    found = {key: Series(key=key, what="PSS", unit="MiB", rounds=(memory,), note=note)}
    if not preload or driver == "bubblewrap":
        what = f"idle-{driver}"
        told = f"{len(groups)} that wait, over {seconds:g} s{', pandas preloaded' if preload else ''}"
        found[what] = one(what, "processor time of one", "% of a core", share * 100, told)
    return found


def memory_key(driver: str, *, preload: bool) -> str:
    """What the memory of one is called."""
    if driver == "bubblewrap":
        return "memory-pandas" if preload else "memory-bare"
    return f"memory-{driver}{'-pandas' if preload else ''}"


def _server(setup: Setup) -> int:
    """The process of ours that serves this setup."""
    needle = str(setup.directory / "state").encode()
    for pid in clients.family(int(Path("/proc/self").readlink().name)):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if needle in words and b"serve" in words:
                return pid
    raise RuntimeError("the server's process cannot be found")
