"""``glovebox usage``: sums of what calls spent."""

import csv
import os
from datetime import datetime

import click

from glovebox_audit.printable import printable
from glovebox_profiles.policy.model import SPENDING
from glovebox_server.cli.options import command, emit, err, out, time_or_age, wants_json
from glovebox_server.cli.terminal import table_of
from glovebox_server.guards.budgets import store
from glovebox_server.guards.budgets.store import BY, UsageRow, used
from glovebox_server.settings import Settings
from glovebox_server.stores import database

_FORMULA = ("=", "+", "-", "@")


class _By(click.ParamType[tuple[str, ...]]):
    name = "names"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Parse ``principal,tool``."""
        names = tuple(dict.fromkeys(filter(None, value.split(","))))
        if not set(names) <= set(BY):
            self.fail(f"{value!r} is not some of {','.join(BY)}.", param, ctx)
        return names


@command("usage")
@click.option("--by", type=_By(), default="principal,tool", show_default=True, help=f"Some of {','.join(BY)}.")
@click.option(
    "--since", type=time_or_age, default="7d", show_default=True, help="Since this time (UTC), local day, or 7d ago."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
def usage(settings: Settings, *, by: tuple[str, ...], since: datetime, as_csv: bool) -> None:
    """Show what calls have spent, where policy.toml has budgets."""
    if as_csv and wants_json():
        raise click.UsageError("Choose one of --csv and --json.")
    path = settings.state_dir / database.DIRECTORY / store.NAME
    found: list[UsageRow] = []
    if os.path.lexists(path):
        with database.opened(path, store.SCHEMA) as kept:
            found = kept.query_now(lambda connection: used(connection, since, by))
    elif not as_csv and not wants_json():
        err.print("Nothing is counted: no server of this state directory has had a policy with budgets.")
    if as_csv:
        writer = csv.writer(out.file, lineterminator="\n")
        writer.writerow([*by, *SPENDING, "lost"])
        for row in found:
            writer.writerow([*map(_cell, row.by.values()), *row.spent.values(), row.lost])
        return
    rows = [{**row.by, **row.spent, "lost": row.lost} for row in found]
    shown = [{**row.by, **_spent(row)} for row in found]
    table = table_of(shown, right=[title for row in shown for title in row if title not in by])
    emit({"since": since.isoformat(timespec="seconds"), "by": list(by), "usage": rows}, table)


def _spent(row: UsageRow) -> dict[str, str]:
    told = {name.replace("_seconds", " s").replace("_bytes", " B"): n for name, n in row.spent.items()}
    return {
        name: f"{n:,.3f}".rstrip("0").rstrip(".") if isinstance(n, float) else f"{n:,}"
        for name, n in (told | {"lost": row.lost}).items()
    }


def _cell(text: str) -> str:
    """Return a cell that no spreadsheet reads as a formula, and no terminal as a command."""
    plain = printable(text)
    return f"'{plain}" if plain.startswith(_FORMULA) else plain
