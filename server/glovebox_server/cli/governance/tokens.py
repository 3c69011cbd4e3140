"""``glovebox token``: declared here, done in ``actions.governance.tokens``."""

import re
import sys
from datetime import timedelta

import click

from glovebox_server.cli.options import Group, err, json_option, out, state_directory
from glovebox_server.settings import Settings

_UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}


class Lifetime(click.ParamType[timedelta]):
    """How long something lasts."""

    name = "time"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Read ``12h`` or ``30d``."""
        found = re.fullmatch(r"([1-9]\d{0,5})([mhdw])", value)
        if found is None:
            self.fail(f"{value!r} is not how long, as 90m, 12h, 30d or 8w.", param, ctx)
        return timedelta(seconds=int(found[1]) * _UNITS[found[2]])


@click.group(cls=Group)
def token() -> None:
    """Bearer tokens of callers over HTTP. A running server follows within a second."""


@token.command("create")
@click.argument("name")
@click.option("--role", help="What it may do, of policy.toml; else what policy.toml says of token:NAME.")
@click.option("--workflow", help="What its calls are part of.")
@click.option("--expires", type=Lifetime(), help="When it ends: 12h, 30d. Never, unless given.")
@json_option
@state_directory
def token_create(
    settings: Settings, *, name: str, role: str | None, workflow: str | None, expires: timedelta | None, as_json: bool
) -> None:
    """Make a token and show it, once: only its hash is kept. NAME is 1 to 32 of a-z 0-9 -."""
    from glovebox_server.cli.actions.governance import tokens  # noqa: PLC0415 - see the header of ``main``

    sys.exit(
        tokens.create(
            settings, out, err, name=name, role=role, workflow=workflow, lifetime=expires, as_json=as_json
        )
    )  # fmt: skip


@token.command("list")
@json_option
@state_directory
def token_list(settings: Settings, as_json: bool) -> None:
    """Each with its role, workflow, making, last use and end."""
    from glovebox_server.cli.actions.governance import tokens  # noqa: PLC0415 - see the header of ``main``

    sys.exit(tokens.show(settings, out, as_json=as_json))


@token.command("revoke")
@click.argument("name")
@json_option
@state_directory
def token_revoke(settings: Settings, name: str, as_json: bool) -> None:
    """End a token, and what is under way with it."""
    from glovebox_server.cli.actions.governance import tokens  # noqa: PLC0415 - see the header of ``main``

    sys.exit(tokens.revoke(settings, out, name=name, as_json=as_json))


@token.command("migrate")
@json_option
@state_directory
def token_migrate(settings: Settings, as_json: bool) -> None:
    """Keep only the hash of tokens whose files hold the token itself."""
    from glovebox_server.cli.actions.governance import tokens  # noqa: PLC0415 - see the header of ``main``

    sys.exit(tokens.migrate(settings, out, as_json=as_json))
