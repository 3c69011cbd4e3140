"""Describe this process's system, containers and sandboxes, and why it gets no user namespaces. Only reads files.

The kernel answers EPERM whatever the reason, see user_namespaces(7).
"""

import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

_SWITCHES = (("kernel/unprivileged_userns_clone", "0", "1"), ("user/max_user_namespaces", "0", "15000"))
"""Below /proc/sys: the file, the value that refuses, and one that does not."""
_APPARMOR = "kernel/apparmor_restrict_unprivileged_userns"
"""Ubuntu's. 1: a program without a profile of its own gets namespaces in which it may do nothing."""
_CONTAINER_MARKS = (".dockerenv", "run/.containerenv", "run/systemd/container")
_INITIAL_MAP = ["0", "0", "4294967295"]
_OUTSIDE = "or run Glovebox outside of it"
_ANCESTORS = 64


def fix(words: str, root: Path = Path("/")) -> str:
    """Return what most likely has to change, by bwrap's message: of all causes that show, the first."""
    most = _read(root, "proc/sys/user/max_user_namespaces")
    apparmor = _APPARMOR.replace("/", ".")
    causes = [
        (_read(root, f"proc/sys/{_APPARMOR}") == "1",
         (f"AppArmor keeps bwrap from using user namespaces ({apparmor} is 1). Give bwrap a profile "
         "(docs/operate/troubleshoot.md has it); or, as root, for every program: "
         f"`sysctl -w {apparmor}=0`")),
        (nested(root) and ("ENOSPC" in words or most == "0"),
         ("The sandbox around this process forbids user namespaces inside it, as bwrap --disable-userns does. Start "
         f"that one without it, {_OUTSIDE}.")),
        (nested(root) and "uid map" in words,
         ("The sandbox around this process calls it root and took root's capabilities; the kernel lets such a user "
         f"make no user namespace. Start that one with another number (bwrap --uid 1000 --gid 1000), {_OUTSIDE}.")),
        *((_read(root, f"proc/sys/{name}") == refuses,
           f"Allow user namespaces, as root: `sysctl -w {name.replace('/', '.')}={allows}`")
          for name, refuses, allows in _SWITCHES),
        (chrooted(root),
         f"The kernel refuses user namespaces inside a chroot: enter it with pivot_root, {_OUTSIDE}."),
        (container(root) and (filtered(root) or apparmor_profile(root) or _masked(words)), _in_container(words, root)),
        (_masked(words),
         ("Something around this process hides parts of procfs, or makes them read-only. In a systemd unit, take "
         "ProtectKernelTunables=, ProtectKernelLogs= and ProtectProc= out; start an outer sandbox with a whole one; "
         "or run Glovebox outside.")),
        (filtered(root),
         ("A filter of system calls around this process refuses them. In a systemd unit, take RestrictNamespaces= "
         "and SystemCallFilter= out; an outer sandbox has to permit clone, unshare, mount, umount2 and pivot_root. "
         "Or run Glovebox outside.")),
        (True,
         ("Allow user namespaces to unprivileged users. Likely causes: an outer sandbox or service manager that "
         "forbids them, or a kernel built without them.")),
    ]  # fmt: skip
    return next(words for shows, words in causes if shows)


def _in_container(words: str, root: Path) -> str:
    # All at once: a person who clears one obstacle should not meet the next.
    options = ["seccomp=unconfined"] * filtered(root) + ["systempaths=unconfined"]
    options += ["apparmor=unconfined"] * bool(apparmor_profile(root))
    what = "hides parts of procfs" if _masked(words) else "refuses user namespaces"
    return (
        f"This container {what}. Run Glovebox on the host or in a virtual machine; or start the container with "
        f"`{' '.join(f'--security-opt {each}' for each in options)}` (what that opens: docs/operate/install.md)."
    )


def _masked(words: str) -> bool:
    """Return whether namespaces were given, and procfs could not be mounted anew, or not written."""
    return "mount proc" in words or "Read-only file system" in words


def container(root: Path = Path("/")) -> bool:
    """Return whether a container engine left its mark."""
    return any((root / mark).exists() for mark in _CONTAINER_MARKS)


def nested(root: Path = Path("/")) -> bool:
    """Return whether we are in a user namespace other than the initial one."""
    return _read(root, "proc/self/uid_map").split() not in ([], _INITIAL_MAP)


def filtered(root: Path = Path("/")) -> bool:
    """Return whether a filter of system calls is in effect, see seccomp(2)."""
    return "Seccomp:\t2" in _read(root, "proc/self/status").splitlines()


def apparmor_profile(root: Path) -> str:
    """Return the name of the AppArmor profile that confines us; empty if none does."""
    found = _read(root, "proc/self/attr/apparmor/current") or _read(root, "proc/self/attr/current")
    return found.removesuffix(" (enforce)") if found.endswith(" (enforce)") else ""


def _read(root: Path, name: str) -> str:
    with suppress(OSError):
        return (root / name).read_text(errors="replace").strip().strip("\0")
    return ""


def chrooted(root: Path) -> bool:
    """Return whether our root is not that of our mount namespace, as far as visible."""
    with suppress(OSError):
        # Only root may look; every process's root is that of its namespace unless it was changed.
        if not (root / "proc/1/root").samefile(root):
            return True
    with suppress(OSError):
        table = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        # A chroot into a plain directory leaves nothing mounted at the root.
        return bool(table) and not any(line.split(" ")[4] == "/" for line in table)
    return False


def facts(root: Path = Path("/")) -> dict[str, Any]:
    """Return facts for a reader of a proof or of doctor's report; plain data."""
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
    """Return what is around this process, outermost first, as far as it shows; empty on a plain host."""
    confined = apparmor_profile(root)
    found = {
        "container": container(root),
        "bubblewrap": _below("bwrap", root),
        "user namespace": nested(root),
        "chroot": chrooted(root),
        "system-call filter": filtered(root),
        f"AppArmor profile {confined}": bool(confined),
    }
    return [name for name, there in found.items() if there]


def control_groups(root: Path) -> str:
    """Return the kind mounted there: ``v2``, ``v1`` or ``none``. Only a driver's probe knows whether we may use it."""
    if (root / "cgroup.controllers").exists():
        return "v2"
    return "v1" if (root / "memory/cgroup.procs").exists() else "none"


def _below(program: str, root: Path) -> bool:
    pid = "self"
    with suppress(OSError, IndexError):  # it ended meanwhile, or is not readable
        for _ in range(_ANCESTORS):
            head, _, rest = (root / "proc" / pid / "stat").read_text(errors="replace").rpartition(")")
            if head.partition("(")[2] == program:
                return True
            pid = rest.split()[1]
    return False
