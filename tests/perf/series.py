"""What was measured under one name, and the few numbers that are said of it. Pure; nothing here measures."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Statistic = Literal["p50", "p95", "p99", "max"]
RESAMPLES = 2000
"""Of a bootstrap: the ends of its interval then move by less than what is shown of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values of one thing, in the rounds in which they were taken."""

    key: str
    what: str
    """For a reader who sees nothing else."""
    unit: str
    rounds: tuple[tuple[float, ...], ...]
    note: str = ""
    """How it was measured, where that is not plain: how many callers, which pause."""

    @property
    def values(self) -> tuple[float, ...]:
        """All of them, in order."""
        return tuple(value for each in self.rounds for value in each)

    def get(self, statistic: Statistic) -> float:
        """One number that stands for all."""
        values = self.values
        if statistic == "max":
            return max(values)
        return quantile(values, {"p50": 0.5, "p95": 0.95, "p99": 0.99}[statistic])

    def summary(self) -> dict[str, Any]:
        """As JSON: the numbers that are shown, and the median of each round, by which two runs can be compared."""
        values = self.values
        return {
            "what": self.what,
            "unit": self.unit,
            "count": len(values),
            **{name: rounded(self.get(name)) for name in ("p50", "p95", "p99", "max")},
            "quartiles": [rounded(quantile(values, 0.25)), rounded(quantile(values, 0.75))],
            "rounds": [rounded(statistics.median(each)) for each in self.rounds if each],
            "note": self.note,
        }


def one(key: str, what: str, unit: str, value: float, note: str = "") -> Series:
    """A series of a single value."""
    return Series(key=key, what=what, unit=unit, rounds=((value,),), note=note)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies, straight between the two nearest.

    Raises:
        ValueError: there are none.
    """
    if not values:
        raise ValueError("there is no quantile of nothing")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def rounded(value: float) -> float:
    """Four digits that mean something."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, max(0, 3 - math.floor(math.log10(abs(value)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A ratio, and where it would lie in 95 of 100 runs like this one."""

    ratio: float
    low: float
    high: float

    @property
    def differs(self) -> bool:
        """Whether the two are told apart at all."""
        return not self.low <= 1.0 <= self.high


def compared(ours: Series, theirs: Series, seed: int = 1) -> Interval:
    """The ratio of two medians (of their rounds' medians), with a bootstrap interval.

    Whole rounds are drawn, for both at once: what a slow moment of the machine did to one it did to the other, and
    the calls of one round are not independent of each other.

    Raises:
        ValueError: they were not taken in the same rounds.
    """
    pairs = [
        (statistics.median(a), statistics.median(b)) for a, b in zip(ours.rounds, theirs.rounds, strict=True) if a and b
    ]
    chance = random.Random(seed)  # noqa: S311 - not for secrets

    def ratio(drawn: Sequence[tuple[float, float]]) -> float:
        return statistics.median(a for a, _ in drawn) / statistics.median(b for _, b in drawn)

    found = [ratio(chance.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES)]
    return Interval(ratio=ratio(pairs), low=quantile(found, 0.025), high=quantile(found, 0.975))
