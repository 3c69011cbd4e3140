"""The contract between the broker and every driver: probe, plan, open. No driver and no I/O lives here.

A driver only has to start an isolated process that runs the guest, and provide one byte stream to it. The protocol on
that stream is the same for every driver (see ``wire`` and ``link``).
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

from anyio.abc import ByteStream

from glovebox_sandboxes.contract.measure import Expected
from glovebox_sandboxes.contract.spec import SandboxSpec
from glovebox_sandboxes.host.host_view import HostView

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

    async def host_view(self) -> HostView:
        """Return the host's measurements once the guest is ready; ``outside.unseen`` if it sees nothing."""

    def cpu_seconds(self) -> float | None:
        """Return the processor time of all its processes so far, by the host's kernel; None if it is not counted."""

    async def kill(self) -> None:
        """End every process of the sandbox and return when they are gone. Safe to call more than once."""

    def weigh(self, parts: int) -> None:
        """Set its share of processor time to one part in ``parts`` of the default, if possible."""

    async def stats(self) -> SandboxStats:
        """Return the host's observations so far; complete once the sandbox is dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of prepared sandboxes of one plan."""

    open: Callable[[], AbstractAsyncContextManager[Sandbox]]
    """Open a prepared sandbox, as ``Driver.open``."""
    bytes_each: int
    quick: bool = False
    """``open`` is quicker here than the driver's own; else it starts every sandbox from nothing, as for a call."""


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

    def open(self, plan: Plan) -> AbstractAsyncContextManager[Sandbox]:
        """Start a sandbox. However the context is left, nothing of the sandbox remains. Raises SandboxError."""

    def source(self, plan: Plan) -> AbstractAsyncContextManager[Source]:
        """Provide prepared sandboxes for the length of the block; all of them must be closed before it ends.

        Raises SandboxError: it could not be started.
        """
