"""Plan the docker driver's requests to the Engine, as plain data. Pure: no SDK, no I/O, nothing of the server.

The body is the Engine API's "Create a container" (https://docs.docker.com/reference/api/engine/). It spells out every
field that could weaken the sandbox, so that no default of image or daemon decides anything.
"""

import json
import posixpath
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

from glovebox_sandboxes.contract.base import DEFAULT, GUEST_UID, ORIGINAL, WORKSPACE, Level, Mount, Plan, SandboxSpec
from glovebox_sandboxes.contract.errors import UnsupportedSpecError
from glovebox_sandboxes.contract.measure import NAMESPACES, Expected
from glovebox_sandboxes.drivers import boundary
from glovebox_sandboxes.runtime import environments, guest_tree

Runtime = Literal["runc", "crun", "runsc"]
"""Low-level runtimes; with ``runsc``, gVisor's, containers have a kernel of their own."""
DRIVER: Mapping[Runtime, str] = {"runc": "docker", "crun": "docker", "runsc": "gvisor"}
"""The word used in profiles, by runtime."""
LEVEL: Mapping[Runtime, Level] = {"runc": "container", "crun": "container", "runsc": "userspace-kernel"}
PYTHON = "/usr/bin/python3"
LABEL = "dev.glovebox."
MINIMUM_MEMORY = 32 * 1024 * 1024
"""Bytes. The interpreter and the runtime's own start need about 20 MiB; the Engine reads 0 as "no limit"."""
MINIMUM_PIDS = 4
"""The guest, one program, and two to spare; the Engine reads 0 and -1 as "no limit"."""
MINIMUM_TMPFS = 64 * 1024
"""Bytes. tmpfs(5) reads ``size=0`` as "no limit"."""
_BYTES_PER_INODE = 4096
"""A tmpfs file costs at least a page, so one bound limits bytes and empty files."""
_SHARED_MEMORY = 1024 * 1024
"""Bytes of /dev/shm: room for the semaphores of multiprocessing, not for data, which belongs in /tmp."""
_OPEN_FILES = 1024
_CPU_ALLOWANCE = 10
"""Seconds of processor time for the guest's own start and preload; the program's own limit is exact."""

# Moby's lists, and additions of later versions; spelled out because the Engine's default differs between versions. The
# runtime skips a path that does not exist on this kernel.
_MASKED_FILES = (
    "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug", "/proc/timer_list",
    "/proc/timer_stats",
)  # fmt: skip
_MASKED_DIRECTORIES = (
    # Message queues: a file system in which any user may make files; its system calls are refused anyway.
    "/dev/mqueue",
    "/proc/acpi", "/proc/asound", "/proc/scsi", "/sys/devices/virtual/powercap", "/sys/firmware",
)  # fmt: skip
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

# Mount points that the runtime leaves writable. Those below /dev and /proc belong to root, and their modes close them
# to the guest; the masked files are /dev/null.
_RUNTIME_WRITABLE = ("/dev", "/dev/mqueue", "/dev/pts", "/dev/shm", "/proc", "/sys/fs/cgroup")  # noqa: S108 - inside

_USER_NAMESPACE_WRITABLE = tuple(f"/dev/{name}" for name in ("full", "null", "random", "tty", "urandom", "zero"))
"""A user namespace can make no device: there each is a mount of the host's, under its own name."""

_SENTRY_GROUPS = ("cpu", "cpuacct", "cpuset", "devices", "job", "memory", "pids")
"""With runsc, the sentry's entries below /sys/fs/cgroup: root's, and without effect on the host."""

_HOST_CONTROL = (
    "/boot", "/dev", "/etc", "/proc", "/run", "/sys", "/var/lib/containerd", "/var/lib/docker", "/var/run",
)  # fmt: skip
"""Places of the host that name its devices, secrets and daemons: no mount may lie in them or contain them."""
_SOCKETS = ("/run/docker.sock", "/run/containerd/containerd.sock", "/var/run/docker.sock")


