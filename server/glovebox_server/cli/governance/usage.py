"""``glovebox usage``: declared here, done in ``actions.governance.usage``."""

import sys
from datetime import datetime

import click

from glovebox_server.cli.options import Moment, Told, err, json_option, out, state_directory
from glovebox_server.settings import Settings

_BY = ("principal", "workflow", "tool", "day", "hour")


class _By(click.ParamType[tuple[str, ...]]):
    """Names with commas between."""

    name = "names"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Read ``principal,tool``."""
        names = tuple(dict.fromkeys(filter(None, value.split(","))))
        if not set(names) <= set(_BY):
            self.fail(f"{value!r} is not some of {','.join(_BY)}.", param, ctx)
        return names


@click.command(cls=Told)
@click.option("--by", type=_By(), default="principal,tool", show_default=True, help=f"Some of {','.join(_BY)}.")
@click.option(
    "--since", type=Moment(), default="7d", show_default=True, help="Since this time (UTC), local day, or 7d ago."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@json_option
@state_directory
def usage(settings: Settings, *, by: tuple[str, ...], since: datetime, as_csv: bool, as_json: bool) -> None:
    """What calls have spent, where policy.toml has budgets."""
    from glovebox_server.cli.actions.governance import usage as commands  # noqa: PLC0415 - see the header of ``main``

    if as_csv and as_json:
        raise click.UsageError("Choose one of --csv and --json.")
    sys.exit(
        commands.usage(settings, out, err, by=by, since=since, form="csv" if as_csv else "json" if as_json else "")
    )
