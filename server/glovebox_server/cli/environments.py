"""``glovebox environment``: declared here, done in ``actions.environments``."""

import sys

import click

from glovebox_server.cli.options import Group, complete_environment, directories, err, json_option, out
from glovebox_server.settings import Settings


@click.group(cls=Group)
def environment() -> None:
    """Python packages for programs: named sets, locked by hash. `glovebox setup --environment` builds."""


@environment.command("list")
@json_option
@directories
def environment_list(settings: Settings, as_json: bool) -> None:
    """Each with its state, size, digest and the tools that have it."""
    from glovebox_server.cli.actions import environments  # noqa: PLC0415 - see the header of ``main``

    sys.exit(environments.show(settings, out, as_json=as_json))


@environment.command("update")
@click.argument("name", shell_complete=complete_environment)
@json_option
@directories
def environment_update(settings: Settings, name: str, as_json: bool) -> None:
    """Lock the newest versions that its file allows; build nothing."""
    from glovebox_server.cli.actions import environments  # noqa: PLC0415 - see the header of ``main``

    sys.exit(environments.update(settings, out, err, name=name, as_json=as_json))


@environment.command("remove")
@click.argument("name", shell_complete=complete_environment)
@click.option("--force", is_flag=True, help="Also where a profile names it; then no server starts with that profile.")
@click.option("--docker", is_flag=True, help="Also the Docker Engine's images of it, which others may use too.")
@json_option
@directories
def environment_remove(settings: Settings, name: str, force: bool, docker: bool, as_json: bool) -> None:
    """Remove what is built of an environment; its file and lock stay."""
    from glovebox_server.cli.actions import environments  # noqa: PLC0415 - see the header of ``main``

    sys.exit(environments.remove(settings, out, name=name, force=force, docker=docker, as_json=as_json))