GROUPS_FIX = (
    "Run the Engine or Podman as root, or delegate control groups v2 to its user (systemd: Delegate=memory pids cpu); "
    'or let the profile accept limits per process: limits.enforce = "any".'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Facts about this host that the plan needs; found by ``probe``."""

    image: str
    """``sha256:…`` of the local image's configuration, which fixes its contents."""
    image_environment: tuple[str, ...] = ()
    """Names of the images' variables; each is removed or replaced."""
    apparmor: bool = False
    user_namespace: bool = False
    socket: str = "/var/run/docker.sock"
    runtime: Runtime = "runc"
    groups: bool = True
    """The Engine may make control groups; without root it may not on version 1."""
    processors: int = 1
    environments: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Environment that has a module, by module."""
    added: tuple[str, ...] = ("/etc/hostname",)
    """Files that the Engine mounts into a container unasked."""


_CLOSED: Mapping[str, Any] = {
    "Privileged": False, "ReadonlyRootfs": True, "CapAdd": [], "CapDrop": ["ALL"], "Devices": [], "NetworkMode": "none",
    "IpcMode": "private", "CgroupnsMode": "private", "PidMode": "", "UTSMode": "", "UsernsMode": "",
}  # fmt: skip
"""Fields of the host's side that would open it with any other value."""
_NEVER = ("DeviceRequests", "DeviceCgroupRules", "Binds", "VolumesFrom")
"""Those that must not be there at all."""


def filter_text(seccomp: Mapping[str, Any]) -> str:
    """Return Docker's form of the filter as text."""
    return json.dumps(seccomp, sort_keys=True, separators=(",", ":"))


def make(spec: SandboxSpec, host: Host, seccomp: Mapping[str, Any]) -> Plan:
    """Return the plan for ``spec`` on ``host``; ``seccomp`` is Docker's form of the filter.

    Raises:
        UnsupportedSpecError: a field's value would mean "no limit" to the Engine, or a mount could open the host.
    """
    _check(spec, host)
    image = {DEFAULT: host.image, **host.environments}.get(spec.environment)
    if image is None:
        raise environments.not_built(spec.environment, docker=True)
    own_kernel = host.runtime == "runsc"
    command = boundary.sentry_command if own_kernel else guest_tree.command
    env = guest_tree.ENVIRONMENT
    # A name without "=" removes the image's variable instead of leaving it empty.
    stripped = sorted(set(host.image_environment) - set(env))
    writable = boundary.own_mounts(spec, inputs=spec.limits.scratch_bytes)
    del writable[boundary.SHM]  # the Engine has a field of its own for it
    body: dict[str, Any] = {
        "Image": image,
        "Entrypoint": list(command(PYTHON, spec, hidden=_SOCKETS, elsewhere=host.elsewhere)),
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in sorted(env.items())] + stripped,
        "User": f"{GUEST_UID}:{GUEST_UID}",
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",
        "Labels": {LABEL + key: value for key, value in sorted(spec.labels)},
        "Tty": False,
        # The container's input ends with our connection, and so, the guest being process 1, does the container.
        **dict.fromkeys(("OpenStdin", "StdinOnce", "AttachStdin", "AttachStdout", "AttachStderr"), True),
        # NetworkMode none: the Engine sets up no network; runc still makes an empty namespace with its loopback up.
        "NetworkDisabled": True,
        "HostConfig": _host_config(spec, host, seccomp, writable),
    }
    check_closed(body)
    return Plan(
        driver=DRIVER[host.runtime],
        level=LEVEL[host.runtime],
        spec=spec,
        action=body,
        expected=_expected(spec, host),
        rlimits=("pids",) if own_kernel else () if host.groups else ("memory_bytes", "pids"),
    )


def _check(spec: SandboxSpec, host: Host) -> None:
    least = {
        "memory_bytes": MINIMUM_MEMORY,
        "pids": MINIMUM_PIDS,
        "cpu_seconds": 1,
        "scratch_bytes": MINIMUM_TMPFS,
        "output_bytes": MINIMUM_TMPFS * spec.output,
        "workspace_bytes": MINIMUM_TMPFS * spec.overlay,
    }
    for name, minimum in least.items():
        value = getattr(spec.limits, name)
        if value < minimum:
            reason = f"{value} cannot be enforced by Docker, where small values mean no limit"
            raise UnsupportedSpecError(f"limits.{name}", reason, f"Use at least {minimum}.")
    if spec.require_cgroup and not host.groups:
        reason = "the Engine may make no control groups here, so limits hold per process only"
        raise UnsupportedSpecError("limits.enforce", reason, GROUPS_FIX)
    for mount in spec.mounts:
        for name, path in (("source", mount.source), ("target", mount.target)):
            if not path.startswith("/") or path != posixpath.normpath(path) or "\0" in path:
                reason = f"{path!r} is not a plain absolute path"
                raise UnsupportedSpecError(f"mounts.{name}", reason, "Write it out in full.")
        if mount.target not in (WORKSPACE, ORIGINAL):
            reason = f"{mount.target} is not a place for files"
            raise UnsupportedSpecError("mounts.target", reason, f"Use {WORKSPACE}.")
        check_source(mount.source, host.socket)
    if len({mount.target for mount in spec.mounts}) != len(spec.mounts):
        raise UnsupportedSpecError("mounts", "two mounts have the same target", "Give each its own.")


