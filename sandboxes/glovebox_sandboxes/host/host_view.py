"""View a sandbox as the host's kernel does: its first process in proc(5). Reads only, decides nothing.

The guest's report is trusted because nothing untrusted ran before it. This view trusts no report: it reads the
process's users, rights, namespaces and mounts. What cannot be read says why.

Race-free by one open directory: every file is opened in it, so all are the same process's, even if its number is reused
meanwhile. See proc_pid_status(5), proc_pid_mountinfo(5), namespaces(7).
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from _glovebox_guest import measure as inside
from glovebox_sandboxes.contract.measure import NAMESPACES, MeasuredMount
from glovebox_sandboxes.host.descriptors import opened

_UNMAPPED = 65534
"""Shown inside for a user or group of the host without a number there (kernel.overflowuid)."""
_IDS = re.compile(r"^\d+ \d+ \d+:\d+", re.MULTILINE)
"""Numbers of a mount, of the one that it is in, and of its device."""
_OWNER = re.compile(r",uid=\d+,gid=\d+$", re.MULTILINE)
_MAX_BYTES = 1 << 20
"""Of one file: a mount table of a few thousand lines; a sandbox's is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteView:
    """Namespaces and filters of a zygote, for comparison with its forks."""

    namespaces: Mapping[str, int]
    filters: int | None
    """Seccomp filters: its forks have one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """The values read; a part that is not there is explained in ``unread``."""

    parts: Mapping[str, Any] = field(default_factory=dict)
    """By the names in ``_PARTS``. Users and groups are the host's numbers, each once; ``inner`` ones those of its own
    user namespace, see user_namespaces(7)."""
    zygote: ZygoteView | None = None
    unread: Mapping[str, str] = field(default_factory=dict)
    """Part → why it could not be read; ``""`` stands for all parts."""
    compared: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """The driver's own readings by name: as planned, and as found (None: unreadable)."""

    def why(self, part: str) -> str:
        """Return why a part is not there."""
        return self.unread.get(part) or self.unread.get("") or "the kernel does not tell"


def unseen(reason: str, compared: Mapping[str, tuple[Any, Any]] | None = None) -> HostView:
    """Return a view of a process that could not be read."""
    return HostView(unread={"": reason}, compared=compared or {})


def only_child(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Return the one child of our single-threaded child; None if there is not exactly one.

    Its number cannot mean another process while its parent lives and has not waited for it. None also if the mounted
    proc(5) is that of another pid namespace, in which our numbers mean others.
    """
    try:
        if (proc / "self").readlink().name != str(os.getpid()):
            return None
        listed = _read(f"{proc}/{pid}/task/{pid}/children").split()
    except OSError:  # it has ended; or a kernel without CONFIG_PROC_CHILDREN
        return None
    return int(listed[0]) if len(listed) == 1 else None


def look(pid: int, compared: Mapping[str, tuple[Any, Any]] | None = None, proc: Path = Path("/proc")) -> HostView:
    """Return the view of one process; ``compared`` are the driver's own readings."""
    parts: dict[str, Any] = {"status": {}}
    unread: dict[str, str] = {}
    try:
        with opened(f"{proc}/{pid}", os.O_DIRECTORY) as place:
            for part, read in _PARTS.items():
                try:
                    parts[part] = read(place, parts["status"])
                except (OSError, ValueError, LookupError) as problem:
                    reason = getattr(problem, "strerror", "it is not in the form that was expected")
                    unread[part] = f"{part} cannot be read: {reason}"
    except OSError as problem:
        return unseen(f"its process cannot be looked at: {problem.strerror}", compared)
    return HostView(parts=parts, unread=unread, compared=compared or {})


def groups_of(pid: int, proc: Path = Path("/proc")) -> dict[str, str]:
    """Return controller (on v2 ``""``) → path of a process's control group, see cgroups(7); empty if unreadable."""
    try:
        lines = _read(f"{proc}/{pid}/cgroup").splitlines()
    except OSError:
        return {}
    # hierarchy:controllers:path
    parts = (line.split(":", 2) for line in lines)
    return {controller: path for _, controllers, path in parts for controller in controllers.split(",")}


def _capabilities(status: dict[str, str]) -> int:
    # Unlike the guest, which lists its gaps: a set that is missing here is not an empty one.
    if not status.keys() >= set(inside.CAPABILITIES):
        raise LookupError
    return inside.capabilities(status)


def _inner(text: str, place: int, kind: str) -> tuple[int, ...]:
    """Return numbers of the host's by the numbers of the process's user namespace."""
    lines = [[int(number) for number in line.split()] for line in _lines(place, f"{kind}_map")]
    return tuple(
        next((first + number - here for first, here, count in lines if here <= number < here + count), _UNMAPPED)
        for number in _numbers(text)
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(sorted({int(number) for number in text.split()}))


@lru_cache(maxsize=64)
def _mounts(told: str) -> tuple[MeasuredMount, ...]:
    """Return the mounts of a mountinfo; those of a plan's forks differ in ids and owners alone."""
    return tuple(MeasuredMount(**each) for each in inside.mounts(told.split("\n")[:-1]))


def _lines(place: int, name: str) -> list[str]:
    return _read(name, place).split("\n")[:-1]


def _read(name: str, place: int | None = None) -> str:
    content = bytearray()
    with opened(name, dir_fd=place) as descriptor:
        while len(content) < _MAX_BYTES and (part := os.read(descriptor, 1 << 16)):
            content += part
    return content.decode(errors="surrogateescape")


_PARTS: Mapping[str, Callable[[int, dict[str, str]], Any]] = {
    "status": lambda place, _: inside.status(_lines(place, "status")),
    # Real, effective, saved and file system ones.
    "uids": lambda _, status: _numbers(status["Uid"]),
    "gids": lambda _, status: _numbers(status["Gid"]),
    "groups": lambda _, status: _numbers(status["Groups"]),
    "inner_uids": lambda place, status: _inner(status["Uid"], place, "uid"),
    "inner_gids": lambda place, status: _inner(status["Gid"], place, "gid"),
    "inner_groups": lambda place, status: _inner(status["Groups"], place, "gid"),
    "capabilities": lambda _, status: _capabilities(status),
    "no_new_privs": lambda _, status: status["NoNewPrivs"] == "1",
    "seccomp": lambda _, status: int(status["Seccomp"]),
    # Number of its filters; unknown before Linux 5.9.
    "filters": lambda _, status: int(status["Seccomp_filters"]),
    "inner_pid": lambda _, status: int(status["NSpid"].split()[-1]),
    "namespaces": lambda place, _: {
        name: inside.namespace_number(os.readlink(f"ns/{name}", dir_fd=place)) for name in NAMESPACES
    },
    "mounts": lambda place, _: _mounts(_OWNER.sub("", _IDS.sub("0 0 0:0", _read("mountinfo", place)))),
    "interfaces": lambda place, _: tuple(inside.interfaces(_lines(place, "net/dev"))),
}
"""Readers by field: each takes the process's directory and its status, which is read first."""
