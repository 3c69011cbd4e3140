"""Enforce limits for all processes of a sandbox together: one control group each, v1 or v2.

A group exists before its sandbox and is gone after it. ``host.process.Janitor`` removes the groups of dead servers. See
cgroups(7), https://docs.kernel.org/admin-guide/cgroup-v2.html and …/cgroup-v1/memory.html.
"""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio

from glovebox_sandboxes.contract.base import Limits, SandboxStats
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host.descriptors import opened
from glovebox_sandboxes.host.host_view import groups_of
from glovebox_sandboxes.host.owner import PREFIX, kill_all

_CPU_PERIOD_US = 100_000
SOCKET_BYTES = 32 * 1024 * 1024
"""On v1, bytes in flight in a sandbox's sockets. v1 counts them apart from memory, and not at all without a limit
(cgroup-v1/memory.html, 2.7.2). All sockets of a machine share a bound too, so one sandbox could take it from the host.
v2 counts them as memory."""
_REMOVE_TRIES = 100
"""A group can be removed once its last process is reaped: polled every millisecond at first, for at most 1 s."""

_SETTING_BYTES = 256
_STATISTIC_BYTES = 4096
SERVERS = f"{PREFIX}servers"
"""On v2, the group into which a lone server moves. It goes with the unit or container."""

_CONTROLLERS = ("memory", "pids", "cpu")
_WEIGHT = {"cpu": ("cpu.shares", 1024), "": ("cpu.weight", 100)}
"""By controller: the file, and the default of every group."""
_PARTS = 8
"""All sandboxes together weigh 1/8 of one process of the host, on v2 of a group beside theirs, which come first. With a
whole one, six sandboxes whose many threads often sleep kept Linux 6.18.44 from running anything else for up to 40 s."""
_ACCOUNT = "cpuacct"
"""On v1, the controller of processor time: mostly in one hierarchy with ``cpu``, else in its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Places where this host lets us make groups."""

    version: int
    parents: tuple[Path, ...]
    """Parent directories of sandboxes' groups: one on v2, one per controller on v1."""
    counts: bool = True
    """They count processor time: not on v1 without its controller."""


def fix() -> str:
    """Return the advice that makes limits hold for all processes of a sandbox together."""
    where = "Run the server as root, or in a systemd unit with Delegate=yes"
    if os.geteuid() == 0:
        where = "Control groups are absent or read-only here: start the container, or sandbox, with writable ones"
    return f'{where} (docs/operate/install.md); or let the profile accept limits per process: limits.enforce = "any".'


def detect(owner: str, root: Path = Path("/sys/fs/cgroup")) -> Hierarchy | None:
    """Find a place for our groups by making it, or None; ``owner`` tells those of dead and living servers apart."""
    if (root / "cgroup.controllers").exists():
        return _detect_v2(owner, root)
    counts = (root / _ACCOUNT / "cgroup.procs").exists()
    apart = counts and not (root / _ACCOUNT).samefile(root / "cpu")
    places = [root / controller for controller in (*_CONTROLLERS, *[_ACCOUNT] * apart)]
    parents = tuple(place / "glovebox" / owner for place in places)
    there = all((place / "cgroup.procs").exists() for place in places)
    if not there or not _made(*parents):
        return None
    GroupFiles({"cpu": str(root / "cpu" / "glovebox")}).weigh(_PARTS)
    return Hierarchy(version=1, parents=parents, counts=counts)


def _made(*parents: Path) -> bool:
    try:
        for parent in parents:
            parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return True


def _detect_v2(owner: str, root: Path) -> Hierarchy | None:
    """Return the v2 hierarchy: a group that can hand controllers down.

    Only a group without processes of its own may do that, or the root of all groups. Tried in this order: the root,
    which only root may change and a container does not see; the group above our own (a unit with DelegateSubgroup=);
    our own (a unit with Delegate=yes, a container's first process), which we leave.
    """
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((root / line[4:] for line in lines if line.startswith("0::/")), None)
    above = [] if own in (None, root) else [own.parent]
    for base in [root] * (not (root / "cgroup.type").exists()) + above:
        if _handed_down(base) and (found := _parent_in(base, owner)):
            return found
    return _parent_in(own, owner) if own and _moved_below(own) else None


def _parent_in(base: Path, owner: str) -> Hierarchy | None:
    parent = base / f"{PREFIX}{owner}"
    if not _made(parent):
        return None
    if not _handed_down(parent):
        parent.rmdir()
        return None
    GroupFiles({"": str(parent)}).weigh(_PARTS)
    return Hierarchy(version=2, parents=(parent,))


