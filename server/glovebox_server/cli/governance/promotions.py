"""``glovebox artifact promote | promotions | rollback``: declared here, done in ``actions.governance.promotions``."""

import sys

import click

from glovebox_server.cli.options import Form, Told, err, json_option, out, state_directory
from glovebox_server.settings import Settings

_ID = Form("p_[0-9a-f]{20}", "p_ and 20 characters, as `glovebox artifact promotions` has it")


@click.command("promote", cls=Told)
@click.argument("uris", metavar="URI…", nargs=-1, required=True)
@click.option("--into", metavar="FOLDER", required=True, help="One of those that [promote] of policy.toml names.")
@click.option("--apply", is_flag=True, help="The artifact is a patch (changes.patch): change the files that it names.")
@click.option("--expect", metavar="DIGEST", help="Do it without asking, if this is the digest of what would change.")
@click.option("--scan", is_flag=True, help="Look into each artifact first; refuse where something is found.")
@click.option("--accept-findings", "accept", is_flag=True, help="Go on with what --scan found, which is shown.")
@json_option
@state_directory
def promote(
    settings: Settings,
    *,
    uris: tuple[str, ...],
    into: str,
    apply: bool,
    expect: str | None,
    scan: bool,
    accept: bool,
    as_json: bool,
) -> None:
    """Put artifacts into a folder, all or none.

    Shows what would change, and asks. Without a terminal it only shows, with a digest for --expect.
    """
    if apply and len(uris) > 1:
        raise click.UsageError("--apply takes one patch at a time.")
    from glovebox_server.cli.actions.governance import promotions as commands  # noqa: PLC0415 - see the header of ``main``

    sys.exit(
        commands.promote(
            settings, out, err, uris=uris, into=into, apply=apply, expect=expect, scan=scan or accept, accept=accept,
            as_json=as_json,
        )
    )  # fmt: skip


@click.command("promotions", cls=Told)
@json_option
@state_directory
def promotions(settings: Settings, as_json: bool) -> None:
    """What was promoted, newest first, and whether it was put back. Puts back what was interrupted."""
    from glovebox_server.cli.actions.governance import promotions as commands  # noqa: PLC0415 - see the header of ``main``

    sys.exit(commands.listed(settings, out, err, as_json=as_json))


@click.command("rollback", cls=Told)
@click.argument("promotion", metavar="ID", type=_ID)
@json_option
@state_directory
def rollback(settings: Settings, promotion: str, as_json: bool) -> None:
    """Put every file of a promotion back as it was.

    Or none, where one changed since. `artifact promotions` has the ID.
    """
    from glovebox_server.cli.actions.governance import promotions as commands  # noqa: PLC0415 - see the header of ``main``

    sys.exit(commands.roll_back(settings, out, err, identifier=promotion, as_json=as_json))
