"""``glovebox approvals``: declared here, done in ``actions.governance.approvals``."""

import sys
from datetime import datetime

import click

from glovebox_server.cli.options import Group, Moment, err, json_option, out, state_directory
from glovebox_server.settings import Settings


@click.group(cls=Group)
def approvals() -> None:
    """Answer calls that wait for a yes, and see what was granted."""


@approvals.command("list")
@click.option("--all", "everything", is_flag=True, help="Those that are over too, of the last seven days.")
@json_option
@state_directory
def approvals_list(settings: Settings, everything: bool, as_json: bool) -> None:
    """Questions that wait, and yeses that are good; the newest first."""
    from glovebox_server.cli.actions.governance import approvals as commands  # noqa: PLC0415 - brings the store

    sys.exit(commands.listed(settings, out, everything=everything, as_json=as_json))


@approvals.command("show")
@click.argument("wanted", metavar="ID")
@json_option
@state_directory
def approvals_show(settings: Settings, wanted: str, as_json: bool) -> None:
    """What would run, what it may do, and why it is asked. ID is a question's, or its beginning."""
    from glovebox_server.cli.actions.governance import approvals as commands  # noqa: PLC0415 - brings the store

    sys.exit(commands.show(settings, out, wanted, as_json=as_json))


@approvals.command("allow")
@click.argument("wanted", metavar="ID")
@click.option("--run", "for_run", is_flag=True, help="For identical calls of the run too, where the rule permits it.")
@click.option("--rule", is_flag=True, help="Print the change that would lift the denial for good; answer nothing.")
@json_option
@state_directory
def approvals_allow(settings: Settings, wanted: str, for_run: bool, rule: bool, as_json: bool) -> None:
    """Say yes to a question. Look at it first: `approvals show`."""
    from glovebox_server.cli.actions.governance import approvals as commands  # noqa: PLC0415 - brings the store

    if rule and for_run:
        raise click.UsageError("--rule answers nothing, so there is no yes that --run could be about.")
    if rule:
        sys.exit(commands.as_rule(settings, out, wanted, as_json=as_json))
    sys.exit(commands.answer(settings, out, wanted, allow=True, reach="run" if for_run else "call", as_json=as_json))


@approvals.command("deny")
@click.argument("wanted", metavar="ID")
@click.option("--reason", default="", help="Why, in at most 500 characters: the model reads it.")
@json_option
@state_directory
def approvals_deny(settings: Settings, wanted: str, reason: str, as_json: bool) -> None:
    """Say no to a question, or take a yes back that is still good.

    The same call is not asked about again until its time is over.
    """
    from glovebox_server.cli.actions.governance import approvals as commands  # noqa: PLC0415 - brings the store
    from glovebox_server.guards.approvals.question import MAX_REASON  # noqa: PLC0415 - brings the store

    if len(reason) > MAX_REASON:
        raise click.BadParameter(f"say it in at most {MAX_REASON} characters.", param_hint="--reason")
    sys.exit(commands.answer(settings, out, wanted, allow=False, reach="call", as_json=as_json, reason=reason))


@approvals.command("revoke")
@click.argument("wanted", metavar="ID")
@json_option
@state_directory
def approvals_revoke(settings: Settings, wanted: str, as_json: bool) -> None:
    """Take a yes or a grant back; no call passes on it any more. What runs goes on: `glovebox stop` ends that."""
    from glovebox_server.cli.actions.governance import approvals as commands  # noqa: PLC0415 - brings the store

    sys.exit(commands.revoke(settings, out, wanted, as_json=as_json))


@approvals.command("grants")
@json_option
@state_directory
def approvals_grants(settings: Settings, as_json: bool) -> None:
    """Denials that somebody lifted, and for how long."""
    from glovebox_server.cli.actions.governance import approvals as commands  # noqa: PLC0415 - brings the store

    sys.exit(commands.grants(settings, out, as_json=as_json))


@approvals.command("watch")
@json_option
@state_directory
def approvals_watch(settings: Settings, as_json: bool) -> None:
    """Print each question as it comes, until interrupted.

    With --json one object for each line.
    """
    from glovebox_server.cli.actions.governance import approvals as commands  # noqa: PLC0415 - brings the store

    sys.exit(commands.watch(settings, out, err, as_json=as_json))


@approvals.command("stats")
@click.option("--since", type=Moment(), default="7d", show_default=True, help="Since then, or so long ago: 2h.")
@json_option
@state_directory
def approvals_stats(settings: Settings, since: datetime, as_json: bool) -> None:
    """How often people are asked, and what they say.

    Prompts for 100 calls, share of yes, time to an answer. From the audit log.
    """
    from glovebox_server.cli.actions.governance import approvals as commands  # noqa: PLC0415 - brings the store

    sys.exit(commands.stats(settings, out, since=since, as_json=as_json))
