"""``glovebox doctor``: what this host can enforce, what is missing, whether the profiles load. Changes nothing.

The checks are each driver's; here are words and an exit code.
"""

import importlib
import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import anyio
import click
from rich.console import Console
from rich.text import Text

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED
from glovebox_sandboxes.contract.base import Capabilities, mechanisms
from glovebox_sandboxes.drivers import registry
from glovebox_sandboxes.host import surroundings
from glovebox_server import app as apps
from glovebox_server import workspace
from glovebox_server.cli import state
from glovebox_server.cli.options import command, emit, out
from glovebox_server.errors import MisnamedError
from glovebox_server.exits import OK, UNAVAILABLE, USAGE
from glovebox_server.secret_files import SecretFileError
from glovebox_server.settings import Settings
from glovebox_server.startup import governed, policy_file
from glovebox_server.tools import TOOLS
from glovebox_server.upkeep.environments import require_apart, required
from glovebox_server.upkeep.readiness import Readiness, can_write, is_built
from glovebox_server.workspace import Workspace

_WIDEST = 100
"""Columns; longer lines are hard to read, however wide the terminal."""
_LABEL = 12
"""Columns of a line's label, its indent included."""
_COMMAND = re.compile(r"`[^`]+`")
_JOINT = "\N{NO-BREAK SPACE}"
"""Replaces the spaces of a command while its sentence is laid out."""


@command("doctor", opens="settings")
@click.option("--prove", is_flag=True, help="Attack the sandboxes of this host and say what held: 0 all, 1 not all.")
@click.option(
    "--driver",
    "names",
    multiple=True,
    type=click.Choice(registry.NAMES),
    help="Prove this driver (may be repeated); else every usable one.",
)
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
    refused, served = _workspace(settings)
    problem, loaded = _profiles(settings, served)
    file = policy_file(settings)
    objection = None if problem or file is None else _policy(settings)
    ready = Readiness(runtime=is_built(settings.data_dir), log=not unusable, policy=objection is None)
    advice = _advice(found) if not ready.runtime else None
    reports = [{**asdict(driver), "limits": dict(driver.limits), "usable": driver.usable} for driver in found]
    path = str(served.path) if served.path else None
    body = {
        "host": surroundings.facts(),
        "drivers": reports,
        "profiles": {"error": problem},
        "policy": {"error": objection, "path": None if file is None else str(file)},
        "ready": {"ready": ready.ready, **asdict(ready)},
        "workspace": {"error": refused, "path": path, "reason": served.reason, "closed": served.closed},
        "advice": advice,
    }
    if not emit(body):
        width = max(1, min(out.width, _WIDEST)) if out.is_terminal else None
        _host(out, width)
        for driver in found:
            _block(out, driver, width)
        _verdict(out, "profiles", "wrong" if problem else "fine")
        _line(out, "problem" if problem else "loaded", problem or loaded, width)
        if file is not None and not problem:
            _verdict(out, "policy", "wrong" if objection else "fine")
            _line(out, "problem" if objection else "loaded", objection or str(file), width)
        _show_workspace(refused, served, width)
        _show_readiness(ready, unusable, advice, width)
    if problem or objection or refused:
        return USAGE
    return OK if ready.log and any(driver.usable for driver in found) else UNAVAILABLE


def _show_workspace(refused: str | None, served: Workspace, width: int | None) -> None:
    word = "wrong" if refused else "none" if not served.path else "closed" if served.closed else "fine"
    _verdict(out, "workspace", word)
    label = "problem" if refused or served.closed else "served" if served.path else ""
    _line(out, label, refused or str(served), width)


def _show_readiness(ready: Readiness, unusable: str, advice: str | None, width: int | None) -> None:
    _verdict(out, "ready", "yes" if ready.ready else "no")
    lacks = {
        "the runtime, which `glovebox setup` builds": ready.runtime,
        unusable: ready.log,
        "a valid policy": ready.policy,
    }
    for what in (words for words, there in lacks.items() if not there):
        _line(out, "missing", what, width)
    if advice:
        out.print()
        for line in _laid_out(advice, width, ""):
            out.print(line)


