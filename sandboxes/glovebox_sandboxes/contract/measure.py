"""The measurement of a sandbox from inside, its expected values, and the difference. Pure.

The guest measures itself before any untrusted code runs and sends the result with ``ready``. ``attestation`` compares
it with the plan and with the host's view.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from _glovebox_guest.measure import told
from glovebox_sandboxes.contract.errors import SandboxError

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
"""Linux namespaces, see namespaces(7); ``time`` is left out: of the host it hides only the uptime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The measurement that proves the planned isolation."""

    uid: int
    interfaces: tuple[str, ...]
    writable: tuple[str, ...]
    """Mount points that may be writable, and no others."""
    mounts: tuple[str, ...]
    """Mount points of host files, read-only: exactly these, beside the kernel's own file systems."""
    namespaces: tuple[str, ...]
    """Namespaces that must not be the host's."""
    seccomp: int = 2
    no_new_privs: bool = True
    capabilities: int = 0
    """Every capability set, bounding included, as the bit mask of capabilities(7)."""
    landlock: bool = True
    """True if the kernel has Landlock, which keeps ``/output`` from being read."""
    system: Literal["linux", "gvisor"] = "linux"
    unmeasured: tuple[str, ...] = ()
    """Properties that this kernel does not show: only these may be missing from the measurement."""
    hidden: tuple[str, ...] = ()
    kept_groups: tuple[int, ...] = ()
    """Supplementary groups, as seen from inside, that an unprivileged server cannot remove from its sandboxes."""


class MeasuredMount(BaseModel):
    """A relevant line of /proc/self/mountinfo."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    target: str = Field(max_length=4096)
    type: str = Field(max_length=64)
    writable: bool


class Measured(BaseModel):
    """The guest's measurement of itself. It comes over the wire before untrusted code has run, and is still checked."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    uid: int
    gid: int
    groups: list[int] = Field(max_length=64)
    capabilities: int
    no_new_privs: bool
    seccomp: int
    dumpable: int
    namespaces: dict[str, int]
    mounts: list[MeasuredMount] = Field(max_length=512)
    interfaces: list[str] = Field(max_length=64)
    descriptors: list[int] = Field(max_length=64)
    """Open file descriptors beside the wire."""
    landlock: int
    pid: int
    hostname: str = Field(max_length=256)
    kernel: str = Field(max_length=512)
    python: str = Field(max_length=64)
    present: list[str] = Field(default_factory=list, max_length=64)
    system: Literal["linux", "gvisor"] = "linux"
    """The kernel; ``linux`` unless every mark of another one is there."""
    unmeasured: list[str] = Field(default_factory=list, max_length=16)
    """Capability sets and namespaces that the kernel does not show; elsewhere they count as empty and as our own."""


# File systems that the kernel or the driver makes for this sandbox alone and that hold no host files, but only in their
# own places: the host's /run is a tmpfs too, and so may a workspace be.
_OWN = frozenset({"proc", "sysfs", "tmpfs", "devpts", "mqueue", "cgroup", "cgroup2", "devtmpfs"})
_OWN_PLACES = ("/dev", "/proc", "/sys")


def raw(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measurement in a ``ready`` message, not checked yet; raise SandboxError if there is none."""
    try:
        return told(body)
    except (LookupError, TypeError, ValueError, AttributeError) as problem:
        raise _no_measurement(repr(problem)) from None


def parse(body: Mapping[str, Any]) -> Measured:
    """Return the checked body of a ``ready`` message; raise SandboxError if it is not a measurement."""
    try:
        return Measured.model_validate(body)
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _no_measurement(f"{where}: {first['msg']}") from None


def _no_measurement(reason: str) -> SandboxError:
    fix = "Run `glovebox setup`: guest and server may be of different versions."
    return SandboxError("Reading the guest's measurement of its isolation", reason, fix)


def more_groups(expected: Expected, groups: Iterable[int]) -> list[int]:
    """Return supplementary groups beside the sandbox's own and those that could not be removed."""
    return [group for group in groups if group not in (expected.uid, *expected.kept_groups)]


def shared(expected: Expected, namespaces: Mapping[str, int], host_namespaces: Mapping[str, int]) -> list[str]:
    """Return namespaces that must differ from the host's and are not shown to."""
    return [name for name in expected.namespaces if namespaces.get(name) in (None, host_namespaces[name])]


def writable(expected: Expected, mounts: Iterable[MeasuredMount]) -> list[str]:
    """Return mount points that are writable against the plan."""
    return sorted({mount.target for mount in mounts if mount.writable} - set(expected.writable))


def foreign(expected: Expected, mounts: Iterable[MeasuredMount]) -> list[str]:
    """Return mount points that may hold files of the host."""
    return sorted({mount.target for mount in mounts if not _own(mount, expected)})


def _own(mount: MeasuredMount, expected: Expected) -> bool:
    """Return whether a mount can hold no host files: by its kind, and by its place."""
    if mount.type not in _OWN or mount.target in expected.mounts:
        return False
    kernel = mount.target in _OWN_PLACES or mount.target.startswith(tuple(f"{place}/" for place in _OWN_PLACES))
    return kernel or mount.target in expected.writable
