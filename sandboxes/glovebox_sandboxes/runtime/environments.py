"""Named sets of Python packages for sandboxes: a short TOML file lists them, and the lock beside it pins exact files.

Some are shipped; an operator's file replaces the shipped one of the same name, except the default. Built ones are
recorded in the data directory by name, so that servers need not know where the files are.
"""

import hashlib
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from glovebox_sandboxes.contract.base import DEFAULT
from glovebox_sandboxes.contract.errors import MisnamedError, UnsupportedSpecError
from glovebox_sandboxes.host import permissions
from glovebox_sandboxes.host.identity import changes_user
from glovebox_sandboxes.plural import printable

SHIPPED = Path(__file__).parent / "environments"
"""The environments in Glovebox, with their locks."""
MAX_FILE = 512 * 1024
"""Bytes of a file or lock: ten times those of the largest shipped one."""
MAX_ELSEWHERE = 400
"""Modules with a hint about their environment: they are part of every sandbox's command line, of 128 KiB at most."""
MAX_RECORD = 64 * 1024
"""Bytes of the record of a built one."""

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,31}")
_NAMES = f"a letter and at most 31 more of a-z, 0-9, - and _, such as science, and not {DEFAULT}"
# PEP 508 without URLs, paths and markers: only an index or a directory of wheels that pip knows is ever asked.
_BOUND = r"(?:===?|!=|~=|<=?|>=?) ?[A-Za-z0-9.*+!_-]+"
_Requirement = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?:\[[A-Za-z0-9._,-]+\])?"
        rf"(?: ?{_BOUND}(?:, ?{_BOUND})*)?$",
        max_length=200,
    ),
]
_Module = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*$", max_length=100)]
_Series = Annotated[str, Field(pattern=r"^3\.[0-9]{1,2}$")]
# A lock has nothing else: no option of pip's, no address, no other file.
_LINE = re.compile(
    r"#.*|[A-Za-z0-9._-]+==[A-Za-z0-9.!+_-]+(?: \\| --hash=sha256:[0-9a-f]{64})?| *--hash=sha256:[0-9a-f]{64}(?: \\)?|"
)
_FITS = re.compile(r"^# Fits (sha256:[0-9a-f]{64})$", re.MULTILINE)


class _EnvironmentFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    description: str = Field(default="", max_length=200)
    packages: tuple[_Requirement, ...] = Field(strict=False, min_length=1, max_length=200)
    """Requirements, each a name with bounds for its version."""
    modules: tuple[_Module, ...] = Field(default=(), strict=False, max_length=200)
    """Its modules that programs import, which models are shown."""
    python: tuple[_Series, ...] = Field(default=(), strict=False, max_length=8)
    """Series of Python it is locked for, as in ``3.12``; empty for this host's."""
    machines: tuple[Literal["x86_64", "aarch64"], ...] = Field(default=(), strict=False)
    """The same of processors."""

    _is_printable = field_validator("description")(printable)


class Environment(_EnvironmentFile):
    """One named set of packages."""

    name: str
    path: Path

    @property
    def shipped(self) -> bool:
        """Return whether it comes with Glovebox."""
        return self.path.parent == SHIPPED

    @property
    def lock(self) -> Path:
        """Return the path of its lock, which need not exist."""
        return self.path.with_suffix(".lock")

    @cached_property
    def fits(self) -> str:
        """Return ``sha256:…`` over the inputs of a lock: it carries the same, or was made for something else."""
        asked = json.dumps([sorted(self.packages), sorted(self.python), sorted(self.machines)])
        return "sha256:" + hashlib.sha256(asked.encode()).hexdigest()

    def locked(self) -> str:
        """Return the digest of its lock, which names every file by hash and fits the current file.

        Raises MisnamedError: it is missing, has anything except packages, or was made for another file.
        """
        update = f"Run `glovebox environment update {self.name}`."
        if not self.lock.exists():
            raise MisnamedError(f"The environment {self.name}", f"{self.lock} is not there", update)
        data = _read(self.lock)
        lines = data.decode("utf-8", "replace").splitlines()
        wrong = next((number for number, line in enumerate(lines, 1) if not _LINE.fullmatch(line)), 0)
        if wrong:
            raise MisnamedError(f"{self.lock}:{wrong}", "it is neither a package with its hashes nor a note", update)
        fits = _FITS.search(data.decode("utf-8", "replace"))
        if fits is None or fits[1] != self.fits:
            raise MisnamedError(f"{self.lock}", f"it was made before {self.path.name} became what it is", update)
        return hashlib.sha256(data).hexdigest()


class RuntimeRecord(BaseModel):
    """The runtime that is built under a name."""

    model_config = ConfigDict(frozen=True)

    lock: str
    """Digest of the lock it was built from."""
    modules: tuple[str, ...]


def named(directory: Path) -> list[str]:
    """Return the names of all environments, shipped or in an operator's directory."""
    found = {path.stem for place in (SHIPPED, directory) for path in place.glob("*.toml")}
    return sorted(name for name in found if _NAME.fullmatch(name))


