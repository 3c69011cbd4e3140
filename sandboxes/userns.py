"""Why this host refuses user namespaces, as well as it can be told from outside, and what to do. Only reads files.

The kernel answers EPERM whatever the reason, see user_namespaces(7).
"""

from contextlib import suppress
from pathlib import Path

_SWITCHES = (
    ("kernel/unprivileged_userns_clone", "0", "1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0"),
    ("user/max_user_namespaces", "0", "15000"),
)
"""Below /proc/sys: the file, the value that refuses, and one that does not."""
_CONTAINER_MARKS = (".dockerenv", "run/.containerenv", "run/systemd/container")
"""Files that container engines leave below the root."""


def fix(words: str, root: Path = Path("/")) -> str:
    """What most likely has to change.

    Args:
        words: what bwrap said.
        root: the root directory, for tests.
    """
    for name, refuses, allows in _SWITCHES:
        with suppress(OSError):
            if (root / "proc/sys" / name).read_text().strip() == refuses:
                return f"Allow user namespaces: `sysctl -w {name.replace('/', '.')}={allows}`"
    if _chrooted(root):
        return (
            "The kernel refuses user namespaces inside a chroot: enter it with pivot_root, as containers do, or run "
            "Glovebox outside of it."
        )
    if any((root / mark).exists() for mark in _CONTAINER_MARKS):
        masked = "mount proc" in words
        option = "systempaths=unconfined" if masked else "seccomp=PROFILE with one that permits unshare and clone"
        what = "hides parts of /proc" if masked else "refuses user namespaces"
        return (
            f"This container {what}. Run Glovebox on the host or in a virtual machine; or start the container with "
            f"--security-opt {option} (what that opens: docs/operations.md)."
        )
    return (
        "Allow user namespaces to unprivileged users. Likely causes: an outer sandbox, container or service manager "
        "that filters them, or a kernel built without them."
    )


def _chrooted(root: Path) -> bool:
    """Whether our root is not that of our mount namespace; as far as can be seen."""
    with suppress(OSError):
        # Only root may look; every process's root is that of its namespace unless it was changed.
        if not (root / "proc/1/root").samefile(root):
            return True
    with suppress(OSError):
        table = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        # A chroot into a plain directory leaves nothing mounted at the root.
        return bool(table) and not any(line.split(" ")[4] == "/" for line in table)
    return False
