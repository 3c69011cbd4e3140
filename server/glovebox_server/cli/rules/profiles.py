"""``glovebox profiles``: shows, checks, changes and locks profiles, and tries others on recorded calls."""

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from glovebox_audit.events import CallDecided
from glovebox_audit.printable import printable
from glovebox_audit.query import story
from glovebox_audit.receipts import dsse
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.errors import ProfileError, nearest
from glovebox_profiles.explain import explain, render
from glovebox_profiles.load import loader
from glovebox_profiles.load.loader import SHIPPED
from glovebox_profiles.load.reading import read_bytes, set_value
from glovebox_profiles.model import Profile, effective
from glovebox_profiles.order import KeyChange, diff, diff_sets
from glovebox_sandboxes.plural import counted
from glovebox_server import app, workspace
from glovebox_server.app import check_example, load_profiles, profile_directories
from glovebox_server.cli.groups import LazyGroup
from glovebox_server.cli.options import command, complete_tool, emit, time_option
from glovebox_server.cli.saving import replace_file
from glovebox_server.cli.terminal import Shown, pick, styled, table_of
from glovebox_server.exits import FAILED, OK, USAGE
from glovebox_server.proof import suggest as recorded
from glovebox_server.proof.lock import Effective, Lock, written
from glovebox_server.proof.sealed import opener
from glovebox_server.receipts import keys
from glovebox_server.settings import Settings
from glovebox_server.startup import governed, policy_file
from glovebox_server.tools import TOOLS
from glovebox_server.upkeep.keeping import objections, required

_NO_PATTERN = "it is no pattern, and names the one file that is called so; name each file, or their folder"
_DIRECTIONS = {"widening": "bold red", "narrowing": "green", "neutral": "dim"}
_WIDENING = {True: "Something widens.", False: "Nothing widens."}
_STYLES = {"allow": "bold red", "deny": "green", "ask": "green"}
_PATH = click.Path(path_type=Path)
_tool = click.argument("tool", shell_complete=complete_tool)
_since = time_option("--since", "Calls since this time.", "30d")
_key = click.option("--key", type=_PATH, help="The private key to which arguments were sealed.")


@click.group(cls=LazyGroup)
def profiles() -> None:
    """List, explain, check and lock tools' profiles."""


@command("list", profiles, opens="settings")
def profiles_list(settings: Settings) -> None:
    """One line per tool."""
    found = load_profiles(settings)
    rows, described_all = [], []
    for tool, profile in found.items():
        source, rules = found.source(tool), profile.network.allow
        told = pick(profile, "tool", "risk", "isolation", "approval") | {"network": profile.network.mode}
        where = {"digest": found.digests[tool], "source": str(source), "shipped": source.parent == SHIPPED}
        described_all.append(told | where)
        whose = "shipped" if source.parent == SHIPPED else source
        network = counted(len(rules), "rule") if rules else "none"
        rows.append((tool, profile.risk, profile.isolation, network, profile.approval, whose))
    titles = ["tool", "risk", "isolation", "network", "approval", "from"]
    emit({"digest": found.digest, "profiles": described_all}, table_of(titles, rows))


@command("show", profiles, opens="settings")
@_tool
def profiles_show(settings: Settings, tool: str) -> None:
    """The whole profile in effect, every default filled in.

    As TOML that loads to the same digest, or as JSON.
    """
    found = load_profiles(settings)
    profile, source, digest = found_for(found, tool), found.source(tool), found.digests[tool]
    value = {"digest": digest, "source": str(source), "profile": effective(profile)}
    emit(value, f"# from {source}\n# {digest}\n{to_toml(profile)}")


@command("explain", profiles, opens="settings")
@_tool
def profiles_explain(settings: Settings, tool: str) -> int:
    """Explain in plain words what a tool may do."""
    found = load_profiles(settings)
    profile = found_for(found, tool)
    errors = objections(settings, [(found.source(tool), profile)])
    sections = explain(profile)
    value = {"tool": tool, "sections": [asdict(each) for each in sections]}
    return _emit_errors(value, errors, [f"{profile.tool}\n\n{render(sections)}"])


