"""Counts questions and answers in the records of the audit log. Pure: no I/O."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from statistics import median, quantiles

from glovebox_audit.chain import Record
from glovebox_audit.events import ApprovalAnswered, ApprovalRequested, CallDecided

_MANY = 2
"""Least sample of a percentile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Approval statistics of one stretch of the log."""

    calls: int
    """Decided calls; a call that asked and was retried counts again."""
    asked: int
    answered: int
    """Decided questions."""
    allowed: int
    """Allowed questions."""
    prompts_per_100_calls: float
    approval_rate: float | None
    """Share of approvals; near 1 over many questions, people no longer read them. None without answers."""
    median_seconds: float | None
    """Median time from a question to its decision."""
    p95_seconds: float | None
    """95th percentile of it."""
    by_rule: dict[str, int]
    """Questions by the rules that asked."""


def counted(records: Iterable[Record], since: datetime) -> Stats:
    """Count what was recorded since a moment, in the order of the log."""
    calls, asked, decided = 0, dict[str, datetime](), dict[str, bool]()
    times, rules = list[float](), dict[str, int]()
    for record in records:
        time = datetime.fromisoformat(record.time)
        if time < since:
            continue
        if record.kind == CallDecided.kind:
            calls += 1
        elif record.kind == ApprovalRequested.kind:
            asked[record.data["approval"]] = time
            for rule in record.data["rules"]:
                rules[rule] = rules.get(rule, 0) + 1
        elif record.kind == ApprovalAnswered.kind and record.data["approval"] in asked:
            if record.data["state"] == "pending":
                continue
            if record.data["approval"] not in decided:  # a denial after an approval is one question's second answer
                times.append((time - asked[record.data["approval"]]).total_seconds())
            decided[record.data["approval"]] = record.data["state"] == "allowed"
    answered, allowed = len(decided), sum(decided.values())
    return Stats(
        calls=calls,
        asked=len(asked),
        answered=answered,
        allowed=allowed,
        prompts_per_100_calls=round(100 * len(asked) / calls, 2) if calls else 0.0,
        approval_rate=round(allowed / answered, 3) if answered else None,
        median_seconds=round(median(times), 3) if times else None,
        p95_seconds=round(quantiles(times, n=20)[-1], 3) if len(times) >= _MANY else None,
        by_rule=dict(sorted(rules.items(), key=lambda each: -each[1])),
    )
