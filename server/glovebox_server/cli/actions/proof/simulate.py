"""What ``glovebox profiles simulate`` does: prints, and returns an exit code."""

from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from rich.console import Console

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.loader import SHIPPED, load, read
from glovebox_sandboxes.plural import counted
from glovebox_server.cli.actions.profiles import say
from glovebox_server.cli.terminal import print_json
from glovebox_server.exits import FAILED, OK
from glovebox_server.printable import printable
from glovebox_server.proof.simulate import decisions
from glovebox_server.proof.simulate import simulate as decide_again
from glovebox_server.tools import TOOLS

_STYLES = {"allow": "bold red", "deny": "green", "ask": "green"}


def simulate(directory: Path, candidate: Path, since: datetime, console: Console, *, as_json: bool) -> int:
    """Decide the recorded calls again, under a profile or a directory of profiles; 1 where one would be otherwise."""
    if not candidate.exists():
        raise ProfileError(candidate, None, "", "does not exist", "Name a profile or a directory of profiles.")
    if candidate.is_dir():
        profiles = dict(load([SHIPPED, candidate], check_example=None))
    else:
        profile = read(candidate, check_example=None, any_name=True)
        profiles = {profile.tool: profile}
    found = decide_again(decisions(directory, since), profiles, TOOLS)
    if as_json:
        print_json(console.file, asdict(found))
        return FAILED if found.otherwise else OK
    for each in found.otherwise:
        words = f"{each.time[:19]}  {each.call_id}  {each.tool}  {each.was} -> {each.now}  ({each.rule})"
        say(console, printable(words), _STYLES.get(each.now, ""))
    for tool, many in sorted(found.unknown.items()):
        words = f"{tool}: {counted(many, 'call')} unknown, since the arguments were not kept as they were (audit.keep)."
        say(console, words, "yellow")
    unknown = sum(found.unknown.values())
    told = f"{counted(len(found.otherwise), 'call')} otherwise, {found.same} the same, {unknown} unknown"
    say(console, f"{told}, {found.elsewhere} not decided by a profile.")
    return FAILED if found.otherwise else OK
