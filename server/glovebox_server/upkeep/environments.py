"""The environments of one server: each tool's, all that exist, their sizes, and their removal."""

import secrets
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

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


def of_profile(settings: Settings, profile: Profile) -> Environment:
    """Return the environment that a profile names, locked and built as its file and lock say.

    Raises MisnamedError, with the command, if it does not exist or is not built so.
    """
    found = environments.load(profile.python.environment, settings.environments_dir)
    if found.name == DEFAULT:
        return found  # calls report that it is not built; other drivers may do without
    record = environments.recorded(settings.data_dir).get(found.name)
    setup = f"Run `glovebox setup --environment {found.name}`."
    if record is None:
        raise MisnamedError(f"The environment {found.name}", "it is not built here", setup)
    if record.lock != found.locked():
        raise MisnamedError(f"The environment {found.name}", "it was built from another lock", setup)
    if not runtime.is_built(settings.data_dir, record.lock):
        raise MisnamedError(f"The environment {found.name}", "its last build failed or was removed", setup)
    return found


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
    try:
        return of_profile(settings, profile)
    except MisnamedError as problem:
        setup = f"`glovebox setup --environment {profile.python.environment}`"
        fix = problem.fix if "glovebox " in problem.fix else f"{problem.fix} Then run {setup}."
        reason = f'is "{profile.python.environment}": {problem.reason}'
        raise ProfileError(path, None, "python.environment", reason, fix) from None


def listed(settings: Settings, profiles: Mapping[str, Profile]) -> list[Listed]:
    """Return all environments, including those that are built but whose file is gone."""
    own, data = settings.environments_dir, settings.data_dir.resolve()
    names = {*environments.named(own), *environments.recorded(data)}
    return [_listed(name, own, data, profiles) for name in sorted(names)]


def _listed(name: str, own: Path, data: Path, profiles: Mapping[str, Profile]) -> Listed:
    built = runtime.find(data, name)
    record = environments.recorded(data).get(name)
    source, state = "", "built" if built else "not built"
    packages: tuple[str, ...] = ()
    modules = record.modules if record else ()
    try:
        found = environments.load(name, own)
        source, packages, modules = "shipped" if found.shipped else str(found.path), found.packages, found.modules
        if found.lock.exists():
            lock = found.locked()
            if record is not None and record.lock != lock:
                state = f"built from another lock: run `glovebox setup --environment {name}`"
    except MisnamedError as problem:
        state = f"{problem.reason}: {problem.fix}"
        if name not in environments.named(own):
            state = f"its file is gone: run `glovebox environment remove {name}`"
    return Listed(
        name=name,
        source=source,
        packages=packages,
        modules=modules,
        state=state,
        digest=built.digest if built else "",
        bytes=size_of(built.root.parent) if built else 0,
        tools=_tools(name, profiles),
    )


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
