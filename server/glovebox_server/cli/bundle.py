"""``glovebox bundle``: declared here, done in ``actions.proof.bundle``. Takes nothing of a server."""

import sys
from pathlib import Path

import click

from glovebox_server.cli.options import File, Group, json_option, out

_file = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.group(cls=Group)
def bundle() -> None:
    """What one call or run did, as one file to check anywhere."""


@bundle.command("verify")
@click.argument("file", type=_file)
@click.option("--key", "keys", multiple=True, type=File(), help="The server's public key, not from whoever sent FILE.")
@json_option
def bundle_verify(file: Path, keys: tuple[Path, ...], as_json: bool) -> None:
    """Check a bundle of `audit bundle`, offline.

    It shows what ran, what was withheld, and that no more of it is on record.
    """
    from glovebox_server.cli.actions.proof import bundle as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.verify(file, out, key_files=keys, as_json=as_json))