def load(name: str, directory: Path) -> Environment:
    """Return the environment of that name, the operator's before the shipped one.

    Raises MisnamedError: it is missing, or its file is unsafe, unreadable or wrong.
    """
    if not _NAME.fullmatch(name):
        raise MisnamedError(f"The environment {name!r}", "that is no name for one", f"Use {_NAMES}.")
    own = directory / f"{name}.toml"
    if name == DEFAULT and directory != SHIPPED and os.path.lexists(own):
        raise MisnamedError(str(own), f"{DEFAULT} is the shipped environment's name", "Give yours another.")
    path = own if os.path.lexists(own) else SHIPPED / own.name
    if not path.exists() and not path.is_symlink():
        fix = (
            f"There are: {', '.join(named(directory))}. Or write {own}, and run `glovebox setup --environment {name}`."
        )
        raise MisnamedError(f"The environment {name}", "there is none of that name", fix)
    try:
        said = _EnvironmentFile.model_validate(tomllib.loads(_read(path).decode()))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise MisnamedError(f"{path}: {key}", first["msg"], "See docs/operate/install.md.") from None
    except ValueError as error:  # neither TOML nor UTF-8
        raise MisnamedError(str(path), f"not TOML: {error}", "See https://toml.io/en/v1.0.0.") from None
    modules = said.modules or tuple(_imported(package) for package in said.packages)
    return Environment(**{**dict(said), "modules": modules, "name": name, "path": path})


def _imported(package: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", package, maxsplit=1)[0].replace("-", "_").lower()


def _read(path: Path) -> bytes:
    """Read a file that only this user, root or the owner of the package can have written."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            status = os.fstat(handle)
            _require_own(path, permissions.flaw(handle))
            _require_own(path.parent, permissions.flaw(path.parent))
            above = permissions.flaw_above(path.parent) if changes_user() else None
            if above is not None:
                _require_own(above[0], above[1:])
            data = file.read(MAX_FILE + 1) if stat.S_ISREG(status.st_mode) else b"\0" * (MAX_FILE + 1)
    except OSError as error:
        reason = "it is a symbolic link" if path.is_symlink() else f"it cannot be read: {error.strerror}"
        raise MisnamedError(str(path), reason, "Put the file itself there, readable.") from None
    if len(data) > MAX_FILE:
        reason = f"it is no regular file of at most {MAX_FILE // 1024} KiB"
        raise MisnamedError(str(path), reason, "It is a page of text.")
    return data


def _require_own(path: Path, flaw: tuple[str, str] | None) -> None:
    if flaw is not None:
        problem, command = flaw
        fix = f"Who can change it decides what programs import. Review what it holds, then: {command} {path}"
        raise MisnamedError(str(path), f"it {problem}", fix)


def _records(data: Path) -> Path:
    return data / "environments"


def record(data: Path, environment: Environment, lock: str) -> None:
    """Record in the data directory that this is built, from the lock with that digest."""
    _records(data).mkdir(exist_ok=True)
    path = _records(data) / f"{environment.name}.json"
    new = path.with_suffix(".new")
    new.write_text(RuntimeRecord(lock=lock, modules=environment.modules).model_dump_json())
    new.replace(path)


def recorded(data: Path) -> Mapping[str, RuntimeRecord]:
    """Return the built environments of a data directory except the default, by name."""
    found = {}
    for path in sorted(_records(data).glob("*.json")):
        with suppress(OSError, ValueError), path.open("rb") as file:
            if _NAME.fullmatch(path.stem) and path.stem != DEFAULT:
                found[path.stem] = RuntimeRecord.model_validate_json(file.read(MAX_RECORD))
    return found


def _shipped_modules(name: str) -> Iterator[str]:
    """Yield the modules of a shipped environment, and those of its packages' dependencies."""
    environment = load(name, SHIPPED)
    yield from map(_imported, re.findall(r"^[^#\s]+==", environment.lock.read_text(), re.MULTILINE))
    yield from environment.modules


def forget(data: Path, name: str) -> bool:
    """Undo ``record``; return whether there was one."""
    path = _records(data) / f"{name}.json"
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


def not_built(name: str, *, docker: bool = False) -> UnsupportedSpecError:
    """Return a driver's error for a missing environment."""
    setup = "glovebox setup --docker" if docker else "glovebox setup"
    fix = f"Run `{setup} --environment {name}`, and start the server again."
    return UnsupportedSpecError("python.environment", f"the environment {name} is not built here", fix)


def elsewhere(data: Path) -> Mapping[str, str]:
    """Return an environment for each module, as a hint if it is missing in another: the default, else a built one."""
    has: dict[str, str] = {}
    for name in named(SHIPPED):
        if name != DEFAULT:
            has |= dict.fromkeys(_shipped_modules(name), name)
    for name, each in recorded(data).items():
        has |= dict.fromkeys(each.modules, name)
    has |= dict.fromkeys(_shipped_modules(DEFAULT), DEFAULT)
    return {module.partition(".")[0]: name for module, name in sorted(has.items())[:MAX_ELSEWHERE]}
