"""Installs locked packages, each checked by hash, with whatever pip or uv is at hand.

An environment that uv or pipx made has no pip, but Python's standard library carries one as a wheel (on Debian beside
it, see ensurepip), and a wheel can be run as it lies.
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

from glovebox_sandboxes.contract.errors import DiagnosedError

_GLIBC_MINORS = range(17, 29)
"""glibc 2.17 to 2.28, in the words of wheels' platform tags (PEP 600): the newest a lock's files need."""
WHEELS = ("--only-binary", ":all:")
"""Arguments by which pip takes wheels alone: building anything would run its code."""
NO_PIP = "needs pip, and neither Python's standard library nor the system has one"
GET_PIP = (
    "Install it (Debian and Ubuntu: `apt-get install python3-pip-whl`; elsewhere the package python3-pip) and run it "
    "again."
)
_WORDS = 1500
"""Characters of what a program said last: enough for what pip ends with."""

_CHUNK = 65536
_KILLED_SECONDS = 10.0
"""For killed programs to be gone: one on a disk that does not answer never is."""


class RuntimeBuildError(DiagnosedError):
    """The runtime could not be built."""


async def install(target: Path, lock: Path, series: str, *, pythons: Iterable[Path] = (), machine: str = "") -> None:
    """Install the wheels a lock names into a directory, for a Python that need not be ours.

    Args:
        target: the directory, absolute.
        lock: exact versions and hashes.
        series: of the Python they are for, as in ``3.11``.
        pythons: where to look for a pip, beside our own Python.
        machine: to take wheels for, as in ``x86_64``; this one where it is empty. Only pip knows others.

    Raises:
        RuntimeBuildError: there is nothing to install with, or it failed.
    """
    chosen = ["--quiet", "--target", str(target), "--no-deps", *WHEELS, "--require-hashes", "--requirement", str(lock)]
    pip = await find_pip((Path(sys.executable), *pythons))
    # uv says where it is to what it starts.
    uv = None if machine else os.environ.get("UV") or shutil.which("uv")
    if pip:
        chosen += tags(series, machine) if machine else ["--python-version", series]
        command = [*pip, "install", "--disable-pip-version-check", "--no-compile", *chosen]
    elif uv:
        # Copied: a link would be the same file as in uv's cache, which is not ours to give modes.
        series = f"--python-version={series}"
        command = [uv, "pip", "install", "--python", sys.executable, "--link-mode", "copy", series, *chosen]
    else:
        raise RuntimeBuildError("Installing the sandboxes' packages", NO_PIP, GET_PIP)
    # uv takes settings, the index among them, from the directory it is called in: that may be a stranger's project.
    await output(command, cwd="/")


_FIND_PIP = """
import glob, importlib.util, json, sysconfig
places = sysconfig.get_path("stdlib") + "/ensurepip/_bundled", sysconfig.get_config_var("WHEEL_PKG_DIR")
wheels = [path for place in places if place for path in glob.glob(place + "/pip-*.whl")]
print(json.dumps(["-m", "pip"] if importlib.util.find_spec("pip") else [f"{path}/pip" for path in wheels[:1]]))
"""


def tags(series: str, machine: str) -> list[str]:
    """Arguments by which pip takes wheels for another Python than its own: its series, and what it runs on."""
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in reversed(_GLIBC_MINORS)] + [f"manylinux2014_{machine}"]
    return ["--python-version", series, "--implementation", "cp", *(f"--platform={name}" for name in platforms)]


async def find_pip(pythons: Iterable[Path]) -> list[str]:
    """Return how to run the first pip there is; empty if there is none."""
    for python in pythons:
        # -I: a pip.py in the directory we were called from, which strangers may have filled, must not be what we run.
        isolated = [str(python), "-I"]
        found: list[str] = json.loads(await output([*isolated, "-c", _FIND_PIP]))
        if found:
            return [*isolated, *found]
    return []


async def output(command: list[str], *, check: bool = True, cwd: str | None = None) -> str:
    """Return standard output of a program of the host's that we trust; raises RuntimeBuildError with its last words."""
    try:
        # A group of its own: pip and compileall have workers, and whoever ends them has to reach those too. And made
        # without waiting: an interruption in between would not know of it.
        process = Popen(  # noqa: S603, ASYNC220 - a list, of our own words
            command, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, cwd=cwd, start_new_session=True
        )
    except OSError as problem:
        fix = f"Install or repair {command[0]}, and run `glovebox setup` again."
        raise RuntimeBuildError(f"Running {command[0]}", problem.strerror or str(problem), fix) from problem
    said, complained = await _ended(process)
    if check and process.returncode != 0:
        lines = complained.decode(errors="replace").strip().splitlines() or [f"exit status {process.returncode}"]
        # pip marks the lines that say it, uv says it in all of them; of a traceback, the last one says what happened.
        errors = [line for line in lines if line.startswith("ERROR:")]
        whole = lines[-1:] if any(line.startswith("Traceback") for line in lines) else lines
        words = " ".join(" ".join(errors or whole).split())[-_WORDS:].rstrip(".")
        fix = "Repair that (free space, the network), and run `glovebox setup` again."
        raise RuntimeBuildError(f"Running `{' '.join(command[:4])} …`", words, fix)
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
            # Its output ends when the last worker is gone: only then is nobody writing to what will be removed.
            with anyio.move_on_after(_KILLED_SECONDS, shield=True):
                await drain(0, process.stdout)
            raise
    return bytes(said[0]), bytes(said[1])
