"""Stores budgets in SQLite: each function is the work of one transaction, and waits only for SQLite.

``spent`` has what was spent in each window, and what running calls may still take. ``reserved`` has one row for each
running call, so that settling returns the rest; the row of a dead server counts as spent.
"""

import json
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from glovebox_profiles.policy.model import SPENDING
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_server.errors import StoreError
from glovebox_server.guards.budgets.spending import (
    Amounts,
    BudgetLine,
    BudgetRemainder,
    Granted,
    Spender,
    left_of,
    refusal,
    taken,
)
from glovebox_server.guards.budgets.windows import LENGTH_MS, Clocks, Mark, advanced, window

NAME: Final = "budgets.sqlite"

TIDY_MS: Final = 60_000
"""Interval of removing expired rows, and of settling calls of dead servers."""

KEEP_MS: Final = 1_000
"""Maximum age of the kept time: it may stand still this long over a reboot whose wall clock is behind."""

HOURLY_DAYS: Final = 32
"""Usage is kept by the hour for this long, then by the day."""

KEPT_DAYS: Final = 400
"""Usage is kept for this long: a year, and the month to compare with."""

MAX_USAGE: Final = 200_000
"""Rows of usage, about 30 MB: beyond it the oldest are deleted."""

MAX_RUNS: Final = 10_000
"""Runs of one principal per budget. Beyond it the longest idle go; the total of the principal is unaffected."""

_NUMBERS = ", ".join(f"{name} INTEGER NOT NULL" for name in SPENDING)
_NAMES = ", ".join(SPENDING)
_MARKS = ", ".join("?" * len(SPENDING))
_SUMS = ", ".join(f"{name} = {name} + excluded.{name}" for name in SPENDING)

SCHEMA: Final = (
    f"""
    CREATE TABLE clock (time INTEGER NOT NULL, boot TEXT NOT NULL, since_boot INTEGER NOT NULL,
                        tidied INTEGER NOT NULL);
    CREATE TABLE spent (budget TEXT, key TEXT, since INTEGER, until INTEGER NOT NULL, {_NUMBERS},
                        PRIMARY KEY (budget, key, since)) WITHOUT ROWID;
    CREATE TABLE reserved (call TEXT PRIMARY KEY, server TEXT NOT NULL, body TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE usage (since INTEGER, hours INTEGER, principal TEXT, workflow TEXT, tool TEXT, lost INTEGER NOT NULL,
                        {_NUMBERS}, PRIMARY KEY (since, hours, principal, workflow, tool)) WITHOUT ROWID
    """,
)

# A run's key is its id, a space, and its principal; of the windows a run's alone begins at 0.
_CROWDED = (
    "SELECT budget, substr(key, instr(key, ' ') + 1) AS principal, count(*) AS runs FROM spent WHERE since = 0"
    " GROUP BY 1, 2 HAVING runs > ?"
)
_FORGET = (
    "DELETE FROM spent WHERE since = 0 AND budget = ? AND key IN (SELECT key FROM spent WHERE since = 0"
    " AND budget = ? AND substr(key, instr(key, ' ') + 1) = ? ORDER BY until LIMIT ?)"
)
_TOTALS = ", ".join(f"sum({name})" for name in SPENDING)

_SPEND = (
    f"INSERT INTO spent (budget, key, since, until, {_NAMES}) VALUES (?, ?, ?, ?, {_MARKS})"  # noqa: S608 - constants
    f" ON CONFLICT (budget, key, since) DO UPDATE SET until = max(until, excluded.until), {_SUMS}"
)
_CORRECT = (
    f"UPDATE spent SET {', '.join(f'{n} = {n} + ?' for n in SPENDING)} WHERE budget = ? AND key = ? AND since = ?"  # noqa: S608 - constants
)
_USE = (
    f"INSERT INTO usage (since, hours, principal, workflow, tool, lost, {_NAMES}) VALUES (?, 1, ?, ?, ?, ?, {_MARKS})"  # noqa: S608 - constants
    f" ON CONFLICT (since, hours, principal, workflow, tool) DO UPDATE SET lost = lost + excluded.lost, {_SUMS}"
)
_SPENT = f"SELECT {_NAMES} FROM spent WHERE budget = ? AND key = ? AND since = ?"  # noqa: S608 - constants