@command("check", profiles, opens="settings")
@click.argument("paths", nargs=-1, type=_PATH)
@click.option("--locked", metavar="FILE", type=_PATH, help="Compare all in effect with this lock.")
def profiles_check(settings: Settings, paths: tuple[Path, ...], locked: Path | None) -> int:
    """Load profiles and run their examples.

    Yours and the shipped ones, or the given files and directories. With --locked, name what differs from a lock.
    """
    if locked is None:
        return _check(settings, paths)
    if paths:
        raise click.UsageError("--locked compares what is in effect: leave the files out.")
    lock = Lock.read(locked)
    differences = lock.differences(_effective(settings))
    told = f"{counted(len(differences), 'difference')} from {locked}."
    return _emit_errors({"lock": lock.digest}, differences, (), told)


def _check(settings: Settings, paths: Sequence[Path]) -> int:
    """Load each file, and each file of each directory; print ``path:line`` and the problem of each failure.

    A file in a directory that is no profile is reported, as an error if it may be meant as one. So is a path of
    ``files.reveal`` that is not in the workspace, or looks like a pattern where none is given.
    """
    checked: list[Path] = []
    errors: list[ProfileError] = []
    others: list[Path] = []
    found: list[tuple[Path, Profile]] = []
    for path in paths or profile_directories(settings):
        try:
            files = _existing(path)
            if path.is_dir() and path != SHIPPED:
                errors += loader.lost_profiles(path, TOOLS)
                others += loader.ignored(path)
        except ProfileError as error:
            errors.append(error)
            continue
        checked += files
        for file in files:
            try:
                found.append((file, loader.read(file, check_example=check_example, tools=TOOLS)))
            except ProfileError as error:
                errors.append(error)
    errors += objections(settings, found)
    lost = {each.path for each in errors}
    unread = "not read, since it is not named TOOL.toml in the directory itself"
    lines = [styled(f"{path}: {unread}", "dim") for path in others if path not in lost]
    absent = []
    for file, profile in found:
        for each in profile.files.reveal:
            if reason := _absent(each.path, settings.workspace):
                absent.append({"path": str(file), "reveal": each.path, "reason": reason})
                told = f"{file}: files.reveal: {json.dumps(each.path)} shows nothing: {reason}."
                lines.append(styled(told, "yellow"))
    value = {"checked": [*map(str, checked)], "ignored": [*map(str, others)], "shows_nothing": absent}
    count = counted(sum(1 + len(error.more) for error in errors), "error")
    return _emit_errors(value, errors, lines, f"{counted(len(checked), 'profile')} checked, {count}.")


def _setting(value: str) -> tuple[tuple[str, ...], str]:
    """Split ``limits.wall_seconds=120``."""
    key, equals, text = value.partition("=")
    if not equals or not re.fullmatch(r"[a-z_]+(\.[a-z_]+){0,3}", key):
        raise click.BadParameter(f"{value!r} is no KEY=VALUE, as limits.wall_seconds=120.")
    return tuple(key.split(".")), text


