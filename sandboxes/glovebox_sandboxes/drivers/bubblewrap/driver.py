"""The embedded driver: bubblewrap, one short-lived set of namespaces per call. No daemon, no image, no root needed.

As root it first becomes an unprivileged user: a process of the host's uid 0 keeps rights over files owned by root
(``/proc/sys`` among them) even without any capability. What it must see of root's own directories it gets as open
descriptors of a place it can reach (sandboxes/glovebox_sandboxes/host/staging.py). See bwrap(1), user_namespaces(7).
"""

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import anyio

from _glovebox_guest import landlock
from glovebox_sandboxes import seccomp
from glovebox_sandboxes.contract.base import Capabilities, Missing, Plan, Sandbox, Source
from glovebox_sandboxes.contract.errors import SandboxUnavailable, UnsupportedSpec
from glovebox_sandboxes.contract.measure import NAMESPACES, Expected
from glovebox_sandboxes.contract.spec import GUEST, GUEST_UID, INPUT, OUTPUT, SCRATCH, WORKSPACE, SandboxSpec
from glovebox_sandboxes.drivers.bubblewrap import bwrap
from glovebox_sandboxes.host import cgroup, identity
from glovebox_sandboxes.host.host_view import Zygote as ZygoteSeen
from glovebox_sandboxes.host.identity import changes_user
from glovebox_sandboxes.host.janitor import Janitor
from glovebox_sandboxes.pool.zygote import Zygote
from glovebox_sandboxes.runtime import guest_gc, guest_tree
from glovebox_sandboxes.runtime import runtime as runtimes
from glovebox_sandboxes.runtime.runtime import PACKAGES, SETUP, Runtime

NAME = "bubblewrap"
SHM_BYTES = 16 * 1024 * 1024
"""Size of /dev/shm: semaphores and small shared buffers of multiprocessing."""
INPUT_BYTES = 64 * 1024 * 1024
"""Size of /input: the broker sends no more than this of earlier artifacts."""
FORK_BYTES = 4 * 1024 * 1024
"""About what a forked sandbox takes while it waits, beside what it shares with its zygote."""

# Device nodes bwrap's --dev binds from the host, and the kernel's own file systems: writable, and harmless.
_DEVICES = ("/dev/full", "/dev/null", "/dev/pts", "/dev/random", "/dev/tty", "/dev/urandom", "/dev/zero", "/proc")
#: Never to be seen inside, whatever is mounted.
HIDDEN = ("/var/run/docker.sock", "/run/docker.sock", "/etc/shadow", "/root", "/home", "/sys/fs/cgroup")