_USAGE = (
    f"INSERT INTO usage (since, hours, principal, workflow, tool, lost, {_NAMES}) "  # noqa: S608 - constants
    f"SELECT since - since % 86400000, 24, principal, workflow, tool, sum(lost), {_TOTALS} "
    "FROM usage WHERE hours = 1 AND since < ? GROUP BY 1, principal, workflow, tool "
    f"ON CONFLICT (since, hours, principal, workflow, tool) DO UPDATE SET lost = lost + excluded.lost, {_SUMS}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationRequest:
    """A call's request to its budgets."""

    call_id: str
    spender: Spender
    lines: Sequence[BudgetLine]
    worst: Amounts


def reserve(
    connection: sqlite3.Connection, clocks: Clocks, server: str, asked: ReservationRequest
) -> list[Granted] | Refusal:
    """Reserve what a call may spend of all its budgets, or of none.

    Raises:
        StoreError: it has an unsettled reservation already.
    """
    time = _time(connection, clocks)
    granted = []
    for line in asked.lines:
        spent = _spent(connection, line, time)
        takes = taken(line, spent, asked.worst)
        if isinstance(takes, str):
            return _refused(connection, clocks, asked, line, takes)
        left = {name: limit - spent.get(name, 0) for name, limit in line.limits.items()}
        granted.append(Granted(line=line, takes=takes, left=left, refills=_refills(line, clocks, time)))
    rows = []
    for each in granted:
        since, until = window(each.line.every, time)
        _add(connection, each.line, since, until, each.takes)
        rows.append([each.line.name, each.line.key, since, each.takes])
    who = asked.spender
    body = json.dumps({"lines": rows, "who": [who.principal, who.workflow, who.tool]})
    try:
        connection.execute("INSERT INTO reserved VALUES (?, ?, ?)", (asked.call_id, server, body))
    except sqlite3.IntegrityError as error:
        reason = f"what the call {asked.call_id} took before is not settled"
        raise StoreError(f"reserve in the store {NAME}", reason, "Let it be called again.") from error
    return granted


def spend(connection: sqlite3.Connection, clocks: Clocks, asked: ReservationRequest) -> Refusal | None:
    """Spend at once what is known beforehand, of all budgets or of none."""
    time = _time(connection, clocks)
    for line in asked.lines:
        takes = taken(line, _spent(connection, line, time), asked.worst)
        if isinstance(takes, str):
            return _refused(connection, clocks, asked, line, takes)
    for line in asked.lines:
        _add(connection, line, *window(line.every, time), asked.worst)
    return None


def settle(connection: sqlite3.Connection, clocks: Clocks, call_id: str, spender: Spender, spent: Amounts) -> None:
    """Replace a call's reservation by what it spent; nothing if it did not run."""
    found = connection.execute("SELECT body FROM reserved WHERE call = ?", (call_id,)).fetchone()
    if found is None:  # settled before
        return
    connection.execute("DELETE FROM reserved WHERE call = ?", (call_id,))
    for name, key, since, takes in json.loads(found[0])["lines"]:
        # An ended window may be removed, and then its spending does not matter.
        more = (spent.get(each, 0) - takes.get(each, 0) for each in SPENDING)
        connection.execute(_CORRECT, (*more, name, key, since))
    if spent:
        _use(connection, clocks, spender, spent)


def left(connection: sqlite3.Connection, clocks: Clocks, lines: Sequence[BudgetLine]) -> list[BudgetRemainder]:
    """Return what is left of each."""
    return _left(connection, clocks, _time(connection, clocks, keep=False), lines)


def tidy(connection: sqlite3.Connection, clocks: Clocks, is_gone: Callable[[str], bool]) -> list[str]:
    """Remove ended windows and old usage; count calls of dead servers as spent, and return their ids."""
    time = _time(connection, clocks)
    connection.execute("UPDATE clock SET tidied = ?", (time,))
    servers = [name for (name,) in connection.execute("SELECT DISTINCT server FROM reserved").fetchall()]
    lost: list[str] = []
    for server in filter(is_gone, servers):
        for call, body in connection.execute("SELECT call, body FROM reserved WHERE server = ?", (server,)).fetchall():
            principal, workflow, tool = json.loads(body)["who"]
            who = Spender(principal=principal, run="", workflow=workflow, tool=tool)
            _use(connection, clocks, who, {"calls": 1}, lost=1)
            lost.append(call)
        connection.execute("DELETE FROM reserved WHERE server = ?", (server,))
    connection.execute("DELETE FROM spent WHERE until <= ?", (time,))
    crowded = connection.execute(_CROWDED, (MAX_RUNS,)).fetchall()
    for budget, principal, runs in crowded:
        connection.execute(_FORGET, (budget, budget, principal, runs - MAX_RUNS))
    day = LENGTH_MS["day"]
    hourly = clocks.wall - clocks.wall % day - HOURLY_DAYS * day
    connection.execute(_USAGE, (hourly,))
    connection.execute("DELETE FROM usage WHERE hours = 1 AND since < ?", (hourly,))
    connection.execute("DELETE FROM usage WHERE since < ?", (clocks.wall - KEPT_DAYS * day,))
    (rows,) = connection.execute("SELECT count(*) FROM usage").fetchone()
    if rows > MAX_USAGE:
        oldest = "SELECT since FROM usage ORDER BY since LIMIT 1 OFFSET ?"
        connection.execute(f"DELETE FROM usage WHERE since <= ({oldest})", (rows - MAX_USAGE,))  # noqa: S608 - constants
    return lost


def is_untidy(connection: sqlite3.Connection, clocks: Clocks) -> bool:
    """Return whether ``tidy`` is due."""
    found = connection.execute("SELECT tidied FROM clock").fetchone()
    return found is None or _time(connection, clocks, keep=False) - found[0] >= TIDY_MS


def _time(connection: sqlite3.Connection, clocks: Clocks, *, keep: bool = True) -> int:
    """Return the time; stored at most once in ``KEEP_MS``, since within a boot it follows from the stored one."""
    found = connection.execute("SELECT time, boot, since_boot FROM clock").fetchone()
    last = None if found is None else Mark(time=found[0], boot=found[1], since_boot=found[2])
    mark = advanced(last, clocks)
    if not keep or (last is not None and last.boot == mark.boot and mark.time - last.time < KEEP_MS):
        return mark.time
    row = (mark.time, mark.boot, mark.since_boot)
    if last is None:
        connection.execute("INSERT INTO clock VALUES (?, ?, ?, ?)", (*row, mark.time))
    else:
        connection.execute("UPDATE clock SET time = ?, boot = ?, since_boot = ?", row)
    return mark.time


def _spent(connection: sqlite3.Connection, line: BudgetLine, time: int) -> dict[str, int]:
    since, _ = window(line.every, time)
    found = connection.execute(_SPENT, (line.name, line.key, since)).fetchone()
    return {} if found is None else dict(zip(SPENDING, found, strict=True))


def _add(connection: sqlite3.Connection, line: BudgetLine, since: int, until: int, more: Amounts) -> None:
    amounts = (more.get(each, 0) if each in line.limits else 0 for each in SPENDING)
    connection.execute(_SPEND, (line.name, line.key, since, until, *amounts))


def _use(connection: sqlite3.Connection, clocks: Clocks, who: Spender, spent: Amounts, lost: int = 0) -> None:
    # By the wall clock, as people ask for it; budgets do not depend on it.
    hour = clocks.wall - clocks.wall % LENGTH_MS["hour"]
    row = (hour, who.principal, who.workflow, who.tool, lost, *(spent.get(each, 0) for each in SPENDING))
    connection.execute(_USE, row)


def _left(
    connection: sqlite3.Connection, clocks: Clocks, time: int, lines: Sequence[BudgetLine]
) -> list[BudgetRemainder]:
    found = []
    for line in lines:
        spent = _spent(connection, line, time)
        rest = {name: limit - spent.get(name, 0) for name, limit in line.limits.items()}
        found += left_of(line, rest, _refills(line, clocks, time))
    return found


def _refills(line: BudgetLine, clocks: Clocks, time: int) -> int | None:
    """Return when it refills, by the wall clock as it is now."""
    return None if line.every == "run" else clocks.wall + window(line.every, time)[1] - time


def _refused(
    connection: sqlite3.Connection, clocks: Clocks, asked: ReservationRequest, line: BudgetLine, name: str
) -> Refusal:
    time = _time(connection, clocks)
    every = _left(connection, clocks, time, asked.lines)
    this = next(each for each in every if (each.budget, each.what) == (line.name, name))
    since, until = window(line.every, time)
    return refusal(
        name,
        asked.worst.get(name, 0),
        [this, *(each for each in every if each is not this)],
        _held(connection, line, since, name),
        None if line.every == "run" else until - time,
    )


def _held(connection: sqlite3.Connection, line: BudgetLine, since: int, name: str) -> int:
    """Return how much of a budget running calls hold."""
    held = 0
    for (body,) in connection.execute("SELECT body FROM reserved").fetchall():
        rows: list[Any] = json.loads(body)["lines"]
        held += sum(
            takes.get(name, 0) for row, key, at, takes in rows if (row, key, at) == (line.name, line.key, since)
        )
    return held
