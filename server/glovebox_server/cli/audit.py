"""``glovebox audit``: declared here, done in ``actions.audit``."""

import sys
from pathlib import Path
from typing import Any

import click

from glovebox_audit.query.outcomes import OUTCOMES
from glovebox_server.cli.options import File, Group, Moment, err, json_option, out, state_directory
from glovebox_server.settings import Settings

_file = File()
_lines_option = click.option("--json", "as_json", is_flag=True, help="Print the records, one JSON object per line.")


@click.group(cls=Group)
def audit() -> None:
    """What happened, and whether the log of it is whole."""


@audit.command("tail")
@click.option("-n", "--limit", "count", default=20, show_default=True, help="How many records.")
@click.option("-f", "--follow", is_flag=True, help="Go on as records are written.")
@click.option("--all", "everything", is_flag=True, help="Show the servers' own records too, as --json does.")
@_lines_option
@state_directory
def audit_tail(settings: Settings, count: int, follow: bool, everything: bool, as_json: bool) -> None:
    """The last records of calls."""
    from glovebox_server.cli.actions import audit as commands  # noqa: PLC0415 - see the module's header

    log = settings.state_dir / "audit"
    sys.exit(commands.tail(log, out, count=count, follow=follow, as_json=as_json, everything=everything))


@audit.command("show")
@click.argument("call_id", metavar="[CALL]", default="last")
@_lines_option
@state_directory
def audit_show(settings: Settings, call_id: str, as_json: bool) -> None:
    """One call as a page: what was asked, decided, done, and spent.

    CALL is its id, the beginning of it, or `last`, which it is where none is given.
    """
    from glovebox_server.cli.actions import page  # noqa: PLC0415 - see the module's header

    sys.exit(page.show(settings.state_dir / "audit", out, err, call_id, as_json=as_json))


@audit.command("query")
@click.option("--tool", "tools", multiple=True, help="Calls of this tool.")
@click.option("--principal", "principals", multiple=True, help="Calls of this caller, as token:ci or local:1000.")
@click.option("--client", "clients", multiple=True, help="Calls of this program, as it is shown; '' for none.")
@click.option("--run", "runs", multiple=True, help="Calls of this run, as `audit show` has it: r_ and 26 characters.")
@click.option("--workflow", "workflows", multiple=True, help="Calls of this workflow; '' for none.")
@click.option("--outcome", "outcomes", multiple=True, type=click.Choice(OUTCOMES), help="Calls that came out so.")
@click.option(
    "--since",
    type=Moment(),
    help="Not before this time (UTC unless it names a zone), local day (yesterday), or 2h ago.",
)
@click.option("--until", type=Moment(), help="Before this time, or the beginning of this day: today.")
@click.option("--grep", "text", help="Calls of which a record has this text, in upper or lower case.")
@click.option(
    "-n", "--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="How many, the newest first."
)
@json_option
@state_directory
def audit_query(settings: Settings, *, text: str | None, limit: int, as_json: bool, **given: Any) -> None:
    """Find calls, the newest first.

    Those that fit every option; of a repeated one, any of its values.
    """
    from glovebox_audit.query.index import Filters  # noqa: PLC0415 - see the module's header
    from glovebox_server.cli.actions import query  # noqa: PLC0415 - see the module's header

    filters = Filters(text=None if text is None else text.casefold(), **given)
    sys.exit(query.query(settings.state_dir / "audit", out, err, filters, limit=limit, as_json=as_json))


@audit.command("verify")
@click.option("--anchor", help="SEQ:HASH noted down earlier (`glovebox audit head`): finds a log cut and rewritten.")
@click.option("--anchors", type=_file, help="The same for each line of this file, as a server keeps them.")
@click.option("--key", "keys", multiple=True, type=_file, help="A public key: check the signature of each seal too.")
@click.option("--all", "everything", is_flag=True, help="Read again what was found whole before.")
@click.option("--proof", type=_file, help="Check this inclusion proof instead, with --key and nothing else.")
@json_option
@state_directory
def audit_verify(
    settings: Settings,
    *,
    anchor: str | None,
    anchors: Path | None,
    keys: tuple[Path, ...],
    everything: bool,
    proof: Path | None,
    as_json: bool,
) -> None:
    """Check the log, and name the line where it was changed.

    Or where lines were removed, added or reordered.
    """
    from glovebox_server.cli.actions import audit as commands  # noqa: PLC0415 - see the module's header

    if proof is not None:
        if anchor is not None or anchors is not None or everything or len(keys) != 1:
            raise click.UsageError(
                "--proof takes one --key, the server's public key, and no --anchor, --anchors, --all."
            )
        sys.exit(commands.verify_proof(proof, out, key_file=keys[0], as_json=as_json))
    log = settings.state_dir / "audit"
    code = commands.verify(
        log, out, anchor=anchor, anchors_file=anchors, key_files=keys, everything=everything, as_json=as_json
    )
    sys.exit(code)


@audit.command("prove")
@click.argument("call_id", metavar="CALL")
@state_directory
def audit_prove(settings: Settings, call_id: str) -> None:
    """Print the inclusion proof of one call, as JSON.

    Its records, and that they lie in a sealed segment.
    """
    from glovebox_server.cli.actions import audit as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.prove(settings.state_dir / "audit", out, err, call_id))


@audit.command("bundle")
@click.option("--call", metavar="CALL", help="Of this call.")
@click.option("--run", metavar="ID", help="Of all calls of this run, as `audit show` has it, or `last`.")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, dir_okay=False),
    help="A file that does not exist yet.",
)
@json_option
@state_directory
def audit_bundle(settings: Settings, call: str | None, run: str | None, output: Path, as_json: bool) -> None:
    """Write one file that shows what a call or a run did.

    And that there is no more of it: for `bundle verify`, anywhere. Seals what is not sealed yet.
    """
    from glovebox_server.cli.actions.proof import bundle  # noqa: PLC0415 - see the module's header

    if (call is None) == (run is None):
        raise click.UsageError("Name one: --call CALL or --run ID.")
    sys.exit(bundle.make(settings, out, err, call=call, run=run, output=output, as_json=as_json))


@audit.command("seal")
@json_option
@state_directory
def audit_seal(settings: Settings, as_json: bool) -> None:
    """Seal what is written so far, so that it can be proved."""
    from glovebox_server.cli.actions import audit as commands  # noqa: PLC0415 - see the module's header
    from glovebox_server.upkeep.log import audit_log  # noqa: PLC0415 - see the module's header

    sys.exit(commands.seal(settings.state_dir / "audit", out, lambda: audit_log(settings), as_json=as_json))


@audit.command("head")
@json_option
@state_directory
def audit_head(settings: Settings, as_json: bool) -> None:
    """The end of the chain, to be kept elsewhere as an anchor."""
    from glovebox_server.cli.actions import audit as commands  # noqa: PLC0415 - see the module's header

    sys.exit(commands.head(settings.state_dir / "audit", out, as_json=as_json))
