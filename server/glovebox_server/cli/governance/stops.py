"""``glovebox stop``, ``resume`` and ``stops``: declared here, done in ``actions.governance.stops``."""

import re
import sys
from pathlib import Path

import click
from click.core import ParameterSource

from glovebox_server.cli.options import Group, Told, complete_tool, directories, err, json_option, out, state_directory
from glovebox_server.guards.stops.stop import SCOPES, Scope
from glovebox_server.settings import Settings

_ID = r"[0-9a-z]{26}"
_FORMS = {
    "call": (rf"c_{_ID}", "a call's id, as c_01h…: `glovebox audit query` shows them"),
    "run": (rf"r_{_ID}", "a run's id, as r_01h…: `glovebox audit show CALL` names it"),
    "principal": (r".{1,640}", "a caller as the audit log names it, as token:ci or local:1000"),
    "workflow": (r"[a-z][a-z0-9-]{0,63}", "a workflow, as [workflows] of policy.toml does"),
}
"""What each name looks like: a slip would stop nobody."""


@click.command(cls=Told)
@click.option("--call", metavar="ID", help="This call.")
@click.option("--run", metavar="ID", help="All calls of this run.")
@click.option("--principal", metavar="ID", help="All calls of this caller, as token:ci or local:1000.")
@click.option("--workflow", metavar="NAME", help="All calls of this workflow.")
@click.option("--tool", metavar="NAME", shell_complete=complete_tool, help="All calls of this tool.")
@click.option("--all", "everything", is_flag=True, help="Everything.")
@click.option(
    "--because",
    default="The operator gave no reason.",
    help="Why, in a sentence: every caller that is stopped reads it.",
)
@json_option
@directories
def stop(settings: Settings, *, everything: bool, because: str, as_json: bool, **given: str | None) -> None:
    """End calls under way within a second, and refuse new ones.

    In all servers of the state directory, also after a restart, until `glovebox resume`. --all: of every directory
    there is. Exit 5: it is stored, and no server is live there.
    """
    from glovebox_profiles.policy.model import is_principal  # noqa: PLC0415 - see the header of ``main``
    from glovebox_server.cli.actions.governance import stops as commands  # noqa: PLC0415 - see the header of ``main``

    named: list[tuple[Scope, str]] = [(scope, name) for scope in SCOPES if (name := given.get(scope)) is not None]
    if everything:
        named.append(("all", ""))
    if len(named) != 1:
        raise click.UsageError("Say what to stop by one of --call, --run, --principal, --workflow, --tool and --all.")
    (scope, name) = named[0]
    form, words = _FORMS.get(scope, ("", ""))
    if form and not (re.fullmatch(form, name, re.ASCII) and (scope != "principal" or is_principal(name))):
        raise click.BadParameter(f"name {words}.", param_hint=f"--{scope}")
    if scope == "tool" and name not in (tools := complete_tool(click.get_current_context(), _TOOL, "")):
        raise click.BadParameter(f"there is no such tool; there are {', '.join(tools)}.", param_hint="--tool")
    if not because.strip() or len(because) > commands.MAX_BECAUSE:
        raise click.BadParameter(f"say it in 1 to {commands.MAX_BECAUSE} characters.", param_hint="--because")
    settings, places = _places(settings, everything=everything)
    sys.exit(commands.stop(settings, out, err, places, scope=scope, name=name, because=because, as_json=as_json))


def _places(settings: Settings, *, everything: bool) -> tuple[Settings, list[Path]]:
    """Return the settings with the directory that is meant, and all directories that are."""
    from glovebox_server.cli import state  # noqa: PLC0415 - see the header of ``main``

    is_named = "state_dir" in settings.model_fields_set
    settings = state.locate(settings)
    if everything:
        on_line = click.get_current_context().get_parameter_source("state_dir") is ParameterSource.COMMANDLINE
        return settings, state.find_directories(settings, named=on_line)
    if not is_named:
        state.require_one(settings)
    return settings, [settings.state_dir]


_TOOL = click.Option(["--tool"])


@click.command(cls=Told)
@click.argument("stop_id", metavar="[ID]", required=False)
@click.option("--all", "everything", is_flag=True, help="Every stop.")
@json_option
@state_directory
def resume(settings: Settings, stop_id: str | None, everything: bool, as_json: bool) -> None:
    """Lift a stop, or all of them."""
    from glovebox_server.cli.actions.governance import stops as commands  # noqa: PLC0415 - see the header of ``main``

    if (stop_id is None) is not everything:
        raise click.UsageError("Name one stop, as `glovebox stops list` shows it, or --all.")
    sys.exit(commands.resume(settings, out, stop_id, as_json=as_json))


@click.group(cls=Group)
def stops() -> None:
    """What is stopped: see `glovebox stop` and `glovebox resume`."""


@stops.command("list")
@json_option
@state_directory
def stops_list(settings: Settings, as_json: bool) -> None:
    """The stops in force, the oldest first.

    Exit 4 if one cannot be read: then everything is stopped.
    """
    from glovebox_server.cli.actions.governance import stops as commands  # noqa: PLC0415 - see the header of ``main``

    sys.exit(commands.listed(settings, out, err, as_json=as_json))
