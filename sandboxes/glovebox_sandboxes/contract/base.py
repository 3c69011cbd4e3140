"""The contract between the broker and every driver: probe, plan, open. No driver and no I/O lives here.

A driver only has to start an isolated process that runs the guest, and hand over one byte stream to it. All that is
said over that stream is the same for every driver (see ``wire`` and ``link``).
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
    """Something this host lacks for a driver, and the command that adds it."""

    what: str
    fix: str
    fatal: bool
    """Whether the driver cannot be used at all without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one driver can enforce on this host, found out by trying, not by looking for files."""

    driver: str
    level: Level
    version: str
    """Version of the mechanism (bwrap, the Engine and its runtime); empty when it is not there."""
    limits: Mapping[str, str]
    """By which mechanism each limit is enforced, e.g. ``{"memory_bytes": "cgroup v1", "pids": "rlimit"}``."""
    missing: tuple[Missing, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether the driver can start sandboxes at all."""
        return not any(each.fatal for each in self.missing)


_MECHANISMS = {"broker": "the server", "tmpfs": "the size of tmpfs", "rlimit": "rlimit (per process)"}


def mechanisms(limits: Mapping[str, str]) -> str:
    """By what these limits are enforced, each mechanism once, in words for a person."""
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
    """What the guest must measure inside, or the call is refused."""
    rlimits: tuple[str, ...] = ()
    """Fields of ``Limits`` that only a limit per process can enforce here, set by the guest before untrusted code runs
    (``cpu_seconds`` always is)."""

    @cached_property
    def digest(self) -> str:
        """``sha256:…`` over the plan as canonical JSON: the same for every sandbox made from it."""
        body = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return "sha256:" + hashlib.sha256(body.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxStats:
    """What the host saw of one sandbox, beside what the guest says. Filled in as far as the driver can."""

    out_of_memory: bool = False
    """The kernel killed a process of this sandbox for its memory limit."""
    memory_peak_bytes: int | None = None
    cpu_seconds: float | None = None
    detail: str = ""
    """The end of what the runtime printed as errors (at most 2,000 characters), for the operator."""


class Sandbox(Protocol):
    """One live, single-use instance."""

    @property
    def id(self) -> str:
        """Unique among all sandboxes of this host, and part of the name of everything the driver makes."""

    @property
    def channel(self) -> ByteStream:
        """The guest's standard input and output."""

    async def host_view(self) -> HostView:
        """Return what the host sees of it, once the guest is ready; ``outside.unseen`` where it sees nothing."""

    def cpu_seconds(self) -> float | None:
        """Return processor time of all its processes so far, as the host's kernel counts it; None where it does not."""

    async def kill(self) -> None:
        """End every process of the sandbox and return when they are gone. Safe to call more than once."""

    def weigh(self, parts: int) -> None:
        """Have one part in so many of the processor time it has by default beside others, where that can be set."""

    async def stats(self) -> SandboxStats:
        """Return what the host saw so far; complete once the sandbox is dead."""


class Source(Protocol):
    """Where sandboxes of one plan come from that are prepared before their calls."""

    @property
    def quick(self) -> bool:
        """Whether ``open`` is quicker here than the driver's own."""

    @property
    def bytes_each(self) -> int:
        """About how much memory one of them takes while it waits."""

    def open(self) -> AbstractAsyncContextManager[Sandbox]:
        """As ``Driver.open``."""


class Driver(Protocol):
    """One kind of isolation."""

    @property
    def name(self) -> str:
        """The word used for it in profiles."""

    @property
    def capabilities(self) -> Capabilities:
        """Result of the probe made when the driver was created."""

    def plan(self, spec: SandboxSpec) -> Plan:
        """Say what would be done; starts nothing.

        Raises:
            UnsupportedSpecError: some field cannot be enforced here. Never enforced partly, never downgraded.
        """

    def open(self, plan: Plan) -> AbstractAsyncContextManager[Sandbox]:
        """Do it. On leaving the context nothing of the sandbox is left, on whichever way it is left.

        Raises:
            SandboxError: it could not be started.
        """

    def source(self, plan: Plan) -> AbstractAsyncContextManager[Source]:
        """Where prepared sandboxes come from, for the length of the block; all of them must be closed before it ends.

        Raises:
            SandboxError: it could not be started.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdSource:
    """A source that starts every sandbox from nothing, as for a call."""

    open: Callable[[], AbstractAsyncContextManager[Sandbox]]
    bytes_each: int
    quick: bool = False
