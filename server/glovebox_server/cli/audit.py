"""``glovebox audit``: declared here, done in ``actions.audit``."""

import sys
from pathlib import Path

import click

from glovebox_server.cli.options import Group, directories, err, json_option, out
from glovebox_server.settings import Settings

_file = click.Path(path_type=Path, dir_okay=False)


@click.group(cls=Group)
def audit() -> None:
    """What happened, and whether the log of it is whole."""


@audit.command("tail")
@click.option("-n", "count", default=20, show_default=True, help="How many records.")
@click.option("-f", "--follow", is_flag=True, help="Go on as records are written.")
@click.option("--all", "everything", is_flag=True, help="Show the servers' own records too, as --json does.")
@json_option
@directories
def audit_tail(settings: Settings, count: int, follow: bool, everything: bool, as_json: bool) -> None:
    """The last records of calls."""
    from glovebox_server.cli.actions import audit as commands  # noqa: PLC0415 - see the module's header

    log = settings.state_dir / "audit"
    sys.exit(commands.tail(log, out, count=count, follow=follow, as_json=as_json, everything=everything))


@audit.command("show")
@click.argument("call_id", metavar="CALL")
@json_option
@directories
def audit_show(settings: Settings, call_id: str, as_json: bool) -> None:
    """Everything recorded of one call."""
    from glovebox_server.cli.actions import audit as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.show(settings.state_dir / "audit", out, call_id, as_json=as_json))


@audit.command("verify")
@click.option("--anchor", help="SEQ:HASH noted down earlier (`glovebox audit head`): finds a log cut and rewritten.")
@click.option("--key", "keys", multiple=True, type=_file, help="A public key: check the signature of each seal too.")
@click.option("--all", "everything", is_flag=True, help="Read again what was found whole before.")
@click.option("--proof", type=_file, help="Check this inclusion proof instead, with --key and nothing else.")
@json_option
@directories
def audit_verify(
    settings: Settings,
    *,
    anchor: str | None,
    keys: tuple[Path, ...],
    everything: bool,
    proof: Path | None,
    as_json: bool,
) -> None:
    """Check the log; names the line where something was changed, removed, added or reordered."""
    from glovebox_server.cli.actions import audit as commands  # noqa: PLC0415 - see the module's header

    if proof is not None:
        if anchor is not None or everything or len(keys) != 1:
            raise click.UsageError("--proof takes one --key, the server's public key, and neither --anchor nor --all.")
        sys.exit(commands.verify_proof(proof, out, public_key=keys[0], as_json=as_json))
    log = settings.state_dir / "audit"
    sys.exit(commands.verify(log, out, anchor=anchor, key_files=keys, everything=everything, as_json=as_json))


@audit.command("prove")
@click.argument("call_id", metavar="CALL")
@directories
def audit_prove(settings: Settings, call_id: str) -> None:
    """Print the inclusion proof of one call: its records, and that they lie in a sealed segment, as JSON."""
    from glovebox_server.cli.actions import audit as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.prove(settings.state_dir / "audit", out, err, call_id))


@audit.command("seal")
@directories
def audit_seal(settings: Settings) -> None:
    """End the segment that is being written, so that its calls can be proved."""
    from glovebox_server.cli.actions import audit as commands  # noqa: PLC0415 - see the module's header
    from glovebox_server.cli.actions.commands import audit_log  # noqa: PLC0415 - see the module's header

    sys.exit(commands.seal(settings.state_dir / "audit", out, lambda: audit_log(settings)))


@audit.command("head")
@json_option
@directories
def audit_head(settings: Settings, as_json: bool) -> None:
    """The end of the chain, to be kept elsewhere as an anchor."""
    from glovebox_server.cli.actions import audit as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.head(settings.state_dir / "audit", out, as_json=as_json))
