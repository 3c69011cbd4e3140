"""Read one container's use and limits from its control groups, v1 and v2.

Also set the one limit that runc lacks, and kill what an Engine left in them.

See cgroups(7), https://docs.kernel.org/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html.
"""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from glovebox_sandboxes.contract.base import SandboxStats
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host import cgroup
from glovebox_sandboxes.host.cgroup import SOCKET_BYTES, processor_seconds, statistics, text
from glovebox_sandboxes.host.host_view import groups_of

_NANOSECONDS = 1_000_000_000
_SOCKETS = "memory.kmem.tcp.limit_in_bytes"
"""UDP's as well, despite its name. Without it v1 counts socket buffers nowhere; runc ignores the Engine's."""
_PERIOD = 100_000
"""Microseconds in which the Engine counts NanoCpus."""
_GROUPS = tuple(place + name for place in ("pids/", "") for name in ("docker/{}", "system.slice/docker-{}.scope"))
"""The Engine's places for a container's group, its own or systemd's: on version 1, and on version 2."""
_ROUNDS = 100
"""Passes over a group that is being killed: more than the generations of a fork bomb within its limit."""


def groups(
    pid: int, container: str, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")
) -> dict[str, Path]:
    """Return the directory of each controller (``memory``, ``cpuacct``; "" on v2) for a container's first process.

    ``pid`` is the Engine's number, perhaps another process's here: groups not named after the container are left out.
    """
    found = groups_of(pid, proc)
    return {each: root / each / path.lstrip("/") for each, path in found.items() if container in path}


def started(pid: int, container: str) -> bool:
    """Return whether a container's shim or monitor, with its id among its arguments, is a process's parent.

    Identifies the process if there are no control groups; arguments as for ``groups``.
    """
    try:
        # Behind the name in parentheses, which may hold anything: state, parent. See proc_pid_stat(5).
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        return container.encode() in Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
    except (OSError, IndexError):
        return False


def bound_sockets(directories: Mapping[str, Path]) -> bool:
    """Bound a container's socket buffers on v1, where memory's limit omits them; before its program runs.

    Returns whether this was done: not if needless, and not by a server that is not root.
    """
    memory = directories.get("memory")
    try:
        return memory is not None and (memory / _SOCKETS).write_text(str(SOCKET_BYTES)) > 0
    except OSError:
        return False


def weigh(directories: Mapping[str, Path], parts: int) -> None:
    """See ``Sandbox.weigh``; does nothing if the groups cannot be seen or changed."""
    for version, controller in ((1, "cpu"), (2, "")):
        if controller in directories:
            cgroup.weigh(str(directories[controller]), version, parts)


def limits(
    directories: Mapping[str, Path], host: Mapping[str, Any], *, bounded: bool
) -> dict[str, tuple[object, object]]:
    """Return limits by name: planned in the HostConfig, and the kernel's (None: unreadable). See ``bound_sockets``."""
    # A host of version 1 may have version 2 mounted beside it, without controllers.
    unified = None if "memory" in directories else directories.get("")
    places = {name: unified or directories.get(name) for name in ("memory", "pids", "cpu")}
    files = ("memory.max", "pids.max", "cpu.max") if unified else ("memory.limit_in_bytes", "pids.max", "")
    memory, pids = (_text(places[name], file) for name, file in zip(places, files[:2], strict=False))
    if unified:
        cpu = _text(unified, files[2])
    else:
        cpu = " ".join(_text(places["cpu"], f"cpu.cfs_{part}_us") or "" for part in ("quota", "period")).strip() or None
    sockets = _text(directories.get("memory"), _SOCKETS)
    return {
        **({"limit sockets": (str(SOCKET_BYTES), sockets)} if bounded else {}),
        "limit memory": (str(host["Memory"]), memory),
        "limit pids": (str(host["PidsLimit"]), pids),
        "limit cpu": (f"{host['NanoCpus'] * _PERIOD // _NANOSECONDS} {_PERIOD}", cpu),
    }


def end(container: str, root: Path = Path("/sys/fs/cgroup")) -> int:
    """Kill what a forgetful Engine left in a removed container's groups; return its number, 0 if out of sight."""
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        found = {pid for group in _GROUPS for pid in _processes(root / group.format(container))} - killed
        if not found:
            break
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
    return len(killed)


def _processes(group: Path) -> set[int]:
    try:
        # 0 stands for processes outside of our own pid namespace.
        return {int(pid) for pid in (group / "cgroup.procs").read_text().split()} - {0}
    except OSError:
        return set()


def _text(directory: Path | None, file: str) -> str | None:
    try:
        return None if directory is None else text(f"{directory}/{file}")
    except SandboxError:
        return None  # set by the Engine: only compared here, and unreadable values are reported


def read(directories: Mapping[str, Path]) -> SandboxStats | None:
    """Return the present reading; None when the groups are gone."""
    memory = directories.get("memory", directories.get(""))
    return statistics(str(memory), str(directories.get("cpuacct", memory))) if memory else None


def processor(directories: Mapping[str, Path]) -> float | None:
    """Return seconds of processor time so far; None if not counted."""
    group = directories.get("cpuacct", directories.get(""))
    return None if group is None else processor_seconds(str(group))
