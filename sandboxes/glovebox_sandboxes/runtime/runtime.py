"""Runtimes: for each environment a root directory with a Python, its standard library, the packages, and nothing else.

Sandboxes of the bubblewrap driver see such a tree as ``/``, read-only, instead of the host's directories: no shell, no
other program, no file of the host. It has copies of the host's own interpreter and of the shared libraries that
interpreter and packages need, so only wheels are downloaded. No package code runs while it is made.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

import anyio
from pydantic import BaseModel

from glovebox_sandboxes.contract.base import DEFAULT, PACKAGES, Missing
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host import permissions
from glovebox_sandboxes.host.descriptors import opened
from glovebox_sandboxes.host.identity import changes_user
from glovebox_sandboxes.runtime import environments, guest_tree, packages
from glovebox_sandboxes.runtime.environments import Environment
from glovebox_sandboxes.runtime.packages import output

LOCK = environments.SHIPPED / f"{DEFAULT}.lock"
"""Exact versions and hashes of every package in the default environment."""
_MOUNT_POINTS = ("dev", "etc", "guest", "input", "output", "proc", "tmp", "workspace")
_DECIDING = ("runtime-*", "runtime-*/root", "guest-*", "environments", "environments/*.json")
"""Entries of the data directory that decide what runs in sandboxes."""
_BUILD_SECONDS = 1800.0
"""Longer than a build takes with a slow network; waiting for another build ends with an error then."""
_LOOK_SECONDS = 0.2
_FORMAT: Final = 3
_LOCALE = Path("/usr/lib/locale/C.utf8")
"""The locale that LANG names inside, where libc looks for it, see setlocale(3)."""
# Parts of the standard library that no program in a sandbox can use: tests, windows, installers.
_LEFT_OUT = ("test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages",
             "dist-packages", "__pycache__", "config-*", "*.pyc")  # fmt: skip


SETUP = "Run `glovebox setup`."


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """A built runtime."""

    root: Path
    """The directory that becomes ``/``."""
    guest: Path
    """The directory that becomes ``/guest``."""
    python: str
    """Path of the interpreter inside."""
    version: str
    digest: str
    """Over interpreter, packages and guest: part of every plan."""
    tree: str = ""
    """Over all below ``root``, when it was built."""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Other environments by module: see ``environments.elsewhere``."""

    @property
    def directories(self) -> tuple[Path, Path]:
        """Return what must stay in the data directory while it is used."""
        return self.root.parent, self.guest


class _Manifest(BaseModel):
    """The record beside a complete runtime."""

    format: Literal[3]
    """Raised when the layout of ``_build_root`` changes, so that an older tree is built anew."""
    lock: str
    python: str
    version: str
    digest: str


def base_python() -> Path:
    """Return the interpreter to build from: the distribution's if new enough (it starts fastest), else ours."""
    system = Path("/usr/bin/python3")
    if system.exists():
        name = system.resolve().name  # python3.11
        major, _, minor = name.removeprefix("python").partition(".")
        if major == "3" and minor.isdigit() and int(minor) >= sys.version_info.minor - 1 and int(minor) >= 11:  # noqa: PLR2004 - requires-python
            return system.resolve()
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def find(data: Path, environment: str = DEFAULT) -> Runtime | None:
    """Return the environment's runtime under the data directory, if this version can use it."""
    lock = _locks(data).get(environment)
    return None if lock is None else _find(data, lock)


def _locks(data: Path) -> dict[str, str]:
    """Return the digest of each environment's lock, by name."""
    default = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    return {DEFAULT: default} | {name: each.lock for name, each in environments.recorded(data).items()}


def place(data: Path, lock: str) -> Path:
    """Return the place of the runtime that is built from the lock with this digest."""
    return data / f"runtime-{hashlib.sha256(f'{_FORMAT} {lock}'.encode()).hexdigest()[:16]}"


def _guest(data: Path, manifest: _Manifest) -> Path:
    return data / f"guest-{guest_tree.digest()[7:23]}-{manifest.version}"


