"""Share one probe, one refusal and the writable places among drivers that start bwrap on the embedded runtime."""

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import anyio

from glovebox_sandboxes.contract.base import Capabilities, Missing, Plan
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_sandboxes.contract.measure import Expected
from glovebox_sandboxes.contract.spec import GUEST, GUEST_UID, INPUT, OUTPUT, SCRATCH, WORKSPACE, SandboxSpec
from glovebox_sandboxes.drivers.bubblewrap import bwrap
from glovebox_sandboxes.host import cgroup
from glovebox_sandboxes.host.janitor import GroupJanitor, Janitor
from glovebox_sandboxes.host.sandbox import ProcessSandbox
from glovebox_sandboxes.runtime import environments, guest_gc
from glovebox_sandboxes.runtime import runtime as runtimes
from glovebox_sandboxes.runtime.runtime import SETUP, Runtime

SHM_BYTES = 16 * 1024 * 1024
"""Size of /dev/shm: semaphores and small shared buffers of multiprocessing."""
INPUT_BYTES = 64 * 1024 * 1024
"""Size of /input: the broker sends at most this much of earlier artifacts."""
_EMPTY_BYTES = 4096
"""Size of the tmpfs that covers a folder: nothing is ever written there."""
HIDDEN = ("/var/run/docker.sock", "/run/docker.sock", "/etc/shadow", "/root", "/home", "/sys/fs/cgroup")
"""Never visible inside, whatever is mounted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The probe's findings on this host."""

    program: str
    version: str
    runtimes: Mapping[str, Runtime]
    """By environment; empty if there is none."""
    hierarchy: cgroup.Hierarchy | None
    missing: tuple[Missing, ...]

    @property
    def janitor(self) -> Janitor | None:
        """Return a janitor that removes the control groups if this server is killed."""
        return GroupJanitor(self.hierarchy.parents) if self.hierarchy else None

    def limits(self, **different: str) -> Mapping[str, str]:
        """Return the mechanism of each limit, except those that are ``different``."""
        mechanism = self.hierarchy.mechanism if self.hierarchy else "rlimit"
        processor = mechanism if self.hierarchy and self.hierarchy.counts else "rlimit"
        busy = mechanism if self.hierarchy else "none"
        usual = {"memory_bytes": mechanism, "pids": mechanism, "cpu_seconds": processor, "processors": busy,
                 "wall_seconds": "broker",
                 "scratch_bytes": "tmpfs", "output_bytes": "tmpfs", "stream_bytes": "broker"}  # fmt: skip
        return usual | different


async def probe(trial: tuple[str, ...], own: Iterable[Missing], data: Path, owner: str) -> ProbeResult:
    """Find out what this host has of the needs of every driver behind bwrap, beside those it looked for itself.

    ``trial`` are arguments with which bwrap is tried out; ``owner`` names the control groups.
    """
    program, version, missing = await bwrap.find(trial)
    # A path without links names what is mounted.
    data = data.resolve()  # noqa: ASYNC240 - once
    built, lacking = await runtimes.usable(data)
    missing += [*own, *([lacking] if lacking else [])]
    hierarchy = await bwrap.groups(owner)
    if hierarchy is None:
        missing.append(Missing(what="no control groups: limits hold per process", fix=cgroup.fix(), fatal=False))
    return ProbeResult(program=program, version=version, runtimes=built, hierarchy=hierarchy, missing=tuple(missing))


class Walled:
    """Base of a driver that starts its sandboxes with bwrap."""

    name: str

    def __init__(
        self,
        capabilities: Capabilities,
        programs: tuple[str, ...],
        runtimes: Mapping[str, Runtime],
        hierarchy: cgroup.Hierarchy | None,
        janitor: Janitor | None,
    ) -> None:
        self.capabilities = capabilities
        self._programs = programs
        self._runtimes = runtimes
        self._hierarchy = hierarchy
        self._launcher = bwrap.Launcher(self.name, hierarchy, janitor)

    def _usable(self, spec: SandboxSpec) -> Runtime:
        """Return the environment's runtime. Raises UnsupportedSpecError if this host lacks what the spec needs."""
        fatal = [missing for missing in self.capabilities.missing if missing.fatal]
        if fatal or not self._runtimes:
            missing = fatal[0] if fatal else Missing(what="there is no runtime", fix=SETUP, fatal=True)
            raise UnsupportedSpecError("isolation", missing.what, missing.fix)
        found = self._runtimes.get(spec.environment)
        if found is None:
            raise environments.not_built(spec.environment)
        if spec.require_cgroup and self._hierarchy is None:
            reason = "this host lets us make no control groups, so limits hold per process only"
            raise UnsupportedSpecError("limits.enforce", reason, cgroup.fix())
        return found

    def _start(self, plan: Plan, files: Mapping[str, bytes]) -> AbstractAsyncContextManager[ProcessSandbox]:
        found = self._runtimes.get(plan.spec.environment)
        if found is None:
            raise SandboxError(f"Starting a {self.name} sandbox", "there is no runtime", SETUP)
        return self._launcher.open(plan, {"root": found.root, "guest": found.guest}, files)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Hold this driver during the block: our runtimes stay meanwhile, our groups are removed afterwards."""
        try:
            with guest_gc.held(path for each in self._runtimes.values() for path in each.directories):
                yield self
        finally:
            with anyio.CancelScope(shield=True):
                await self._launcher.close()


def own_mounts(spec: SandboxSpec) -> list[tuple[str, int]]:
    """Return every tmpfs of a sandbox, and its size in bytes."""
    limits = spec.limits
    found = [("/dev/shm", SHM_BYTES), (SCRATCH, limits.scratch_bytes)]  # noqa: S108 - inside the sandbox
    found += [(OUTPUT, limits.output_bytes)] * spec.output
    found += [(INPUT, INPUT_BYTES)] * spec.inputs
    found += [(WORKSPACE, limits.workspace_bytes)] * spec.overlay
    return found


def masks(spec: SandboxSpec, at: str) -> list[str]:
    """Return arguments that cover masked paths below their directory's mount, so that nothing of them can be read.

    A file is covered by a device that may not be opened there, a folder by an empty one.
    """
    argv = []
    for name in spec.masks:
        place = f"{at}/{name.rstrip('/')}"
        if name.endswith("/"):
            argv += ["--perms", "0000", "--size", str(_EMPTY_BYTES), "--tmpfs", place, "--remount-ro", place]
        else:
            argv += ["--ro-bind", "/dev/null", place]
    return argv


def expected(spec: SandboxSpec, writable: Iterable[str], *, masks: Iterable[str] = (), **kernel: Any) -> Expected:
    """Return what the guest must find: own mounts, ``masks`` that it sees as mounts, and ``writable`` places."""
    return Expected(
        uid=GUEST_UID,
        interfaces=("lo",),
        writable=tuple(sorted([*writable, *(target for target, _ in own_mounts(spec))])),
        mounts=tuple(sorted(["/", GUEST, *(mount.target for mount in spec.mounts), *map(_shown, masks)])),
        **kernel,
    )


def _shown(path: str) -> str:
    """Return a path as proc_pid_mountinfo(5) writes it."""
    return "".join(f"\\{ord(each):03o}" if each in "\\ \t\n" else each for each in path.rstrip("/"))
