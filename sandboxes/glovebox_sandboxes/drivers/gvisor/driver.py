"""Open sandboxes with runsc behind bwrap, as ``plan`` decided."""

import re
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio

from glovebox_sandboxes.contract.base import Capabilities, Driver, Missing, Plan, Sandbox, Source
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_sandboxes.contract.spec import Limits, SandboxSpec
from glovebox_sandboxes.drivers.bubblewrap import bwrap, wall
from glovebox_sandboxes.drivers.docker.driver import DockerDriver
from glovebox_sandboxes.drivers.gvisor import plan as plans
from glovebox_sandboxes.session.connection import GuestConnection

READY_BYTES = 36 * 1024 * 1024
"""Approximate memory of a waiting sandbox, its kernel included."""
PRELOADED_BYTES = 40 * 1024 * 1024
"""The same for imported modules, such as pandas."""
MINIMUM = 20240729
"""The release this was tried with, Debian 13's; one of 2022 (Debian 12's) starts programs in other ways."""


class Gvisor(wall.Walled):
    """The driver of runsc without a container engine. Create it with ``detect``."""

    name = plans.NAME

    def plan(self, spec: SandboxSpec) -> Plan:
        """See ``Driver.plan``."""
        runtime = self._usable(spec)
        if spec.limits.memory_bytes < plans.MINIMUM_MEMORY:
            raise UnsupportedSpecError(
                "limits.memory_bytes",
                f"{spec.limits.memory_bytes} is less than gVisor's kernel and the guest need themselves",
                f"Use at least {plans.MINIMUM_MEMORY}.",
            )
        version = self.capabilities.version
        return plans.make(spec, runtime, programs=self._programs, version=version, hierarchy=self._hierarchy)

    def open(self, plan: Plan) -> AbstractAsyncContextManager[Sandbox]:
        """See ``Driver.open``."""
        return self._start(plan, {"config": plans.config_file(plan)})

    def source(self, plan: Plan) -> AbstractAsyncContextManager[Source]:
        """See ``Driver.source``."""
        each = READY_BYTES + PRELOADED_BYTES * bool(plan.spec.preload)
        return nullcontext(Source(open=partial(self.open, plan), bytes_each=each))


@asynccontextmanager
async def connect(data: Path, server_id: str) -> AsyncIterator[Driver]:
    """Provide the driver during the block. If we may not run runsc ourselves, the Docker Engine is asked to."""
    async with (await detect(data, server_id)).running() as driver:
        if driver.capabilities.usable:
            yield driver
            return
        async with DockerDriver.connect("runsc", data) as engine:
            yield engine if engine.capabilities.usable else driver


async def detect(data: Path, server_id: str) -> Gvisor:
    """Find out what runsc can enforce on this host; ``server_id`` names our control groups."""
    missing: list[Missing] = []
    runsc, version = await _find_runsc(missing)
    # Not the groups of the same server's bubblewrap driver: each ends with its own janitor.
    found = await wall.probe(_TRIAL, missing, data, f"{server_id}-{plans.NAME}")
    capabilities = Capabilities(
        driver=plans.NAME,
        level="userspace-kernel",
        version=version,
        limits=found.limits(pids="rlimit"),
        missing=found.missing,
    )
    driver = Gvisor(capabilities, (found.program, runsc), found.runtimes, found.hierarchy, found.janitor)
    if capabilities.usable and (trouble := await _trouble(driver)):
        last = Missing(what=f"it cannot start a sandbox: {trouble}", fix=_TRIAL_FIX, fatal=True)
        driver.capabilities = replace(capabilities, missing=(*found.missing, last))
    return driver


# Needs of runsc beyond namespaces: to be root in them, and to make more.
_TRIAL = ("--unshare-all", "--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "CAP_SYS_ADMIN",
          "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev",
          "--", "/usr/bin/unshare", "--user", "/bin/true")  # fmt: skip

# One sandbox is started before a call needs one: only a trial shows what hinders runsc.
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
    """Return the version from ``runsc --version``, "release-20250407.0" or Debian's form; empty if too old."""
    found = re.search(r"\bversion (\S*?(\d{8})\S*)", words)
    return found[1] if found is not None and int(found[2]) >= MINIMUM else ""


async def _trouble(driver: Gvisor) -> str:
    """Return why no sandbox can be started here; empty if one was, and gVisor's kernel answered in it."""
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
    except SandboxError as problem:
        return problem.reason
    return "" if measured.system == plans.NAME else "what started does not run on gVisor's kernel"
