"""The contract between the broker and every driver: spec, probe, plan, open. No driver and no I/O lives here.

A ``SandboxSpec`` comes from a profile and says what to enforce, the same for every driver. A ``Plan`` is exactly what
one driver will do about it.

A driver only has to start an isolated process that runs the guest, and provide one byte stream to it. The protocol on
that stream is the same for every driver (see ``wire`` and ``link``).
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

from anyio.abc import ByteStream

from glovebox_sandboxes.contract.measure import Expected
from glovebox_sandboxes.host.host_view import HostView

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


Level = Literal["namespaces", "container", "userspace-kernel", "microvm"]
"""Strength class of an isolation, weakest first: what an attacker has to break to reach the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A missing requirement of a driver on this host, and the command that adds it."""

    what: str
    fix: str
    fatal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The features that one driver can enforce on this host, found by trying, not by looking for files."""

    driver: str
    level: Level
    version: str
    """Version of the mechanism (bwrap, the Engine and its runtime); empty if it is missing."""
    limits: Mapping[str, str]
    """The mechanism that enforces each limit, e.g. ``{"memory_bytes": "cgroup v1", "pids": "rlimit"}``."""
    missing: tuple[Missing, ...] = ()

    @property
    def usable(self) -> bool:
        """Return whether the driver can start sandboxes at all."""
        return not any(each.fatal for each in self.missing)


_MECHANISMS = {"broker": "the server", "tmpfs": "the size of tmpfs", "rlimit": "rlimit (per process)"}


def mechanisms(limits: Mapping[str, str]) -> str:
    """Return the mechanisms that enforce these limits, each once, in words for a person."""
    return ", ".join(_MECHANISMS.get(each, each) for each in dict.fromkeys(limits.values()))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Exactly what a driver will do for a spec: plain data that can be printed, compared and audited."""

    driver: str
    level: Level
    spec: SandboxSpec
    action: Mapping[str, Any]
    """The argument vector or API body, JSON-compatible, without anything that differs from call to call."""
    expected: Expected
    rlimits: tuple[str, ...] = ()
    """Fields of ``Limits`` that only a limit per process can enforce here, set by the guest before untrusted code runs
    (``cpu_seconds`` always is)."""

    @cached_property
    def digest(self) -> str:
        """Return ``sha256:…`` over the plan as canonical JSON: the same for every sandbox made from it."""
        body = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return "sha256:" + hashlib.sha256(body.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxStats:
    """The host's observations of one sandbox, beside the guest's. Filled in as far as the driver can."""

    out_of_memory: bool = False
    memory_peak_bytes: int | None = None
    cpu_seconds: float | None = None
    detail: str = ""
    """The end of the runtime's error output (at most 2,000 characters), for the operator."""


class Sandbox(Protocol):
    """One live, single-use instance."""

    @property
    def id(self) -> str:
        """Return the id, unique among all sandboxes of this host, and part of the name of all that the driver makes."""

    @property
    def channel(self) -> ByteStream:
        """Return the guest's standard input and output."""

    def cpu_seconds(self) -> float | None:
        """Return the processor time of all its processes so far, by the host's kernel; None if it is not counted."""

    async def kill(self) -> None:
        """End every process of the sandbox and return when they are gone. Safe to call more than once."""

    def weigh(self, parts: int) -> None:
        """Set its share of processor time to one part in ``parts`` of the default, if possible."""

    async def stats(self) -> SandboxStats:
        """Return the host's observations so far; complete once the sandbox is dead."""


class OpenSandbox(Sandbox, Protocol):
    """One that this process has opened."""

    async def host_view(self) -> HostView:
        """Return the host's measurements once the guest is ready; ``outside.unseen`` if it sees nothing."""

    def hand_over(self) -> dict[str, int]:
        """Return descriptors for a process that runs a job in it: see ``host.process.hand_over``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of prepared sandboxes of one plan."""

    open: Callable[[], AbstractAsyncContextManager[OpenSandbox]]
    """Open a prepared sandbox, as ``Driver.open``."""
    bytes_each: int
    make: Callable[[], Any] | None = None
    """Make a ``host.fork.Fork`` in blocking code, for its caller to end, more quickly than the driver opens a sandbox.
    None if every sandbox is started from nothing, as for a call. Raises SandboxError."""


class Driver(Protocol):
    """One kind of isolation."""

    @property
    def name(self) -> str:
        """Return its name in profiles."""

    @property
    def capabilities(self) -> Capabilities:
        """Return the result of the probe made when the driver was created."""

    def plan(self, spec: SandboxSpec) -> Plan:
        """Return the plan; starts nothing.

        Raises UnsupportedSpecError: some field cannot be enforced here. Never enforced partly, never downgraded.
        """

    def open(self, plan: Plan) -> AbstractAsyncContextManager[OpenSandbox]:
        """Start a sandbox. However the context is left, nothing of the sandbox remains. Raises SandboxError."""

    @property
    def adopt(self) -> Callable[[ByteStream], ByteStream] | None:
        """Return what makes a channel of the stream of a sandbox that another process opened; None if it is one."""

    def source(self, plan: Plan) -> AbstractAsyncContextManager[Source]:
        """Provide prepared sandboxes for the length of the block; all of them must be closed before it ends.

        Raises SandboxError: it could not be started.
        """
