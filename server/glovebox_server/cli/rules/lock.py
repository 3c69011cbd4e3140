"""``glovebox profiles lock | sign | simulate | suggest``: what is in effect as one file, and what would be."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from glovebox_audit.events import CallDecided
from glovebox_audit.printable import printable
from glovebox_audit.receipts import dsse
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.errors import ProfileError, nearest
from glovebox_profiles.load.loader import SHIPPED, checked, load, read
from glovebox_profiles.model import Profile, effective
from glovebox_profiles.order import KeyChange
from glovebox_sandboxes.contract.errors import MisnamedError
from glovebox_sandboxes.plural import counted
from glovebox_server import app, workspace
from glovebox_server.app import check_example, load_profiles
from glovebox_server.cli.evidence.page import KEEPING
from glovebox_server.cli.options import command, complete_tool, emit, out, time_or_age
from glovebox_server.cli.saving import replace_file
from glovebox_server.exits import FAILED, OK, USAGE
from glovebox_server.proof.lock import Effective, Lock, policy_keys, written
from glovebox_server.proof.sealed import opener
from glovebox_server.proof.suggest import KINDS, records
from glovebox_server.proof.suggest import simulate as decide_again
from glovebox_server.proof.suggest import suggest as narrowest
from glovebox_server.receipts import keys
from glovebox_server.settings import Settings
from glovebox_server.startup import governed, policy_file
from glovebox_server.tools import TOOLS
from glovebox_server.upkeep.environments import required

_DIRECTIONS = {"widening": "bold red", "narrowing": "green", "neutral": "dim"}


WIDENING = {True: "Something widens.", False: "Nothing widens."}


def found_for(profiles: ProfileSet, tool: str) -> Profile:
    """Return the profile in effect for a tool. Raises ProfileError if there is none."""
    if tool in profiles:
        return profiles[tool]
    reason = "there is no profile for this tool, so every call of it is refused"
    raise ProfileError(tool, None, "", reason, nearest(tool, profiles))


def described(error: ProfileError) -> dict[str, Any]:
    """Return an error as data."""
    return {
        "path": str(error.path), "line": error.line, "key": error.key, "problem": error.reason, "hint": error.fix
    }  # fmt: skip


def change_line(change: KeyChange) -> Text:
    """Return one change for a person: its direction, key and sentence."""
    words = f"  {change.direction:<9}  {change.key}  {change.sentence}"
    return Text(printable(words), _DIRECTIONS[change.direction])


def refusal(error: ProfileError) -> Text:
    """Return an error for a person."""
    return Text(printable(str(error), "\n"), "red")


def show_widening(fields: dict[str, Any], changes: Mapping[str, Sequence[KeyChange]]) -> int:
    """Print changes by title, ``fields`` as JSON; return ``FAILED`` if one widens."""
    widened = any(change.direction == "widening" for found in changes.values() for change in found)
    lines: list[Text] = []
    for title, found in changes.items():
        lines += [*([Text(title, "bold")] if title else []), *map(change_line, found)]
    emit({"widening": widened, **fields}, *lines, WIDENING[widened])
    return FAILED if widened else OK


def to_toml(profile: Profile, comments: Mapping[str, str] | None = None) -> str:
    """Return the effective profile as TOML, one dotted key a line, with comments by key."""
    lines: list[str] = []

    def write(prefix: str, values: dict[str, Any]) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                write(f"{prefix}{key}.", value)
            else:
                comment = (comments or {}).get(f"{prefix}{key}")
                lines.append(f"{prefix}{key} = {_toml(value)}" + (f" # {printable(comment)}" if comment else ""))

    write("", effective(profile))
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{_quoted(key)} = {_toml(each)}" for key, each in value.items() if each is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(_toml(each) for each in value)}]"
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    """Return a TOML string; what a terminal would act on or not show is escaped."""
    plain = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08X}" for each in plain)


@command("lock", opens="settings")
@click.argument("file", default="glovebox.lock", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def profiles_lock(settings: Settings, file: Path, force: bool) -> None:
    """Write down what is in force: profiles, policy, tools.

    One file (glovebox.lock), to review, and for `serve --locked`.
    """
    found = _effective(settings)
    replace_file(file, written(found.content()), force=force)
    digest = Lock.read(file).digest
    policy = "the policy" if found.policy is not None else "no policy"
    counts = f"{counted(len(found.profiles), 'profile')}, {policy}, {counted(len(found.tools), 'tool')}"
    emit({"file": str(file), "lock": digest}, f"{file}: {counts}. {digest}")


@command("sign", opens="nothing")
@click.argument("file", default="glovebox.lock", type=click.Path(path_type=Path))
@click.option("--key", required=True, type=click.Path(path_type=Path), help="Your Ed25519 private key, in PEM.")
def profiles_sign(file: Path, key: Path) -> None:
    """Sign a lock, into FILE.sig: for `serve --require-signed`.

    FILE is glovebox.lock where none is given.
    """
    lock, private = Lock.read(file), keys.operators(key)
    replace_file(lock.signature, lock.signed(private), force=True)
    key_id = dsse.key_id(private.public_key())
    fields = {"file": str(lock.signature), "lock": lock.digest, "key_id": key_id}
    emit(fields, f"{lock.signature}: signed with key {key_id}")


def check_lock(settings: Settings, file: Path) -> int:
    """Name all that differs from a lock."""
    lock = Lock.read(file)
    differences = lock.differences(_effective(settings))
    told = f"{counted(len(differences), 'difference')} from {file}."
    emit({"lock": lock.digest, "errors": [described(it) for it in differences]}, *map(refusal, differences), told)
    return USAGE if differences else OK


def _effective(settings: Settings) -> Effective:
    profiles = app.load_profiles(settings)
    environments = required(settings, profiles)
    path = policy_file(settings)
    policy = governed(settings, profiles, workspace.find(settings, "http"), TOOLS).policy
    return app.effective(profiles, environments, policy, path)


def texts(settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return profiles in effect, of each role too, and the policy, by digest; empty if they do not load."""
    try:
        profiles = load_profiles(settings)
        found = governed(settings, profiles, workspace.find(settings, "http"), TOOLS)
    except (ProfileError, MisnamedError):
        return {}, {}
    sets = [profiles, *(each.profiles for each in found.every)]
    texts = {each.digests[tool]: effective(each[tool]) for each in sets for tool in each}
    return texts, {} if found.policy is None else {found.digest or "": policy_keys(found.policy)}