def _host_config(
    spec: SandboxSpec, host: Host, seccomp: Mapping[str, Any], writable: Mapping[str, int]
) -> dict[str, Any]:
    limits = spec.limits
    memory, pids = limits.memory_bytes, (boundary.around_sentry(limits) if host.runtime == "runsc" else limits).pids
    cpus = min(limits.processors, host.processors) * 1_000_000_000
    groups = {"Memory": memory, "MemorySwap": memory, "PidsLimit": pids, "NanoCpus": cpus}
    return {
        # A copy: a plan whose lists were changed must not pass as the model it is compared with.
        **deepcopy(_CLOSED),
        "Runtime": host.runtime,
        # A removed container cannot report why it ended, which is late for gVisor: see Engine.ran_out_of_memory.
        "AutoRemove": host.runtime != "runsc",
        "LogConfig": {"Type": "none", "Config": {}},
        "SecurityOpt": [
            "no-new-privileges",
            "seccomp=" + filter_text(seccomp),
            *(["apparmor=docker-default"] if host.apparmor else []),
        ],
        "Init": False,
        **(groups if host.groups else {}),
        # The host's own programs first: in a shortage the kernel should kill a sandbox.
        "OomScoreAdj": 500,
        "ShmSize": _SHARED_MEMORY,
        "Ulimits": [
            {"Name": name, "Soft": value, "Hard": value}
            # 1 and not 0: a core_pattern that is a pipe ignores 0, but the kernel gives up at 1, see core(5).
            for name, value in (("core", 1), ("cpu", limits.cpu_seconds + _CPU_ALLOWANCE), ("nofile", _OPEN_FILES))
        ],
        "Tmpfs": {target: _tmpfs(size) for target, size in sorted(writable.items())},
        "Mounts": [_bind(mount) for mount in spec.mounts],
        "MaskedPaths": sorted((*_MASKED_FILES, *_MASKED_DIRECTORIES, *_masked(spec))),
        "ReadonlyPaths": list(READ_ONLY),
    }


def _expected(spec: SandboxSpec, host: Host) -> Expected:
    devices = _USER_NAMESPACE_WRITABLE if host.user_namespace else ()
    writable = (*_RUNTIME_WRITABLE, *devices, *_MASKED_FILES, *_masked(spec))
    kernel: Mapping[str, Any] = {
        "namespaces": tuple(name for name in NAMESPACES if name != "user" or host.user_namespace)
    }
    if host.runtime == "runsc":
        writable = (*writable, *(f"/sys/fs/cgroup/{name}" for name in _SENTRY_GROUPS))
        kernel = boundary.SENTRY
    # The image's own file system, the Engine's additions, and the profile's mounts.
    return boundary.expected(spec, writable=writable, files=host.added, hidden=_SOCKETS, **kernel)


def _masked(spec: SandboxSpec) -> tuple[str, ...]:
    return tuple(path.rstrip("/") for path in spec.masked)


def check_closed(body: Mapping[str, Any]) -> None:
    """Raise UnsupportedSpecError if a finished body would open the host, by our mistake or a changed plan."""
    host = body["HostConfig"]
    options = host["SecurityOpt"]
    found = {
        **{field: host.get(field) != value for field, value in _CLOSED.items()},
        **{field: bool(host.get(field)) for field in _NEVER},
        "NetworkDisabled": body["NetworkDisabled"] is not True,
        "Volumes": bool(body.get("Volumes")),
        "Mounts": any(mount["Type"] != "bind" or mount["ReadOnly"] is not True for mount in host["Mounts"]),
        "SecurityOpt": "no-new-privileges" not in options
        or not any(option.startswith("seccomp={") for option in options)
        or any(option.endswith("unconfined") for option in options),
        "User": body["User"] != f"{GUEST_UID}:{GUEST_UID}",
        "Image": not body["Image"].startswith("sha256:"),
    }
    opened = [field for field, wrong in found.items() if wrong]
    if opened:
        reason = "it would open the host to the sandbox"
        raise UnsupportedSpecError(f"plan.{opened[0]}", reason, "Report this as a bug.")


def check_source(source: str, socket: str) -> None:
    """Check one directory of the host that a sandbox is to see; links in ``source`` are resolved where it matters.

    Raises UnsupportedSpecError: it contains the host's devices, secrets or daemons, or lies in one of their places.
    """
    for place in (*_HOST_CONTROL, socket):
        if _holds(place, source) or _holds(source, place):
            reason = f"{source} would show the sandbox the host's {place}"
            fix = "Choose a directory that holds the caller's files and nothing else."
            raise UnsupportedSpecError("mounts.source", reason, fix)


def _holds(outer: str, inner: str) -> bool:
    return outer in ("/", inner) or inner.startswith(outer + "/")


def _tmpfs(size: int) -> str:
    owner = f"uid={GUEST_UID},gid={GUEST_UID}"
    return f"rw,nosuid,nodev,noexec,size={size},nr_inodes={size // _BYTES_PER_INODE},mode=0700,{owner}"


def _bind(mount: Mount) -> dict[str, Any]:
    # Not recursive: below Engine 25 only the top of a read-only bind is read-only; a mount inside it stays writable.
    return {
        "Type": "bind",
        "Source": mount.source,
        "Target": mount.target,
        "ReadOnly": True,
        "BindOptions": {"Propagation": "rprivate", "NonRecursive": True},
    }
