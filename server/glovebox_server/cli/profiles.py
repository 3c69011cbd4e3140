"""``glovebox profiles``: declared here, done in ``actions.profiles``."""

import re
import sys
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import click

from glovebox_server.cli.options import Group, Moment, complete_tool, directories, json_option, out, state_directory
from glovebox_server.settings import Settings

_since = click.option(
    "--since",
    type=Moment(),
    default="30d",
    show_default=True,
    help="Calls since this time (UTC), local day, or 30d ago.",
)
_key = click.option("--key", type=click.Path(path_type=Path), help="The private key to which arguments were sealed.")


@click.group(cls=Group)
def profiles() -> None:
    """What each tool may do."""


@profiles.command("list")
@json_option
@directories
def profiles_list(settings: Settings, as_json: bool) -> None:
    """One line per tool."""
    sys.exit(_with_profiles(settings, lambda found, commands: commands.list_profiles(found, out, as_json=as_json)))


@profiles.command("show")
@click.argument("tool", shell_complete=complete_tool)
@json_option
@directories
def profiles_show(settings: Settings, tool: str, as_json: bool) -> None:
    """The whole profile in force, every default filled in."""
    sys.exit(_with_profiles(settings, lambda found, commands: commands.show(found, tool, out, as_json=as_json)))


@profiles.command("explain")
@click.argument("tool", shell_complete=complete_tool)
@json_option
@directories
def profiles_explain(settings: Settings, tool: str, as_json: bool) -> None:
    """What a tool may read, write, reach and spend, in plain words."""
    from glovebox_server.upkeep.environments import objections  # noqa: PLC0415 - see the module's header

    def explain(found: Any, commands: Any) -> int:
        check = partial(objections, settings)
        code: int = commands.explain_tool(found, tool, out, check_environments=check, as_json=as_json)
        return code

    sys.exit(_with_profiles(settings, explain))


@profiles.command("check")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--locked", metavar="FILE", type=click.Path(path_type=Path), help="Compare all in force with this lock.")
@json_option
@directories
def profiles_check(settings: Settings, paths: tuple[Path, ...], locked: Path | None, as_json: bool) -> None:
    """Load profiles and run their examples.

    Yours and the shipped ones, or the given files and directories. With --locked, name what differs from a lock.
    """
    if locked is not None:
        from glovebox_server.cli.actions.proof import lock  # noqa: PLC0415 - see the module's header

        if paths:
            raise click.UsageError("--locked compares what is in force: leave the files out.")
        sys.exit(lock.check(settings, locked, out, as_json=as_json))
    from glovebox_server.app import check_example, profile_directories  # noqa: PLC0415 - see the module's header
    from glovebox_server.cli.actions import profiles as commands  # noqa: PLC0415 - see the module's header
    from glovebox_server.tools import TOOLS  # noqa: PLC0415 - see the module's header
    from glovebox_server.upkeep.environments import objections  # noqa: PLC0415 - see the module's header

    checked = list(paths) or profile_directories(settings)
    code = commands.check(
        checked,
        out,
        check_example=check_example,
        check_environments=partial(objections, settings),
        tools=TOOLS,
        workspace=settings.workspace,
        as_json=as_json,
    )
    sys.exit(code)


class Setting(click.ParamType[tuple[tuple[str, ...], str]]):
    """A key of a profile with its new value."""

    name = "key=value"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[str, ...], str]:
        """Split ``limits.wall_seconds=120``."""
        key, equals, text = value.partition("=")
        if not equals or not re.fullmatch(r"[a-z_]+(\.[a-z_]+){0,3}", key):
            self.fail(f"{value!r} is no KEY=VALUE, as limits.wall_seconds=120.", param, ctx)
        return tuple(key.split(".")), text


