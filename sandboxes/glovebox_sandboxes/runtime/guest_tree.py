"""The guest as files: the content of ``/guest`` in every sandbox, for every driver."""

import ctypes
import functools
import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _glovebox_guest
from glovebox_sandboxes.contract.base import GUEST, INPUT, ORIGINAL, OUTPUT, PACKAGES, WORKSPACE, SandboxSpec

_PACKAGE = Path(_glovebox_guest.__file__).parent
PROCESS_1 = _PACKAGE / "process_1" / f"process_1.{platform.machine()}.so"
"""Process 1 in C. Without it, all guests are in Python."""


@functools.cache
def process_1() -> tuple[str, str]:
    """Return the digest of process 1 in C, if it was built for this machine and can be loaded; else "" and why not."""
    try:
        # By the C library of this Python, of which the sandboxes' one is a copy.
        ctypes.CDLL(str(PROCESS_1))
        return "sha256:" + hashlib.sha256(PROCESS_1.read_bytes()).hexdigest(), ""
    except OSError as problem:
        return "", str(
            problem
        ) if PROCESS_1.exists() else "it was not built: install a C compiler, and run `make setup`"


@functools.cache
def files() -> Mapping[str, bytes]:
    """Return content by path below ``/guest``."""
    found = {
        # A mount point, hidden while in use.
        f"{ORIGINAL.removeprefix(GUEST + '/')}/README": b"The workspace, where the program has a copy of it.\n"
    }
    for path in sorted((*_PACKAGE.rglob("*.py"), *[PROCESS_1] * bool(process_1()[0]))):
        found[f"{_PACKAGE.name}/{path.relative_to(_PACKAGE)}"] = path.read_bytes()
    return found


@functools.cache
def digest() -> str:
    """Return ``sha256:…`` over names and contents of this server's guest."""
    summary = {name: hashlib.sha256(content).hexdigest() for name, content in files().items()}
    return "sha256:" + hashlib.sha256(json.dumps(summary, sort_keys=True).encode()).hexdigest()


def process_1_for(spec: SandboxSpec) -> str:
    """Return the digest of process 1 in C if prepared sandboxes of this spec have it, empty if theirs is in Python."""
    return "" if spec.overlay or spec.network == "egress" else process_1()[0]


def write(directory: Path) -> None:
    """Write the guest's files below an existing directory."""
    for name, content in files().items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def command(
    python: str,
    spec: SandboxSpec,
    *,
    hidden: tuple[str, ...],
    elsewhere: Mapping[str, str],
    landlock: bool = True,
    own_filter: bytes = b"",
    program_filter: bytes = b"",
    zygote: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Return the argument vector that starts the guest with the interpreter inside a sandbox.

    It must report paths that are ``hidden`` if they exist. ``landlock`` puts the program under Landlock rules, or runs
    nothing; it is False only if the plan expects a kernel without it. The guest puts ``own_filter`` on itself, if its
    starter cannot, and ``program_filter`` on the program alone. ``zygote`` has the mounts of each guest that is forked.
    """
    config = {
        "path": [PACKAGES],
        "hidden": list(hidden),
        "masked": list(spec.masked),
        "elsewhere": dict(elsewhere),
        "preload": list(spec.preload),
        "input": INPUT if spec.inputs else "",
        "output": OUTPUT if spec.output else "",
        "overlay": [ORIGINAL, WORKSPACE] if spec.overlay else [],
        "proxy": spec.network == "egress",
        "landlock": landlock,
        "filter": own_filter.hex(),
        "program_filter": program_filter.hex(),
        "zygote": zygote,
    }
    start = _START.format(module="zygote" if zygote else "main")
    return (python, *_OPTIONS, start, json.dumps(config, sort_keys=True, separators=(",", ":")))


_OPTIONS = ("-I", "-S", "-B", "-X", "utf8", "-c")
"""No environment, user site or current directory; no site-packages start-up; no files written; not the locale's."""
# Not `python /guest`: running a directory brings `runpy` and its imports, which take longer than the guest itself. The
# guest's package finds its own modules. On the path, /guest would offer a program useless names.
_START = (
    f"import sys; sys.path.insert(0, {GUEST!r}); from _glovebox_guest.{{module}} import main; del sys.path[0]; main()"
)

#: Environment of every guest, and so of every program: nothing of the host's.
ENVIRONMENT: Mapping[str, str] = {
    "HOME": "/tmp",  # noqa: S108 - inside the sandbox
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PATH": "/usr/bin:/bin",
    # For interpreters that a program starts; the guest itself takes no path from the environment.
    "PYTHONPATH": f"{GUEST}/{_PACKAGE.name}/site:{PACKAGES}",
    "MPLBACKEND": "module://_glovebox_guest.program.figures",
    "MPLCONFIGDIR": "/tmp/.matplotlib",  # noqa: S108 - inside the sandbox
    # Width of tables that pandas prints, which leaves out wider ones' middle.
    "COLUMNS": "200",
    # A sandbox may use one processor; thread pools sized for the host's would only cost memory.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}
