"""Keeps environments, and removes expired and unused files, none of them in use.

Environments are each tool's, all that exist, their sizes, and their removal. Of the state and data directories, each
kind of what can go is found with the locks that its owner takes: a search changes nothing. Leftovers of sandboxes are
not here: a killed server's janitor has removed them.
"""

import contextlib
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from glovebox_audit import writers
from glovebox_audit.file import LogFile
from glovebox_audit.place import is_held
from glovebox_audit.segments import files, rotation
from glovebox_audit.segments.rotation import Retention
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.model import Profile
from glovebox_sandboxes.contract.base import DEFAULT, PACKAGES
from glovebox_sandboxes.contract.errors import MisnamedError
from glovebox_sandboxes.runtime import environments, guest_gc, runtime
from glovebox_sandboxes.runtime.environments import Environment, RuntimeRecord
from glovebox_server.artifacts import record as artifact_record
from glovebox_server.artifacts.record import Disk
from glovebox_server.settings import Settings
from glovebox_server.tools import TOOLS
from glovebox_server.workspace import find, place


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """An environment, as ``glovebox environment list`` has it."""

    name: str
    source: str
    """``shipped``, or the operator's file."""
    packages: tuple[str, ...]
    modules: tuple[str, ...]
    state: str
    """``built``; ``not built``; or what is wrong, and its fix."""
    digest: str
    bytes: int
    tools: tuple[str, ...]


def required(settings: Settings, profiles: ProfileSet) -> Mapping[str, Environment]:
    """Return each tool's environment, by its name. Raises ProfileError if one does not exist or is not built."""
    found: dict[str, Environment] = {}
    for tool, profile in profiles.items():
        if profile.python.environment not in found:
            found[profile.python.environment] = _required(settings, profile, profiles.source(tool))
    return {tool: found[profile.python.environment] for tool, profile in profiles.items()}


def objections(settings: Settings, profiles: Iterable[tuple[Path, Profile]]) -> list[ProfileError]:
    """Return what is wrong with the environments that these profiles name."""
    found = []
    try:
        served = find(settings, "cli").path
    except MisnamedError:
        served = None  # nothing starts with it; `glovebox doctor` reports it
    for path, profile in profiles:
        try:
            _required(settings, profile, path)
            _require_preload(settings, profile, path)
            require_apart([(path, profile)], [served] if served else ())
        except ProfileError as problem:
            found.append(problem)
    return found


def _require_preload(settings: Settings, profile: Profile, path: Path) -> None:
    """Check from files, if the environment is built: the server's start tries whether they can be imported."""
    built = runtime.find(settings.data_dir, profile.python.environment)
    if built is None:
        return
    tops = {each.name.partition(".")[0] for each in (built.root / PACKAGES.lstrip("/")).iterdir()}
    tops |= sys.stdlib_module_names
    lacks = [module for module in profile.python.preload if module.partition(".")[0] not in tops]
    if lacks:
        reason = f"names {', '.join(lacks)}, which the environment {profile.python.environment} does not have"
        raise ProfileError(path, None, "python.preload", reason, "Name modules that it has, or leave the key out.")


def _required(settings: Settings, profile: Profile, path: Path) -> Environment:
    """Return the environment that a profile names, locked and built as its file and lock say.

    Raises ProfileError, with the command, if it does not exist or is not built so.
    """
    name = profile.python.environment
    setup = f"`glovebox setup --environment {name}`"
    try:
        found = environments.load(name, settings.environments_dir)
        record = environments.recorded(settings.data_dir).get(name)
        if name == DEFAULT:
            return found  # calls report that it is not built; other drivers may do without
        if record is None:
            reason = "it is not built here"
        elif record.lock != found.locked():
            reason = "it was built from another lock"
        elif not runtime.is_built(settings.data_dir, record.lock):
            reason = "its last build failed or was removed"
        else:
            return found
        fix = f"Run {setup}."
    except MisnamedError as problem:
        reason, fix = problem.reason, problem.fix
        if "glovebox " not in fix:
            fix = f"{fix} Then run {setup}."
    raise ProfileError(path, None, "python.environment", f'is "{name}": {reason}', fix)


