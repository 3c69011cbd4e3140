"""Stores budgets in SQLite: a ``Ledger`` is the work of one transaction, and waits only for SQLite.

``spent`` has what was spent in each window, and what running calls may still take. ``reserved`` has one row for each
running call, so that settling returns the rest; the row of a dead server counts as spent.
"""

import json
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from glovebox_profiles.policy.model import SPENDING
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_server.errors import StoreError
from glovebox_server.guards.budgets import spending
from glovebox_server.guards.budgets.spending import LENGTH_MS, Amounts, BudgetLine, Clocks, Funds, Spender
from glovebox_server.tools.base import BudgetRemainder

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
SCHEMA: Final = f"""
    CREATE TABLE clock (time INTEGER NOT NULL, boot TEXT NOT NULL, since_boot INTEGER NOT NULL,
                        tidied INTEGER NOT NULL);
    CREATE TABLE spent (budget TEXT, key TEXT, since INTEGER, until INTEGER NOT NULL, {_NUMBERS},
                        PRIMARY KEY (budget, key, since)) WITHOUT ROWID;
    CREATE TABLE reserved (call TEXT PRIMARY KEY, server TEXT NOT NULL, body TEXT NOT NULL) WITHOUT ROWID;
    CREATE TABLE usage (since INTEGER, hours INTEGER, principal TEXT, workflow TEXT, tool TEXT, lost INTEGER NOT NULL,
                        {_NUMBERS}, PRIMARY KEY (since, hours, principal, workflow, tool)) WITHOUT ROWID
    """

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