_STYLES = {"allow": "bold red", "deny": "green", "ask": "green"}


_since = click.option(
    "--since", type=time_or_age, metavar="TIME", default="30d", show_default=True, help="Calls since this time."
)


_key = click.option("--key", type=click.Path(path_type=Path), help="The private key to which arguments were sealed.")


@command("simulate")
@click.argument("candidate", type=click.Path(path_type=Path))
@_since
@_key
def profiles_simulate(settings: Settings, candidate: Path, since: datetime, key: Path | None) -> int:
    """Decide recorded calls again, under another profile.

    CANDIDATE is a file, or a directory as in force over the shipped ones. Exit 1 if one would be decided otherwise.
    """
    directory = settings.state_dir / "audit"
    if not candidate.exists():
        raise ProfileError(candidate, None, "", "does not exist", "Name a profile or a directory of profiles.")
    if candidate.is_dir():
        profiles = dict(load([SHIPPED, candidate], check_example=None))
    else:
        profile = read(candidate, check_example=None, any_name=True)
        profiles = {profile.tool: profile}
    open_sealed = None if key is None else opener(key)
    found = decide_again(records(directory, since, {CallDecided.kind}), profiles, TOOLS, open_sealed)
    how = "--key KEY opens those that are sealed" if key is None else "none was sealed to this key"
    unknown = "unknown, since the arguments were not kept as they were"
    told = f"{counted(len(found.otherwise), 'call')} otherwise, {found.same} the same"
    emit(
        asdict(found),
        *(
            Text(
                printable(f"{it.time[:19]}  {it.call_id}  {it.tool}  {it.was} -> {it.now}  ({it.rule})"),
                _STYLES[it.now],
            )
            for it in found.otherwise
        ),
        *(
            Text(printable(f"{tool}: {counted(many, 'call')} {unknown}: {KEEPING}; {how}."), "yellow")
            for tool, many in sorted(found.unknown.items())
        ),
        f"{told}, {sum(found.unknown.values())} unknown, {found.elsewhere} not decided by a profile.",
    )
    return FAILED if found.otherwise else OK


@command("suggest")
@click.argument("tool", shell_complete=complete_tool)
@_since
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Write it here: a new TOOL.toml, or a directory.")
@_key
def profiles_suggest(settings: Settings, tool: str, *, since: datetime, output: Path | None, key: Path | None) -> int:
    """The narrowest profile for what recorded calls used.

    What would change, and what each change is based on. Nothing is changed.
    """
    profile = found_for(load_profiles(settings), tool)
    log = records(settings.state_dir / "audit", since, KINDS)
    found = narrowest(log, TOOLS[tool], profile, None if key is None else opener(key))
    said = f"{counted(found.calls, 'call')} from {found.first[:19]} to {found.last[:19]}"
    if output is not None and found.calls:
        output = output / f"{tool}.toml" if output.is_dir() else output
        data = f"# Suggested, based on {said}.\n{to_toml(found.profile, found.based_on)}\n".encode()
        # A file that `profiles check` would refuse is not written.
        checked(data, output, check_example=check_example, tools=TOOLS)
        replace_file(output, data, force=False)
    if emit({**asdict(found), "profile": effective(found.profile)}):
        return OK if found.calls else FAILED
    if not found.calls:
        out.print(f"No call of {tool} was allowed since {since:%Y-%m-%d %H:%M}: nothing can be suggested.")
        return FAILED
    for change in found.changes:
        out.print(change_line(change))
        if why := found.based_on.get(change.key):
            out.print(printable(f"             {why}"), style="dim")
    for name, many in found.unknown.items():
        out.print(f"  unknown    {name}  stays: not known of {counted(many, 'call')}.", style="yellow")
    out.print(f"{counted(len(found.changes), 'change')}, based on {said}.")
    if found.refused or found.lifted:
        out.print(f"Not based on {counted(found.refused, 'refused call')}; denials lifted for {found.lifted}.")
    if output is not None:
        words = ["glovebox", "profiles", "simulate", str(output), *(["--key", str(key)] if key else [])]
        out.print(f"{output}: try it with `{shlex.join(words)}`.")
    return OK
