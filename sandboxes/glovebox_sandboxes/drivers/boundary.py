"""The boundary that every driver draws around a sandbox, computed once from its specification. Pure.

Also the settings of a guest on gVisor's kernel, the sentry, for every driver that starts it. Unlike Linux, the sentry
has no Landlock and lets any process of a user signal process 1. And runsc's own way to a seccomp filter inside answers
every refusal with EPERM, where libc waits for ENOSYS.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from glovebox_sandboxes import seccomp
from glovebox_sandboxes.contract.base import GUEST_UID, INPUT, OUTPUT, SCRATCH, WORKSPACE, Limits, SandboxSpec
from glovebox_sandboxes.contract.measure import Expected
from glovebox_sandboxes.runtime import guest_tree

SHM = "/dev/shm"  # noqa: S108 - inside the sandbox
_SHM_BYTES = 16 * 1024 * 1024
_INPUT_BYTES = 64 * 1024 * 1024
"""Size of /input: the broker sends at most this much of earlier artifacts."""
HIDDEN = ("/var/run/docker.sock", "/run/docker.sock", "/etc/shadow", "/root", "/home", "/sys/fs/cgroup")
"""Never visible inside, whatever is mounted."""

SENTRY: Mapping[str, Any] = {
    # The sentry's own, not the host's: as certain as that the kernel is the sentry.
    "namespaces": ("ipc", "mnt", "net", "pid", "user", "uts"),
    "landlock": False,
    "system": "gvisor",
    # Missing from its /proc.
    "unmeasured": ("CapAmb", "namespace cgroup"),
}
"""Expected measurements on gVisor's kernel, in place of Linux's."""
_THREADS = 96
"""Threads of runsc, gofer and sentry on the host, measured with a margin: Go makes more as needed."""
_THREADS_PER_TASK = 4
"""Host threads per thread of the program: systrap's stub for it and its address space, and the sentry's own."""


def own_mounts(spec: SandboxSpec, *, inputs: int = _INPUT_BYTES) -> dict[str, int]:
    """Return every tmpfs of a sandbox, and its size in bytes."""
    limits = spec.limits
    wanted = (
        (True, SHM, _SHM_BYTES),
        (True, SCRATCH, limits.scratch_bytes),
        (spec.output, OUTPUT, limits.output_bytes),
        (spec.inputs, INPUT, inputs),
        (spec.overlay, WORKSPACE, limits.workspace_bytes),
    )
    return {target: size for present, target, size in wanted if present}


def expected(spec: SandboxSpec, *, writable: Iterable[str], files: Iterable[str], **kernel: Any) -> Expected:
    """Return what the guest must find: own mounts and ``writable`` places; mounts of ``files`` beside the spec's."""
    return Expected(
        uid=GUEST_UID,
        interfaces=("lo",),
        writable=tuple(sorted({*writable, *own_mounts(spec)})),
        mounts=tuple(sorted(["/", *files, *(mount.target for mount in spec.mounts)])),
        **kernel,
    )


def mechanisms(group: str, *, counted: bool, **others: str) -> dict[str, str]:
    """Return what enforces each limit: a control group of this kind, if not empty, ``counted`` its processor time."""
    each = group or "rlimit"
    return {"memory_bytes": each, "pids": each, "cpu_seconds": each if counted else "rlimit",
            "processors": group or "none", "wall_seconds": "broker", "scratch_bytes": "tmpfs",
            "output_bytes": "tmpfs", "stream_bytes": "broker", **others}  # fmt: skip


def sentry_command(
    python: str, spec: SandboxSpec, *, hidden: tuple[str, ...], elsewhere: Mapping[str, str], counted: bool = True
) -> tuple[str, ...]:
    """Return the arguments of a guest on the sentry, as ``guest_tree.command``; ``counted`` by a control group."""
    return guest_tree.command(
        python,
        spec,
        hidden=hidden,
        elsewhere=elsewhere,
        landlock=False,
        own_filter=seccomp.bpf_for_filtering(),
        program_filter=seccomp.for_programs(process_1=True, children=not counted),
    )


def around_sentry(limits: Limits) -> Limits:
    """Return the limits of a control group around the sentry: all memory, and its threads beside the program's."""
    return replace(limits, pids=_THREADS + _THREADS_PER_TASK * limits.pids)
