"""Opening sandboxes with runsc behind bwrap. What is run is decided in ``plan``; this only does it."""

import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio

from glovebox_sandboxes.contract.base import Capabilities, Driver, Missing, Plan, Sandbox, Source
from glovebox_sandboxes.contract.errors import SandboxUnavailable, UnsupportedSpec
from glovebox_sandboxes.contract.spec import Limits, SandboxSpec
from glovebox_sandboxes.drivers.bubblewrap import bwrap
from glovebox_sandboxes.drivers.docker.driver import DockerDriver
from glovebox_sandboxes.drivers.gvisor import plan as plans
from glovebox_sandboxes.host import cgroup
from glovebox_sandboxes.host.janitor import Janitor
from glovebox_sandboxes.pool.source import starting
from glovebox_sandboxes.runtime import guest_gc
from glovebox_sandboxes.runtime import runtime as runtimes
from glovebox_sandboxes.runtime.runtime import SETUP, Runtime
from glovebox_sandboxes.session.connection import GuestConnection

READY_BYTES = 36 * 1024 * 1024
"""About what a sandbox takes while it waits, its kernel included."""
PRELOADED_BYTES = 40 * 1024 * 1024
"""The same of imported modules, pandas for instance."""
MINIMUM = 20240729
"""The release this was tried with, Debian 13's; one of 2022 (Debian 12's) starts programs in other ways."""


class Gvisor:
    """Driver for runsc without a container engine. Create it with ``detect``."""

    name = plans.NAME

    def __init__(
        self,
        capabilities: Capabilities,
        programs: tuple[str, str],
        runtime: Runtime | None,
        hierarchy: cgroup.Hierarchy | None,
    ) -> None:
        """Take what ``detect`` found; ``programs`` are the paths of bwrap and runsc."""
        self.capabilities = capabilities
        self._programs = programs
        self._runtime = runtime
        self._hierarchy = hierarchy
        janitor = Janitor(hierarchy.parents) if hierarchy else None
        # A socket: gVisor lets any process of a user open another's pipes through /proc, the guest's wire among them.
        self._launcher = bwrap.Launcher(plans.NAME, hierarchy, janitor, one_socket=True)

    def plan(self, spec: SandboxSpec) -> Plan:
        """See ``Driver.plan``."""
        fatal = [missing for missing in self.capabilities.missing if missing.fatal]
        if fatal or self._runtime is None:
            missing = fatal[0] if fatal else Missing(what="there is no runtime", fix=SETUP, fatal=True)
            raise UnsupportedSpec("isolation", f"gvisor cannot be used here: {missing.what}", missing.fix)
        if spec.require_cgroup and self._hierarchy is None:
            raise UnsupportedSpec(
                "limits.enforce",
                "this host lets us make no control groups, so limits hold per process only",
                cgroup.fix(),
            )
        if spec.limits.memory_bytes < plans.MINIMUM_MEMORY:
            raise UnsupportedSpec(
                "limits.memory_bytes",
                f"{spec.limits.memory_bytes} is less than gVisor's kernel and the guest need themselves",
                f"Use at least {plans.MINIMUM_MEMORY}.",
            )
        return plans.make(
            spec,
            self._runtime,
            program=self._programs[0],
            runsc=(self._programs[1], self.capabilities.version),
            hierarchy=self._hierarchy,
        )

    def open(self, plan: Plan) -> AbstractAsyncContextManager[Sandbox]:
        """See ``Driver.open``."""
        runtime = self._runtime
        if runtime is None:
            raise SandboxUnavailable("Starting a gvisor sandbox", "there is no runtime", SETUP)
        directories = {"root": runtime.root, "guest": runtime.guest}
        return self._launcher.open(plan, directories, {"config": plans.config_file(plan)})

    def source(self, plan: Plan) -> AbstractAsyncContextManager[Source]:
        """See ``Driver.source``."""
        return starting(self.open, plan, READY_BYTES + PRELOADED_BYTES * bool(plan.spec.preload))

    def holding(self) -> AbstractContextManager[None]:
        """Keep our guest from being removed by the setup of another version, for the length of the block."""
        return guest_gc.held(self._runtime.guest if self._runtime else None)

    async def close(self) -> None:
        """End what starts sandboxes, and remove this server's control groups."""
        await self._launcher.close()


@asynccontextmanager
async def connect(data: Path, server_id: str) -> AsyncIterator[Driver]:
    """The driver, for the length of the block; nothing of it is left after it.

    Where this host does not let us run runsc ourselves, the Docker Engine may: then it is asked to.
    """
    driver = await detect(data, server_id)
    try:
        if driver.capabilities.usable:
            with driver.holding():
                yield driver
        else:
            async with DockerDriver.connect("runsc") as engine:
                yield engine if engine.capabilities.usable else driver
    finally:
        with anyio.CancelScope(shield=True):
            await driver.close()


