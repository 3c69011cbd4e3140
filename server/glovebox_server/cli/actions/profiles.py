"""What ``glovebox profiles`` prints, and its exit codes: 0 fine, 1 a widening, 2 an error in a profile or a name.

Everything from a file is printed as plain text, never as terminal markup.
"""

import json
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from glovebox_audit.printable import printable
from glovebox_profiles.compile import ProfileSet
from glovebox_profiles.diff import KeyChange, diff, diff_sets
from glovebox_profiles.errors import ProfileError, nearest
from glovebox_profiles.explain import explain, render
from glovebox_profiles.load.editing import set_value
from glovebox_profiles.load.loader import (
    SHIPPED,
    CheckExample,
    checked,
    ignored,
    load,
    lost_profiles,
    parse,
    profile_files,
    read,
)  # fmt: skip
from glovebox_profiles.load.positions import KeyPath
from glovebox_profiles.load.reading import read_bytes
from glovebox_profiles.model import Profile, effective
from glovebox_sandboxes.plural import counted
from glovebox_server.cli.actions.saving import replace_file
from glovebox_server.cli.terminal import new_table, print_json, print_table
from glovebox_server.exits import FAILED, OK, USAGE
from glovebox_server.proof import signature

CheckEnvironments = Callable[[Sequence[tuple[Path, Profile]]], list[ProfileError]]
"""Says what is wrong with the environments that profiles name, and with what they preload of them."""
_NO_PATTERN = "it is no pattern, and names the one file that is called so; name each file, or their folder"
_STYLES = {"widening": "bold red", "narrowing": "green", "neutral": "dim"}


def list_profiles(profiles: ProfileSet, console: Console, *, as_json: bool = False) -> int:
    """Print one line per tool: risk, isolation, network, approval, digest and the file that is in force."""
    rows = [
        {
            "tool": tool,
            "risk": profile.risk,
            "isolation": list(profile.isolation),
            "network": profile.network.mode,
            "approval": profile.approval,
            "digest": profiles.digest_for(tool),
            "source": str(profiles.source(tool)),
            "shipped": profiles.source(tool).parent == SHIPPED,
        }
        for tool, profile in profiles.items()
    ]
    if as_json:
        return _json(console, {"digest": profiles.digest, "profiles": rows})
    table = new_table("tool", "risk", "isolation", "network", "approval", "from")
    for tool, profile in profiles.items():
        network = f"{len(profile.network.allow)} rules" if profile.network.allow else "none"
        source = profiles.source(tool)
        where = "shipped" if source.parent == SHIPPED else str(source)
        cells = (tool, profile.risk, ", ".join(profile.isolation), network, profile.approval, where)
        table.add_row(*(Text(cell) for cell in cells))
    print_table(console, table)
    return OK


def show(profiles: ProfileSet, tool: str, console: Console, *, as_json: bool = False) -> int:
    """Print the effective profile, every default filled in: as TOML that loads to the same digest, or as JSON.

    Raises:
        ProfileError: there is none for this tool.
    """
    profile = found_for(profiles, tool)
    if as_json:
        described = {"digest": profiles.digest_for(tool), "source": str(profiles.source(tool))}
        return _json(console, {**described, "profile": effective(profile)})
    say(console, f"# from {profiles.source(tool)}\n# {profiles.digest_for(tool)}\n{to_toml(profile)}")
    return OK


def explain_tool(
    profiles: ProfileSet,
    tool: str,
    console: Console,
    *,
    check_environments: CheckEnvironments | None = None,
    as_json: bool = False,
) -> int:
    """Print in plain words what one tool may do, and what of it cannot be had here.

    Raises:
        ProfileError: there is no profile for it.
    """
    profile = found_for(profiles, tool)
    errors = check_environments([(profiles.source(tool), profile)]) if check_environments else []
    if as_json:
        sections = [asdict(section) for section in explain(profile)]
        _json(console, {"tool": tool, "sections": sections, "errors": [described(each) for each in errors]})
    else:
        say(console, render(profile))
        for each in errors:
            say(console, str(each), "red")
    return USAGE if errors else OK


