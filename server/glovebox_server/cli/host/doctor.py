"""``glovebox doctor``: what this host can enforce, what is missing, whether the profiles load. Changes nothing.

The checks are each driver's; here are words and an exit code.
"""

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
import click
from rich.text import Text

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED
from glovebox_sandboxes.contract.base import Capabilities, mechanisms
from glovebox_sandboxes.contract.errors import MisnamedError
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.host import surroundings
from glovebox_server import app as apps
from glovebox_server import workspace
from glovebox_server.app import VERSION, load_profiles
from glovebox_server.calls import Principal
from glovebox_server.cli import state
from glovebox_server.cli.options import command, emit, out
from glovebox_server.cli.terminal import Shown, table_of
from glovebox_server.exits import OK, UNAVAILABLE, USAGE
from glovebox_server.secret_files import SecretFileError
from glovebox_server.settings import Settings
from glovebox_server.startup import governed, policy_file
from glovebox_server.tools import TOOLS
from glovebox_server.upkeep import environments
from glovebox_server.upkeep.environments import require_apart, required
from glovebox_server.upkeep.readiness import Readiness, can_write, is_built
from glovebox_server.workspace import Workspace

if TYPE_CHECKING:
    from glovebox_server.mcp.catalogue import Manifest

T = TypeVar("T")
_COLOURS = {
    "fine": "green", "yes": "green", "usable": "green", "none": "yellow", "closed": "yellow",
    "wrong": "red", "no": "red", "not usable": "red",
}  # fmt: skip


@command("doctor", opens="settings")
@click.option("--prove", is_flag=True, help="Attack the sandboxes of this host and say what held: 0 all, 1 not all.")
@click.option("--driver", "names", multiple=True, type=click.Choice(registry.NAMES), help="Prove this one; else all.")
def doctor(settings: Settings, prove: bool, names: tuple[str, ...]) -> int:
    """Show what this host can enforce, and what fixes the rest."""
    if not prove:
        if names:
            raise click.UsageError("--driver says what to prove; add --prove.")
        return anyio.run(_diagnose, state.locate(settings))
    scorecard = importlib.import_module("glovebox_server.cli.host.scorecard")  # imports the cases
    code: int = anyio.run(lambda: scorecard.run(settings, names=names))
    return code


async def _diagnose(settings: Settings) -> int:
    """Check and print.

    Returns ``USAGE`` if a profile or the workspace is invalid, because then nothing starts; else ``UNAVAILABLE`` if no
    driver is usable or the audit log cannot be written; else ``OK``.
    """
    unusable = _unusable_log(settings.state_dir)  # first, for it may fork, which no thread survives
    async with registry.opened(settings.data_dir, f"doctor{os.getpid()}") as available:
        found = [(await available.get(name)).capabilities for name in registry.NAMES]
    served, refused = _tried(lambda: workspace.find(settings, "cli"), Workspace(path=None))
    loaded, problem = _tried(lambda: _profiles(settings, served), "")
    file, objection = policy_file(settings), None
    if file is not None and not problem:
        find = partial(governed, settings, apps.load_profiles(settings), Workspace(path=None), TOOLS)
        _, objection = _tried(find, None)
    ready = Readiness(runtime=is_built(settings.data_dir), log=not unusable, policy=objection is None)
    used = [each.driver for each in found if each.usable]
    advice = None
    if used and not ready.runtime:  # where none is usable, each says what it lacks
        advice = f"`glovebox setup` was not run here, so calls can only use {', '.join(used)}. Run it for the others."
    body = {
        "host": surroundings.facts(),
        "drivers": [{**asdict(each), "limits": dict(each.limits), "usable": each.usable} for each in found],
        "profiles": {"error": problem},
        "policy": {"error": objection, "path": file and str(file)},
        "ready": {"ready": ready.ready, **asdict(ready)},
        "workspace": {
            "error": refused,
            "path": served.path and str(served.path),
            "reason": served.reason,
            "closed": served.closed,
        },
        "advice": advice,
    }
    if not emit(body):
        _show_host(found)
        _block("profiles", "wrong" if problem else "fine", ("problem" if problem else "loaded", problem or loaded))
        if file is not None and not problem:
            told = ("problem", objection) if objection else ("loaded", str(file))
            _block("policy", "wrong" if objection else "fine", told)
        word = "wrong" if refused else "none" if not served.path else "closed" if served.closed else "fine"
        _block("workspace", word, ("problem" if word in ("wrong", "closed") else "served", refused or str(served)))
        lacks = {
            "the runtime, which `glovebox setup` builds": ready.runtime,
            unusable: ready.log,
            "a valid policy": ready.policy,
        }
        _block(
            "ready", "yes" if ready.ready else "no", *(("missing", what) for what, there in lacks.items() if not there)
        )
        if advice:
            out.print(f"\n{advice}")
    if problem or objection or refused:
        return USAGE
    return OK if ready.log and used else UNAVAILABLE


