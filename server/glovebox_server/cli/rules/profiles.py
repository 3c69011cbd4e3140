"""``glovebox profiles``: shows, checks and changes profiles."""

import json
import os
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import click
from rich.text import Text

from glovebox_audit.printable import printable
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.explain import explain, render
from glovebox_profiles.load.loader import (
    SHIPPED,
    checked,
    ignored,
    load,
    lost_profiles,
    parse,
    profile_files,
    read,
)  # fmt: skip
from glovebox_profiles.load.reading import read_bytes, set_value
from glovebox_profiles.model import Profile, effective
from glovebox_profiles.order import KeyChange, diff, diff_sets
from glovebox_sandboxes.plural import counted
from glovebox_server.app import check_example, load_profiles, profile_directories
from glovebox_server.cli.options import LazyGroup, command, complete_tool, emit, out
from glovebox_server.cli.rules.lock import (
    WIDENING,
    change_line,
    check_lock,
    described,
    found_for,
    refusal,
    show_widening,
    to_toml,
)
from glovebox_server.cli.saving import replace_file
from glovebox_server.cli.terminal import table_of
from glovebox_server.exits import OK, USAGE
from glovebox_server.settings import Settings
from glovebox_server.tools import TOOLS
from glovebox_server.upkeep.environments import objections

_NO_PATTERN = "it is no pattern, and names the one file that is called so; name each file, or their folder"


@click.group(
    cls=LazyGroup,
    lazy={
        "lock": ("rules.lock:profiles_lock", "Write down what is in force: profiles, policy, tools."),
        "sign": ("rules.lock:profiles_sign", "Sign a lock, into FILE.sig: for `serve --require-signed`."),
        "simulate": ("rules.lock:profiles_simulate", "Decide recorded calls again, under another profile."),
        "suggest": ("rules.lock:profiles_suggest", "The narrowest profile for what recorded calls used."),
    },
)
def profiles() -> None:
    """What each tool may do."""


@command("list", profiles, opens="settings")
def profiles_list(settings: Settings) -> None:
    """One line per tool."""
    found = load_profiles(settings)
    rows, described_all = [], []
    for tool, profile in found.items():
        source = found.source(tool)
        shipped, rules = source.parent == SHIPPED, profile.network.allow
        told = {"tool": tool, "risk": profile.risk, "isolation": list(profile.isolation)}
        told |= {"network": profile.network.mode, "approval": profile.approval, "digest": found.digests[tool]}
        described_all.append({**told, "source": str(source), "shipped": shipped})
        network = counted(len(rules), "rule") if rules else "none"
        rows.append(
            (tool, profile.risk, profile.isolation, network, profile.approval, "shipped" if shipped else source)
        )
    titles = ["tool", "risk", "isolation", "network", "approval", "from"]
    emit({"digest": found.digest, "profiles": described_all}, table_of(titles, rows))


@command("show", profiles, opens="settings")
@click.argument("tool", shell_complete=complete_tool)
def profiles_show(settings: Settings, tool: str) -> None:
    """The whole profile in force, every default filled in.

    As TOML that loads to the same digest, or as JSON.
    """
    found = load_profiles(settings)
    profile, source, digest = found_for(found, tool), found.source(tool), found.digests[tool]
    if not emit({"digest": digest, "source": str(source), "profile": effective(profile)}):
        out.print(f"# from {source}\n# {digest}\n{to_toml(profile)}")


@command("explain", profiles, opens="settings")
@click.argument("tool", shell_complete=complete_tool)
def profiles_explain(settings: Settings, tool: str) -> int:
    """What a tool may read, write, reach and spend, in plain words."""
    found = load_profiles(settings)
    profile = found_for(found, tool)
    errors = objections(settings, [(found.source(tool), profile)])
    sections = explain(profile)
    value = {"tool": tool, "sections": [asdict(each) for each in sections], "errors": [described(it) for it in errors]}
    emit(value, f"{profile.tool}\n\n{render(sections)}", *map(refusal, errors))
    return USAGE if errors else OK


@command("check", profiles, opens="settings")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--locked", metavar="FILE", type=click.Path(path_type=Path), help="Compare all in force with this lock.")
def profiles_check(settings: Settings, paths: tuple[Path, ...], locked: Path | None) -> int:
    """Load profiles and run their examples.

    Yours and the shipped ones, or the given files and directories. With --locked, name what differs from a lock.
    """
    if locked is not None:
        if paths:
            raise click.UsageError("--locked compares what is in force: leave the files out.")
        return check_lock(settings, locked)
    return _check(settings, paths)


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
                errors += lost_profiles(path, TOOLS)
                others += ignored(path)
        except ProfileError as error:
            errors.append(error)
            files = ()
        for file in files:
            checked.append(file)
            try:
                found.append((file, read(file, check_example=check_example, tools=TOOLS)))
            except ProfileError as error:
                errors.append(error)
    errors += objections(settings, found)
    absent = [
        {"path": str(file), "reveal": each.path, "reason": reason}
        for file, profile in found
        for each in profile.files.reveal
        if (reason := _absent(each.path, settings.workspace))
    ]
    described_all = [described(item) for error in errors for item in (error, *error.more)]
    lost = {each.path for each in errors}
    unread = "not read, since it is not named TOOL.toml in the directory itself"
    lines = [Text(printable(f"{path}: {unread}"), "dim") for path in others if path not in lost]
    for each in absent:
        told = f"files.reveal: {json.dumps(each['reveal'])} shows nothing: {each['reason']}."
        lines.append(Text(printable(f"{each['path']}: {told}"), "yellow"))
    value = {"checked": [*map(str, checked)], "ignored": [*map(str, others)], "shows_nothing": absent}
    total = f"{counted(len(checked), 'profile')} checked, {counted(len(described_all), 'error')}."
    emit({**value, "errors": described_all}, *lines, *map(refusal, errors), total)
    return USAGE if errors else OK