def _find(data: Path, lock: str) -> Runtime | None:
    manifest = _manifest(data, lock)
    if manifest is None or not _guest(data, manifest).is_dir():
        return None
    whole = hashlib.sha256((manifest.digest + guest_tree.digest()).encode()).hexdigest()
    return Runtime(
        root=place(data, lock) / "root",
        guest=_guest(data, manifest),
        python=manifest.python,
        version=manifest.version,
        digest=f"sha256:{whole}",
        tree=manifest.digest,
    )


def is_built(data: Path, lock: str) -> bool:
    """Return whether a runtime was built from the lock with this digest, and not removed."""
    return _manifest(data, lock) is not None


def every(data: Path) -> Mapping[str, Runtime]:
    """Return each runtime under the data directory that this version can use, by environment."""
    found = {name: _find(data, lock) for name, lock in _locks(data).items()}
    other = environments.elsewhere(data)
    return {name: replace(each, elsewhere=other) for name, each in found.items() if each is not None}


async def usable(data: Path) -> tuple[Mapping[str, Runtime], Missing | None]:
    """Return every runtime, adding this version's guest if only that is missing; or what is missing."""
    try:
        _require_own(data)
    except SandboxError as problem:
        return {}, Missing(what=problem.reason, fix=problem.fix, fatal=True)
    except OSError as problem:
        fix = "Run as the user it belongs to, or choose another with --data-dir."
        return {}, Missing(what=f"{data} cannot be read: {problem.strerror}", fix=fix, fatal=True)
    try:
        for lock in _locks(data).values():
            if _find(data, lock) is None and is_built(data, lock):
                await _build(data, lock, LOCK, lambda _: None)
    except PermissionError:
        return {}, Missing(
            what=f"the guest of this version is not in {data}, where this user may not write",
            fix=f"Run `glovebox setup --data-dir {data}` as the user it belongs to, or choose another with --data-dir.",
            fatal=True,
        )
    except (SandboxError, OSError) as problem:
        return {}, Missing(what=f"the guest cannot be installed: {problem}", fix=SETUP, fatal=True)
    found = every(data)
    if DEFAULT not in found:
        return {}, Missing(what="the sandbox's Python runtime is not built", fix=SETUP, fatal=True)
    return found, None


def _require_own(data: Path) -> None:
    """Raise SandboxError if another user could change the data directory, which every sandbox runs from.

    Nor may root's server be led to a place that another user can exchange.
    """
    inside = [path for pattern in _DECIDING for path in sorted(data.glob(pattern))]
    flaws = ((each, *found) for each in (data, *inside) if each.exists() and (found := permissions.flaw(each)))
    first = next(flaws, None) or (permissions.flaw_above(data) if changes_user() else None)
    if first is not None:
        where, problem, command = first
        fix = f"Name another directory with --data-dir; or, if nothing was changed, run `{command} {where}`."
        reason = f"{where} {problem}, who could change what runs in every sandbox"
        raise SandboxError("Building the runtime", reason, fix)


async def build(data: Path, tell: Callable[[str], None], environment: Environment | None = None) -> Runtime:
    """Build what is missing or altered of a runtime under ``data``; ``tell`` gets one sentence a step.

    Raises:
        SandboxError: something is missing on this host, with the command that adds it; or others could change what
            is there.
        MisnamedError: its lock is invalid.
        OSError: the data directory cannot be written.
    """
    data = data.resolve()  # noqa: ASYNC240 - once, in a command
    if environment is None:
        return await _build(data, hashlib.sha256(LOCK.read_bytes()).hexdigest(), LOCK, tell)
    lock = environment.locked()
    found = await _build(data, lock, environment.lock, tell)
    if environment.name != DEFAULT:
        environments.record(data, environment, lock)
    return found


