"""Selects the approval rules that apply to a call, and combines them. Pure functions over facts: no I/O."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from glovebox_profiles.policy.model import Approval
from glovebox_sandboxes.plural import counted
from glovebox_server.guards.approvals.lifting import Escalation
from glovebox_server.guards.approvals.question import By, RequiredApproval

PROFILE_ASKS: Final = Approval(name="ask")
"""Of a profile's ``approval = "ask"``: each call, answered by anyone, one approval for one call."""
WATCH_ASKS: Final = Approval(name="watch", by="operator")
"""Of a watch rule's ``ask``: each call, by an operator, since the caller's run looks suspicious."""
CHANGES_ASK: Final = Approval(name="changes")
"""Of every call that would change host files, whatever its profile: one approval for one call."""

_NAMED: Final = 5
"""Hosts that a sentence names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts for rules: all known before the start, none self-reported by the caller."""

    tool: str
    new_program: bool
    """It differs from every program of this caller approved under the same profile and policy."""
    new_hosts: tuple[str, ...]
    """Reachable hosts that no approved call of the run could reach: a request's own, or all of a program's profile."""
    leaving: int
    """Input artifacts that the call could send away, since it has a network."""
    seconds: float
    """Time limit of the call."""


def _always(_rule: Approval, _facts: Facts) -> str:
    return "every one is"


def _new_program(_rule: Approval, facts: Facts) -> str:
    return "it differs from every one that was approved before" if facts.new_program else ""


def _new_host(_rule: Approval, facts: Facts) -> str:
    if not facts.new_hosts:
        return ""
    more = len(facts.new_hosts) - _NAMED
    named = ", ".join(facts.new_hosts[:_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"it can reach what this run has not reached before: {named}"


def _leaves(_rule: Approval, facts: Facts) -> str:
    return f"it could send {counted(facts.leaving, 'artifact')} of earlier calls away" if facts.leaving else ""


def _longer_than(rule: Approval, facts: Facts) -> str:
    if rule.seconds is None or facts.seconds <= rule.seconds:
        return ""
    return f"it may take {facts.seconds:g} seconds, which is more than {rule.seconds:g}"


CONDITIONS: Final[Mapping[str, Callable[[Approval, Facts], str]]] = {
    "always": _always,
    "new_program": _new_program,
    "new_host": _new_host,
    "leaves": _leaves,
    "longer_than": _longer_than,
}
"""Each condition by its name in ``policy.toml``: why it asks, as the end of a sentence; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """The combined demands of the rules that ask about one call."""

    rules: tuple[str, ...]
    """Their ids, ``approval.NAME``, in the order of the policy."""
    why: str
    lifts: bool = False
    """An approval would lift a denial too."""
    asked: RequiredApproval
    """The strictest of each rule's demands, so that one approval satisfies all of them."""


def applying(rules: Iterable[Approval], tool: str) -> tuple[Approval, ...]:
    """Return the rules about this tool, whatever their condition."""
    return tuple(rule for rule in rules if rule.tool in {None, tool})


def asking(rules: Sequence[Approval], facts: Facts) -> Asking | None:
    """Return what the rules ask about a call with these facts, or None."""
    reasons = [(rule, CONDITIONS[rule.when](rule, facts)) for rule in applying(rules, facts.tool)]
    found = [(rule, reason) for rule, reason in reasons if reason]
    if not found:
        return None
    return Asking(
        rules=tuple(f"approval.{rule.name}" for rule, _ in found),
        why=f"A call of {facts.tool} is asked about: {'; '.join(dict.fromkeys(reason for _, reason in found))}.",
        asked=together([demanded(rule) for rule, _ in found]),
    )


def demanded(rule: Approval) -> RequiredApproval:
    """Return the demand of one rule."""
    return RequiredApproval(
        by=rule.by,
        quorum=rule.quorum,
        another_principal=rule.another_principal,
        reach=rule.reach,
        teaches=rule.when in {"new_program", "new_host"},
        minutes=rule.expires_minutes,
    )


def together(demands: Sequence[RequiredApproval]) -> RequiredApproval:
    """Combine the strictest demands. Out of band is stricter than at the client, where a host may answer by itself."""
    order: tuple[By, ...] = ("either", "client", "operator")
    by = max((each.by for each in demands), key=order.index)
    quorum, another = max(each.quorum for each in demands), any(each.another_principal for each in demands)
    # At the client only the caller answers: another principal's approval cannot come from there.
    return RequiredApproval(
        by="operator" if by == "client" and (another or quorum > 1) else by,
        quorum=quorum,
        another_principal=another,
        # An approval for a run and one for a caller share only a single call of the run.
        reach=demands[0].reach if len({each.reach for each in demands}) == 1 else "call",
        teaches=any(each.teaches for each in demands),
        minutes=min(each.minutes for each in demands),
    )


def with_lift(asks: Asking | None, escalation: Escalation | None, tool: str) -> Asking | None:
    """Add the lift of a denial to what is asked: one question for all of it."""
    if escalation is None:
        return asks
    reason = f"A call of {tool} would be refused: {escalation.why}."
    return Asking(
        rules=(escalation.rule, *(asks.rules if asks else ())),
        why=f"{reason} {asks.why}" if asks else reason,
        lifts=True,
        asked=together([escalation.asked, asks.asked]) if asks else escalation.asked,
    )