def listed(settings: Settings, profiles: Mapping[str, Profile]) -> list[Listed]:
    """Return all environments, including those that are built but whose file is gone."""
    own, data = settings.environments_dir, settings.data_dir.resolve()
    files, records = environments.named(own), environments.recorded(data)
    found = []
    for name in sorted({*files, *records}):
        built, record = runtime.find(data, name), records.get(name)
        state = "built" if built else "not built"
        about: dict[str, Any] = {"source": "", "packages": (), "modules": record.modules if record else ()}
        try:
            file = environments.load(name, own)
            source = "shipped" if file.shipped else str(file.path)
            about = {"source": source, "packages": file.packages, "modules": file.modules}
            lock = file.locked() if file.lock.exists() else None
            if record is not None and lock not in {None, record.lock}:
                state = f"built from another lock: run `glovebox setup --environment {name}`"
        except MisnamedError as problem:
            state = f"{problem.reason}: {problem.fix}"
            if name not in files:
                state = f"its file is gone: run `glovebox environment remove {name}`"
        about |= {"digest": built.digest if built else "", "bytes": size_of(built.root.parent) if built else 0}
        found.append(Listed(name=name, state=state, tools=_tools(name, profiles), **about))
    return found


def _tools(name: str, profiles: Mapping[str, Profile]) -> tuple[str, ...]:
    return tuple(
        tool
        for tool, profile in profiles.items()
        if profile.python.environment == name and (name != DEFAULT or TOOLS[tool].imports)
    )


def removable(settings: Settings, profiles: Mapping[str, Profile], name: str, *, force: bool) -> RuntimeRecord:
    """Return the record of a built environment that may be removed.

    Raises MisnamedError if it is not built, it is the default, or a profile names it without ``force``.
    """
    what = f"Removing the environment {name}"
    if name == DEFAULT:
        raise MisnamedError(what, "every server needs it", "Leave it.")
    record = environments.recorded(settings.data_dir).get(name)
    if record is None:
        raise MisnamedError(what, "it is not built here", "See `glovebox environment list`.")
    if (tools := _tools(name, profiles)) and not force:
        fix = "Change that, or add --force: then no server starts with it."
        raise MisnamedError(what, f"the profile of {', '.join(tools)} names it", fix)
    return record


def remove(settings: Settings, name: str, record: RuntimeRecord) -> int:
    """Remove what is built of an environment; return the freed bytes. Its file and lock stay.

    A running server continues to use it; `glovebox clean` removes it once that has ended. ``record`` is of
    ``removable``.
    """
    data = settings.data_dir.resolve()
    environments.forget(data, name)
    place = runtime.place(data, record.lock)
    if place in {each.root.parent for each in runtime.every(data).values()} or not guest_gc.unused(place):
        return 0
    going = data / f".building-{secrets.token_hex(8)}"
    bytes_freed = size_of(place)
    place.rename(going)
    shutil.rmtree(going)
    return bytes_freed


_WHY = "tools may read a file there, and a program there runs with the server's rights for anyone who can change it"


def require_apart(profiles: Iterable[tuple[Path, Profile]], workspaces: Iterable[Path]) -> None:
    """Refuse a key whose file, or the program that prints it, lies in a workspace. The error names host directories."""
    served = [place(each) for each in dict.fromkeys(workspaces)]
    for path, profile in profiles:
        for each in profile.network.credential:
            for file in _files(each.source):
                # Both its target and its own place: a link in a workspace can be changed to lead elsewhere.
                lies = place(file), place(file.parent)
                where = next((one.path for one in served if any(one.way_to(there) is not None for there in lies)), None)
                if where is not None:
                    reason = f'"{each.name}" comes from {file}, which lies in the workspace, {where}: {_WHY}'
                    fix = "Move it out of there, and name its new path in source."
                    raise ProfileError(path, None, "network.credential", reason, fix)


