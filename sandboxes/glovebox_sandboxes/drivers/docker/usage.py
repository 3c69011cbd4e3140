"""Read one container's use and limits from its control groups, v1 and v2.

Also set the one limit that runc lacks, and kill what an Engine left in them.

See cgroups(7), https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host.cgroup import SOCKET_BYTES, GroupFiles, text
from glovebox_sandboxes.host.host_view import groups_of
from glovebox_sandboxes.host.owner import kill_all

_NANOSECONDS = 1_000_000_000
_SOCKETS = "memory.kmem.tcp.limit_in_bytes"
"""UDP's as well, despite its name. Without it v1 counts socket buffers nowhere; runc ignores the Engine's."""
_PERIOD = 100_000
"""Microseconds in which the Engine counts NanoCpus."""
_PLACES = tuple(place + name for place in ("pids/", "") for name in ("docker/{}", "system.slice/docker-{}.scope"))
"""The Engine's places for a container's group, its own or systemd's: on version 1, and on version 2."""
_ROUNDS = 100
"""Passes over a group that is being killed: more than the generations of a fork bomb within its limit."""


def group(pid: int, container: str, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> GroupFiles:
    """Return the control group of a container's first process.

    ``pid`` is the Engine's number, perhaps another process's here: groups not named after the container are left out.
    """
    found = groups_of(pid, proc)
    return GroupFiles({each: f"{root / each}{path}" for each, path in found.items() if container in path})


def started(pid: int, container: str) -> bool:
    """Return whether a container's shim or monitor, with its id among its arguments, is a process's parent.

    Identifies the process if there are no control groups; arguments as for ``group``.
    """
    try:
        # Behind the name in parentheses, which may hold anything: state, parent. See proc_pid_stat(5).
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        return container.encode() in Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
    except (OSError, IndexError):
        return False


def bound_sockets(group: GroupFiles) -> bool:
    """Bound a container's socket buffers on v1, where memory's limit omits them; before its program runs.

    Returns whether this was done: not if needless, and not by a server that is not root.
    """
    try:
        memory = group.directories.get("memory")
        return memory is not None and Path(memory, _SOCKETS).write_text(str(SOCKET_BYTES)) > 0
    except OSError:
        return False


def limits(group: GroupFiles, host: Mapping[str, Any], *, bounded: bool) -> dict[str, tuple[object, object]]:
    """Return limits by name: planned in the HostConfig, and the kernel's (None: unreadable). See ``bound_sockets``."""
    # A host of version 1 may have version 2 mounted beside it, without controllers.
    unified = None if "memory" in group.directories else group.directories.get("")

    def found(controller: str, *files: str, v2: str = "") -> str | None:
        place = unified or group.directories.get(controller)
        try:
            values = [text(f"{place}/{file}") if place else None for file in ((v2,) if unified and v2 else files)]
        except SandboxError:
            return None  # set by the Engine: only compared here, and unreadable values are reported
        return " ".join(filter(None, values)) or None

    return {
        **({"limit sockets": (str(SOCKET_BYTES), found("memory", _SOCKETS))} if bounded else {}),
        "limit memory": (str(host["Memory"]), found("memory", "memory.limit_in_bytes", v2="memory.max")),
        "limit pids": (str(host["PidsLimit"]), found("pids", "pids.max")),
        "limit cpu": (
            f"{host['NanoCpus'] * _PERIOD // _NANOSECONDS} {_PERIOD}",
            found("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us", v2="cpu.max"),
        ),
    }


def end(container: str, root: Path = Path("/sys/fs/cgroup")) -> int:
    """Kill what a forgetful Engine left in a removed container's groups; return its number, 0 if out of sight."""
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        found = {pid for place in _PLACES for pid in kill_all(str(root / place.format(container)))}
        if found <= killed:
            break
        killed |= found
    return len(killed)
