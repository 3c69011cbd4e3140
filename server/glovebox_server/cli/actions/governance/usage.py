"""What ``glovebox usage`` does: print sums of what calls spent."""

import csv
import os
from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text as Plain

from glovebox_audit.printable import printable
from glovebox_profiles.policy.model import SPENDING
from glovebox_server.cli.terminal import new_table, print_json, print_table
from glovebox_server.exits import OK
from glovebox_server.guards.budgets import store
from glovebox_server.guards.budgets.usage import Used, used
from glovebox_server.settings import Settings
from glovebox_server.stores import database

_FORMULA = ("=", "+", "-", "@")


def usage(
    settings: Settings,
    out: Console,
    err: Console,
    *,
    by: Sequence[str],
    since: datetime,
    form: Literal["", "csv", "json"],
) -> int:
    """Print what was spent; see ``glovebox usage``."""
    path = settings.state_dir / database.DIRECTORY / store.NAME
    found: list[Used] = []
    if os.path.lexists(path):
        with database.opened(path, store.SCHEMA) as kept:
            found = kept.query_now(lambda connection: used(connection, since, by))
    elif not form:
        err.print(Plain("Nothing is counted: no server of this state directory has had a policy with budgets."))
    if form == "json":
        rows = [{**each.by, **each.spent, "lost": each.lost} for each in found]
        print_json(out.file, {"since": since.isoformat(timespec="seconds"), "by": list(by), "usage": rows})
    elif form == "csv":
        writer = csv.writer(out.file, lineterminator="\n")
        writer.writerow([*by, *SPENDING, "lost"])
        for each in found:
            writer.writerow([*map(_cell, each.by.values()), *each.spent.values(), each.lost])
    elif found:
        print_table(out, _table(found, by), folded=False)
    return OK


def _table(found: Sequence[Used], by: Sequence[str]) -> Table:
    numbers = [name.replace("_seconds", " s").replace("_bytes", " B") for name in (*SPENDING, "lost")]
    table = new_table(*by, *numbers, right=numbers)
    for each in found:
        spent = [f"{n:,.3f}".rstrip("0").rstrip(".") if isinstance(n, float) else f"{n:,}" for n in each.spent.values()]
        table.add_row(*each.by.values(), *spent, f"{each.lost:,}")
    return table


def _cell(text: str) -> str:
    """A name as no spreadsheet takes it for a formula, and no terminal for a command."""
    plain = printable(text)
    return f"'{plain}" if plain.startswith(_FORMULA) else plain