def check(
    paths: Sequence[Path],
    console: Console,
    *,
    check_example: CheckExample | None,
    check_environments: CheckEnvironments | None = None,
    tools: Collection[str] | None = None,
    workspace: Path | None = None,
    as_json: bool = False,
) -> int:
    """Load each file, and each file of each directory; print ``path:line`` and the problem of every one that fails.

    What lies in a directory and is no profile is named: what may be meant as one, as an error. Named too is what is to
    be shown (``files.reveal``) and is not in the workspace, or looks like a pattern where none is given.
    """
    checked: list[Path] = []
    errors: list[ProfileError] = []
    others: list[Path] = []
    found: list[tuple[Path, Profile]] = []
    for path in paths:
        try:
            files = _existing(path)
            if path.is_dir() and path != SHIPPED:
                errors += lost_profiles(path, tools or ())
                others += ignored(path)
        except ProfileError as error:
            errors.append(error)
            continue
        for file in files:
            checked.append(file)
            try:
                found.append((file, read(file, check_example=check_example, tools=tools)))
            except ProfileError as error:
                errors.append(error)
    errors += check_environments(found) if check_environments else []
    absent = list(_showing_nothing(found, workspace))
    if as_json:
        paths_of = {"checked": [str(path) for path in checked], "ignored": [str(path) for path in others]}
        described_all = [described(item) for error in errors for item in (error, *error.more)]
        _json(console, {**paths_of, "shows_nothing": absent, "errors": described_all})
        return USAGE if errors else OK
    lost = {each.path for each in errors}
    for path in others:
        if path not in lost:
            say(
                console,
                f"{printable(str(path))}: not read, since it is not named TOOL.toml in the directory itself",
                "dim",
            )
    _say_nothing(console, absent)
    for each in errors:
        say(console, str(each), "red")
    total = sum(1 + len(error.more) for error in errors)
    say(console, f"{counted(len(checked), 'profile')} checked, {counted(total, 'error')}.")
    return USAGE if errors else OK


def _showing_nothing(found: Sequence[tuple[Path, Profile]], workspace: Path | None) -> Iterator[dict[str, str]]:
    """Each path that is to be shown and is not there, with its file and why."""
    for file, profile in found:
        for each in profile.files.reveal:
            if reason := _absent(each.path, workspace):
                yield {"path": str(file), "reveal": each.path, "reason": reason}


def _say_nothing(console: Console, absent: Sequence[dict[str, str]]) -> None:
    for each in absent:
        text = f"{printable(each['path'])}: files.reveal: {json.dumps(each['reveal'])} shows nothing: {each['reason']}."
        say(console, text, "yellow")


def _absent(path: str, workspace: Path | None) -> str:
    """Why a file that is to be shown is not there; empty where it is, or where nobody can know."""
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


def diff_paths(a: Path, b: Path, console: Console, *, as_json: bool = False) -> int:
    """Print what changes from ``a`` to ``b``, two files or two directories; 1 if anything widens.

    Directories are compared as they would be in force, over the shipped profiles: taking a narrow file out of one
    brings the shipped one back, and that can be a widening.

    Raises:
        ProfileError: one does not load, or they cannot be compared.
    """
    changes = _changes(a, b)
    widened = any(change.direction == "widening" for found in changes.values() for change in found)
    if as_json:
        tools = {tool: [asdict(change) for change in found] for tool, found in changes.items()}
        _json(console, {"widening": widened, "tools": tools})
        return FAILED if widened else OK
    for tool, found in changes.items():
        say(console, tool, "bold")
        for change in found:
            say_change(console, change)
    say(console, "Something widens." if widened else "Nothing widens.")
    return FAILED if widened else OK


