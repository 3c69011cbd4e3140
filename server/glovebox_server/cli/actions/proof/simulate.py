"""What ``glovebox profiles simulate | suggest`` do. Each prints, and returns an exit code."""

import shlex
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from rich.console import Console

from glovebox_audit.events import CallDecided
from glovebox_audit.printable import printable
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED, CheckExample, checked, load, read
from glovebox_profiles.model import effective
from glovebox_sandboxes.plural import counted
from glovebox_server.cli.actions.page import KEEPING
from glovebox_server.cli.actions.profiles import found_for, say, say_change, to_toml
from glovebox_server.cli.actions.saving import replace_file
from glovebox_server.cli.terminal import print_json
from glovebox_server.exits import FAILED, OK
from glovebox_server.proof.sealed import opener
from glovebox_server.proof.simulate import records
from glovebox_server.proof.simulate import simulate as decide_again
from glovebox_server.proof.suggest import KINDS
from glovebox_server.proof.suggest import suggest as narrowest
from glovebox_server.tools import TOOLS

_STYLES = {"allow": "bold red", "deny": "green", "ask": "green"}


def simulate(
    directory: Path, candidate: Path, since: datetime, console: Console, *, key: Path | None, as_json: bool
) -> int:
    """Decide the recorded calls again, under a profile or a directory of profiles; 1 where one would be otherwise."""
    if not candidate.exists():
        raise ProfileError(candidate, None, "", "does not exist", "Name a profile or a directory of profiles.")
    if candidate.is_dir():
        profiles = dict(load([SHIPPED, candidate], check_example=None))
    else:
        profile = read(candidate, check_example=None, any_name=True)
        profiles = {profile.tool: profile}
    open_sealed = None if key is None else opener(key)
    found = decide_again(records(directory, since, {CallDecided.kind}), profiles, TOOLS, open_sealed)
    if as_json:
        print_json(console.file, asdict(found))
        return FAILED if found.otherwise else OK
    for each in found.otherwise:
        words = f"{each.time[:19]}  {each.call_id}  {each.tool}  {each.was} -> {each.now}  ({each.rule})"
        say(console, printable(words), _STYLES.get(each.now, ""))
    how = "--key KEY opens those that are sealed" if key is None else "none was sealed to this key"
    for tool, many in sorted(found.unknown.items()):
        words = f"{tool}: {counted(many, 'call')} unknown, since the arguments were not kept as they were: {KEEPING}"
        say(console, f"{words}; {how}.", "yellow")
    unknown = sum(found.unknown.values())
    told = f"{counted(len(found.otherwise), 'call')} otherwise, {found.same} the same, {unknown} unknown"
    say(console, f"{told}, {found.elsewhere} not decided by a profile.")
    return FAILED if found.otherwise else OK


def suggest(
    directory: Path,
    profiles: ProfileSet,
    tool: str,
    since: datetime,
    console: Console,
    *,
    check_example: CheckExample,
    key: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Suggest the narrowest profile for what the calls of a tool used; 1 where there was none."""
    profile = found_for(profiles, tool)
    found = narrowest(records(directory, since, KINDS), TOOLS[tool], profile, None if key is None else opener(key))
    said = f"{counted(found.calls, 'call')} from {found.first[:19]} to {found.last[:19]}"
    if output is not None and found.calls:
        output = output / f"{tool}.toml" if output.is_dir() else output
        data = f"# Suggested, based on {said}.\n{to_toml(found.profile, found.based_on)}\n".encode()
        # What `profiles check` would refuse, as a file of another name, is not written.
        checked(data, output, check_example=check_example, tools=TOOLS)
        replace_file(output, data, force=False)
    if as_json:
        told = {**asdict(found), "profile": effective(found.profile)}
        print_json(console.file, told)
        return OK if found.calls else FAILED
    if not found.calls:
        say(console, f"No call of {tool} was allowed since {since:%Y-%m-%d %H:%M}: nothing can be suggested.")
        return FAILED
    for change in found.changes:
        say_change(console, change)
        if why := found.based_on.get(change.key):
            say(console, printable(f"             {why}"), "dim")
    for name, many in found.unknown.items():
        say(console, f"  unknown    {name}  stays: not known of {counted(many, 'call')}.", "yellow")
    say(console, f"{counted(len(found.changes), 'change')}, based on {said}.")
    if found.refused or found.lifted:
        say(console, f"Not based on {counted(found.refused, 'refused call')}; denials lifted for {found.lifted}.")
    if output is not None:
        words = ["glovebox", "profiles", "simulate", str(output), *(["--key", str(key)] if key else [])]
        say(console, f"{output}: try it with `{shlex.join(words)}`.")
    return OK
