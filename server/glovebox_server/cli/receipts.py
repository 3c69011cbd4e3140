"""``glovebox receipt``: declared here, done in ``actions.receipts``."""

import sys
from pathlib import Path

import click

from glovebox_server.cli.options import File, Group, err, json_option, out, state_directory
from glovebox_server.settings import Settings


@click.group(cls=Group)
def receipt() -> None:
    """Signed proof of what one call was, got and did."""


@receipt.command("key")
@json_option
@state_directory
def receipt_key(settings: Settings, as_json: bool) -> None:
    """The public key, for whoever verifies; made where there is none."""
    from glovebox_server.cli.actions import receipts as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.key(settings.state_dir, out, err, as_json=as_json))


@receipt.command("show")
@click.argument("wanted", metavar="CALL|FILE")
@click.option("--json", "as_json", is_flag=True, help="Print the receipt itself, as `receipt verify` takes it.")
@state_directory
def receipt_show(settings: Settings, wanted: str, as_json: bool) -> None:
    """What a receipt says; of a call made here, or in a file."""
    from glovebox_server.cli.actions import receipts as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.show(settings.state_dir, out, err, wanted, as_json=as_json))


@receipt.command("verify")
@click.argument("wanted", metavar="CALL|FILE")
@click.option("--key", type=File(), help="Public key; else that of this server.")
@click.option(
    "--audit",
    type=click.Path(path_type=Path, file_okay=False),
    help="Log to find its place in; of a CALL this server's.",
)
@json_option
@state_directory
def receipt_verify(settings: Settings, wanted: str, key: Path | None, audit: Path | None, as_json: bool) -> None:
    """Prove a receipt, of a call made here or in a file.

    Exit 1 and the reason if it does not hold.
    """
    from glovebox_server.cli.actions import receipts as commands  # noqa: PLC0415 - see the module's header

    state = settings.state_dir
    sys.exit(commands.verify(state, out, err, wanted, public_key=key, audit=audit, as_json=as_json))
