"""Computes spending, budgets and remainders. Pure except ``read_clocks``. Amounts are integers, so sums are exact."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from glovebox_profiles.model import Profile
from glovebox_profiles.policy.model import SPENDING, Budget, Rate
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_server.tools.base import BudgetRemainder

Every = Literal["minute", "hour", "day", "run"]

LENGTH_MS: Final = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
RUN_MS: Final = 7 * LENGTH_MS["day"]
"""Time that a run's own budgets are remembered after its last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Readings of this machine's clocks, in milliseconds."""

    wall: int
    boot: str
    since_boot: int
    """Includes sleep (CLOCK_BOOTTIME, clock_gettime(2)); cannot be set."""


def read_clocks() -> Clocks:
    """Read the clocks."""
    since_boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
    return Clocks(wall=time.time_ns() // 1_000_000, boot=_boot(), since_boot=since_boot)


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def advanced(last: Clocks | None, now: Clocks) -> Clocks:
    """Return the clocks with the time of budgets for ``wall``, as ``last`` has it; None if none was seen.

    Within one boot it passes by the boot-time clock, whatever happens to the wall clock. After a reboot it continues
    from the wall clock or, if that is behind, from the latest time seen. So a clock that is set forward refills nothing
    early, and one that is set back keeps nothing spent longer than its window.
    """
    if last is None:
        return now
    if last.boot == now.boot:
        # Never back, should a container have a boot-time clock of its own (time_namespaces(7)).
        return replace(now, wall=last.wall + max(0, now.since_boot - last.since_boot))
    return replace(now, wall=max(last.wall, now.wall))


def window(every: Every, time: int) -> tuple[int, int]:
    """Return the first millisecond of a time's window, and the first after it; windows begin on the hour in UTC.

    A run's has no end that a call could wait for: it lies ``RUN_MS`` after the call.
    """
    if every == "run":
        return 0, time + RUN_MS
    length = LENGTH_MS[every]
    start = time - time % length
    return start, start + length


Amounts = Mapping[str, int]
"""From a name of ``SPENDING`` to a count, bytes, or milliseconds; missing names are 0."""

WHOLE: Final = ("calls", "failures", "wall_seconds", "cpu_seconds")
"""The most that a call can take of these must be left before it starts: the profile bounds it closely."""
MAX_SCAN_SECONDS: Final = 20
"""Of scanning the files of one call, while its caller waits; counted as processor time too."""
LOW: Final = 5
"""A result reports what is left when it is less than a fifth."""
_SECONDS: Final = {"wall_seconds", "cpu_seconds"}
_MS: Final = 1000
LOOKING: Final = dict.fromkeys(("wall_seconds", "cpu_seconds"), MAX_SCAN_SECONDS * _MS)


def amount(name: str, value: float) -> int:
    """Convert a number of a policy into the unit of counting."""
    return round(value * _MS) if name in _SECONDS else int(value)


def told(name: str, amount: int) -> int | float:
    """Convert an amount into the unit of policies."""
    return amount / _MS if name in _SECONDS else amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Spender:
    """The identity that spending is counted for."""

    principal: str
    run: str
    workflow: str
    tool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLine:
    """One budget and one spender that it counts."""

    name: str
    per: str
    every: Every
    tool: str | None
    """Only its calls are counted; None for all."""
    key: str
    """Run, principal, workflow (or principal), or principal and tool. A run's has its principal: no other spends."""
    limits: Amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Funds:
    """The amounts of one budget for its spender."""

    line: BudgetLine
    left: Amounts
    refills: int | None
    """In milliseconds of the wall clock; None if it lasts as long as the run."""
    takes: Amounts = field(default_factory=dict)

    def remainders(self) -> list[BudgetRemainder]:
        """Return what is left, one entry for each thing that it bounds."""
        # To the second: the wall clock and that of the windows differ by parts of one.
        moment = None if self.refills is None else datetime.fromtimestamp(round(self.refills / _MS), UTC).isoformat()
        return [
            BudgetRemainder(
                budget=self.line.name,
                what=name,
                per=self.line.per,
                every=self.line.every,
                tool=self.line.tool,
                left=told(name, max(0, self.left[name])),
                of=told(name, limit),
                refills=moment and moment.replace("+00:00", "Z"),
            )
            for name, limit in self.line.limits.items()
        ]


def little(granted: Funds, spent: Amounts) -> list[BudgetRemainder]:
    """Return what is left after a call, where that is less than a fifth."""
    after = {name: n - spent.get(name, 0) for name, n in granted.left.items()}
    if all(n * LOW >= granted.line.limits[name] for name, n in after.items()):
        return []
    return [each for each in replace(granted, left=after).remainders() if each.left * LOW < each.of]


