"""What calls spend, what budgets bound, and what is left. Pure. Amounts are whole numbers: sums are exact."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from glovebox_profiles.model import Profile
from glovebox_profiles.policy.model import SPENDING, Budget, Rate
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_server.guards.budgets.windows import Every

Amounts = Mapping[str, int]
"""From a name of ``SPENDING`` to a count, bytes, or milliseconds; what is not named is 0."""

WHOLE: Final = ("calls", "failures", "wall_seconds", "cpu_seconds")
"""Of these the most that a call can take must be left before it starts: the profile bounds it closely."""

MAX_SCAN_SECONDS: Final = 20
"""Of looking into the files of one call together, in which its caller waits; counted as processor time too."""

LOW: Final = 5
"""What is left is told with a result when it is less than a fifth."""

_SECONDS: Final = {"wall_seconds", "cpu_seconds"}
_MS: Final = 1000

LOOKING: Final = dict.fromkeys(("wall_seconds", "cpu_seconds"), MAX_SCAN_SECONDS * _MS)
"""The most that looking into the files of one call spends."""


def amount(name: str, value: float) -> int:
    """A number as policy and people say it, in the unit it is counted in."""
    return round(value * _MS) if name in _SECONDS else int(value)


def told(name: str, amount: int) -> int | float:
    """The other way round."""
    return amount / _MS if name in _SECONDS else amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Spender:
    """Whose spending is counted."""

    principal: str
    run: str
    workflow: str
    """Empty for none."""
    tool: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLine:
    """One budget, and one of those whose spending it adds up."""

    name: str
    """Of the budget."""
    per: str
    every: Every
    tool: str | None
    """Whose calls alone are counted; None where all are."""
    key: str
    """The run, principal, workflow (the principal where it has none), or principal and tool. A run's has its principal:
    nobody spends for others."""
    limits: Amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRemainder:
    """What is left of one thing that a budget bounds; the numbers as policy says them."""

    budget: str
    what: str
    """A name of ``SPENDING``."""
    per: str
    every: str
    tool: str | None
    left: int | float
    """Never less than 0. What calls under way may still take is not in it."""
    of: int | float
    refills: str | None
    """When the window is over, by the wall clock; None where it lasts as long as the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """What a call took of one budget before it started."""

    line: BudgetLine
    takes: Amounts
    left: Amounts
    """What was left before it."""
    refills: int | None
    """When, in milliseconds of the wall clock."""


def left_of(line: BudgetLine, left: Amounts, refills: int | None) -> list[BudgetRemainder]:
    """What is left of one budget for people: one for each thing that it bounds."""
    # To the second: the wall clock and that of the windows differ by parts of one.
    moment = None if refills is None else datetime.fromtimestamp(round(refills / _MS), UTC).isoformat()
    return [
        BudgetRemainder(
            budget=line.name,
            what=name,
            per=line.per,
            every=line.every,
            tool=line.tool,
            left=told(name, max(0, left[name])),
            of=told(name, limit),
            refills=moment and moment.replace("+00:00", "Z"),
        )
        for name, limit in line.limits.items()
    ]


def little(granted: Granted, spent: Amounts) -> list[BudgetRemainder]:
    """What is left after a call, where that is less than a fifth."""
    limits = granted.line.limits
    after = {name: n - spent.get(name, 0) for name, n in granted.left.items()}
    if all(n * LOW >= limits[name] for name, n in after.items()):
        return []
    return [each for each in left_of(granted.line, after, granted.refills) if each.left * LOW < each.of]


def lines_of(budgets: Iterable[Budget], spender: Spender) -> tuple[BudgetLine, ...]:
    """The budgets that a call counts against."""
    return tuple(
        BudgetLine(
            name=budget.name,
            per=budget.per,
            every=budget.every,
            tool=spender.tool if budget.per == "tool" else budget.tool,
            key=_key(budget.per, spender),
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
    """Everything that bounds a caller, whichever of these tools it calls."""
    every = [line for tool in tools for line in lines_of(budgets, replace(spender, tool=tool))]
    return (*{(line.name, line.key): line for line in every}.values(), *rates_of(rates, spender))


def _key(per: str, spender: Spender) -> str:
    keys = {
        "run": f"{spender.run} {spender.principal}",
        "principal": spender.principal,
        # Who works in none shares with nobody; no workflow's name begins with a space.
        "workflow": spender.workflow or f" {spender.principal}",
        "tool": f"{spender.tool} {spender.principal}",
    }
    return keys[per]


def rates_of(rates: Iterable[Rate], spender: Spender) -> tuple[BudgetLine, ...]:
    """The rates that one connection counts against: of each host, for each principal."""
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
    """The most that one call can spend, as far as its profile bounds it."""
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


def taken(line: BudgetLine, spent: Amounts, worst: Amounts) -> dict[str, int] | str:
    """What a call takes of a budget before it starts; the name of what there is too little of.

    Of what is bounded closely, all that it could spend. Of bytes, connections and files, which a call seldom uses up,
    what is left at most: one call can then spend more than that, two at one time cannot.
    """
    takes: dict[str, int] = {}
    for name, limit in line.limits.items():
        wanted, left = worst.get(name, 0), limit - spent.get(name, 0)
        if wanted and (left < wanted if name in WHOLE else left < 1):
            return name
        takes[name] = min(wanted, max(left, 0))
    return takes


def refusal(name: str, wanted: int, left: Iterable[BudgetRemainder], held: int, refills_ms: int | None) -> Refusal:
    """What the caller is told who may not spend any more.

    Args:
        name: of what there is too little of.
        wanted: how much the call would take.
        left: of all budgets of the call; the one that refuses first.
        held: how much calls under way hold of it, some of which may come back.
        refills_ms: until it refills, in milliseconds; None where it does not within the run.
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
    """In words, as ``calls-an-hour 3 of 100 calls``."""
    return f"{left.budget} {left.left:g} of {left.of:g} {left.what.replace('_', ' ')}"


def _duration(ms: int) -> str:
    seconds = -(-ms // _MS)
    hours, minutes = seconds // 3600, -(-(seconds % 3600) // 60)
    if seconds < 100:  # noqa: PLR2004 - a minute and a half is still told in seconds
        return f"{seconds} s"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
