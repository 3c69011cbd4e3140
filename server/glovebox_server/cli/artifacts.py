"""``glovebox artifact``: declared here, done in ``actions.artifacts``."""

import os
import sys
from pathlib import Path

import click

from glovebox_audit.printable import printable
from glovebox_server.cli.options import Group, err, json_option, out, state_directory
from glovebox_server.settings import Settings


class _Artifact(Group):
    """``glovebox artifact URI`` is short for ``glovebox artifact save URI``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put ``save`` before what is no command."""
        known = args and (args[0] in self.commands or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if known or not args else ["save", *args])


def _principal(_ctx: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    from glovebox_profiles.policy.model import is_principal  # noqa: PLC0415 - see the header of ``main``

    if value is not None and not is_principal(value):
        raise click.BadParameter("name a principal as the audit log does: local:UID or token:NAME, or oauth:….")
    return value


def _address(_ctx: click.Context, _argument: click.Parameter, value: str) -> str:
    from glovebox_server.artifacts.record import id_of  # noqa: PLC0415 - see the header of ``main``

    if id_of(value) is None:
        shown = repr(printable(value)[:200])
        raise click.BadParameter(f"{shown} is no address (artifact://…): `glovebox artifact list` shows them.")
    return value


@click.group(cls=_Artifact)
def artifact() -> None:
    """Files that programs made: list, save, promote them. `glovebox artifact URI` saves, too."""


@artifact.command("list")
@click.option("--principal", callback=_principal, help="Of this caller only: local:UID or token:NAME.")
@click.option("--call", "call_id", metavar="CALL", help="Of this call only.")
@json_option
@state_directory
def artifact_list(settings: Settings, principal: str | None, call_id: str | None, as_json: bool) -> None:
    """One line per artifact of any caller, newest first."""
    from glovebox_server.cli.actions import artifacts as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.listed(settings.state_dir, out, principal=principal, call_id=call_id, as_json=as_json))


@artifact.command("save")
@click.argument("uri", callback=_address)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File to write; else stdout.")
@click.option("--principal", callback=_principal, help="Whose it is, where it is not yours: token:NAME over HTTP.")
@json_option
@state_directory
def artifact_save(settings: Settings, uri: str, output: Path | None, principal: str | None, as_json: bool) -> None:
    """Write an artifact to a new file, or to standard output.

    Its risks are told on standard error.
    """
    from glovebox_server.cli.actions import artifacts as commands  # noqa: PLC0415 - see the module's header

    if as_json and output is None:
        raise click.UsageError("--json says what was written: add -o FILE.")
    whose = principal or f"local:{os.getuid()}"
    sys.exit(commands.saved(settings, out, err, uri=uri, output=output, principal=whose, as_json=as_json))


@artifact.command("scan")
@click.argument("uris", metavar="URI…", nargs=-1, required=True)
@click.option("--principal", callback=_principal, help="Whose they are, where they are not yours: token:NAME.")
@json_option
@state_directory
def artifact_scan(settings: Settings, uris: tuple[str, ...], principal: str | None, as_json: bool) -> None:
    """Look, in a sandbox, for what acts when files are opened.

    And for secrets. Exit 1 where there is something.
    """
    from glovebox_server.cli.actions.governance import scans as commands  # noqa: PLC0415 - see the module's header

    whose = principal or f"local:{os.getuid()}"
    sys.exit(commands.scan(settings, out, uris=uris, principal=whose, as_json=as_json))


@artifact.command("reencode")
@click.argument("uris", metavar="URI…", nargs=-1, required=True)
@click.option("--principal", callback=_principal, help="Whose they are, where they are not yours: token:NAME.")
@json_option
@state_directory
def artifact_reencode(settings: Settings, uris: tuple[str, ...], principal: str | None, as_json: bool) -> None:
    """Make pictures anew in a sandbox, of their pixels alone.

    Prints the address of each new artifact. Exit 1 where one could not be made.
    """
    from glovebox_server.cli.actions.governance import scans as commands  # noqa: PLC0415 - see the module's header

    whose = principal or f"local:{os.getuid()}"
    sys.exit(commands.reencode(settings, out, uris=uris, principal=whose, as_json=as_json))
