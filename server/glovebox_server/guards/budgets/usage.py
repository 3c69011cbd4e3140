"""Sums spending for people: the rows of settled calls, grouped."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from glovebox_profiles.policy.model import SPENDING
from glovebox_server.guards.budgets.spending import told

BY: Final = ("principal", "workflow", "tool", "day", "hour")
"""Columns to group by."""

_COLUMNS: Final = {"day": "since - since % 86400000", "hour": "since"}


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Spending of the calls in one group."""

    by: dict[str, str]
    """Values of the grouping columns: names, or the start of the hour or day in UTC."""
    spent: dict[str, int | float]
    """By name of ``SPENDING``, seconds in seconds."""
    lost: int
    """Calls in flight when their server died: only their number is counted here."""


def used(connection: sqlite3.Connection, since: datetime, by: Sequence[str]) -> list[UsageRow]:
    """Return sums of calls that ended in that hour or later, most calls first.

    Calls of more than a month ago are known by the day, and count if their day began after ``since``.
    """
    if not set(by) <= set(BY):
        raise ValueError(by)
    keys = [_COLUMNS.get(each, each) for each in by]
    sums = ", ".join(f"sum({name})" for name in SPENDING)
    groups = f" GROUP BY {', '.join(str(n + 1) for n in range(len(keys)))}" if keys else ""
    hour = int(since.timestamp() * 1000) // 3_600_000 * 3_600_000
    found = connection.execute(
        f"SELECT {''.join(f'{key}, ' for key in keys)}sum(lost), {sums} FROM usage WHERE since >= ?"  # noqa: S608 - names of ours
        f"{groups} HAVING sum(calls) ORDER BY sum(calls) DESC",
        (hour,),
    ).fetchall()
    return [
        UsageRow(
            by={name: _said(name, value) for name, value in zip(by, row, strict=False)},
            lost=row[len(by)],
            spent={name: told(name, n) for name, n in zip(SPENDING, row[len(by) + 1 :], strict=True)},
        )
        for row in found
    ]


def _said(name: str, value: object) -> str:
    if name not in _COLUMNS or not isinstance(value, int):
        return str(value)
    moment = datetime.fromtimestamp(value / 1000, UTC)
    return f"{moment:%Y-%m-%d}" if name == "day" else f"{moment:%Y-%m-%dT%H:00Z}"
