"""Run programs on a user-space kernel of their own: bwrap around runsc, and runsc's container.

Two walls. Inside, gVisor's kernel (the sentry) answers the program's system calls; it and its file server (the gofer)
face the host. Outside, bwrap gives those two namespaces with nothing but the runtime's root, the guest and the
workspace, and a user that owns nothing on the host. See https://gvisor.dev/docs/architecture_guide/ and the OCI runtime
specification, config.md.
"""

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from glovebox_sandboxes import seccomp
from glovebox_sandboxes.contract.base import GUEST, GUEST_UID, Driver, Missing, OpenSandbox, Plan, SandboxSpec, Source
from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.drivers import boundary
from glovebox_sandboxes.drivers.bubblewrap import wall
from glovebox_sandboxes.drivers.docker.driver import DockerDriver
from glovebox_sandboxes.runtime import guest_tree, trial

NAME = "gvisor"
MINIMUM_MEMORY = 48 * 1024 * 1024
"""Bytes. The sentry, the gofer and the guest need about 60 MiB before a program asks for any."""

# Paths behind bwrap's wall. Programs never see these names: their root is ``_ROOT``.
_RUNSC = "/runsc"
_ROOT = "/rootfs"
_BUNDLE = "/bundle"
_STATE = "/state"
_TMP = "/tmp"  # noqa: S108 - behind the wall: runsc makes its own root directories there
_HIDDEN = tuple(path for path in boundary.HIDDEN if not path.startswith("/sys/"))
"""The sentry's /sys is its own, with an empty place for control groups."""
_SMALL_BYTES = 1024 * 1024

_CAPABILITIES = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH", "CAP_FOWNER", "CAP_FSETID", "CAP_MKNOD", "CAP_SETFCAP",
    "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_ADMIN", "CAP_SYS_CHROOT", "CAP_SYS_PTRACE",
)  # fmt: skip
"""Of runsc's in bwrap's user namespace, where it makes namespaces and mounts for its own two processes; meaningless on
the host. The sentry keeps none of them."""

_FLAGS = (
    f"--root={_STATE}",
    "--rootless",
    "--platform=systrap",
    # Loopback only, inside the sentry. There is no other network behind the wall either.
    "--network=none",
    # The group is ours, made before anything runs and around all of it.
    "--ignore-cgroups",
    # Off: the sentry would open the host's files itself. So each goes through the gofer, a process of its own.
    "--directfs=false",
    # runsc would lay a writable layer over the root.
    "--overlay2=none",
    "--host-uds=none",
    "--host-fifo=none",
)

# Made by the sentry: /dev with the usual nodes, pts, and its own view of itself in /proc.
_KERNEL_WRITABLE = ("/dev", "/dev/pts", "/proc")
READY_BYTES = 36 * 1024 * 1024
"""Approximate memory of a waiting sandbox, its kernel included."""
PRELOADED_BYTES = 40 * 1024 * 1024
MINIMUM = 20240729
"""The release this was tried with, Debian 13's; one of 2022 (Debian 12's) starts programs in other ways."""


class Gvisor(wall.Walled):
    """The driver of runsc without a container engine. Create it with ``connect``."""

    name = NAME
    level = "userspace-kernel"
    # The group counts the sentry's threads, so the program's own are counted inside the sentry.
    limits: ClassVar = {"pids": "rlimit"}

    def plan(self, spec: SandboxSpec) -> Plan:
        """See ``Driver.plan``."""
        runtime = self._usable(spec)
        if spec.limits.memory_bytes < MINIMUM_MEMORY:
            reason = f"{spec.limits.memory_bytes} is less than gVisor's kernel and the guest need themselves"
            raise UnsupportedSpecError("limits.memory_bytes", reason, f"Use at least {MINIMUM_MEMORY}.")
        bwrap, runsc = self._programs
        command = boundary.sentry_command(
            runtime.python, spec, hidden=_HIDDEN, elsewhere=runtime.elsewhere, counted=self._counted
        )
        return Plan(
            driver=NAME,
            level=self.level,
            spec=spec,
            action={
                "argv": [bwrap, *_wall(spec, runsc), "--", _RUNSC, *_FLAGS, "run", "--bundle", _BUNDLE, "s"],
                "config": _config(spec, command),
                "cgroup": self._settings(boundary.around_sentry(spec.limits)),
                "seccomp": seccomp.digest(),
                "runtime": runtime.digest,
                "runsc": self.capabilities.version,
            },
            expected=boundary.expected(
                spec, writable=_KERNEL_WRITABLE, files=(GUEST,), hidden=_HIDDEN, **boundary.SENTRY
            ),
            rlimits=("pids",) if self._hierarchy else ("memory_bytes", "pids"),
        )

    def open(self, plan: Plan) -> AbstractAsyncContextManager[OpenSandbox]:
        """See ``Driver.open``."""
        return self._start(plan, {"config": config_file(plan)})

    def source(self, plan: Plan) -> AbstractAsyncContextManager[Source]:
        """See ``Driver.source``."""
        each = READY_BYTES + PRELOADED_BYTES * bool(plan.spec.preload)
        return nullcontext(Source(open=partial(self.open, plan), bytes_each=each))


def config_file(plan: Plan) -> bytes:
    """Return ``config.json`` of the bundle."""
    return json.dumps(plan.action["config"], sort_keys=True, separators=(",", ":")).encode()