async def _build(data: Path, lock: str, file: Path, tell: Callable[[str], None]) -> Runtime:
    _require_own(data)
    previous = os.umask(0o022)  # the sandbox's user is another one and has to read it
    try:
        _make(data)
        _require_own(data)  # somebody else may have made it, or what is above it, a moment before us
        async with _alone(data, tell):
            found = _find(data, lock)
            if found is not None and not await anyio.to_thread.run_sync(_intact, found):
                tell("Something of it was changed or removed: building it again")
                found.guest.rename(data / f".building-{secrets.token_hex(8)}")
                (found.root.parent / "manifest.json").unlink()
            if not is_built(data, lock):
                await _build_root(data, lock, file, tell)
            manifest = _manifest(data, lock)
            if manifest is not None and _find(data, lock) is None:
                await _build_guest(data, manifest, tell)
    except OSError as problem:
        problem.filename = problem.filename or str(data)  # of a write that fails, the system does not say where
        raise
    finally:
        os.umask(previous)
    found = _find(data, lock)
    if found is None:
        raise SandboxError(f"Building the runtime below {data}", "it cannot be read", "Remove it, and run it again.")
    return found


def _make(data: Path) -> None:
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        fix = "Name another with --data-dir or GLOVEBOX_DATA_DIR."
        raise SandboxError(f"The data directory {data} cannot be made", problem.strerror or "", fix) from problem


@asynccontextmanager
async def _alone(data: Path, tell: Callable[[str], None]) -> AsyncIterator[None]:
    """Wait until no other process builds; the kernel releases its lock if it dies.

    Raises SandboxError: it builds for longer than any build takes.
    """
    with opened(data, os.O_DIRECTORY) as place:
        with anyio.move_on_after(_BUILD_SECONDS) as waiting:
            if _busy(place):
                tell("Another set-up is at work in the same directory: waiting for it")
                while _busy(place):  # noqa: ASYNC110 - another process
                    await anyio.sleep(_LOOK_SECONDS)
        if waiting.cancelled_caught:
            found = f"another set-up has been at work for {_BUILD_SECONDS / 60:g} minutes"
            raise SandboxError(f"Building the runtime below {data}", found, f"Find it with `fuser {data}`.")
        yield


def _busy(place: int) -> bool:
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        return isinstance(problem, BlockingIOError)  # else a file system without locks
    return False


def _intact(built: Runtime) -> bool:
    """Return whether runtime and guest are as built, to the byte, except files compiled from the guest."""
    try:
        guest = all((built.guest / name).read_bytes() == content for name, content in guest_tree.files().items())
        return guest and _tree_digest(built.root) == built.tree
    except OSError:
        return False


def _manifest(data: Path, lock: str) -> _Manifest | None:
    """Return the runtime's manifest, or None if it is not a whole runtime of this version."""
    here = place(data, lock)
    try:
        found = _Manifest.model_validate_json((here / "manifest.json").read_bytes())
        there = (here / "root" / found.python.lstrip("/")).is_file()
    except (OSError, ValueError):
        return None
    return found if there and found.lock == lock else None