@command("set", profiles, opens="settings")
@_tool
@click.argument("changes", metavar="KEY=VALUE...", nargs=-1, required=True, type=_setting)
def profiles_set(settings: Settings, tool: str, changes: tuple[tuple[tuple[str, ...], str], ...]) -> int:
    """Change keys of your profile of a tool; comments stay.

    Copies the shipped profile first, if you have none. Prints what changes and what widens. Nothing is written if the
    result is wrong.
    """
    profiles, file = load_profiles(settings), settings.profiles_dir / f"{tool}.toml"
    before, source = found_for(profiles, tool), profiles.source(tool)
    data = read_bytes(source)
    for key, value in changes:
        data = set_value(data, file, key, value)
    data = _with_shipped_examples(data, file)
    after = loader.checked(data, file, check_example=check_example, tools=profiles)
    errors = objections(settings, [(file, after)])
    found = diff(before, after)
    widened = any(change.direction == "widening" for change in found)
    lock, lines, locked = settings.locked or Path("glovebox.lock"), list[Shown](), None
    if errors or not found:
        lines.append(f"{file}: not written, {'see above' if errors else 'since nothing changes'}.")
    else:
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        replace_file(file, data, force=True)
        copied = "copied from the shipped profile and " if source != file else ""
        lines += [_WIDENING[widened], f"{file}: {copied}changed; restart servers."]
        if lock.exists():
            locked = str(lock)
            sign = " and sign it again" if lock.with_name(f"{lock.name}.sig").exists() else ""
            renew = f"Review the change, then run `glovebox profiles lock --force {shlex.quote(locked)}`{sign}."
            told = f"{lock}: holds the profile as it was, so `--locked` refuses the new one. {renew}"
            lines.append(styled(told, "yellow"))
    fields: dict[str, Any] = {"path": str(file), "copied": source != file, "lock": locked, "widening": widened}
    fields |= {"changes": [asdict(change) for change in found]}
    return _emit_errors(fields, errors, [*map(_change_line, found)], *lines)


@command("diff", profiles, opens="nothing")
@click.argument("a", type=_PATH)
@click.argument("b", type=_PATH)
def profiles_diff(a: Path, b: Path) -> int:
    """Compare two profiles, or directories; exit 1 if one is wider."""
    for path in (a, b):
        _existing(path)
    if a.is_dir() and b.is_dir():
        was, now = (loader.load([SHIPPED, each], check_example=None) for each in (a, b))
        changes = diff_sets(was, now)
    elif a.is_dir() or b.is_dir():
        raise ProfileError(a, None, "", f"cannot be compared with {b}", "Name two files or two directories.")
    else:
        before, after = (loader.read(path, check_example=None, any_name=True) for path in (a, b))
        if before.tool != after.tool:
            reason = f'is "{after.tool}", and "{before.tool}" in {a}'
            raise ProfileError(b, None, "tool", reason, "Name two versions of one profile.")
        changes = {after.tool: found} if (found := diff(before, after)) else {}
    tools = {tool: [asdict(change) for change in found] for tool, found in changes.items()}
    return show_widening({"tools": tools}, changes)


def _absent(path: str, workspace: Path | None) -> str:
    """Return why a revealed file does not exist; empty if it does, or cannot be checked."""
    if workspace is not None and os.path.lexists(workspace / path):
        return ""
    if set(path) & set("*?["):
        return _NO_PATTERN
    if workspace is None:
        return ""
    at, parts = workspace, path.split("/")
    while len(parts) > 1 and os.path.lexists(at / parts[0]):
        at /= parts.pop(0)
    with suppress(OSError):
        for each in sorted(at.iterdir()):
            if each.name.casefold() == parts[0].casefold():
                return f"there is {json.dumps(str(each.relative_to(workspace)))}, and case counts"
    return f"it is not in {printable(str(workspace))}"


def _with_shipped_examples(data: bytes, file: Path) -> bytes:
    """Return a profile in which examples of the shipped one expect what it now answers.

    They describe the shipped profile, not what the operator wants; examples of the operator's own stay as they are. An
    example is identified by its call, since an earlier change may have changed its expectation.
    """
    profile, shipped = loader.parse(data, file), SHIPPED / file.name
    theirs = loader.parse(shipped.read_bytes(), shipped).example if shipped.exists() else ()
    calls = [example.call for example in theirs]
    for index, example in enumerate(profile.example):
        effect, rule = check_example(profile, example.call)
        if example.call in calls and example.expect != effect:
            data = set_value(data, file, ("example", index, "expect"), effect)
        if example.call in calls and example.rule not in (None, rule):
            data = set_value(data, file, ("example", index, "rule"), rule)
    return data


