"""Looks at what a server has on this machine: processes, control groups, containers, mounts. For tests of clean-up.

Everything is found by the server's own process or the sandbox's own namespaces, so that tests may run beside others.
"""

import re
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from glovebox_sandboxes.conformance.trial import processes
from glovebox_sandboxes.contract.errors import SandboxUnavailable
from glovebox_sandboxes.drivers.docker.driver import OWNER_LABEL
from glovebox_sandboxes.drivers.docker.engine import Engine, host_from_environment
from glovebox_server.audit.chain import Record, parse

#: Real seconds a test waits for something that takes well below one.
PATIENCE = 30.0


async def until(true: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Wait for something that nobody announces."""
    with anyio.fail_after(seconds):
        while not true():  # noqa: ASYNC110 - see the docstring
            await anyio.sleep(0.005)


@dataclass(frozen=True, slots=True)
class Process:
    """One process; a number that is used again is another one."""

    pid: int
    parent: int
    name: str
    born: int
    """Clock ticks after boot."""

    def runs(self) -> bool:
        """Whether it still does."""
        now = _look(self.pid)
        return now is not None and now.born == self.born


def _look(pid: int) -> Process | None:
    """One line of /proc/PID/stat, see proc_pid_stat(5); None for what is gone, or a zombie."""
    try:
        head, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return None
    fields = rest.split()
    if fields[0] in "ZX":
        return None
    return Process(pid=pid, parent=int(fields[1]), name=head.partition("(")[2], born=int(fields[19]))


def family(pid: int) -> tuple[Process, ...]:
    """A process's descendants, now."""
    every = [found for each in Path("/proc").iterdir() if each.name.isdigit() and (found := _look(int(each.name)))]
    members: list[Process] = []
    parents = {pid}
    while parents:
        generation = [each for each in every if each.parent in parents]
        members += generation
        parents = {each.pid for each in generation}
    return tuple(members)


def alive(found: Collection[Process]) -> list[Process]:
    """Those that still run."""
    return [process for process in found if process.runs()]


def of_sandbox(started: Record) -> tuple[str, ...]:
    """Processes in the sandbox that a ``sandbox.started`` record tells of."""
    if started.data["measured"]["system"] == "gvisor":
        # Its namespaces are its own kernel's. On the host all of it is in one control group.
        return _in_group(started.data["sandbox_id"])
    return processes(started.data["measured"]["namespaces"])


def _in_group(name: str) -> tuple[str, ...]:
    """Processes in a sandbox's control group, as lines like those of ``processes``."""
    places = (path for pattern in ("*/glovebox/*", "glovebox-*") for path in Path("/sys/fs/cgroup").glob(pattern))
    found: set[str] = set()
    for place in places:
        with suppress(OSError):
            found.update((place / name / "cgroup.procs").read_text().split())
    alive = (_look(int(pid)) for pid in sorted(found, key=int))
    return tuple(f"process {each.pid}: {each.name}" for each in alive if each is not None)


def groups(pid: int) -> list[str]:
    """Control groups that carry the number of a server's process in their names."""
    own = re.compile(rf"(?<!\d){pid}(?!\d)")
    places = (
        path
        for pattern in ("*/glovebox/*", "glovebox-*", "*/glovebox-*")
        for path in Path("/sys/fs/cgroup").glob(pattern)
    )
    return [str(path) for path in places if path.is_dir() and own.search(path.name)]


def containers(pid: int) -> list[str]:
    """Containers that carry the mark of a server's process."""
    try:
        engine = Engine(host_from_environment())
    except SandboxUnavailable:
        return []
    try:
        found = engine.api.containers(all=True, filters={"label": [OWNER_LABEL]})
        return [each["Id"] for each in found if f":{pid}:" in each["Labels"][OWNER_LABEL]]
    finally:
        engine.close()


def mounts() -> list[str]:
    """This namespace's mounts that are ours by their names."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "glovebox" in line]


def records(state: Path, server: int) -> list[Record]:
    """What a server, named by its process, has recorded so far."""
    log = state / "audit" / "audit.jsonl"
    if not log.exists():
        return []
    whole = log.read_bytes().splitlines(keepends=True)
    return [
        record for line in whole if line.endswith(b"\n") and (record := parse(line)).server.startswith(f"g{server}-")
    ]


def kinds(found: list[Record]) -> list[str]:
    """Kinds of records, in order."""
    return [record.kind for record in found]