async def detect(data: Path, server_id: str) -> Gvisor:
    """Find out what runsc can enforce on this host.

    Args:
        data: the directory that holds the runtime.
        server_id: names the control groups of this server.
    """
    data = data.resolve()  # noqa: ASYNC240 - once; what is mounted is named by a path without links
    wall = await bwrap.find(_TRIAL)
    missing = list(wall.missing)
    runsc, version = await _find_runsc(missing)
    runtime, lacking = await runtimes.usable(data)
    missing += [lacking] if lacking else []
    # Not the groups of the same server's bubblewrap driver: each ends with its own janitor.
    hierarchy = await bwrap.groups(f"{server_id}-{plans.NAME}")
    if hierarchy is None:
        missing.append(Missing(what="no control groups: limits hold per process", fix=cgroup.fix(), fatal=False))
    memory = hierarchy.mechanism if hierarchy else "rlimit"
    limits = {"memory_bytes": memory, "pids": "rlimit", "cpu_seconds": "rlimit", "wall_seconds": "broker",
              "scratch_bytes": "tmpfs", "output_bytes": "tmpfs", "stream_bytes": "broker"}  # fmt: skip
    capabilities = Capabilities(
        driver=plans.NAME, level="userspace-kernel", version=version, limits=limits, missing=tuple(missing)
    )
    driver = Gvisor(capabilities, (wall.program, runsc), runtime, hierarchy)
    if capabilities.usable and (trouble := await _trouble(driver)):
        missing.append(Missing(what=f"it cannot start a sandbox: {trouble}", fix=_TRIAL_FIX, fatal=True))
        driver.capabilities = replace(capabilities, missing=tuple(missing))
    return driver


# What runsc needs of the kernel beyond namespaces: to be root in them, and to make more.
_TRIAL = ("--unshare-all", "--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "CAP_SYS_ADMIN",
          "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev",
          "--", "/usr/bin/unshare", "--user", "/bin/true")  # fmt: skip

# One sandbox is started before a call needs one: what is in the way of runsc, only trying tells.
_TRIAL_SECONDS = 30.0
_TRIAL_LIMITS = Limits(
    wall_seconds=_TRIAL_SECONDS, cpu_seconds=10, memory_bytes=256 * 1024 * 1024, pids=8, scratch_bytes=1024 * 1024,
    output_bytes=0, output_files=0, stream_bytes=0,
)  # fmt: skip
_TRIAL_FIX = "See what runsc says in docs/operate/drivers.md; inside a container, run Glovebox outside of it."

_RUNSC_FIX = (
    "On Debian, as root: scripts/install-runsc; elsewhere gVisor's own "
    "release into /usr/local/bin: https://gvisor.dev/docs/user_guide/install/"
)


async def _find_runsc(missing: list[Missing]) -> tuple[str, str]:
    program = bwrap.which("runsc")
    if program is None:
        missing.append(Missing(what="runsc is not installed", fix=_RUNSC_FIX, fatal=True))
        return "runsc", ""
    _, words = await bwrap.run([program, "--version"])
    version = version_of(words)
    if not version:
        what = f"{program} is no runsc of {MINIMUM} or later: {words[:100]!r}"
        missing.append(Missing(what=what, fix=_RUNSC_FIX, fatal=True))
    return program, version


def version_of(words: str) -> str:
    """The version in what ``runsc --version`` prints, "release-20250407.0" or Debian's form; empty if too old."""
    found = re.search(r"\bversion (\S*?(\d{8})\S*)", words)
    return found[1] if found is not None and int(found[2]) >= MINIMUM else ""


async def _trouble(driver: Gvisor) -> str:
    """Why no sandbox can be started here; empty if one was, and gVisor's kernel answered in it."""
    try:
        with anyio.fail_after(_TRIAL_SECONDS):
            async with driver.open(driver.plan(SandboxSpec(limits=_TRIAL_LIMITS))) as sandbox:
                try:
                    measured = await GuestConnection(sandbox.channel).ready()
                except anyio.EndOfStream:
                    await sandbox.kill()
                    return (await sandbox.stats()).detail or "it ended without a word"
    except TimeoutError:
        return f"it was not ready after {_TRIAL_SECONDS:.0f} seconds"
    except SandboxUnavailable as problem:
        return problem.reason
    return "" if measured.system == plans.NAME else "what started does not run on gVisor's kernel"
