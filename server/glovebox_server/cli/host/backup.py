"""``glovebox backup`` and ``restore``: a state directory in one file, and back."""

from importlib.metadata import version
from pathlib import Path

import click

from glovebox_sandboxes.plural import counted
from glovebox_server.cli import state
from glovebox_server.cli.options import command, emit
from glovebox_server.settings import Settings
from glovebox_server.upkeep import backup as taking
from glovebox_server.upkeep import restore as restoring

_file = click.argument("file", type=click.Path(path_type=Path, dir_okay=False))


@command("backup")
@_file
@click.option("--without-keys", is_flag=True, help="Leave out keys and canaries, which a thief could use.")
def backup(settings: Settings, file: Path, without_keys: bool) -> None:
    """Back up the state directory, while servers use it.

    To a new file that only you can read.
    """
    head, found = taking.take(settings.state_dir, file, version=version("glovebox-mcp"), with_keys=not without_keys)
    size = sum(each for each, _ in found.values())
    keys = any(name.startswith("keys/") for name in found)
    told = f"{file}: {counted(len(found), 'file')}, {counted(size, 'byte')}, the log up to {head}."
    value = {"file": str(file), "head": head, "keys": keys, "files": len(found), "bytes": size}
    emit(value, f"{told} {'It contains keys: keep it like one.' if keys else 'It contains no keys.'}")


@command("restore")
@_file
def restore(settings: Settings, file: Path) -> None:
    """Put a backup in the place of the state directory.

    No server may be live there. Stops, and tokens that were revoked, stay so; open approvals are withdrawn.
    """
    done = restoring.restore(settings, file, by=state.OPERATOR)
    lost, old = done["tokens_left_out"], done["replaced"]
    emit(
        done,
        f"{settings.state_dir} is as it was at {done['made']}: the log up to {done['head']}.",
        f"Open questions and approvals that were withdrawn: {done['withdrawn']}.",
        f"Tokens left out, gone since: {', '.join(lost)}." if lost else None,
        f"What was there before is in {old}." if old else None,
    )