BY: Final = ("principal", "workflow", "tool", "day", "hour")
_TIMES: Final = {"day": "since - since % 86400000", "hour": "since"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationRequest:
    """A call's request to its budgets."""

    call_id: str
    spender: Spender
    lines: Sequence[BudgetLine]
    worst: Amounts


class Ledger:
    """All spending, in one transaction, at one moment."""

    def __init__(self, connection: sqlite3.Connection, clocks: Clocks) -> None:
        self.connection = connection
        self._clocks = clocks
        found = connection.execute("SELECT time, boot, since_boot, tidied FROM clock").fetchone()
        self._kept = None if found is None else Clocks(wall=found[0], boot=found[1], since_boot=found[2])
        self._mark = spending.advanced(self._kept, clocks)
        self._time = self._mark.wall
        self.is_untidy = found is None or self._time - found[3] >= TIDY_MS

    def reserve(self, server: str, asked: ReservationRequest) -> list[Funds] | Refusal:
        """Reserve what a call may spend of all its budgets, or of none.

        Raises StoreError: it has an unsettled reservation already.
        """
        granted = self._granted(asked)
        if isinstance(granted, Refusal):
            return granted
        rows = []
        for each in granted:
            since = self._add(each.line, each.takes)
            rows.append([each.line.name, each.line.key, since, each.takes])
        who = asked.spender
        body = json.dumps({"lines": rows, "who": [who.principal, who.workflow, who.tool]})
        try:
            self.connection.execute("INSERT INTO reserved VALUES (?, ?, ?)", (asked.call_id, server, body))
        except sqlite3.IntegrityError as error:
            reason = f"what the call {asked.call_id} took before is not settled"
            raise StoreError(f"reserve in the store {NAME}", reason, "Let it be called again.") from error
        return granted

    def spend(self, asked: ReservationRequest) -> Refusal | None:
        """Spend at once what is known beforehand, of all budgets or of none."""
        granted = self._granted(asked)
        if isinstance(granted, Refusal):
            return granted
        for line in asked.lines:
            self._add(line, asked.worst)
        return None

    def settle(self, call_id: str, spent: Amounts) -> None:
        """Replace a call's reservation by what it spent; nothing if it did not run."""
        found = self.connection.execute("SELECT body FROM reserved WHERE call = ?", (call_id,)).fetchone()
        if found is None:  # settled before
            return
        self.connection.execute("DELETE FROM reserved WHERE call = ?", (call_id,))
        reserved = json.loads(found[0])
        for name, key, since, takes in reserved["lines"]:
            # An ended window may be removed, and then its spending does not matter.
            more = (spent.get(each, 0) - takes.get(each, 0) for each in SPENDING)
            self.connection.execute(_CORRECT, (*more, name, key, since))
        if spent:
            self._use(reserved["who"], spent)

    def left(self, lines: Iterable[BudgetLine]) -> list[BudgetRemainder]:
        """Return what is left of each."""
        return [each for line in lines for each in self._funds(line).remainders()]

    def tidy(self, is_gone: Callable[[str], bool]) -> None:
        """Remove ended windows and old usage; count calls of dead servers as spent."""
        self._keep_time()
        execute, time, day = self.connection.execute, self._time, LENGTH_MS["day"]
        execute("UPDATE clock SET tidied = ?", (time,))
        servers = [name for (name,) in execute("SELECT DISTINCT server FROM reserved").fetchall()]
        for server in filter(is_gone, servers):
            for (body,) in execute("SELECT body FROM reserved WHERE server = ?", (server,)).fetchall():
                self._use(json.loads(body)["who"], {"calls": 1}, lost=1)
            execute("DELETE FROM reserved WHERE server = ?", (server,))
        execute("DELETE FROM spent WHERE until <= ?", (time,))
        for budget, principal, runs in execute(_CROWDED, (MAX_RUNS,)).fetchall():
            execute(_FORGET, (budget, budget, principal, runs - MAX_RUNS))
        hourly = self._clocks.wall - self._clocks.wall % day - HOURLY_DAYS * day
        execute(_USAGE, (hourly,))
        execute("DELETE FROM usage WHERE hours = 1 AND since < ?", (hourly,))
        execute("DELETE FROM usage WHERE since < ?", (self._clocks.wall - KEPT_DAYS * day,))
        (rows,) = execute("SELECT count(*) FROM usage").fetchone()
        if rows > MAX_USAGE:
            oldest = "SELECT since FROM usage ORDER BY since LIMIT 1 OFFSET ?"
            execute(f"DELETE FROM usage WHERE since <= ({oldest})", (rows - MAX_USAGE,))  # noqa: S608 - constants

    def _granted(self, asked: ReservationRequest) -> list[Funds] | Refusal:
        self._keep_time()
        granted = []
        for line in asked.lines:
            funds = self._funds(line)
            takes = spending.taken(funds.left, asked.worst)
            if isinstance(takes, str):
                return self._refused(asked, funds, takes)
            granted.append(replace(funds, takes=takes))
        return granted

    def _refused(self, asked: ReservationRequest, funds: Funds, name: str) -> Refusal:
        this = next(each for each in funds.remainders() if each.what == name)
        others = [each for each in self.left(asked.lines) if each != this]
        since, until = spending.window(funds.line.every, self._time)
        held = 0
        for (body,) in self.connection.execute("SELECT body FROM reserved").fetchall():
            rows: list[Any] = json.loads(body)["lines"]
            held += sum(takes.get(name, 0) for *of, takes in rows if of == [funds.line.name, funds.line.key, since])
        refills = None if funds.refills is None else until - self._time
        return spending.refusal(name, asked.worst.get(name, 0), [this, *others], held, refills)

    def _keep_time(self) -> None:
        """Store the time, at most once in ``KEEP_MS``: within a boot it follows from the stored one."""
        last, mark = self._kept, self._mark
        if last is not None and last.boot == mark.boot and mark.wall - last.wall < KEEP_MS:
            return
        row = (mark.wall, mark.boot, mark.since_boot)
        if last is None:
            self.connection.execute("INSERT INTO clock VALUES (?, ?, ?, ?)", (*row, mark.wall))
        else:
            self.connection.execute("UPDATE clock SET time = ?, boot = ?, since_boot = ?", row)
        self._kept = mark

    def _funds(self, line: BudgetLine) -> Funds:
        since, until = spending.window(line.every, self._time)
        found = self.connection.execute(_SPENT, (line.name, line.key, since)).fetchone() or [0] * len(SPENDING)
        spent = dict(zip(SPENDING, found, strict=True))
        left = {name: limit - spent[name] for name, limit in line.limits.items()}
        refills = None if line.every == "run" else self._clocks.wall + until - self._time
        return Funds(line=line, left=left, refills=refills)

    def _add(self, line: BudgetLine, more: Amounts) -> int:
        """Add to the window of now; return its beginning."""
        since, until = spending.window(line.every, self._time)
        amounts = (more.get(each, 0) if each in line.limits else 0 for each in SPENDING)
        self.connection.execute(_SPEND, (line.name, line.key, since, until, *amounts))
        return since

    def _use(self, who: Sequence[str], spent: Amounts, lost: int = 0) -> None:
        """Add to the usage of a principal, its workflow, and its tool."""
        # By the wall clock, as people ask for it; budgets do not depend on it.
        hour = self._clocks.wall - self._clocks.wall % LENGTH_MS["hour"]
        row = (hour, *who, lost, *(spent.get(each, 0) for each in SPENDING))
        self.connection.execute(_USE, row)


def used(connection: sqlite3.Connection, since: datetime, by: Sequence[str]) -> list[dict[str, str | int | float]]:
    """Return sums of calls that ended in that hour or later, most calls first; each with what it is grouped by.

    Calls of more than a month ago are known by the day, and count if their day began after ``since``. ``lost`` are
    calls in flight when their server died: only their number is counted.
    """
    if not set(by) <= set(BY):
        raise ValueError(by)
    keys = [_TIMES.get(each, each) for each in by]
    groups = f" GROUP BY {', '.join(str(n + 1) for n in range(len(keys)))}" if keys else ""
    hour = int(since.timestamp() * 1000) // LENGTH_MS["hour"] * LENGTH_MS["hour"]
    found = connection.execute(
        f"SELECT {''.join(f'{key}, ' for key in keys)}{_TOTALS}, sum(lost) FROM usage WHERE since >= ?"  # noqa: S608 - names of ours
        f"{groups} HAVING sum(calls) ORDER BY sum(calls) DESC",
        (hour,),
    )
    names = [*by, *SPENDING, "lost"]
    return [{name: _said(name, value) for name, value in zip(names, row, strict=True)} for row in found]


def _said(name: str, value: Any) -> str | int | float:
    if name not in _TIMES:
        return spending.told(name, value)
    moment = datetime.fromtimestamp(value / 1000, UTC)
    return f"{moment:%Y-%m-%d}" if name == "day" else f"{moment:%Y-%m-%dT%H:00Z}"
