"""``glovebox canary``: declared here, done in ``actions.governance.canaries``."""

import sys

import click

from glovebox_server.cli.options import Group, json_option, out, state_directory
from glovebox_server.settings import Settings


@click.group(cls=Group)
def canary() -> None:
    """Files whose content stops whoever sends it."""


@canary.command("plant")
@click.option("--name", help="Its path in the workspace; else deploy-credentials.env.")
@json_option
@state_directory
def canary_plant(settings: Settings, name: str | None, as_json: bool) -> None:
    """Put one into the workspace; servers know it at once."""
    from glovebox_server.cli.actions.governance import canaries as commands  # noqa: PLC0415 - see the header of ``main``

    sys.exit(commands.plant(settings, out, name=name, as_json=as_json))


@canary.command("list")
@json_option
@state_directory
def canary_list(settings: Settings, as_json: bool) -> None:
    """Where they are, and whether they stand.

    Exit 4 if one cannot be read: then it is not looked for.
    """
    from glovebox_server.cli.actions.governance import canaries as commands  # noqa: PLC0415 - see the header of ``main``

    sys.exit(commands.listed(settings, out, as_json=as_json))


@canary.command("remove")
@click.argument("canary_id", metavar="[ID]", required=False)
@click.option("--all", "everything", is_flag=True, help="Every canary.")
@json_option
@state_directory
def canary_remove(settings: Settings, canary_id: str | None, everything: bool, as_json: bool) -> None:
    """Take one out of its workspace, and forget it."""
    from glovebox_server.cli.actions.governance import canaries as commands  # noqa: PLC0415 - see the header of ``main``

    if (canary_id is None) is not everything:
        raise click.UsageError("Name one canary, as `glovebox canary list` shows it, or --all.")
    sys.exit(commands.remove(settings, out, canary_id, as_json=as_json))
