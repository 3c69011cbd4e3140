"""The specification of one sandbox, the same for every driver: plain frozen data, no I/O.

A ``SandboxSpec`` comes from a profile and says what to enforce. A ``Plan`` (see ``base``) is exactly what one driver
will do about it.
"""

from dataclasses import dataclass, replace
from typing import Literal

#: Fixed places inside every sandbox, shared by the guest, the drivers and the documentation.
SCRATCH = "/tmp"  # noqa: S108 - a path inside the sandbox: a private tmpfs, not the host's directory
OUTPUT = "/output"
INPUT = "/input"
WORKSPACE = "/workspace"
GUEST = "/guest"
PACKAGES = "/opt/packages"
#: The read-only workspace, while a copy of it is at ``WORKSPACE``. In the guest's own tree, which every sandbox has and
#: no program can write.
ORIGINAL = f"{GUEST}/workspace"

DEFAULT = "default"

#: User and group of every sandbox's processes, seen from inside (distroless images call it "nonroot").
GUEST_UID = 65532


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds for one call; every field is enforced by the sandbox or by the broker, never by the program."""

    wall_seconds: float
    cpu_seconds: int
    memory_bytes: int
    """Memory of all processes in the sandbox, scratch and output files included."""
    pids: int
    """Processes and threads at one time."""
    scratch_bytes: int
    output_bytes: int
    """Size of the tmpfs at ``/output``, and of all artifacts of one call together."""
    output_files: int
    stream_bytes: int
    """Bytes of stdout, and of stderr, that are kept: head and tail; the gap is counted."""
    processors: int = 1
    """Processors it may keep busy at one time, if a control group can bound them."""
    workspace_bytes: int = 0
    workspace_files: int = 0
    """Most files, folders and links of the workspace that are copied there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A host directory that is visible inside. Always read-only: a sandbox writes to its own tmpfs only."""

    source: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """Driver-neutral description of one sandbox."""

    limits: Limits
    mounts: tuple[Mount, ...] = ()
    network: Literal["none", "egress"] = "none"
    """``egress`` adds a proxy on the guest's own loopback; the network namespace is empty either way."""
    masks: tuple[str, ...] = ()
    """Paths in the mounted directory that programs cannot read; those of folders end with a slash."""
    overlay: bool = False
    """True if ``/workspace`` is a writable copy of ``ORIGINAL``, whose changes come out as a patch."""
    output: bool = False
    inputs: bool = False
    environment: str = DEFAULT
    preload: tuple[str, ...] = ()
    """Modules the guest imports before it reports ready."""
    require_cgroup: bool = False
    """Refuse if limits could only be enforced per process (rlimits)."""
    labels: tuple[tuple[str, str], ...] = ()
    """Marks on what the driver makes (container labels), for finding and reaping; never secret."""

    @property
    def masked(self) -> tuple[str, ...]:
        """Return ``masks`` as paths inside the sandbox."""
        return tuple(f"{self.mounts[0].target}/{name}" for name in self.masks)

    def without_preload(self) -> "SandboxSpec":
        """Return the same sandbox without preloaded modules."""
        return replace(self, preload=())
