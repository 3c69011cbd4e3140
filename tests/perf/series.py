"""What was measured under one name, and the few numbers that are said of it. Pure; nothing here measures."""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Statistic = Literal["p50", "p95", "p99", "max"]
SHARES: dict[Statistic, float] = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""By the number of rounds: how many standard errors to either side make 95 %."""
FEW = 6
"""Rounds of which not even the smallest and the largest enclose the true median in 95 of 100 runs (2 / 2**n > 5 %)."""
RESAMPLES = 2000  # of a bootstrap: the ends of its interval then move by less than what is shown of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values of one thing, in the rounds in which they were taken."""

    key: str
    what: str  # for a reader who sees nothing else
    unit: str
    rounds: tuple[tuple[float, ...], ...]
    note: str = ""  # how it was measured, where that is not plain: how many callers, which pause

    @property
    def values(self) -> tuple[float, ...]:
        """All of them, in order."""
        return tuple(value for each in self.rounds for value in each)

    def get(self, statistic: Statistic) -> float:
        """One number that stands for all."""
        return _number(self.values, statistic)

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
    """The value below which this share of them lies, straight between the two nearest."""
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

    @property
    def inverse(self) -> "Interval":
        """The same of the two in the other order."""
        return Interval(ratio=1 / self.ratio, low=1 / self.high, high=1 / self.low)


def compared(ours: Series, theirs: Series, statistic: Statistic = "p50", *, floor: float = 0.0) -> Interval:
    """The ratio of one number of two series, and its 95 % interval."""
    # A median is that of the rounds' medians; other numbers are of all values. The interval is a bootstrap's: whole
    # rounds are drawn, for both at once, since what a slow moment of the machine did to one it did to the other, and
    # the calls of one round are not independent of each other. A bootstrap of a few rounds says less than it seems
    # to: below ``FEW`` it is Student's, of the logarithms of the rounds' ratios.
    pairs = [
        (_raised(a, floor, statistic), _raised(b, floor, statistic))
        for a, b in zip(ours.rounds, theirs.rounds, strict=True)
        if a and b
    ]
    if len(pairs) < min(STUDENT):
        raise ValueError(f"{len(pairs)} of at least {min(STUDENT)} rounds say nothing of how far rounds differ")
    if any(min(each) <= 0 for pair in pairs for each in pair):
        raise ValueError("a value came to nothing, and nothing has no ratio")
    if len(pairs) < FEW:
        return _students([_number(a, statistic) / _number(b, statistic) for a, b in pairs])
    chance = random.Random(1)  # noqa: S311 - not for secrets

    def ratio(drawn: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
        ours, theirs = ([value for values in each for value in values] for each in zip(*drawn, strict=True))
        return _number(ours, statistic) / _number(theirs, statistic)

    found = [ratio(chance.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES)]
    return Interval(ratio=ratio(pairs), low=quantile(found, 0.025), high=quantile(found, 0.975))


def _raised(values: Sequence[float], floor: float, statistic: Statistic) -> Sequence[float]:
    """A round's values; its median alone where that is what counts, so that no round counts for more than another."""
    kept = [max(value, floor) for value in values]
    return [statistics.median(kept)] if statistic == "p50" else kept


def _number(values: Sequence[float], statistic: Statistic) -> float:
    return max(values) if statistic == "max" else quantile(values, SHARES[statistic])


def _students(ratios: Sequence[float]) -> Interval:
    logs = [math.log(each) for each in ratios]
    middle, reach = statistics.mean(logs), STUDENT[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(ratio=math.exp(middle), low=math.exp(middle - reach), high=math.exp(middle + reach))
