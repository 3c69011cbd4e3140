"""Shared by all commands: output, the options for directories, what they take."""

import functools
import importlib
import os
import re
import stat
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from click.core import ParameterSource
from pydantic import ValidationError
from rich.text import Text

from glovebox_audit.printable import printable
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.cli import state
from glovebox_server.cli.groups import JSON, STATE_DIR, Act, CliCommand
from glovebox_server.cli.terminal import Shown, Terminal, print_json, print_table
from glovebox_server.settings import Settings, unknown_variables

T = TypeVar("T")

#: Results and data go to standard output, messages for the person to standard error.
out = Terminal()
err = Terminal(stderr=True)


_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

#: Characters of the longest principals, which are those of OAuth issuers.
_MAX_PRINCIPAL = 640

#: Words for days, and how many days ago each began.
_DAYS = {"today": 0, "yesterday": 1}


def duration(text: str) -> timedelta | None:
    """Parse ``90m`` or ``30d``; None if it is none."""
    found = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    return found and timedelta(**{_UNITS[found[2]]: int(found[1])})


def time_or_age(value: str) -> datetime:
    """Parse ``2h``, ``yesterday``, ``2026-11-22`` (local days, from midnight) or ``2026-11-22T10:00:00+01:00``."""
    try:
        if (ago := duration(value)) is not None:
            return datetime.now(UTC) - ago
        day = str(datetime.now(UTC).astimezone().date() - timedelta(days=_DAYS[value])) if value in _DAYS else value
        found = datetime.fromisoformat(day)
        is_day = re.fullmatch(r"[\dW-]+", day, re.ASCII)  # astimezone reads it as a local one
        return (found if found.tzinfo or is_day else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        told = "a day (yesterday, 2026-11-22) or time (2026-11-22T10:00) nor how long ago (2h)"
        raise click.BadParameter(f"{value!r} is neither {told}.") from None


def time_option(name: str, text: str, default: str | None = None) -> Callable[[Act], Act]:
    """Return an option that takes a time, or how long ago."""
    return click.option(name, type=time_or_age, metavar="TIME", default=default, show_default=True, help=text)


def lifetime(value: str) -> timedelta:
    """Parse ``12h`` or ``30d``."""
    found = duration(value)
    if not found or value.endswith("s"):
        raise click.BadParameter(f"{value!r} is not how long, as 90m, 12h, 30d or 8w.")
    return found


def parsed_file(what: str, parse: Callable[[bytes], T], most: int) -> Callable[[str], T]:
    """Return a type of options: the content of a regular file, of which ``most`` bytes are read, parsed."""

    def file(value: str) -> T:
        if (path := Path(value)).exists() and not path.is_file():  # a pipe without a writer would block
            raise click.BadParameter(f"{value!r} is no regular file: name the file itself.")
        try:
            with path.open("rb") as opened:
                return parse(opened.read(most))
        except (ValueError, OSError) as problem:
            words = (isinstance(problem, OSError) and problem.strerror) or str(problem)
            raise click.BadParameter(printable(f"The {what} {path} cannot be used: {words}.")) from None

    return file


def word_form(pattern: str, words: str) -> Callable[[str], str]:
    """Return a type of options: a word that matches a pattern, which ``words`` describe for a person."""

    def word(value: str) -> str:
        if not re.fullmatch(pattern, value, re.ASCII):
            raise click.BadParameter(f"{value!r} is none: {words}.")
        return value

    return word


def caller_id(value: str) -> str:
    """Refuse an invalid principal."""
    model = importlib.import_module("glovebox_profiles.policy.model")  # not of every command
    if not model.is_principal(value) or len(value) > _MAX_PRINCIPAL:
        told = "name a caller as the audit log does, as token:ci, local:1000 or oauth:ISSUER#SUBJECT"
        raise click.BadParameter(f"{value!r} is no principal: {told}.")
    return value


workflow_name = word_form("[a-z][a-z0-9-]{0,63}", "1 to 64 of a-z 0-9 -, a letter first, as in policy.toml")
workflow_option = click.option(
    "--workflow",
    metavar="NAME",
    type=workflow_name,
    help="What calls are part of, where their token is bound to nothing.",
)

transport_option = click.option(
    "--transport",
    type=click.Choice(["stdio", "http"]),
    default="stdio",
    show_default=True,
    help="How clients reach it.",
)

_FOLDERS = {
    "workspace": "Directory the tools may read (GLOVEBOX_WORKSPACE); else the current one, over http none.",
    "profiles_dir": "Your own profiles (GLOVEBOX_PROFILES_DIR).",
    "policy": "Who may call what (GLOVEBOX_POLICY); else policy.toml beside your profiles, if it is there.",
    "data_dir": "The sandboxes' runtime (GLOVEBOX_DATA_DIR).",
    "state_dir": "Audit log, artifacts, token (GLOVEBOX_STATE_DIR); else as /etc/glovebox/glovebox.toml says.",
}
"""Options that name settings, of every command that takes settings, and their help."""

_LOCK = {
    "locked": "Refuse profiles, policy and tools that differ from this lock (GLOVEBOX_LOCKED).",
    "require_signed": "Refuse a lock that the holder of this public key did not sign (GLOVEBOX_REQUIRE_SIGNED).",
}
"""The same, of commands that make calls."""


def command(
    name: str,
    group: click.Group | None = None,
    *,
    opens: Literal["state", "settings", "nothing"] = "state",
    json: str = "Print one JSON object.",
    makes_calls: bool = False,
) -> Callable[[Act], click.Command]:
    """Return a decorator that makes a command, with ``--json`` (unless its help is empty) and options for settings.

    ``opens="state"``: it opens the state directory, so it locates it, and becomes its owner; ``"settings"``: it only
    takes ``settings``.
    """

    def made(act: Act) -> click.Command:
        found = click.command(name, cls=CliCommand)(act)
        if json:
            found.params.append(click.Option(["--json"], is_flag=True, help=json))
        if opens != "nothing":
            texts = _FOLDERS | (_LOCK if makes_calls else {})
            for each, text in texts.items():
                is_file = each not in _FOLDERS or each == "policy"
                kind = click.Path(file_okay=is_file, dir_okay=not is_file)
                found.params.append(click.Option([f"--{each.replace('_', '-')}"], type=kind, help=text))
            found.callback = functools.partial(_with_settings, act, [*texts], opens_state=opens == "state")
        if group is not None:
            group.add_command(found)
        return found

    return made


def _with_settings(act: Act, names: list[str], /, *, opens_state: bool, **kwargs: Any) -> int | None:
    """Do what a command does, with settings; each option overrides its environment variable."""
    context = click.get_current_context()
    named = {name: path for name in names if (path := kwargs.pop(name)) is not None}
    if unknown := unknown_variables(os.environ):
        raise click.UsageError(printable(" ".join(unknown)))
    settings = _settings(named)
    # A server that a client starts is the user's own, whatever the machine serves.
    if opens_state and kwargs.get("transport") != "stdio":
        # ``serve`` begins a server; other commands are about those there are.
        settings = state.locate(settings, guesses=context.info_name == "serve")
        if state.become_owner(settings.state_dir):
            settings = _settings(named | {"state_dir": settings.state_dir})
    for name in _FOLDERS:
        if (wrong := _wrong(settings, name)) is not None:
            hint = f"--{name.replace('_', '-')}, GLOVEBOX_{name.upper()}"
            raise click.BadParameter(f"{getattr(settings, name)} {wrong}.", param_hint=hint)
    context.meta[STATE_DIR] = settings.state_dir
    return act(settings=settings, **kwargs)


def _settings(named: Mapping[str, Any]) -> Settings:
    try:
        return Settings(**named)
    except ValidationError as problem:
        first = problem.errors()[0]
        name = f"GLOVEBOX_{'_'.join(str(part) for part in first['loc'])}".upper()
        raise click.UsageError(f"{name}: {first['msg']}.") from None
    except DiagnosedError as problem:
        raise click.UsageError(str(problem)) from None


def _wrong(settings: Settings, name: str) -> str | None:
    """Return why a directory cannot be used; None if it can, or if its user makes it or reports that."""
    path: Path | None = getattr(settings, name)
    if path is None:
        return None
    try:
        str(path).encode()  # records and digests are UTF-8
        # A policy's reader checks it.
        return None if name == "policy" or stat.S_ISDIR(path.stat().st_mode) else "is not a directory"
    except UnicodeEncodeError:
        return "is not UTF-8: rename it, or name another"
    except OSError as problem:
        later = isinstance(problem, (FileNotFoundError, PermissionError)) and name != "workspace"
        return None if later else f"cannot be used: {problem.strerror}"


def wants_json() -> bool:
    """Return whether the current command was given ``--json``."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(JSON))


def emit(value: object, *shown: Shown | None, indent: int | None = 2) -> bool:
    """Print a value: as JSON with ``--json``, else as ``shown``, tables and lines; return whether it was JSON.

    ``indent`` is the JSON's; None for one line.
    """
    if wants_json():
        print_json(out.file, value, indent=indent)
        return True
    for each in shown:
        if isinstance(each, str | Text):
            out.print(each)
        elif each is not None:
            print_table(out, each)
    return False


def require_http(transport: str, *names: str) -> None:
    """Refuse options of a listening server, which would be ignored."""
    given = click.get_current_context()
    for name in names:
        if transport != "http" and given.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} is for --transport http; over {transport} the server listens nowhere.")


def given(settings: Settings, *names: str) -> list[str]:
    """Return the directories that are not the default, as options with absolute paths."""
    words: list[str] = []
    for name in names:
        if name in settings.model_fields_set:
            words += [f"--{name.replace('_', '-')}", str(getattr(settings, name).absolute())]
    return words


def complete_tool(_ctx: click.Context, _param: click.Parameter, begun: str) -> list[str]:
    """Complete names of tools, for a shell's tab key."""
    tools = importlib.import_module("glovebox_server.tools").TOOLS
    return [name for name in tools if name.startswith(begun)]


def complete_environment(ctx: click.Context, _param: click.Parameter, begun: str) -> list[str]:
    """Complete names of environments, shipped and the operator's."""
    environments = importlib.import_module("glovebox_sandboxes.runtime.environments")
    profiles_dir = ctx.params.get("profiles_dir")
    try:
        own = (Settings(profiles_dir=profiles_dir) if profiles_dir else Settings()).environments_dir
    except (ValidationError, DiagnosedError):
        own = environments.SHIPPED
    return [name for name in environments.named(own) if name.startswith(begun)]
