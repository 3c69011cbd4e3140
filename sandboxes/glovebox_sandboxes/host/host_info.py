"""Describes where Glovebox runs: system, user, containers. Only reads files; names no machine and no user."""

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from glovebox_sandboxes.host import userns

_ANCESTORS = 64
"""Parents of parents that are looked at; nobody starts a server deeper."""


def facts(root: Path = Path("/")) -> dict[str, Any]:
    """What a reader of a proof, or of what doctor says, needs to know; plain data.

    Args:
        root: the root directory, for tests.
    """
    release = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    modules = Path("/sys/kernel/security/lsm")
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "system": release.get("PRETTY_NAME", ""),
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "root": os.geteuid() == 0,
        "inside": inside(root),
        "control_groups": control_groups(root / "sys/fs/cgroup"),
        "security_modules": modules.read_text().strip().split(",") if os.access(modules, os.R_OK) else [],
    }


def inside(root: Path = Path("/")) -> list[str]:
    """What is around this process, outermost first, as far as it can be told from within; empty on a plain host."""
    names = ("container", "bubblewrap", "user namespace", "chroot", "system-call filter")
    found = (
        userns.container(root),
        _below("bwrap", root),
        userns.nested(root),
        userns.chrooted(root),
        userns.filtered(root),
    )
    confined = userns.apparmor_profile(root)
    return [name for name, there in zip(names, found, strict=True) if there] + [f"AppArmor profile {confined}"] * bool(
        confined
    )


def control_groups(root: Path) -> str:
    """Which kind is mounted there: ``v2``, ``v1`` or ``none``. Whether we may use them only a driver's probe knows."""
    if (root / "cgroup.controllers").exists():
        return "v2"
    return "v1" if (root / "memory/cgroup.procs").exists() else "none"


def _below(program: str, root: Path) -> bool:
    """Whether one of the processes above us is called so."""
    pid = "self"
    with suppress(OSError, IndexError):  # one that ends meanwhile, or that we may not look at
        for _ in range(_ANCESTORS):
            head, _, rest = (root / "proc" / pid / "stat").read_text(errors="replace").rpartition(")")
            if head.partition("(")[2] == program:
                return True
            pid = rest.split()[1]
    return False