def set_values(
    profiles: ProfileSet,
    tool: str,
    changes: Sequence[tuple[KeyPath, str]],
    file: Path,
    console: Console,
    *,
    check_example: CheckExample,
    check_environments: CheckEnvironments,
    lock: Path,
    as_json: bool = False,
) -> int:
    """Set keys of the operator's profile of a tool; print what changes, what widens, and which lock to renew.

    Args:
        profiles: In effect.
        tool: Whose profile.
        changes: Keys with their values, as ``editing.set_value`` takes them.
        file: The operator's profile; copied from the shipped one if it does not exist.
        console: Where to print.
        check_example: Decides examples.
        check_environments: Names what is wrong with the environment of the result.
        lock: What may hold the profile as it was.
        as_json: Print one JSON object.

    Raises:
        ProfileError: The result is no valid profile, or one of the operator's examples fails; nothing was written.
        CannotSave: The file could not be written.
    """
    before, source = found_for(profiles, tool), profiles.source(tool)
    data = read_bytes(source)
    for key, value in changes:
        data = set_value(data, file, key, value)
    data = _with_shipped_examples(data, file, check_example)
    after = checked(data, file, check_example=check_example, tools=profiles)
    errors = check_environments([(file, after)])
    found = diff(before, after)
    widened = any(change.direction == "widening" for change in found)
    if found and not errors:
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        replace_file(file, data, force=True)
    locked = lock if found and not errors and lock.exists() else None
    if as_json:
        described_all = {"changes": [asdict(change) for change in found], "errors": [described(it) for it in errors]}
        place = {"path": str(file), "copied": source != file, "lock": locked and str(locked)}
        _json(console, {**place, "widening": widened, **described_all})
        return USAGE if errors else OK
    for change in found:
        say_change(console, change)
    for error in errors:
        say(console, str(error), "red")
    if errors or not found:
        say(console, f"{file}: not written, {'see above' if errors else 'since nothing changes'}.")
        return USAGE if errors else OK
    say(console, "Something widens." if widened else "Nothing widens.")
    say(console, f"{file}: {'copied from the shipped profile and ' if source != file else ''}changed; restart servers.")
    if locked:
        sign = " and sign it again" if signature.place(locked).exists() else ""
        renew = f"Review the change, then run `glovebox profiles lock --force {shlex.quote(str(locked))}`{sign}."
        say(console, f"{locked}: holds the profile as it was, so `--locked` refuses the new one. {renew}", "yellow")
    return OK


def _with_shipped_examples(data: bytes, file: Path, check_example: CheckExample) -> bytes:
    """Return a profile in which examples that came with the shipped one expect what it now answers.

    They describe the shipped profile, not what the operator wants; examples of the operator's own stay as they are. An
    example is known by its call, since an earlier change may have had it expect something else.
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


def to_toml(profile: Profile, comments: Mapping[str, str] | None = None) -> str:
    """Write the effective profile as TOML, one dotted key a line, with comments by key."""
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
    """Write a TOML string; what a terminal would act on or not show is escaped."""
    plain = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08X}" for each in plain)


def _changes(a: Path, b: Path) -> dict[str, tuple[KeyChange, ...]]:
    for path in (a, b):
        _existing(path)
    if a.is_dir() and b.is_dir():
        return diff_sets(load([SHIPPED, a], check_example=None), load([SHIPPED, b], check_example=None))
    if a.is_dir() or b.is_dir():
        raise ProfileError(a, None, "", f"cannot be compared with {b}", "Name two files or two directories.")
    before, after = (read(path, check_example=None, any_name=True) for path in (a, b))
    if before.tool != after.tool:
        raise ProfileError(
            b, None, "tool", f'is "{after.tool}", and "{before.tool}" in {a}', "Name two versions of one profile."
        )
    found = diff(before, after)
    return {after.tool: found} if found else {}


def _existing(path: Path) -> tuple[Path, ...]:
    """Return the profile files a path stands for; a mistyped path is an error here, not an empty directory."""
    if path.is_dir():
        return profile_files(path)
    if not path.exists():
        raise ProfileError(path, None, "", "does not exist", "Name a profile or a directory of profiles.")
    return (path,)


def found_for(profiles: ProfileSet, tool: str) -> Profile:
    """The profile in force for a tool; raises ProfileError where there is none."""
    if tool in profiles:
        return profiles[tool]
    reason = "there is no profile for this tool, so every call of it is refused"
    raise ProfileError(tool, None, "", reason, nearest(tool, profiles))


def described(error: ProfileError) -> dict[str, Any]:
    """An error as data."""
    return {
        "path": str(error.path), "line": error.line, "key": error.key, "problem": error.reason, "hint": error.fix
    }  # fmt: skip


def _json(console: Console, value: dict[str, Any]) -> int:
    print_json(console.file, value)
    return OK


def say_change(console: Console, change: KeyChange) -> None:
    """Print one change: its direction, key and sentence."""
    say(console, f"  {change.direction:<9}  {change.key}  {change.sentence}", _STYLES[change.direction])


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is, never as the terminal's markup."""
    console.print(Text(text, style=style), soft_wrap=True)