class Bubblewrap:
    """Driver for bubblewrap. Create it with ``detect``."""

    name = NAME

    def __init__(
        self,
        capabilities: Capabilities,
        program: str,
        runtime: Runtime | None,
        hierarchy: cgroup.Hierarchy | None,
        janitor: Janitor | None,
    ) -> None:
        """Take what ``detect`` found."""
        self.capabilities = capabilities
        self._program = program
        self._runtime = runtime
        self._hierarchy = hierarchy
        self._janitor = janitor
        self._kept_groups = _kept_groups()
        self._launcher = bwrap.Launcher(NAME, hierarchy, janitor, one_socket=True)

    def plan(self, spec: SandboxSpec) -> Plan:
        """See ``Driver.plan``."""
        fatal = [missing for missing in self.capabilities.missing if missing.fatal]
        if fatal or self._runtime is None:
            missing = fatal[0] if fatal else Missing(what="there is no runtime", fix=SETUP, fatal=True)
            raise UnsupportedSpec("isolation", f"bubblewrap cannot be used here: {missing.what}", missing.fix)
        if spec.require_cgroup and self._hierarchy is None:
            raise UnsupportedSpec(
                "limits.enforce",
                "this host lets us make no control groups, so limits hold per process only",
                cgroup.fix(),
            )
        wanted = dict(cgroup.settings(self._hierarchy.version, spec.limits)) if self._hierarchy else {}
        return Plan(
            driver=NAME,
            level="namespaces",
            spec=spec,
            action={
                "argv": list(self._argv(spec, self._runtime, zygote=False)),
                "zygote": list(self._argv(spec, self._runtime, zygote=True)),
                "cgroup": wanted,
                "seccomp": seccomp.digest(),
                "runtime": self._runtime.digest,
            },
            expected=_expected(spec, self._kept_groups),
            rlimits=() if self._hierarchy else ("memory_bytes", "pids"),
        )

    def _argv(self, spec: SandboxSpec, runtime: Runtime, *, zygote: bool) -> tuple[str, ...]:
        """The whole command. ``{root}`` and the like stand for descriptors that differ from call to call."""
        own = _own_mounts(spec)
        argv = [
            self._program,
            "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup",
            "--uid", str(GUEST_UID), "--gid", str(GUEST_UID), "--hostname", "sandbox",
            "--die-with-parent", "--as-pid-1", "--new-session", "--cap-drop", "ALL",
            "--ro-bind-fd", "{root}", "/",
            "--ro-bind-fd", "{guest}", GUEST,
            "--proc", "/proc",
            "--dev", "/dev",
        ]  # fmt: skip
        # A zygote needs no more than a place for what modules write when they are imported.
        for target, size in own:
            if not zygote or target == SCRATCH:
                argv += bwrap.tmpfs(target, size)
        if not zygote:
            argv += ["--disable-userns"]
        elif identity.has_users():
            argv += bwrap.USERS
        argv += ["--remount-ro", "/dev"]
        for number, mount in enumerate(spec.mounts):
            argv += ["--ro-bind-fd", f"{{mount{number}}}", mount.target]
        argv += ["--clearenv"]
        for key, value in guest_tree.ENVIRONMENT.items():
            argv += ["--setenv", key, value]
        argv += ["--seccomp", "{seccomp}", "--"]
        argv += guest_tree.command(
            runtime.python,
            spec,
            packages=(PACKAGES,),
            hidden=HIDDEN,
            own_filter=seccomp.bpf() if zygote else b"",
            zygote={"tmpfs": own} if zygote else None,
        )
        return tuple(argv)

    def _directories(self) -> dict[str, Path]:
        if self._runtime is None:
            raise SandboxUnavailable("Starting a bubblewrap sandbox", "there is no runtime", SETUP)
        return {"root": self._runtime.root, "guest": self._runtime.guest}

    def open(self, plan: Plan) -> AbstractAsyncContextManager[Sandbox]:
        """See ``Driver.open``."""
        return self._launcher.open(plan, self._directories(), {"seccomp": seccomp.bpf()})

    @asynccontextmanager
    async def source(self, plan: Plan) -> AsyncIterator[Source]:
        """See ``Driver.source``: a zygote of this plan."""
        outer = replace(plan, action={**plan.action, "argv": plan.action["zygote"]})
        async with self._launcher.open(outer, self._directories(), {"seccomp": seccomp.bpf_for_zygote()}) as sandbox:
            zygote = Zygote(sandbox.channel)
            try:
                namespaces = await zygote.ready()
            except anyio.EndOfStream:
                await sandbox.kill()
                words = (await sandbox.stats()).detail or "it ended without a word"
                raise SandboxUnavailable("Starting a zygote", words, "Run `glovebox doctor`.") from None
            seen = ZygoteSeen(namespaces=namespaces, filters=(await sandbox.host_view()).filters)
            yield _Forking(launcher=self._launcher, plan=plan, zygote=zygote, seen=seen, user=sandbox.user)

    def holding(self) -> AbstractContextManager[None]:
        """Keep our guest from being removed by the setup of another version, for the length of the block."""
        return guest_gc.held(self._runtime.guest if self._runtime else None)

    async def close(self) -> None:
        """End what starts sandboxes, and remove this server's control groups."""
        await self._launcher.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forking:
    """The source whose sandboxes are forked from one zygote."""

    launcher: bwrap.Launcher
    plan: Plan
    zygote: Zygote
    seen: ZygoteSeen
    user: int | None
    quick: bool = True
    bytes_each: int = FORK_BYTES

    def open(self) -> AbstractAsyncContextManager[Sandbox]:
        """See ``Source.open``."""
        return self.launcher.fork(self.plan, self.zygote, self.seen, self.user)


