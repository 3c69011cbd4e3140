# ruff: noqa: INP001 - a program of the image, not a module of ours
"""Runs inside the image while it is built: compiles, takes away what no sandbox needs. No code of a package runs.

Standard library only; must not import anything of ours.
"""

import compileall
import os
import pwd
import py_compile
import re
import shutil
import stat
import sys
import sysconfig
from pathlib import Path

PACKAGES = Path("/opt/packages")
PYTHON = Path("/usr/bin/python3")
GUEST = Path("/guest")
UID = 65532
USER = f"sandbox:x:{UID}:{UID}::/tmp:/nonexistent\n"
GROUP = f"sandbox:x:{UID}:\n"
#: Where a tmpfs may come: it gets the mode of the directory below it, and from Podman no owner.
WRITABLE = ("input", "output", "tmp", "workspace")
#: Installers, their caches, and documentation; patterns below the root.
LEFT_OUT = ("var/lib/apt", "var/cache", "var/log", "usr/share/doc", "usr/share/man", "usr/share/locale")
INSTALLERS = ("pip", "pip-*", "setuptools", "setuptools-*", "wheel", "wheel-*")
NOT_OURS = frozenset({"dev", "proc", "sys"})


def runtime() -> None:
    """Everything but the guest."""
    if not PYTHON.exists():
        PYTHON.symlink_to(sys.executable)
    for name in ("guest", *WRITABLE):
        Path("/", name).mkdir(exist_ok=True)
    for name in WRITABLE:
        Path("/", name).chmod(0o1777)
    if not any(entry.pw_uid == UID for entry in pwd.getpwall()):
        with Path("/etc/passwd").open("a") as users, Path("/etc/group").open("a") as groups:
            users.write(USER)
            groups.write(GROUP)
    library = Path(sysconfig.get_path("stdlib"))
    installed = Path(sysconfig.get_path("purelib"))
    doomed = [Path("/", name) for name in LEFT_OUT] + [library / "test", library / "ensurepip"]
    doomed += [path for pattern in INSTALLERS for path in installed.glob(pattern)]
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)
    compile_below(library)
    compile_below(PACKAGES)
    for name in sorted(set(os.listdir("/")) - NOT_OURS):  # noqa: PTH208 - names are all it needs
        drop_setuid(Path("/", name))


def compile_below(directory: Path) -> None:
    """Compile to files that are trusted without a look at their source: the root is read-only in every sandbox."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    tests = re.compile(f"{PACKAGES}/.+/tests/")  # of packages: a third of all
    compileall.compile_dir(directory, rx=tests, quiet=2, force=True, workers=0, invalidation_mode=mode)


def drop_setuid(top: Path) -> None:
    """Take set-user-id and set-group-id off every file: nothing in a sandbox may become somebody else."""
    for folder, _, files in os.walk(top):
        for path in (Path(folder, name) for name in files):
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
                path.chmod(stat.S_IMODE(mode) & 0o755)


if __name__ == "__main__":
    runtime() if sys.argv[1] == "runtime" else compile_below(GUEST)
    Path(__file__).unlink()