def _tried(find: Callable[[], T], instead: T) -> tuple[T, str | None]:
    """Return what is found, and None; else ``instead``, and what is wrong."""
    try:
        return find(), None
    except (ProfileError, MisnamedError) as problem:
        return instead, str(problem)


def _profiles(settings: Settings, served: Workspace) -> str:
    """Load the profiles, and name them."""
    found = apps.load_profiles(settings)
    required(settings, found)
    sources = [(found.source(tool), profile) for tool, profile in found.items()]
    require_apart(sources, [] if served.path is None else [served.path])
    own = [tool for tool, _ in found.items() if found.source(tool).parent != SHIPPED]
    shipped = [tool for tool, _ in found.items() if tool not in own]
    parts = [f"{', '.join(tools)} ({whose})" for tools, whose in ((shipped, "shipped"), (own, "yours")) if tools]
    return "; ".join(parts)


def _unusable_log(directory: Path) -> str:
    """Return why a server could not write its log, or make one before its first start; empty if it could."""

    def can_make() -> bool:
        place = directory.absolute() / "audit"
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        return can_write(place)

    try:
        return (
            "" if state.run_as_owner(directory, can_make) else f"an audit log that can be written: look at {directory}"
        )
    except SecretFileError as problem:
        return f"an audit log that can be written: {problem}"


def _show_host(found: Sequence[Capabilities]) -> None:
    """Print this host's facts, and the drivers' findings, which follow from them."""
    facts = surroundings.facts()
    rows = {
        "as": "root" if facts["root"] else "a normal user",
        "inside": ", ".join(facts["inside"]) or "no container or sandbox, as far as can be seen",
        "groups": f"control groups {facts['control_groups']}",
    }
    _block("here", f"{facts['system'] or 'Linux'}, kernel {facts['kernel']}", *rows.items())
    for each in found:
        told = [("level", each.level), ("version", each.version)]
        if each.usable:
            told.append(("limits by", mechanisms({name: by for name, by in each.limits.items() if by != "none"})))
        for missing in each.missing:
            told += [("missing", missing.what), ("", f"→ {missing.fix}")]
        out.print()
        _block(each.driver, "usable" if each.usable else "not usable", *told)
    out.print()


def _block(title: str, verdict: str, *rows: tuple[str, str]) -> None:
    out.print(Text.assemble((title, "bold"), ": ", (verdict, _COLOURS.get(verdict, "default"))))
    for label, words in rows:
        if words:
            out.print(f"  {label:<10}{words}")


@command("capabilities", opens="settings")
def capabilities(settings: Settings) -> None:
    """Show what can be used here, before any call.

    Drivers, limits, network modes, tools, digests, and what is refused.
    """
    found = anyio.run(_find, settings)
    emit(found, *_told(found))


async def _find(settings: Settings) -> "Manifest":
    catalogue = importlib.import_module("glovebox_server.mcp.catalogue")  # imports the SDK
    profiles = load_profiles(settings)
    roles = governed(settings, profiles, workspace.find(settings, "cli"), TOOLS)
    async with registry.opened(settings.data_dir, f"capabilities{os.getpid()}") as available:
        found: Manifest = await catalogue.build_manifest(
            tools=TOOLS,
            rights=roles.rights_of(Principal(id=f"local:{os.getuid()}", transport="cli")),
            environments=environments.required(settings, profiles),
            drivers=available,
            version=VERSION,
        )
    return found


def _told(found: "Manifest") -> Iterator[Shown | None]:
    yield f"Glovebox {found['glovebox']}, tools {found['tools_digest']}, profiles {found['profiles_digest']}"
    if found["policy_digest"]:
        yield f"role {found['role'] or 'none'}, policy {found['policy_digest']}"
    drivers = [
        (
            each["name"],
            each["level"],
            ("experimental" if each["experimental"] else "yes") if each["usable"] else "no",
            each["version"],
            mechanisms(each["limits"]),
        )
        for each in found["drivers"]
    ]
    tools = [
        (
            *(each[name] or "none" for name in ("name", "driver", "network", "workspace")),
            each["output"],
            each["inputs"],
            each["refused"],
        )
        for each in found["tools"]
    ]
    yield ""
    yield table_of(["driver", "level", "usable", "version", "limits by"], drivers)
    yield ""
    titles = ["tool", "driver", "network", "workspace", "files out", "files in", "why it does not run here"]
    yield table_of(titles, tools)
    if found["workspace"]["refused"]:
        yield f"\n{found['workspace']['refused']}"
    yield Text("\nunsupported or experimental in a profile", style="bold")
    for feature in found["features"]:
        told = f'{feature["key"]} = "{feature["value"]}": {feature["status"]}'
        yield f"{told}: {feature['reason']}. {feature['instead']}"