def _wall(spec: SandboxSpec, runsc: str) -> list[str]:
    argv = [
        *wall.NAMESPACES,
        "--uid", "0", "--gid", "0", "--hostname", "sandbox",
        "--die-with-parent", "--as-pid-1", "--new-session",
    ]  # fmt: skip
    for capability in _CAPABILITIES:
        argv += ["--cap-add", capability]
    argv += [
        "--ro-bind", runsc, _RUNSC,
        "--ro-bind-fd", "{root}", _ROOT,
        "--ro-bind-fd", "{guest}", GUEST,
        "--ro-bind-data", "{config}", f"{_BUNDLE}/config.json",
        "--proc", "/proc",
        "--dev", "/dev",
        *wall.tmpfs(_STATE, _SMALL_BYTES),
        *wall.tmpfs(_TMP, _SMALL_BYTES),
    ]  # fmt: skip
    for number, _ in enumerate(spec.mounts):
        argv += ["--ro-bind-fd", f"{{mount{number}}}", f"/mounts/{number}", *wall.masks(spec, f"/mounts/{number}")]
    return [*argv, "--remount-ro", "/", "--clearenv"]


def _config(spec: SandboxSpec, command: tuple[str, ...]) -> dict[str, Any]:
    mounts: list[Mapping[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        _bind(GUEST, GUEST),
        *(_tmpfs(target, size) for target, size in boundary.own_mounts(spec).items()),
    ]
    mounts += [
        _bind(f"/mounts/{number}", mount.target, whole=bool(spec.masks)) for number, mount in enumerate(spec.mounts)
    ]
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": _ROOT, "readonly": True},
        "mounts": mounts,
        "process": {
            "terminal": False,
            "user": {"uid": GUEST_UID, "gid": GUEST_UID},
            "cwd": "/",
            "args": list(command),
            "env": [f"{name}={value}" for name, value in sorted(guest_tree.ENVIRONMENT.items())],
            "capabilities": {name: [] for name in ("ambient", "bounding", "effective", "inheritable", "permitted")},
            "noNewPrivileges": True,
        },
        "linux": {"namespaces": [{"type": name} for name in ("ipc", "mount", "network", "pid", "uts")]},
    }


def _tmpfs(target: str, size: int) -> Mapping[str, Any]:
    options = ["nosuid", "nodev", "noexec", f"size={size}", "mode=0700", f"uid={GUEST_UID}", f"gid={GUEST_UID}"]
    return {"destination": target, "type": "tmpfs", "source": "tmpfs", "options": options}


def _bind(source: str, target: str, *, whole: bool = False) -> Mapping[str, Any]:
    """Return a bind, if ``whole`` with all that is mounted inside it: the covers of masked paths."""
    options = ["rbind" if whole else "bind", "ro", "nosuid", "nodev"]
    return {"destination": target, "type": "bind", "source": source, "options": options}


@asynccontextmanager
async def connect(data: Path, server_id: str) -> AsyncIterator[Driver]:
    """Provide the driver during the block. If we may not run runsc ourselves, the Docker Engine is asked to."""
    runsc, version, lacking = await _find_runsc()
    missing = [Missing(what=lacking, fix=_RUNSC_FIX, fatal=True)] if lacking else []
    # Not the groups of the same server's bubblewrap driver: each ends with its own janitor.
    async with Gvisor.connected(_TRIAL, data, f"{server_id}-{NAME}", {runsc: version}, missing) as driver:
        found = driver.capabilities
        if found.usable and (trouble := await trial.find_trouble(driver)):
            last = Missing(what=f"it cannot start a sandbox: {trouble}", fix=_TRIAL_FIX, fatal=True)
            driver.capabilities = replace(found, missing=(*found.missing, last))
        if driver.capabilities.usable:
            yield driver
            return
        async with DockerDriver.connect("runsc", data) as engine:
            yield engine if engine.capabilities.usable else driver


# Needs of runsc beyond namespaces: to be root in them, and to make more.
_TRIAL = ("--unshare-all", "--unshare-user", "--uid", "0", "--gid", "0", "--cap-add", "CAP_SYS_ADMIN",
          "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev",
          "--", "/usr/bin/unshare", "--user", "/bin/true")  # fmt: skip

# One sandbox is started before a call needs one: only a trial shows what hinders runsc.
_TRIAL_FIX = "See what runsc says in docs/operate/drivers.md; inside a container, run Glovebox outside of it."

_RUNSC_FIX = (
    "On Debian, as root: scripts/install-runsc; elsewhere gVisor's own "
    "release into /usr/local/bin: https://gvisor.dev/docs/user_guide/install/"
)


async def _find_runsc() -> tuple[str, str, str]:
    """Return the path of runsc, its version, and what is wrong with it."""
    program = wall.which("runsc")
    if program is None:
        return "runsc", "", "runsc is not installed"
    _, words = await wall.run([program, "--version"])
    version = version_of(words)
    return program, version, "" if version else f"{program} is no runsc of {MINIMUM} or later: {words[:100]!r}"


def version_of(words: str) -> str:
    """Return the version from ``runsc --version``, "release-20250407.0" or Debian's form; empty if too old."""
    found = re.search(r"\bversion (\S*?(\d{8})\S*)", words)
    return found[1] if found is not None and int(found[2]) >= MINIMUM else ""