def _existing(path: Path) -> tuple[Path, ...]:
    """Return the profile files of a path; a mistyped path is an error here, not an empty directory."""
    if path.is_dir():
        return loader.profile_files(path)
    if not path.exists():
        raise ProfileError(path, None, "", "does not exist", "Name a profile or a directory of profiles.")
    return (path,)


def found_for(profiles: ProfileSet, tool: str) -> Profile:
    """Return the profile in effect for a tool. Raises ProfileError if there is none."""
    if tool in profiles:
        return profiles[tool]
    reason = "there is no profile for this tool, so every call of it is refused"
    raise ProfileError(tool, None, "", reason, nearest(tool, profiles))


def described(error: ProfileError) -> dict[str, Any]:
    """Return an error as data."""
    return {"path": str(error.path), **pick(error, "line", "key"), "problem": error.reason, "hint": error.fix}


def _change_line(change: KeyChange) -> Shown:
    """Return one change for a person: its direction, key and sentence."""
    words = f"  {change.direction:<9}  {change.key}  {change.sentence}"
    return styled(words, _DIRECTIONS[change.direction])


def _emit_errors(value: dict[str, Any], errors: Sequence[ProfileError], before: Sequence[Shown], *after: Shown) -> int:
    """Print errors between other lines, and as the last field of ``value``; return ``USAGE`` if there are any."""
    told = [described(item) for error in errors for item in (error, *error.more)]
    lines = [styled(error, "red", "\n") for error in errors]
    emit({**value, "errors": told}, *before, *lines, *after)
    return USAGE if errors else OK


def show_widening(fields: dict[str, Any], changes: Mapping[str, Sequence[KeyChange]]) -> int:
    """Print changes by title, ``fields`` as JSON; return ``FAILED`` if one widens."""
    widened = any(change.direction == "widening" for found in changes.values() for change in found)
    lines: list[Shown] = []
    for title, found in changes.items():
        lines += [*([styled(title, "bold")] if title else []), *map(_change_line, found)]
    emit({"widening": widened, **fields}, *lines, _WIDENING[widened])
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

    write("", profile.model_dump(mode="json", exclude_none=True))
    return "\n".join(lines)