@profiles.command("set")
@click.argument("tool", shell_complete=complete_tool)
@click.argument("changes", metavar="KEY=VALUE...", nargs=-1, required=True, type=Setting())
@json_option
@directories
def profiles_set(
    settings: Settings, tool: str, changes: tuple[tuple[tuple[str, ...], str], ...], as_json: bool
) -> None:
    """Change keys of your profile of a tool; comments stay.

    Copies the shipped profile first, if you have none. Prints what changes and what widens. Nothing is written if the
    result is wrong.
    """
    from glovebox_server.app import check_example  # noqa: PLC0415 - see the module's header
    from glovebox_server.upkeep.environments import objections  # noqa: PLC0415 - see the module's header

    def change(found: Any, commands: Any) -> int:
        code: int = commands.set_values(
            found,
            tool,
            changes,
            settings.profiles_dir / f"{tool}.toml",
            out,
            check_example=check_example,
            check_environments=partial(objections, settings),
            lock=settings.locked or Path("glovebox.lock"),
            as_json=as_json,
        )
        return code

    sys.exit(_with_profiles(settings, change))


@profiles.command("lock")
@click.argument("file", default="glovebox.lock", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@json_option
@directories
def profiles_lock(settings: Settings, file: Path, force: bool, as_json: bool) -> None:
    """Write down what is in force: profiles, policy, tools.

    One file (glovebox.lock), to review, and for `serve --locked`.
    """
    from glovebox_server.cli.actions.proof import lock  # noqa: PLC0415 - see the module's header

    sys.exit(lock.write(settings, file, out, force=force, as_json=as_json))


@profiles.command("sign")
@click.argument("file", default="glovebox.lock", type=click.Path(path_type=Path))
@click.option("--key", required=True, type=click.Path(path_type=Path), help="Your Ed25519 private key, in PEM.")
@json_option
def profiles_sign(file: Path, key: Path, as_json: bool) -> None:
    """Sign a lock, into FILE.sig: for `serve --require-signed`.

    FILE is glovebox.lock where none is given.
    """
    from glovebox_server.cli.actions.proof import lock  # noqa: PLC0415 - see the module's header

    sys.exit(lock.sign(file, key, out, as_json=as_json))


@profiles.command("simulate")
@click.argument("candidate", type=click.Path(path_type=Path))
@_since
@json_option
@_key
@state_directory
def profiles_simulate(settings: Settings, candidate: Path, since: datetime, key: Path | None, as_json: bool) -> None:
    """Decide recorded calls again, under another profile.

    CANDIDATE is a file, or a directory as in force over the shipped ones. Exit 1 if one would be decided otherwise.
    """
    from glovebox_server.cli.actions.proof import simulate  # noqa: PLC0415 - see the module's header

    sys.exit(simulate.simulate(settings.state_dir / "audit", candidate, since, out, key=key, as_json=as_json))


@profiles.command("suggest")
@click.argument("tool", shell_complete=complete_tool)
@_since
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="Write the suggested profile here: a new TOOL.toml, or a directory.",
)
@json_option
@_key
@state_directory
def profiles_suggest(
    settings: Settings, tool: str, *, since: datetime, output: Path | None, key: Path | None, as_json: bool
) -> None:
    """The narrowest profile for what recorded calls used.

    What would change, and what each change is based on. Nothing is changed.
    """
    from glovebox_server.app import check_example, load_profiles  # noqa: PLC0415 - see the module's header
    from glovebox_server.cli.actions.proof import simulate  # noqa: PLC0415 - see the module's header

    place, found = settings.state_dir / "audit", load_profiles(settings)
    code = simulate.suggest(
        place, found, tool, since, out, check_example=check_example, key=key, output=output, as_json=as_json
    )
    sys.exit(code)


@profiles.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@json_option
def profiles_diff(a: Path, b: Path, as_json: bool) -> None:
    """Compare two profiles, or directories; exit 1 if one is wider."""
    from glovebox_server.cli.actions import profiles as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.diff_paths(a, b, out, as_json=as_json))


def _with_profiles(settings: Settings, act: Callable[[Any, Any], int]) -> int:
    from glovebox_server.app import load_profiles  # noqa: PLC0415 - see the module's header
    from glovebox_server.cli.actions import profiles as commands  # noqa: PLC0415 - see the module's header

    return act(load_profiles(settings), commands)