def lines_of(budgets: Iterable[Budget], spender: Spender) -> tuple[BudgetLine, ...]:
    """Return the budgets that a call counts against."""
    keys = {
        "run": f"{spender.run} {spender.principal}",
        "principal": spender.principal,
        # Calls without a workflow share with no one; no workflow's name begins with a space.
        "workflow": spender.workflow or f" {spender.principal}",
        "tool": f"{spender.tool} {spender.principal}",
    }
    return tuple(
        BudgetLine(
            name=budget.name,
            per=budget.per,
            every=budget.every,
            tool=spender.tool if budget.per == "tool" else budget.tool,
            key=keys[budget.per],
            limits={
                name: amount(name, limit) for name in SPENDING if (limit := getattr(budget, name)) is not None
            },
        )
        for budget in budgets
        if budget.tool in (None, spender.tool)
    )  # fmt: skip


def all_lines(
    budgets: Iterable[Budget], rates: Iterable[Rate], spender: Spender, tools: Iterable[str]
) -> tuple[BudgetLine, ...]:
    """Return all limits of a caller, whichever of these tools it calls."""
    every = [line for tool in tools for line in lines_of(budgets, replace(spender, tool=tool))]
    return (*{(line.name, line.key): line for line in every}.values(), *rates_of(rates, spender))


def rates_of(rates: Iterable[Rate], spender: Spender) -> tuple[BudgetLine, ...]:
    """Return the rates that one connection counts against: of each host, for each principal."""
    return tuple(
        BudgetLine(
            name=f"{rate.host} every {rate.every}",
            per="principal",
            every=rate.every,
            tool=None,
            key=spender.principal,
            limits={"connections": rate.connections},
        )
        for rate in rates
    )


def worst_case(profile: Profile, arguments: Mapping[str, Any]) -> Amounts:
    """Return the most that one call can spend, as far as its profile bounds it."""
    limits, network = profile.limits, profile.network
    asked = arguments.get("timeout_seconds")
    wall = min(limits.wall_seconds, asked) if isinstance(asked, int | float) else limits.wall_seconds
    connections = network.max_connections if network.mode != "none" else 0
    scanned = MAX_SCAN_SECONDS if profile.files.scan and profile.files.output else 0
    return {
        "calls": 1,
        "failures": 1,
        "wall_seconds": amount("wall_seconds", wall + scanned),
        "cpu_seconds": amount("cpu_seconds", limits.cpu_seconds + scanned),
        "disclosed_bytes": 2 * limits.stream,
        "fetched_bytes": connections * network.max_bytes,
        "connections": connections,
        "artifacts": limits.output.files if profile.files.output else 0,
    }


def taken(left: Amounts, worst: Amounts) -> dict[str, int] | str:
    """Return what a call reserves of a budget, or the name of what is insufficient.

    Of what is bounded closely, all that it could spend.
    Of bytes, connections and files, which a call seldom uses up, at most what is left.
    One call can then exceed that, two concurrent ones cannot.
    """
    takes: dict[str, int] = {}
    for name, n in left.items():
        wanted = worst.get(name, 0)
        if wanted and (n < wanted if name in WHOLE else n < 1):
            return name
        takes[name] = min(wanted, max(n, 0))
    return takes


def refusal(name: str, wanted: int, left: Iterable[BudgetRemainder], held: int, refills_ms: int | None) -> Refusal:
    """Return the refusal of a call that wants more of ``name``; ``left`` has the refusing budget first.

    Running calls have ``held`` so much of it. ``refills_ms`` is None if it does not refill within the run.
    """
    this, *others = left
    least = f", and this call may take {told(name, wanted):g}" if name in WHOLE and this.left else ""
    hints = ["It does not refill within this run."]
    if refills_ms is not None:
        hints = [f"It refills in {_duration(refills_ms)}, at {this.refills}."]
    if held:
        hints.append(f"Calls under way hold {told(name, held):g} and give back what they do not use.")
    if name == "wall_seconds" and this.left:
        hints.append("A shorter timeout_seconds takes less.")
    if others:
        hints.append(f"Left of the others: {'; '.join(map(said, others))}.")
    reason = f"Of the budget {said(this)} are left{least}."
    return Refusal(rule=f"budget.{this.budget}", reason=reason, hint=" ".join(hints))


def said(left: BudgetRemainder) -> str:
    """Format as ``calls-an-hour 3 of 100 calls``."""
    return f"{left.budget} {left.left:g} of {left.of:g} {left.what.replace('_', ' ')}"


def _duration(ms: int) -> str:
    seconds = -(-ms // _MS)
    hours, minutes = seconds // 3600, -(-(seconds % 3600) // 60)
    if seconds < 100:  # noqa: PLR2004 - a minute and a half is still in seconds
        return f"{seconds} s"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
