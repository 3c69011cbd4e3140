"""Both sides of every row held against each other: the ratio with its interval, the verdict, the exit code. Pure.

Exit code: 1 if a row is slower, else 3 if a row could not be measured, else 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tests.perf.rows import Row
from tests.perf.series import Interval, Series, compared, rounded
from tests.perf.sides import HERE, THERE

SLOWER = 1.05
"""A row is slower if its whole 95 % interval is above: what is less is within what the layout of a program in memory
does to two builds of the same source, and what no user can tell from noise."""
EXIT_SLOWER, EXIT_UNMEASURED = 1, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """What came of one row."""

    row: Row
    here: float | None = None
    there: float | None = None
    interval: Interval | None = None  # how many times as much it costs here as there; of a rate, there as here
    reason: str = ""  # why it was not measured

    @property
    def slower(self) -> bool:
        """Whether it is told apart by more than ``SLOWER``."""
        return self.interval is not None and self.interval.low > SLOWER

    @property
    def verdict(self) -> str:
        """In words."""
        if self.interval is None:
            return "not measured"
        if self.slower:
            return "SLOWER" if self.row.unit in {"ms", "calls/s", "MB/s"} else "MORE"
        if not self.interval.differs:
            return "no difference seen"
        return "better" if self.interval.ratio < 1 else f"worse, not surely by {SLOWER - 1:.0%}"

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        found = self.interval
        numbers = {"here": self.here, "there": self.there}
        numbers |= {name: getattr(found, name) if found else None for name in ("ratio", "low", "high")}
        return {
            "row": self.row.key,
            "statistic": self.row.statistic,
            "unit": self.row.unit,
            **{name: None if number is None else rounded(number) for name, number in numbers.items()},
            "slower": self.slower,
            "reason": self.reason,
        }


def contrast(row: Row, series: Mapping[str, Series], reasons: Mapping[str, str]) -> Contrast:
    """Hold both sides of a row against each other."""
    keys = [f"{row.judged} {name}" for name in (HERE, THERE)]
    missing = [key for key in keys if key not in series]
    if missing:
        reason = reasons.get(missing[0]) or reasons.get(row.judged) or "not measured in this run"
        return Contrast(row=row, reason=f"{missing[0]}: {reason}")
    here, there = (series[key] for key in keys)
    both = Contrast(row=row, here=here.get(row.statistic), there=there.get(row.statistic))
    try:
        found = compared(here, there, row.statistic, floor=row.floor)
    except ValueError as problem:
        return replace(both, reason=str(problem))
    return replace(both, interval=found.inverse if row.rate else found)


def code(contrasts: Sequence[Contrast]) -> int:
    """The exit code: a row that is slower is the worst, then one, or a run, that says nothing."""
    if any(each.slower for each in contrasts):
        return EXIT_SLOWER
    return EXIT_UNMEASURED if not contrasts or any(each.interval is None for each in contrasts) else 0


def show(contrasts: Sequence[Contrast], facts: Mapping[str, str], console: Console) -> None:
    """The table, and under it what it belongs to and what the exit code means."""
    table = Table(title=f"{facts['revision']} (here) against {facts['against']} (there)", title_justify="left")
    for title in ("row", "", "here", "there", "", "times as much", "95 % interval", ""):
        table.add_column(title, justify="right" if title in {"here", "there", "times as much"} else "left")
    for each in contrasts:
        found = each.interval
        numbers = [f"{rounded(number):g}" if number is not None else "" for number in (each.here, each.there)]
        shown = (f"{found.ratio:.3f}", f"{found.low:.3f} to {found.high:.3f}") if found else ("", "")
        style = "red" if each.slower else "yellow" if found is None else "none"
        verdict = f"[{style}]{each.verdict}[/]"
        table.add_row(each.row.key, each.row.statistic, *numbers, each.row.unit, *shown, verdict)
    console.print(table)
    for name, fact in facts.items():
        console.print(f"[dim]{name:18} {fact}[/]", highlight=False)
    for each in contrasts:
        if each.interval is None:
            console.print(f"[yellow]{each.row.key}[/] not measured: {escape(each.reason)}", highlight=False)
    for title, keys in (
        (f"slower by more than {SLOWER - 1:.0%}", [each.row.key for each in contrasts if each.slower]),
        ("not measured", [each.row.key for each in contrasts if each.interval is None]),
    ):
        console.print(f"{title}: {', '.join(keys) or 'none'}")
