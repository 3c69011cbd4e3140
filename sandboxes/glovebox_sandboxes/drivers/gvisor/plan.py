"""Plan the gvisor driver's command, as plain data: bwrap around runsc, and runsc's container. Pure: no I/O.

Two walls. Inside, gVisor's kernel (the sentry) answers the program's system calls; it and its file server (the gofer)
face the host. Outside, bwrap gives those two namespaces with nothing but the runtime's root, the guest and the
workspace, and a user that owns nothing on the host. See https://gvisor.dev/docs/architecture_guide/ and the OCI runtime
specification, config.md.
"""

import json
from collections.abc import Mapping
from typing import Any

from glovebox_sandboxes import seccomp
from glovebox_sandboxes.contract.base import Plan
from glovebox_sandboxes.contract.spec import GUEST, GUEST_UID, SandboxSpec
from glovebox_sandboxes.drivers import sentry
from glovebox_sandboxes.drivers.bubblewrap import bwrap, wall
from glovebox_sandboxes.host import cgroup
from glovebox_sandboxes.runtime import guest_tree
from glovebox_sandboxes.runtime.runtime import Runtime

NAME = "gvisor"
MINIMUM_MEMORY = 48 * 1024 * 1024
"""Bytes. The sentry, the gofer and the guest need about 60 MiB before a program asks for any."""

# Paths behind bwrap's wall. Programs never see these names: their root is ``_ROOT``.
_RUNSC = "/runsc"
_ROOT = "/rootfs"
_BUNDLE = "/bundle"
_STATE = "/state"
_TMP = "/tmp"  # noqa: S108 - behind the wall: runsc makes its own root directories there
_HIDDEN = tuple(path for path in wall.HIDDEN if not path.startswith("/sys/"))
"""The sentry's /sys is its own, with an empty place for control groups."""
_SMALL_BYTES = 1024 * 1024
"""Size of runsc's own directories: it writes a state file of a few KiB."""

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


def make(
    spec: SandboxSpec, runtime: Runtime, *, programs: tuple[str, ...], version: str, hierarchy: cgroup.Hierarchy | None
) -> Plan:
    """Return the plan for ``spec``; ``programs`` are bwrap and runsc; without ``hierarchy`` there are no groups."""
    return Plan(
        driver=NAME,
        level="userspace-kernel",
        spec=spec,
        action={
            "argv": [programs[0], *_wall(spec, programs[1]), "--", _RUNSC, *_FLAGS, "run", "--bundle", _BUNDLE, "s"],
            "config": _config(spec, runtime, counted=hierarchy is not None and hierarchy.counts),
            "cgroup": dict(cgroup.settings(hierarchy.version, sentry.outside(spec.limits))) if hierarchy else {},
            "seccomp": seccomp.digest(),
            "runtime": runtime.digest,
            "runsc": version,
        },
        expected=wall.expected(
            spec,
            _KERNEL_WRITABLE,
            namespaces=sentry.NAMESPACES,
            landlock=False,
            hidden=_HIDDEN,
            system="gvisor",
            unmeasured=sentry.UNMEASURED,
        ),
        # The group counts the sentry's threads, so the program's own are counted inside the sentry.
        rlimits=("pids",) if hierarchy else ("memory_bytes", "pids"),
    )


def config_file(plan: Plan) -> bytes:
    """Return ``config.json`` of the bundle."""
    return json.dumps(plan.action["config"], sort_keys=True, separators=(",", ":")).encode()


def _wall(spec: SandboxSpec, runsc: str) -> list[str]:
    argv = [
        "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup",
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
        *bwrap.tmpfs(_STATE, _SMALL_BYTES),
        *bwrap.tmpfs(_TMP, _SMALL_BYTES),
    ]  # fmt: skip
    for number, _ in enumerate(spec.mounts):
        argv += ["--ro-bind-fd", f"{{mount{number}}}", f"/mounts/{number}", *wall.masks(spec, f"/mounts/{number}")]
    return [*argv, "--remount-ro", "/", "--clearenv"]


def _config(spec: SandboxSpec, runtime: Runtime, *, counted: bool) -> dict[str, Any]:
    command = sentry.command(runtime.python, spec, hidden=_HIDDEN, elsewhere=runtime.elsewhere, counted=counted)
    mounts: list[Mapping[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
        _bind(GUEST, GUEST),
        *(_tmpfs(target, size) for target, size in wall.own_mounts(spec)),
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