@asynccontextmanager
async def connect(data: Path, server_id: str) -> AsyncIterator[Bubblewrap]:
    """The driver, for the length of the block; the control groups it needed are removed after it."""
    driver = await detect(data, server_id)
    try:
        with driver.holding():
            yield driver
    finally:
        with anyio.CancelScope(shield=True):
            await driver.close()


_LANDLOCK_FIX = "Boot Linux 5.13 or newer with landlock in its list of security modules (lsm=landlock,…)."


async def detect(data: Path, server_id: str) -> Bubblewrap:
    """Find out, by starting one, what bubblewrap can enforce on this host.

    Args:
        data: the directory that holds the runtime.
        server_id: names the control groups of this server.
    """
    data = data.resolve()  # noqa: ASYNC240 - once; what is mounted is named by a path without links
    found = await bwrap.find(_TRIAL)
    missing = list(found.missing)
    runtime, lacking = await runtimes.usable(data)
    missing += [lacking] if lacking else []
    if landlock.abi_version() == 0:
        missing.append(Missing(what="the kernel has no Landlock", fix=_LANDLOCK_FIX, fatal=True))
    try:
        seccomp.bpf()
    except SandboxUnavailable as problem:
        missing.append(Missing(what=problem.reason, fix=problem.fix, fatal=True))
    hierarchy = await bwrap.groups(server_id)
    if hierarchy is None:
        missing.append(Missing(what="no control groups: limits hold per process", fix=cgroup.fix(), fatal=False))
    mechanism = hierarchy.mechanism if hierarchy else "rlimit"
    limits = {"memory_bytes": mechanism, "pids": mechanism, "cpu_seconds": "rlimit", "wall_seconds": "broker",
              "scratch_bytes": "tmpfs", "output_bytes": "tmpfs", "stream_bytes": "broker"}  # fmt: skip
    capabilities = Capabilities(
        driver=NAME, level="namespaces", version=found.version, limits=limits, missing=tuple(missing)
    )
    janitor = Janitor(hierarchy.parents) if hierarchy else None
    return Bubblewrap(capabilities, found.program, runtime, hierarchy, janitor)


# What a sandbox needs of the kernel, tried out on nothing but an empty root.
_TRIAL = ("--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(GUEST_UID), "--cap-drop", "ALL",
          "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "/bin/true")  # fmt: skip


_OVERFLOW_GID = Path("/proc/sys/kernel/overflowgid")
"""What a group without a number inside is shown as, see user_namespaces(7)."""


def _kept_groups() -> tuple[int, ...]:
    """A user's own groups stay with what the user starts: setgroups(2) is for the privileged."""
    if changes_user() or not set(os.getgroups()) - {os.getegid()}:
        return ()
    return (int(_OVERFLOW_GID.read_text()),)


def _own_mounts(spec: SandboxSpec) -> list[tuple[str, int]]:
    """Every tmpfs of a sandbox, and its size in bytes."""
    limits = spec.limits
    found = [("/dev/shm", SHM_BYTES), (SCRATCH, limits.scratch_bytes)]  # noqa: S108 - inside the sandbox
    found += [(OUTPUT, limits.output_bytes)] * spec.output
    found += [(INPUT, INPUT_BYTES)] * spec.inputs
    found += [(WORKSPACE, limits.workspace_bytes)] * spec.overlay
    return found


def _expected(spec: SandboxSpec, kept_groups: tuple[int, ...] = ()) -> Expected:
    writable = [*_DEVICES, "/dev/shm", SCRATCH]  # noqa: S108 - inside the sandbox
    writable += [OUTPUT] * spec.output + [INPUT] * spec.inputs + [WORKSPACE] * spec.overlay
    return Expected(
        uid=GUEST_UID,
        interfaces=("lo",),
        writable=tuple(sorted(writable)),
        mounts=tuple(sorted(["/", GUEST, *(mount.target for mount in spec.mounts)])),
        namespaces=NAMESPACES,
        hidden=HIDDEN,
        kept_groups=kept_groups,
    )