def _handed_down(group: Path) -> bool:
    control = group / "cgroup.subtree_control"
    try:
        if not set(_CONTROLLERS) <= set(control.read_text().split()):
            # No permission to write, or processes in the group, or controllers that it lacks itself.
            control.write_text(" ".join(f"+{each}" for each in _CONTROLLERS))
    except OSError:
        return False
    return True


def _moved_below(own: Path) -> bool:
    """Leave our group for one below it, so that it can hand controllers down; only if we are alone in it."""
    below = own / SERVERS
    try:
        if (own / "cgroup.procs").read_text().split() != [str(os.getpid())]:
            return False
        below.mkdir(exist_ok=True)
        (below / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        return False
    if _handed_down(own):
        return True
    with suppress(OSError):
        (own / "cgroup.procs").write_text(str(os.getpid()))
        below.rmdir()
    return False


def settings(version: int, limits: Limits) -> Mapping[str, str]:
    """Return file name → content that enforces the limits; pure, part of the plan."""
    quota = limits.processors * _CPU_PERIOD_US
    if version == 1:
        return {
            "memory.limit_in_bytes": str(limits.memory_bytes),
            "memory.swappiness": "0",
            "memory.kmem.tcp.limit_in_bytes": str(SOCKET_BYTES),  # UDP's as well, despite its name
            "pids.max": str(limits.pids),
            "cpu.cfs_period_us": str(_CPU_PERIOD_US),
            "cpu.cfs_quota_us": str(quota),
        }
    return {
        "memory.max": str(limits.memory_bytes),
        "memory.swap.max": "0",
        "memory.oom.group": "0",
        "pids.max": str(limits.pids),
        "cpu.max": f"{quota} {_CPU_PERIOD_US}",
    }


class GroupFiles:
    """A control group as others see it: its directory by controller on v1; one, of ``""``, on v2; none if unseen."""

    def __init__(self, directories: Mapping[str, str]) -> None:
        self.directories = directories

    def find(self, *controllers: str) -> str | None:
        """Return the first directory of these controllers on v1, the only one on v2; None if there is none."""
        return next((self.directories[each] for each in (*controllers, "") if each in self.directories), None)

    def weigh(self, parts: int) -> None:
        """Set its processor share to 1/``parts`` of a sibling group's; does nothing if it is gone, or not ours."""
        for controller, (file, default) in _WEIGHT.items():
            if controller in self.directories:
                with suppress(OSError), opened(f"{self.directories[controller]}/{file}", os.O_WRONLY) as descriptor:
                    os.write(descriptor, str(default // parts).encode())

    def stats(self) -> SandboxStats | None:
        """Return the kernel's counts for its processes so far; None if it is gone.

        v2 reports no memory peak before 5.19, v1 no processor time without ``cpuacct``.
        """
        memory = self.find("memory")
        events = memory and (fields(f"{memory}/memory.events") or fields(f"{memory}/memory.oom_control"))
        if not events:
            return None
        peak = text(f"{memory}/memory.max_usage_in_bytes") or text(f"{memory}/memory.peak")
        return SandboxStats(
            out_of_memory=events.get("oom_kill", 0) > 0,
            memory_peak_bytes=int(peak) if peak else None,
            cpu_seconds=self.cpu_seconds(),
        )

    def counters(self) -> dict[str, str]:
        """Return the files of the kernel's counts by what they count: ``events`` of memory, its ``peak``, ``time``."""
        memory, account = self.find("memory"), self.find(_ACCOUNT, "cpu")
        places = {
            "events": (f"{memory}/memory.events", f"{memory}/memory.oom_control"),
            "peak": (f"{memory}/memory.max_usage_in_bytes", f"{memory}/memory.peak"),
            "time": (f"{account}/cpuacct.usage", f"{account}/cpu.stat"),
        }
        return {what: path for what, paths in places.items() for path in paths if os.access(path, os.R_OK)}

    def cpu_seconds(self) -> float | None:
        """Return processor time of its processes so far; None if it is not counted, or the group is gone."""
        group = self.find(_ACCOUNT, "cpu")
        if group is None:
            return None
        nanoseconds = text(f"{group}/cpuacct.usage")
        if nanoseconds:
            return int(nanoseconds) / 1e9
        microseconds = fields(f"{group}/cpu.stat").get("usage_usec")
        return None if microseconds is None else microseconds / 1e6


class Cgroup(GroupFiles):
    """The control group of one sandbox, made here; without a hierarchy there is none, and nothing to do."""

    def __init__(self, hierarchy: Hierarchy | None, name: str, wanted: Mapping[str, str]) -> None:
        """Make the group and set its limits. Raises SandboxError if the kernel rejects or changes a limit."""
        # Strings and system calls: building a dozen paths per call would take longer than the calls themselves.
        parents = hierarchy.parents if hierarchy else ()
        names = ("",) if len(parents) == 1 else (*_CONTROLLERS, _ACCOUNT)
        super().__init__({each: f"{parent}/{name}" for each, parent in zip(names, parents, strict=False)})
        self._name = name
        self._wanted = wanted
        self._held: dict[str, str] = {}
        try:
            for directory in self.directories.values():
                os.mkdir(directory)  # noqa: PTH102 - as above
            for file, content in wanted.items():
                self._set(file, content)
        except OSError as problem:
            self.remove_now()
            reason = f"the control group refused: {problem}"
            raise SandboxError("Setting a sandbox's limits", reason, "Run `glovebox doctor`.") from problem

    def _set(self, file: str, content: str) -> None:
        # Each controller of v1 has a directory of its own, v2 has one for all.
        place = f"{self.find(file.partition('.')[0], 'cpu')}/{file}"
        try:
            with opened(place, os.O_RDWR) as descriptor:
                os.write(descriptor, content.encode())
                # Declared is not effective: the kernel rounds memory to pages and may cap a value.
                held = os.pread(descriptor, _SETTING_BYTES, 0).decode()
        except FileNotFoundError:
            # Swap accounting may be compiled out; without swap there is nothing to limit.
            if file in ("memory.swap.max", "memory.swappiness"):
                return
            raise
        if not _holds(held, content):
            raise OSError(f"{file} is {held.strip()} after {content} was written")
        self._held[file] = content

    def read_back(self, pid: int | None) -> dict[str, tuple[object, object]]:
        """Return plan and kernel values (None: unknown), and whether a process is inside, for ``host_view.look``."""
        if not self.directories:
            return {}
        found: dict[str, tuple[object, object]] = {
            f"limit {file}": (content, self._held.get(file)) for file, content in self._wanted.items()
        }
        groups = groups_of(pid) if pid is not None else {}
        own = all(groups.get(each, "").endswith(f"/{self._name}") for each in self.directories)
        found["in its control group"] = True, own if groups else None
        return found

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return the files by which a thread enters the group itself, at no cost; v1 only."""
        places = self.directories.values()
        return tuple(f"{directory}/tasks" for directory in places) if len(places) > 1 else ()

    @property
    def entrances(self) -> tuple[str, ...]:
        """Return the files by which a process that holds them open enters the group, with a 0."""
        return self.tasks or tuple(f"{directory}/cgroup.procs" for directory in self.directories.values())

    def add(self, pid: int) -> None:
        """Move a process into the group; its later children follow. Raises OSError."""
        for directory in self.directories.values():
            Path(directory, "cgroup.procs").write_text(str(pid))

    async def remove(self) -> None:
        """Kill what lives in the group and remove it. Raises SandboxError if a process does not die."""
        for pause in self.removing():
            await anyio.sleep(pause)

    def removing(self) -> Iterator[float]:
        """Do the same, and yield the seconds to wait before each further try."""
        for attempt in range(_REMOVE_TRIES):
            if self.remove_now():
                return
            self.kill()
            yield 0.001 if attempt < _REMOVE_TRIES // 2 else 0.02
        raise SandboxError("Cleaning up after a sandbox", f"processes stay in {self._name}", "Look at them with `ps`.")

    def kill(self, *, spared: int | None = None) -> None:
        """Send SIGKILL to every process in the group except a spared one."""
        for directory in self.directories.values():
            kill_all(directory, spared=spared)

    def remove_now(self) -> bool:
        """Remove the group if it is empty; return whether it is gone."""
        try:
            for directory in self.directories.values():
                with suppress(FileNotFoundError):
                    os.rmdir(directory)  # noqa: PTH106 - as above
        except OSError:
            return False
        return True


def text(path: str) -> str | None:
    """Return a small file of a group, or None if it is gone. Raises SandboxError if it is there and unreadable."""
    try:
        # By hand: on the way of every call, several times.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _STATISTIC_BYTES).decode().strip()
        finally:
            os.close(descriptor)
    except OSError as problem:
        if problem.errno in (errno.ENOENT, errno.ENODEV):  # ENODEV: the group was removed while the file was open
            return None
        words = problem.strerror or str(problem)
        fix = "Let the server read it, or run it where control groups are not mounted."
        raise SandboxError(f"Reading {path}", words, fix) from problem


def fields(path: str) -> dict[str, int]:
    """Return the name and number of each line of a statistics file."""
    return {name: int(value) for name, value in (line.split() for line in (text(path) or "").splitlines())}


def _holds(found: str, wanted: str) -> bool:
    if found.split() == wanted.split():
        return True
    page = os.sysconf("SC_PAGE_SIZE")
    return found.strip().isdigit() and wanted.isdigit() and int(found) // page == int(wanted) // page