def _files(source: str) -> list[Path]:
    """Return the files that a source names; of a command line each absolute path."""
    kind, _, where = source.partition(":")
    if kind == "exec":
        return [Path(part) for part in shlex.split(where) if part.startswith("/")]
    return [Path(where)] if kind == "file" else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A file or directory that can go."""

    kind: str
    """``artifact``, ``upload``, ``server``, ``segment``, ``guest`` or ``runtime``."""
    name: str
    bytes: int
    why: str


def look(settings: Settings, retention: Retention) -> list[Item]:
    """Return everything that can go now, by kind and name; changes nothing. Raises OSError."""
    state, data = settings.state_dir, settings.data_dir
    items = [*_artifacts(state / "artifacts"), *_servers(state / "audit"), *_segments(state / "audit", retention)]
    if current := _current(data):
        why = "of another version, and not in use"
        for path in guest_gc.removable(data, current):
            kind = "runtime" if path.name.startswith("runtime") else "guest"
            items.append(Item(kind=kind, name=path.name, bytes=size_of(path), why=why))
    return items


def _current(data: Path) -> list[Path]:
    """Return the directories of the runtimes; none if nothing says which guest is this version's."""
    found = runtime.every(data)
    return [path for each in found.values() for path in each.directories] if DEFAULT in found else []


def clean(settings: Settings, retention: Retention, open_log: Callable[[], LogFile]) -> list[Item]:
    """Remove what ``look`` finds, and return what is gone of it. ``open_log`` is called only if needed.

    Raises ArtifactStoreError or AuditError if a directory cannot be changed; earlier removals stay.
    """
    before = look(settings, retention)
    kinds = {item.kind for item in before}
    if kinds & {"artifact", "upload"}:
        disk = Disk(settings.state_dir / "artifacts", max_bytes_total=0, parts=1)
        try:
            disk.start(datetime.now(UTC))  # a store that opens removes what can go
        finally:
            disk.stop()
    if kinds & {"server", "segment"}:
        with contextlib.closing(open_log()) as log:  # so does a log
            log.retain()
    if current := _current(settings.data_dir):
        guest_gc.remove(settings.data_dir, current)
    left = {(item.kind, item.name) for item in look(settings, retention)}
    return [item for item in before if (item.kind, item.name) not in left]


def _artifacts(root: Path) -> Iterator[Item]:
    now = datetime.now(UTC)
    for folder in _folders(root / "items"):
        name, size = f"artifacts/items/{folder.name}", size_of(folder)
        try:
            kept = artifact_record.decode((folder / "record.json").read_bytes()[: 1 << 16])
            why = "expired" if artifact_record.expired(kept, now) else ""
        except (OSError, ValueError):
            why = "damaged"
        if why:
            yield Item(kind="artifact", name=name, bytes=size, why=why)
    for folder in _folders(root / "incoming"):
        if not _in_use(folder):
            yield Item(kind="upload", name=f"artifacts/incoming/{folder.name}", bytes=size_of(folder), why=_GONE)


_GONE = "its server is gone"


def _servers(audit: Path) -> Iterator[Item]:
    for path in sorted((audit / writers.DIRECTORY).glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            size = path.lstat().st_size
            if size and not _in_use(path):  # a server that starts is about to lock an empty one
                yield Item(kind="server", name=f"audit/{writers.DIRECTORY}/{path.name}", bytes=size, why=_GONE)


def _segments(audit: Path, retention: Retention) -> Iterator[Item]:
    current = 0
    with contextlib.suppress(FileNotFoundError):
        current = (audit / files.LOG_NAME).lstat().st_size
    for each, reason in rotation.removable(audit, retention, current=current):
        why = "older than is kept" if reason == "age" else "the log is larger than is kept"
        yield Item(kind="segment", name=f"audit/{files.name(each.number)}", bytes=each.size, why=why)


def _folders(place: Path) -> list[Path]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(path for path in place.iterdir() if path.is_dir() and not path.is_symlink())
    return []


def size_of(place: Path) -> int:
    """Return the bytes that go with it."""
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(folder) / name).lstat().st_size
    return total


def _in_use(place: Path) -> bool:
    """Return whether a living process holds its lock; True too if that cannot be known."""
    try:
        return is_held(place)
    except OSError:
        return True  # gone, nothing of ours, or on a file system without locks
