"""Locks, installs and checks packages, each file by hash, and copies the shared libraries that they need.

An environment made by uv or pipx has no pip. Python's standard library carries one as a wheel (on Debian beside it, see
ensurepip), and a wheel runs without installation. ldd(1) lists the interpreter's libraries. It has the dynamic linker
load a file, which a malicious file could exploit; so the needs of packages are read from their files, see elf(5).
"""

import json
import os
import platform
import re
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen  # noqa: TID251 - programs of the host's that we trust
from typing import IO, Any

import anyio

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.runtime.environments import Environment

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
    """Install the wheels of a lock into an absolute directory, for a Python of this series as in ``3.11``.

    Any of ``pythons``, beside our own, may have a pip. ``machine`` is that of the wheels, as in ``x86_64``; this one if
    empty. Only pip supports others. Raises SandboxError if there is nothing to install with, or it failed.
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


_ELF = b"\x7fELF\x02\x01"
"""64 bits, little-endian: locks exist for nothing else."""
_LIBRARY = re.compile(rb"([A-Za-z0-9_][A-Za-z0-9_.+-]{0,127})\0")
"""Of a library, and no path: it is searched in the host's directories."""
_HEADERS, _ENTRIES = 64, 1024
"""Most headers and entries read of one file: linkers make a dozen, and about fifty."""
_LOAD, _DYNAMIC, _NEEDED, _STRINGS = 1, 2, 1, 5
_ELSEWHERE = ("/usr/lib64", "/usr/lib", "/lib64", "/lib")


async def copy_libraries(root: Path, originals: list[str]) -> None:
    """Copy libraries from outside the tree to the dynamic linker's directory, beside the C library.

    Not to their original place: a Python below a home directory has a libpython there, and no such place exists inside.
    ``originals`` are the interpreter and its modules on the host: a copy does not find the libraries beside those.
    """
    found = await _linked(originals, root)
    beside = next((path.parent for name, path in found.items() if name.startswith("libc.so")), Path("/usr/lib"))
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]  # noqa: ASYNC240 - once
    own = {path.name for path in files}
    wanted = {name for path in files for name in needed(path)} - own - found.keys()
    places = [Path(beside), *map(Path, _ELSEWHERE)]
    there = [
        path for name in sorted(wanted) for path in [place / name for place in places if _is_elf(place / name)][:1]
    ]
    found |= {path.name: path for path in there} | await _linked([str(path) for path in there], root)
    for name, path in found.items():
        inside = str(beside / name)
        # /lib is /usr/lib, as on Debian and in the tree.
        target = root / (f"usr{inside}" if inside.startswith("/lib") else inside[1:])
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


async def _linked(programs: list[str], root: Path) -> dict[str, Path]:
    """Return what the dynamic linker loads with each of the host's own files, by name."""
    # ldd ends with 1 if one of the files is not dynamic; only its output counts.
    return _named(await output(["ldd", *programs], check=False), root) if programs else {}


def _named(told: str, root: Path) -> dict[str, Path]:
    """Return the path of each library outside the tree, by the name it is searched by."""
    found = {}
    for line in told.splitlines():
        name, arrow, place = line.strip().rpartition("=> ")
        path = Path(place.partition(" (")[0])
        if path.is_absolute() and not path.is_relative_to(root) and path.is_file():
            # The linker itself has no other name than its path.
            found[name.strip() if arrow else str(path)] = path
    return found


def needed(path: Path) -> Iterable[str]:
    """Return the DT_NEEDED names of an ELF file; empty if it is not ELF, or broken."""
    with path.open("rb") as file:
        if file.read(len(_ELF)) != _ELF:
            return ()
        try:
            return tuple(_needed(file.fileno()))
        except (struct.error, ValueError, OverflowError, OSError):
            return ()


