"""``glovebox console``: the web page for the people who watch over calls, and who may come in."""

import importlib

import click

from glovebox_audit import events
from glovebox_audit.printable import printable
from glovebox_sandboxes.contract.errors import MisnamedError
from glovebox_sandboxes.plural import counted
from glovebox_server.cli import options, state
from glovebox_server.cli.groups import LazyGroup
from glovebox_server.cli.options import command, emit, err
from glovebox_server.cli.terminal import table_of
from glovebox_server.console import people
from glovebox_server.console.people import People, Role
from glovebox_server.guards.budgets.spending import read_clocks
from glovebox_server.secret_files import prepare_state
from glovebox_server.settings import Settings
from glovebox_server.upkeep.log import recording

PORT = 8322
_name = options.word_form(people.NAME_FORM, "1 to 32 of a-z 0-9 . _ -, a letter first")


class _ServingGroup(LazyGroup):
    """Commands of the console; without one, it is served."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take options without a command as those of ``serve``."""
        begun = bool(args) and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if begun else ["serve", *args])


@click.group(cls=_ServingGroup)
def console() -> None:
    """A web page of this machine: what runs, what waits, what was."""


@command("serve", console, json="")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="Port; 0: any.")
def console_serve(settings: Settings, port: int) -> None:
    """Serve the page on a loopback address."""
    serving = importlib.import_module("glovebox_server.console.serve")  # the other commands need no web server

    def tell(url: str) -> None:
        err.print(f"The console is at {url}. To come in: glovebox console link --name NAME --role viewer")

    serving.serve_console(settings, port, tell)


@command("link", console)
@click.option("--name", required=True, type=_name, help="Whose: records and quorums name them so.")
@click.option("--role", type=click.Choice(people.ROLES), default="viewer", show_default=True, help="What they may do.")
@click.option("--port", type=click.IntRange(1, 65535), default=PORT, show_default=True, help="Port of the console.")
def console_link(settings: Settings, name: str, role: Role, port: int) -> None:
    """Print a link that begins a session.

    Once, within five minutes; the session ends after eight hours.
    """
    prepare_state(settings.state_dir)
    with people.opened(settings.state_dir) as database, recording(settings) as record:
        record(events.ConsoleInvited(name=name, role=role, by=state.OPERATOR))
        secret = database.transact_now(lambda db: People(db, read_clocks()).invite(name, role))
    link = f"http://127.0.0.1:{port}/enter?link={secret}"
    emit({"link": link, "name": name, "role": role, "seconds": people.LINK_MS // 1000}, link)


@command("list", console)
def console_list(settings: Settings) -> None:
    """List everybody with a session."""
    prepare_state(settings.state_dir)
    with people.opened(settings.state_dir) as database:
        found = database.query_now(lambda db: People(db, read_clocks()).listed())
    rows = [(each.name, each.role, f"{each.seconds_left / 60:.0f} min") for each in found]
    value = [{"name": each.name, "role": each.role, "seconds_left": round(each.seconds_left)} for each in found]
    emit({"sessions": value}, table_of(["name", "role", "left"], rows) or "There is no session.")


@command("revoke", console)
@click.argument("name")
def console_revoke(settings: Settings, name: str) -> None:
    """End all sessions and links of a name."""
    prepare_state(settings.state_dir)
    with people.opened(settings.state_dir) as database, recording(settings) as record:
        ended = database.transact_now(lambda db: People(db, read_clocks()).revoke(name))
        if not ended:
            fix = "`glovebox console list` names those there are."
            raise MisnamedError("Ending sessions", f"{printable(name)} has none", fix)
        record(events.ConsoleRevoked(name=name, by=state.OPERATOR))
    emit({"name": name, "ended": ended}, f"{counted(ended, 'session')} of {name} ended, with links not used yet.")
