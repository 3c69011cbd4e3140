"""Installs locked packages, each checked by hash, with any available pip or uv.

An environment made by uv or pipx has no pip. Python's standard library carries one as a wheel (on Debian beside it, see
ensurepip), and a wheel runs without installation.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen  # noqa: TID251 - programs of the host's that we trust
from typing import IO

import anyio

from glovebox_sandboxes.contract.errors import SandboxError

_GLIBC_MINORS = range(17, 29)
"""glibc 2.17 to 2.28, as in wheels' platform tags (PEP 600): the newest a lock's files need."""
WHEELS = ("--only-binary", ":all:")
"""Arguments that restrict pip to wheels: building anything would run its code."""
NO_PIP = "needs pip, and neither Python's standard library nor the system has one"
GET_PIP = (
    "Install it (Debian and Ubuntu: `apt-get install python3-pip-whl`; elsewhere the package python3-pip) and run it "
    "again."
)
_WORDS = 1500
"""Characters of a program's last output: enough for pip's last lines."""

_CHUNK = 65536
_KILLED_SECONDS = 10.0
"""For killed programs to be gone: one on a disk that does not answer never is."""


async def install(target: Path, lock: Path, series: str, *, pythons: Iterable[Path] = (), machine: str = "") -> None:
    """Install the wheels of a lock into a directory, for a Python that need not be ours.

    Args:
        target: the directory, absolute.
        lock: exact versions and hashes.
        series: of their Python, as in ``3.11``.
        pythons: where to look for a pip, beside our own Python.
        machine: of the wheels, as in ``x86_64``; this one if empty. Only pip supports others.

    Raises:
        SandboxError: there is nothing to install with, or it failed.
    """
    chosen = ["--quiet", "--target", str(target), "--no-deps", *WHEELS, "--require-hashes", "--requirement", str(lock)]
    pip = await find_pip((Path(sys.executable), *pythons))
    # uv sets its own path for its child processes.
    uv = None if machine else os.environ.get("UV") or shutil.which("uv")
    if pip:
        chosen += tags(series, machine) if machine else ["--python-version", series]
        command = [*pip, "install", "--disable-pip-version-check", "--no-compile", *chosen]
    elif uv:
        # Copied: a link would be the same file as in uv's cache, whose modes are not ours to change.
        series = f"--python-version={series}"
        command = [uv, "pip", "install", "--python", sys.executable, "--link-mode", "copy", series, *chosen]
    else:
        raise SandboxError("Installing the sandboxes' packages", NO_PIP, GET_PIP)
    # uv takes settings, the index among them, from its working directory, which may be a stranger's project.
    await output(command, cwd="/")


_FIND_PIP = """
import glob, importlib.util, json, sysconfig
places = sysconfig.get_path("stdlib") + "/ensurepip/_bundled", sysconfig.get_config_var("WHEEL_PKG_DIR")
wheels = [path for place in places if place for path in glob.glob(place + "/pip-*.whl")]
print(json.dumps(["-m", "pip"] if importlib.util.find_spec("pip") else [f"{path}/pip" for path in wheels[:1]]))
"""


def tags(series: str, machine: str) -> list[str]:
    """Return pip's arguments for wheels of another Python than its own: its series and platform."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in reversed(_GLIBC_MINORS)] + [f"manylinux2014_{machine}"]
    return ["--python-version", series, "--implementation", "cp", *(f"--platform={name}" for name in platforms)]


async def find_pip(pythons: Iterable[Path]) -> list[str]:
    """Return the command of the first pip there is; empty if there is none."""
    for python in pythons:
        # -I: must not run a pip.py in our working directory, which strangers may have filled.
        isolated = [str(python), "-I"]
        found: list[str] = json.loads(await output([*isolated, "-c", _FIND_PIP]))
        if found:
            return [*isolated, *found]
    return []


async def output(command: list[str], *, check: bool = True, cwd: str | None = None) -> str:
    """Return standard output of a trusted host program; raise SandboxError with the end of its output."""
    try:
        # A group of its own: pip and compileall have workers, which must end too. Started without waiting: an
        # interruption in between would not know of it.
        process = Popen(  # noqa: S603, ASYNC220 - a list, of our own words
            command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, cwd=cwd, start_new_session=True
        )
    except OSError as problem:
        fix = f"Install or repair {command[0]}, and run `glovebox setup` again."
        raise SandboxError(f"Running {command[0]}", problem.strerror or str(problem), fix) from problem
    said, complained = await _ended(process)
    if check and process.returncode != 0:
        lines = complained.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
        # pip marks error lines, uv's are all errors; of a traceback, the last one counts.
        errors = [line for line in lines if line.startswith("ERROR:")]
        whole = lines[-1:] if any(line.startswith("Traceback") for line in lines) else lines
        words = " ".join(" ".join(errors or whole).split())[-_WORDS:].rstrip(".")
        fix = "Repair that (free space, the network), and run `glovebox setup` again."
        raise SandboxError(f"Running `{' '.join(command[:4])} …`", words, fix)
    return said.decode(errors="replace")


async def _ended(process: Popen[bytes]) -> tuple[bytes, bytes]:
    """Wait for a program and return its output and error output; no worker of it outlives an interruption."""
    said = [bytearray(), bytearray()]

    async def drain(number: int, stream: IO[bytes] | None) -> None:
        while stream is not None:
            await anyio.wait_readable(stream)
            chunk = os.read(stream.fileno(), _CHUNK)
            if not chunk:
                return
            said[number] += chunk

    with process:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(drain, 0, process.stdout)
                tasks.start_soon(drain, 1, process.stderr)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            # Its output ends with the last worker: only then does none write to what will be removed.
            with anyio.move_on_after(_KILLED_SECONDS, shield=True):
                await drain(0, process.stdout)
            raise
    return bytes(said[0]), bytes(said[1])