def _needed(file: int) -> Iterator[str]:
    (headers,) = struct.unpack("<Q", os.pread(file, 8, 0x20))
    size, count = struct.unpack("<HH", os.pread(file, 4, 0x36))
    segments = [
        struct.unpack("<II6Q", os.pread(file, 56, headers + size * each)) for each in range(min(count, _HEADERS))
    ]
    for kind, _, offset, *_, length, _, _ in segments:
        if kind != _DYNAMIC:
            continue
        table = os.pread(file, 16 * min(length // 16, _ENTRIES), offset)
        entries = list(struct.iter_unpack("<QQ", table[: len(table) // 16 * 16]))
        tables = [value for tag, value in entries if tag == _STRINGS]
        loaded = [segment for segment in segments if segment[0] == _LOAD]
        # Offset of the names in the file: the table of entries has their address in memory.
        places = [at - each[3] + each[2] for at in tables for each in loaded if each[3] <= at < each[3] + each[5]]
        for tag, value in entries:
            if tag == _NEEDED and places:
                name = _LIBRARY.match(os.pread(file, 256, places[0] + value))
                if name:
                    yield name[1].decode()


def _is_elf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_ELF)) == _ELF
    except OSError:
        return False


_FILE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?==[A-Za-z0-9.!+_-]+ [0-9a-f]{64}")
"""Name, version and hash."""


async def write_lock(environment: Environment, python: Path, tell: Callable[[str], None]) -> int:
    """Make the lock anew, with the newest versions the file allows; return its number of packages.

    The sandboxes' interpreter, ``python``, decides on versions; ``tell`` gets one sentence a step.

    Raises:
        SandboxError: there is no pip, or the packages have no wheels for one of its Pythons.
        OSError: the lock cannot be written.
    """
    own = json.loads(await output([str(python), "-I", "-c", _SERIES]))
    serieses = environment.python or (own,)
    machines = environment.machines or (platform.machine(),)
    targets = [(series, machine) for series in serieses for machine in machines]
    here = (own, platform.machine())
    targets.sort(key=lambda target: target != here)  # first: its markers are those that are true here
    wanted: Iterable[str] = environment.packages
    versions: dict[str, str] = {}
    files: dict[str, set[str]] = {}
    for series, machine in targets:
        tell(f"Choosing files for Python {series} on {machine}")
        found = _files(await _report(wanted, series, machine, python, dependencies=not versions))
        versions = versions or {name: version for name, (version, _) in found.items()}
        wanted = [f"{name}=={version}" for name, version in versions.items()]
        for name, (_, digest) in found.items():
            files.setdefault(name, set()).add(digest)
    text = _HEAD.format(each=environment, pythons=", ".join(serieses), machines=" and ".join(machines))
    for name in sorted(versions):
        hashes = " \\\n".join(f"    --hash=sha256:{digest}" for digest in sorted(files[name]))
        text += f"{name}=={versions[name]} \\\n{hashes}\n"
    new = environment.lock.with_suffix(".lock.new")
    new.write_text(text)
    new.replace(environment.lock)
    return len(versions)


_SERIES = "import json, sys; print(json.dumps('%d.%d' % sys.version_info[:2]))"
_HEAD = """\
# Every file that may be installed for {each.path.name}, by hash. Written by `glovebox environment update {each.name}`.
# CPython {pythons}; Linux (glibc 2.28 or newer) on {machines}.
# Fits {each.fits}

"""


async def _report(
    wanted: Iterable[str], series: str, machine: str, python: Path, *, dependencies: bool
) -> list[dict[str, Any]]:
    # Dependencies may differ by the Python that asks: ours if it is like the sandboxes'.
    ours, own = Path(sys.executable), f"python{sys.version_info.major}.{sys.version_info.minor}"
    pip = await find_pip((ours, python) if own in python.name else (python, ours))
    if not pip:
        raise SandboxError("Choosing packages", NO_PIP, GET_PIP)
    with tempfile.TemporaryDirectory(prefix="glovebox-lock-") as scratch:
        command = [
            *pip, "install", "--disable-pip-version-check", "--quiet", "--dry-run", "--ignore-installed",
            "--report", f"{scratch}/report", "--target", f"{scratch}/nowhere", *WHEELS,
            *tags(series, machine), *([] if dependencies else ["--no-deps"]), *wanted,
        ]  # fmt: skip
        await output(command, cwd="/")
        install: list[dict[str, Any]] = json.loads(Path(scratch, "report").read_bytes())["install"]  # noqa: ASYNC240 - once
    return install


def _files(install: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return the version and hash of each package in pip's report, by normalized name.

    Format: https://pip.pypa.io/en/stable/reference/installation-report/
    """
    found = {}
    for each in install:
        name, version = str(each["metadata"]["name"]), str(each["metadata"]["version"])
        archive = each["download_info"].get("archive_info") or {}
        # Before pip 23.1 there is only the former.
        digest = str(archive.get("hash") or "").removeprefix("sha256=")
        digest = str((archive.get("hashes") or {}).get("sha256") or digest)
        if not _FILE.fullmatch(f"{name}=={version} {digest}"):
            fix = "Use an index that gives hashes, or report this as a bug."
            raise SandboxError(f"Locking {name!r} {version!r}", "pip names no file with a SHA-256 for it", fix)
        found[re.sub(r"[-_.]+", "-", name).lower()] = version, digest
    return found