async def _build_root(data: Path, lock: str, file: Path, tell: Callable[[str], None]) -> None:
    python = base_python()
    facts = json.loads(await output([str(python), "-I", "-c", _FACTS]))
    with tempfile.TemporaryDirectory(dir=data, prefix=".building-") as scratch:
        building = Path(scratch) / "runtime"
        root = building / "root"
        for name in (*_MOUNT_POINTS, "usr/bin", "usr/lib", "usr/lib64", "opt"):
            (root / name).mkdir(parents=True)
        for name in ("bin", "lib", "lib64"):
            (root / name).symlink_to(f"usr/{name}")
        (root / "etc/passwd").write_text("sandbox:x:65532:65532::/tmp:/nonexistent\n")
        (root / "etc/group").write_text("sandbox:x:65532:\n")
        # As in the docker driver's image. No ::1, which a kernel without IPv6 does not have.
        (root / "etc/hosts").write_text("127.0.0.1 localhost sandbox\n")
        if _LOCALE.is_dir():  # noqa: ASYNC240 - once, in a command
            shutil.copytree(_LOCALE, root / _LOCALE.relative_to("/"))
        tell(f"Copying Python {facts['version']} from {python}")
        inside = root / "usr/bin" / f"python{facts['series']}"
        shutil.copy2(python, inside)
        (root / "usr/bin/python3").symlink_to(inside.name)
        library = root / "usr" / facts["library"]
        ignore = shutil.ignore_patterns(*_LEFT_OUT)
        try:
            # In no thread: an interruption would not wait for it, and it would write to what is being removed.
            shutil.copytree(facts["stdlib"], library, ignore=ignore)
        except shutil.Error as problem:  # of everything that could not be copied, the first
            source, _, reason = problem.args[0][0]
            fix = "Repair that (free space, permissions), and run it again."
            raise SandboxError(f"Copying {source}", reason, fix) from problem
        if facts["dynload"] != f"{facts['stdlib']}/lib-dynload":
            shutil.copytree(facts["dynload"], library / "lib-dynload", dirs_exist_ok=True)
        tell(f"Installing the packages of {file.stem}")
        installed = root / PACKAGES[1:]
        # A copy, which no other user can change between check and use.
        content, copy = file.read_bytes(), Path(scratch) / "packages.lock"  # noqa: ASYNC240 - once
        if hashlib.sha256(content).hexdigest() != lock:
            raise SandboxError(f"Reading {file}", "it was changed a moment ago", "Run it again.")
        copy.write_bytes(content)
        await packages.install(installed, copy, facts["series"], pythons=[python])
        installed.mkdir(exist_ok=True)
        shutil.rmtree(installed / "bin", ignore_errors=True)
        tell("Copying the shared libraries they need")
        # The originals too: a copy does not find what its original finds beside itself.
        await packages.copy_libraries(root, [str(python), *facts["modules"]])
        tell("Compiling")
        await _compile(python, [library, installed])
        # Nothing is set-user-id, and the sandbox's user can read what was installed for its owner alone.
        for path in root.rglob("*"):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0o644)
        version, digest = facts["version"], _tree_digest(root)
        manifest = _Manifest(
            format=_FORMAT, lock=lock, python=f"/usr/bin/{inside.name}", version=version, digest=digest
        )
        (building / "manifest.json").write_text(manifest.model_dump_json())
        target = place(data, lock)
        if target.exists():
            target.rename(Path(scratch) / "old")
        building.rename(target)


_FACTS = """
import glob, json, os, platform, sys, sysconfig
stdlib, dynload = sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib") + "/lib-dynload"
print(json.dumps({
    "version": platform.python_version(),
    "series": "%d.%d" % sys.version_info[:2],
    "stdlib": stdlib,
    "library": os.path.relpath(stdlib, sys.base_prefix),
    "dynload": dynload,
    "modules": glob.glob(dynload + "/*.so"),
}))
"""


async def _build_guest(data: Path, manifest: _Manifest, tell: Callable[[str], None]) -> None:
    target = _guest(data, manifest)
    tell("Installing the guest")
    with tempfile.TemporaryDirectory(dir=data, prefix=".building-") as scratch:
        building = Path(scratch) / "guest"
        building.mkdir()
        guest_tree.write(building)
        # Not the manifest's: a file among data must not choose which host program runs.
        await _compile(base_python(), [building])
        try:
            building.rename(target)
        except OSError:
            if not target.is_dir():  # another server was faster
                raise


async def _compile(python: Path, directories: Iterable[Path]) -> None:
    # unchecked-hash: in a read-only tree no compiled file is ever stale. Packages' own tests are a third of all.
    await output(
        [str(python), "-I", "-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash",
         "-x", f"{PACKAGES}/.+/tests/", *(str(directory) for directory in directories)], check=False
    )  # fmt: skip


def _tree_digest(root: Path) -> str:
    """Return a digest over every path, mode, link target and content, in order."""
    whole = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            content = str(path.readlink()).encode()
        elif path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        else:
            content = b""
        whole.update(f"{name}\0{stat.S_IMODE(path.lstat().st_mode):o}\0".encode("utf-8", "surrogateescape") + content)
    return "sha256:" + whole.hexdigest()