def _setting(value: str) -> tuple[tuple[str, ...], str]:
    """Split ``limits.wall_seconds=120``."""
    key, equals, text = value.partition("=")
    if not equals or not re.fullmatch(r"[a-z_]+(\.[a-z_]+){0,3}", key):
        raise click.BadParameter(f"{value!r} is no KEY=VALUE, as limits.wall_seconds=120.")
    return tuple(key.split(".")), text


@command("set", profiles, opens="settings")
@click.argument("tool", shell_complete=complete_tool)
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
    after = checked(data, file, check_example=check_example, tools=profiles)
    errors = objections(settings, [(file, after)])
    found = diff(before, after)
    widened = any(change.direction == "widening" for change in found)
    if found and not errors:
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        replace_file(file, data, force=True)
    lock = settings.locked or Path("glovebox.lock")
    locked = lock if found and not errors and lock.exists() else None
    described_all = {"changes": [asdict(change) for change in found], "errors": [described(it) for it in errors]}
    place = {"path": str(file), "copied": source != file, "lock": locked and str(locked)}
    lines: list[Text | str] = [*map(change_line, found), *map(refusal, errors)]
    if errors or not found:
        lines.append(f"{file}: not written, {'see above' if errors else 'since nothing changes'}.")
    else:
        copied = "copied from the shipped profile and " if source != file else ""
        lines += [WIDENING[widened], f"{file}: {copied}changed; restart servers."]
    if locked:
        sign = " and sign it again" if locked.with_name(f"{locked.name}.sig").exists() else ""
        renew = f"Review the change, then run `glovebox profiles lock --force {shlex.quote(str(locked))}`{sign}."
        lines.append(
            Text(f"{locked}: holds the profile as it was, so `--locked` refuses the new one. {renew}", "yellow")
        )
    emit({**place, "widening": widened, **described_all}, *lines)
    return USAGE if errors else OK


@command("diff", profiles, opens="nothing")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
def profiles_diff(a: Path, b: Path) -> int:
    """Compare two profiles, or directories; exit 1 if one is wider."""
    changes = _changes(a, b)
    tools = {tool: [asdict(change) for change in found] for tool, found in changes.items()}
    return show_widening({"tools": tools}, changes)


def _absent(path: str, workspace: Path | None) -> str:
    """Return why a revealed file does not exist; empty if it does, or cannot be checked."""
    if workspace is None or os.path.lexists(workspace / path):
        return _NO_PATTERN if workspace is None and set(path) & set("*?[") else ""
    if set(path) & set("*?["):
        return _NO_PATTERN
    at = workspace
    for part in path.split("/"):
        if not os.path.lexists(at / part):
            with suppress(OSError):
                for each in sorted(at.iterdir()):
                    if each.name.casefold() == part.casefold():
                        return f"there is {json.dumps(str(each.relative_to(workspace)))}, and case counts"
            break
        at /= part
    return f"it is not in {printable(str(workspace))}"


def _with_shipped_examples(data: bytes, file: Path) -> bytes:
    """Return a profile in which examples of the shipped one expect what it now answers.

    They describe the shipped profile, not what the operator wants; examples of the operator's own stay as they are. An
    example is identified by its call, since an earlier change may have changed its expectation.
    """
    profile, shipped = parse(data, file), SHIPPED / file.name
    calls = [example.call for example in parse(shipped.read_bytes(), shipped).example] if shipped.exists() else []
    for index, example in enumerate(profile.example):
        effect, rule = check_example(profile, example.call)
        if example.call in calls and example.expect != effect:
            data = set_value(data, file, ("example", index, "expect"), effect)
        if example.call in calls and example.rule not in (None, rule):
            data = set_value(data, file, ("example", index, "rule"), rule)
    return data


def _changes(a: Path, b: Path) -> dict[str, tuple[KeyChange, ...]]:
    for path in (a, b):
        _existing(path)
    if a.is_dir() and b.is_dir():
        return diff_sets(load([SHIPPED, a], check_example=None), load([SHIPPED, b], check_example=None))
    if a.is_dir() or b.is_dir():
        raise ProfileError(a, None, "", f"cannot be compared with {b}", "Name two files or two directories.")
    before, after = (read(path, check_example=None, any_name=True) for path in (a, b))
    if before.tool != after.tool:
        reason = f'is "{after.tool}", and "{before.tool}" in {a}'
        raise ProfileError(b, None, "tool", reason, "Name two versions of one profile.")
    found = diff(before, after)
    return {after.tool: found} if found else {}


def _existing(path: Path) -> tuple[Path, ...]:
    """Return the profile files of a path; a mistyped path is an error here, not an empty directory."""
    if path.is_dir():
        return profile_files(path)
    if not path.exists():
        raise ProfileError(path, None, "", "does not exist", "Name a profile or a directory of profiles.")
    return (path,)