def _toml(value: Any) -> str:
    """Return a value without nulls as TOML; what a terminal would act on or not show is escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(", ", " = "))  # all else is written as in JSON
    return "".join(each if each.isprintable() else f"\\U{ord(each):08X}" for each in text)


@command("lock", profiles, opens="settings")
@click.argument("file", default="glovebox.lock", type=_PATH)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def profiles_lock(settings: Settings, file: Path, force: bool) -> None:
    """Write down what is in effect: profiles, policy, tools.

    One file (glovebox.lock), to review, and for `serve --locked`.
    """
    found = _effective(settings)
    replace_file(file, written(found.content()), force=force)
    digest = Lock.read(file).digest
    policy = "the policy" if found.policy is not None else "no policy"
    counts = f"{counted(len(found.profiles), 'profile')}, {policy}, {counted(len(found.tools), 'tool')}"
    emit({"file": str(file), "lock": digest}, f"{file}: {counts}. {digest}")


@command("sign", profiles, opens="nothing")
@click.argument("file", default="glovebox.lock", type=_PATH)
@click.option("--key", required=True, type=_PATH, help="Your Ed25519 private key, in PEM.")
def profiles_sign(file: Path, key: Path) -> None:
    """Sign a lock, into FILE.sig: for `serve --require-signed`.

    FILE is glovebox.lock where none is given.
    """
    lock, private = Lock.read(file), keys.operators(key)
    replace_file(lock.signature, lock.signed(private), force=True)
    key_id = dsse.key_id(private.public_key())
    fields = {"file": str(lock.signature), "lock": lock.digest, "key_id": key_id}
    emit(fields, f"{lock.signature}: signed with key {key_id}")


def _effective(settings: Settings) -> Effective:
    profiles = load_profiles(settings)
    policy = governed(settings, profiles, workspace.find(settings, "http")).policy
    return app.effective(profiles, required(settings, profiles), policy, policy_file(settings))


@command("simulate", profiles)
@click.argument("candidate", type=_PATH)
@_since
@_key
def profiles_simulate(settings: Settings, candidate: Path, since: datetime, key: Path | None) -> int:
    """Decide recorded calls again, under another profile.

    CANDIDATE is a file, or a directory as in effect over the shipped ones. Exit 1 if one would be decided otherwise.
    """
    directory = settings.state_dir / "audit"
    _existing(candidate)
    if candidate.is_dir():
        profiles = dict(loader.load([SHIPPED, candidate], check_example=None))
    else:
        profile = loader.read(candidate, check_example=None, any_name=True)
        profiles = {profile.tool: profile}
    open_sealed = None if key is None else opener(key)
    found = recorded.simulate(recorded.records(directory, since, {CallDecided.kind}), profiles, TOOLS, open_sealed)
    how = "--key KEY opens those that are sealed" if key is None else "none was sealed to this key"
    unknown = "unknown, since the arguments were not kept as they were"
    told = f"{counted(len(found.otherwise), 'call')} otherwise, {found.same} the same"
    lines = []
    for it in found.otherwise:
        words = f"{it.time[:19]}  {it.call_id}  {it.tool}  {it.was} -> {it.now}  ({it.rule})"
        lines.append(styled(words, _STYLES[it.now]))
    for tool, many in sorted(found.unknown.items()):
        lines.append(styled(f"{tool}: {counted(many, 'call')} {unknown}: {story.KEEPING}; {how}.", "yellow"))
    told += f", {sum(found.unknown.values())} unknown, {found.elsewhere} not decided by a profile."
    emit(asdict(found), *lines, told)
    return FAILED if found.otherwise else OK


@command("suggest", profiles)
@_tool
@_since
@click.option("--output", "-o", type=_PATH, help="Write it here: a new TOOL.toml, or a directory.")
@_key
def profiles_suggest(settings: Settings, tool: str, *, since: datetime, output: Path | None, key: Path | None) -> int:
    """The narrowest profile for what recorded calls used.

    What would change, and what each change is based on. Nothing is changed.
    """
    profile = found_for(load_profiles(settings), tool)
    log = recorded.records(settings.state_dir / "audit", since, recorded.KINDS)
    found = recorded.suggest(log, TOOLS[tool], profile, None if key is None else opener(key))
    said = f"{counted(found.calls, 'call')} from {found.first[:19]} to {found.last[:19]}"
    if output is not None and found.calls:
        output = output / f"{tool}.toml" if output.is_dir() else output
        data = f"# Suggested, based on {said}.\n{to_toml(found.profile, found.based_on)}\n".encode()
        # A file that `profiles check` would refuse is not written.
        loader.checked(data, output, check_example=check_example, tools=TOOLS)
        replace_file(output, data, force=False)
    lines: list[Shown] = []
    for change in found.changes:
        lines.append(_change_line(change))
        if why := found.based_on.get(change.key):
            lines.append(styled(f"             {why}", "dim"))
    for name, many in found.unknown.items():
        lines.append(styled(f"  unknown    {name}  stays: not known of {counted(many, 'call')}.", "yellow"))
    lines.append(f"{counted(len(found.changes), 'change')}, based on {said}.")
    if found.refused or found.lifted:
        lines.append(f"Not based on {counted(found.refused, 'refused call')}; denials lifted for {found.lifted}.")
    if output is not None:
        words = ["glovebox", "profiles", "simulate", str(output), *(["--key", str(key)] if key else [])]
        lines.append(f"{output}: try it with `{shlex.join(words)}`.")
    if not found.calls:
        lines = [f"No call of {tool} was allowed since {since:%Y-%m-%d %H:%M}: nothing can be suggested."]
    emit({**asdict(found), "profile": effective(found.profile)}, *lines)
    return OK if found.calls else FAILED
