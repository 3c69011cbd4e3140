"""The environments of one server: each tool's, all that exist, their sizes, and their removal."""

import secrets
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.model import Profile
from glovebox_sandboxes.contract.errors import MisnamedError
from glovebox_sandboxes.contract.spec import DEFAULT, PACKAGES
from glovebox_sandboxes.runtime import environments, guest_gc, runtime
from glovebox_sandboxes.runtime.environments import Environment, RuntimeRecord
from glovebox_server.settings import Settings
from glovebox_server.tools import TOOLS
from glovebox_server.upkeep.clean import size_of
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


_WHY = "a file there is for tools to read, and a program there would have the server's rights from whoever changes it"


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
