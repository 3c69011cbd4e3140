"""``glovebox policy``: declared here, done in ``actions.governance.policy``."""

import sys
from pathlib import Path

import click

from glovebox_server.cli.options import Group, directories, json_option, out, state_directory
from glovebox_server.settings import Settings


@click.group(cls=Group)
def policy() -> None:
    """Who may call what, how much of it, and who is asked."""


@policy.command("check")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@json_option
@directories
def policy_check(settings: Settings, path: Path | None, as_json: bool) -> None:
    """Load the policy, or PATH, and decide its examples."""
    from glovebox_server.cli.actions.governance import policy as actions  # noqa: PLC0415 - see the header of ``main``

    sys.exit(actions.check(settings, path, out, as_json=as_json))


@policy.command("explain")
@click.argument("principal")
@click.option("--workflow", help="What it works in.")
@click.option("--role", "roles", multiple=True, help="Role that its token gives.")
@click.option("--scope", "scopes", multiple=True, help="Scope of its OAuth token.")
@json_option
@state_directory
def policy_explain(
    settings: Settings,
    *,
    principal: str,
    workflow: str | None,
    roles: tuple[str, ...],
    scopes: tuple[str, ...],
    as_json: bool,
) -> None:
    """What PRINCIPAL may do, spend and is asked about, in plain words. PRINCIPAL is as token:NAME or local:1000."""
    from glovebox_server.cli.actions.governance import policy as actions  # noqa: PLC0415 - see the header of ``main``

    sys.exit(
        actions.explain(
            settings, out, principal=principal, workflow=workflow, roles=roles, scopes=scopes, as_json=as_json
        )
    )


@policy.command("diff")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@json_option
@directories
def policy_diff(settings: Settings, a: Path, b: Path, as_json: bool) -> None:
    """Compare two policies, with your profiles; exit 1 if one is wider."""
    from glovebox_server.cli.actions.governance import policy as actions  # noqa: PLC0415 - see the header of ``main``

    sys.exit(actions.diff(settings, a, b, out, as_json=as_json))
