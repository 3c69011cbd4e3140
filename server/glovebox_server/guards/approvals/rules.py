"""Which approval rules ask about a call, and what they ask for together. Pure functions over facts: no I/O."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from glovebox_profiles.policy.model import Approval
from glovebox_sandboxes.plural import counted
from glovebox_server.guards.approvals.lifting import Escalation
from glovebox_server.guards.approvals.question import By, RequiredApproval

PROFILE_ASKS: Final = Approval(name="ask")
"""What a profile's ``approval = "ask"`` means: each call, by whoever answers first, one yes for one call."""
WATCH_ASKS: Final = Approval(name="watch", by="operator")
"""What a watch rule's ``ask`` means: each call, by an operator, since it is the caller's run that looks odd."""
CHANGES_ASK: Final = Approval(name="changes")
"""What every call that would change files on the host means, whatever its profile says: one yes for one call."""

_NAMED: Final = 5
"""Hosts that a sentence names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What rules may look at: all of it known before anything starts, none of it told by the caller about itself."""

    tool: str
    """Name of the tool."""
    new_program: bool
    """Whether it differs from every program of this caller's that was approved under the same profile and policy."""
    new_hosts: tuple[str, ...]
    """Hosts the call could reach, and no approved call of the run could: of a request its own, of a program all that
    its profile allows."""
    leaving: int
    """Artifacts that the call is given and could send away, since it has a network."""
    seconds: float
    """How long it may take."""


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
"""Each condition by its name in ``policy.toml``: why it asks, as the end of a sentence; empty where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What the rules that ask about one call want together."""

    rules: tuple[str, ...]
    """Their ids, ``approval.NAME``, in the order of the policy."""
    why: str
    """Why, in one sentence."""
    lifts: bool = False
    """Whether a yes would lift a denial too."""
    asked: RequiredApproval
    """Who must say yes: the strictest of each rule's demands, so that one yes satisfies all of them."""


def applying(rules: Iterable[Approval], tool: str) -> tuple[Approval, ...]:
    """The rules that are about this tool, whatever their condition."""
    return tuple(rule for rule in rules if rule.tool in {None, tool})


def asking(rules: Sequence[Approval], facts: Facts) -> Asking | None:
    """What the rules ask about a call of which these facts hold; None where none of them asks."""
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
    """What one rule of the policy demands."""
    return RequiredApproval(
        by=rule.by,
        quorum=rule.quorum,
        another_principal=rule.another_principal,
        reach=rule.reach,
        teaches=rule.when in {"new_program", "new_host"},
        minutes=rule.expires_minutes,
    )


def together(demands: Sequence[RequiredApproval]) -> RequiredApproval:
    """The strictest of each demand. Out of band is stricter than at the client, where a host may answer by itself."""
    order: tuple[By, ...] = ("either", "client", "operator")
    by = max((each.by for each in demands), key=order.index)
    quorum, another = max(each.quorum for each in demands), any(each.another_principal for each in demands)
    # At the client only the caller answers: nobody there could give what another rule wants of somebody else.
    return RequiredApproval(
        by="operator" if by == "client" and (another or quorum > 1) else by,
        quorum=quorum,
        another_principal=another,
        # A yes for a run and one for a caller have a single call of the run in common.
        reach=demands[0].reach if len({each.reach for each in demands}) == 1 else "call",
        teaches=any(each.teaches for each in demands),
        minutes=min(each.minutes for each in demands),
    )


def with_lift(asks: Asking | None, escalation: Escalation | None, tool: str) -> Asking | None:
    """What is asked about a call that policy denies unless somebody lifts that: one question for all of it."""
    if escalation is None:
        return asks
    reason = f"A call of {tool} would be refused: {escalation.why}."
    return Asking(
        rules=(escalation.rule, *(asks.rules if asks else ())),
        why=f"{reason} {asks.why}" if asks else reason,
        lifts=True,
        asked=together([escalation.asked, asks.asked]) if asks else escalation.asked,
    )
