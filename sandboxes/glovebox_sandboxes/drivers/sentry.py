"""Settings of the guest on gVisor's kernel, the sentry, for every driver that starts it. Pure.

Unlike Linux, the sentry has no Landlock and lets any process of a user signal process 1. And runsc's own way to a
seccomp filter inside answers every refusal with EPERM, where libc waits for ENOSYS.
"""

from collections.abc import Mapping
from dataclasses import replace

from glovebox_sandboxes import seccomp
from glovebox_sandboxes.contract.spec import Limits, SandboxSpec
from glovebox_sandboxes.runtime import guest_tree

NAMESPACES = ("ipc", "mnt", "net", "pid", "user", "uts")
"""The sentry's own, not the host's: as certain as that the kernel is the sentry."""
UNMEASURED = ("CapAmb", "namespace cgroup")
"""Missing from its /proc; see ``Expected.unmeasured``."""

_THREADS = 96
"""Threads of runsc, gofer and sentry on the host, measured with a margin: Go makes more as needed."""
_THREADS_PER_TASK = 4
"""Host threads per thread of the program: systrap's stub for it and its address space, and the sentry's own."""


def command(
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


def outside(limits: Limits) -> Limits:
    """Return the limits of a control group around the sentry: all memory, and its threads beside the program's."""
    return replace(limits, pids=_THREADS + _THREADS_PER_TASK * limits.pids)