def _verdict(out: Console, what: str, word: str) -> None:
    colour = {"fine": "green", "yes": "green", "none": "yellow", "closed": "yellow"}.get(word, "red")
    out.print(Text.assemble((what, "bold"), ": ", (word, colour)))


def _workspace(settings: Settings) -> tuple[str | None, Workspace]:
    """Return why the named workspace is refused, None if it is not; and the workspace in use."""
    try:
        return None, workspace.find(settings, "cli")
    except MisnamedError as problem:
        return str(problem), Workspace(path=None)


def _profiles(settings: Settings, served: Workspace) -> tuple[str | None, str]:
    """Return what is wrong with a profile, None for nothing; and the profiles."""
    try:
        found = apps.load_profiles(settings)
        required(settings, found)
        sources = [(found.source(tool), profile) for tool, profile in found.items()]
        require_apart(sources, [] if served.path is None else [served.path])
    except ProfileError as problem:
        return str(problem), ""
    own = [tool for tool, _ in found.items() if found.source(tool).parent != SHIPPED]
    shipped = [tool for tool, _ in found.items() if tool not in own]
    parts = [f"{', '.join(tools)} ({whose})" for tools, whose in ((shipped, "shipped"), (own, "yours")) if tools]
    return None, "; ".join(parts)


def _policy(settings: Settings) -> str | None:
    try:
        governed(settings, apps.load_profiles(settings), Workspace(path=None), TOOLS)
    except (ProfileError, MisnamedError) as problem:
        return str(problem)
    return None


def _unusable_log(directory: Path) -> str:
    """Return why a server could not write its log, or make one before its first start; empty if it could."""
    place = directory.absolute() / "audit"
    try:
        if state.run_as_owner(directory, partial(_can_make, place)):
            return ""
    except SecretFileError as problem:
        return f"an audit log that can be written: {problem}"
    return f"an audit log that can be written: look at {directory}"


def _can_make(place: Path) -> bool:
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    return can_write(place)


def _advice(found: Sequence[Capabilities]) -> str | None:
    """Return the one thing to do before the first call, or an option a person may not know."""
    used = [each.driver for each in found if each.usable]
    if not used:
        return None  # each driver reports what it lacks
    return f"`glovebox setup` was not run here, so calls can only use {', '.join(used)}. Run it for the others."


def _host(out: Console, width: int | None) -> None:
    """Print this host's facts: the drivers' findings follow from them."""
    facts = surroundings.facts()
    out.print(Text.assemble(("here", "bold"), f": {facts['system'] or 'Linux'}, kernel {facts['kernel']}"))
    _line(out, "as", "root" if facts["root"] else "a normal user", width)
    _line(out, "inside", ", ".join(facts["inside"]) or "no container or sandbox, as far as can be seen", width)
    _line(out, "groups", f"control groups {facts['control_groups']}", width)
    out.print()


def _block(out: Console, found: Capabilities, width: int | None) -> None:
    usable = ("usable", "green") if found.usable else ("not usable", "red")
    out.print(Text.assemble((found.driver, "bold"), ": ", usable))
    _line(out, "level", found.level, width)
    if found.version:
        _line(out, "version", found.version, width)
    if found.usable:
        _line(out, "limits by", mechanisms({name: by for name, by in found.limits.items() if by != "none"}), width)
    for missing in found.missing:
        _line(out, "missing", missing.what, width)
        _line(out, "", f"→ {missing.fix}", width)
    out.print()


def _line(out: Console, label: str, words: str, width: int | None) -> None:
    lines = _laid_out(words, width and max(1, width - _LABEL), " " * _LABEL)
    out.print(f"  {label}".ljust(_LABEL) + next(lines, ""))
    for line in lines:
        out.print(line)


def _laid_out(words: str, width: int | None, indent: str) -> Iterator[str]:
    """Yield lines of ``width`` columns after ``indent`` (not of the first); one line if ``width`` is None.

    An address or a command in backticks is never broken, so that it can be copied.
    """
    joined = _COMMAND.sub(lambda command: command[0].replace(" ", _JOINT), words)
    lines = [joined] if width is None else textwrap.wrap(joined, width, break_long_words=False, break_on_hyphens=False)
    for number, line in enumerate(lines):
        yield (indent if number else "") + line.replace(_JOINT, " ")
