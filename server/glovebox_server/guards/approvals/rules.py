"""Combines the rules that ask about a call, and derives what an approval is bound to. No store, no clock."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from glovebox_profiles.model import Profile
from glovebox_profiles.policy.model import Approval, By
from glovebox_sandboxes.plural import counted
from glovebox_server.calls import ToolCall
from glovebox_server.guards.approvals.lifting import Escalation
from glovebox_server.guards.approvals.question import QuestionSubject, RequiredApproval, canonical
from glovebox_server.guards.proposal import Proposal

PROFILE_ASKS: Final = Approval(name="ask")
"""Of a profile's ``approval = "ask"``: each call, answered by anyone, one approval for one call."""
WATCH_ASKS: Final = Approval(name="watch", by="operator")
"""Of a watch rule's ``ask``: each call, by an operator, since the caller's run looks suspicious."""
CHANGES_ASK: Final = Approval(name="changes")
"""Of every call that would change host files, whatever its profile: one approval for one call."""


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


def asked_about(proposal: Proposal) -> Asking | None:
    """Return what its changes, its profile, watch rules and its role ask about a call, or None."""
    return asking(_rules_of(proposal), proposal.call, proposal.profile)


def asking(rules: Iterable[Approval], call: ToolCall, profile: Profile) -> Asking | None:
    """Return what the rules ask about a call under its effective profile, or None."""
    about = [(rule, _why(rule, call, profile)) for rule in rules if rule.tool in {None, call.tool}]
    found = [(rule, reason) for rule, reason in about if reason]
    if not found:
        return None
    return Asking(
        rules=tuple(f"approval.{rule.name}" for rule, _ in found),
        why=f"A call of {call.tool} is asked about: {'; '.join(dict.fromkeys(reason for _, reason in found))}.",
        asked=together([demanded(rule) for rule, _ in found]),
    )


def _rules_of(proposal: Proposal) -> Iterator[Approval]:
    if proposal.changes:
        # Over HTTP a caller need not be the host's user, and what is shown holds lines of the operator's files.
        here = proposal.call.principal.transport in ("stdio", "cli")
        yield CHANGES_ASK if here else CHANGES_ASK.model_copy(update={"by": "operator"})
    if proposal.profile.approval == "ask":
        yield PROFILE_ASKS
    if proposal.decision.rule.startswith("watch."):
        yield WATCH_ASKS
    yield from proposal.rights.approvals


def _why(rule: Approval, call: ToolCall, profile: Profile) -> str:
    """Return why a rule asks, as the end of a sentence; empty if it does not. Nothing here is the caller's own word."""
    if rule.when == "always":
        return "every one is"
    if rule.when == "leaves":
        leaving = len(call.arguments.get("inputs", ())) if profile.network.mode != "none" else 0
        return f"it could send {counted(leaving, 'artifact')} of earlier calls away" if leaving else ""
    seconds = call.arguments.get("timeout_seconds") or profile.limits.wall_seconds
    if rule.seconds is None or seconds <= rule.seconds:
        return ""
    return f"it may take {seconds:g} seconds, which is more than {rule.seconds:g}"


def demanded(rule: Approval) -> RequiredApproval:
    """Return the demand of one rule."""
    return RequiredApproval(
        by=rule.by,
        quorum=rule.quorum,
        another_principal=rule.another_principal,
        reach=rule.reach,
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


def subject(proposal: Proposal, rules: tuple[str, ...], environment: str) -> QuestionSubject:
    """Return everything that an approval of this call is bound to.

    Raises:
        ValueError: the arguments cannot be displayed.
    """
    call, rights = proposal.call, proposal.rights
    return QuestionSubject(
        principal=call.principal.id,
        run=call.run or "",
        tool=call.tool,
        arguments=canonical(call.arguments),
        profile_digest=proposal.decision.profile_digest,
        policy_digest=rights.policy_digest or "",
        inputs=tuple((each.uri, each.sha256) for each in proposal.inputs.listed),
        workspace=_identity(rights.workspace, proposal.profile),
        environment=environment,
        rules=rules,
        changes=proposal.changes,
    )


def _identity(workspace: Path | None, profile: Profile) -> str:
    """Return device, inode and path digest of the directory that the call sees, not its content; empty for none."""
    if workspace is None or profile.files.workspace == "none":
        return ""
    try:
        found = workspace.stat()
        where = f"{found.st_dev}:{found.st_ino}"
    except OSError:
        where = "unreadable"
    return f"{where}:sha256:{hashlib.sha256(str(workspace).encode('utf-8', 'surrogateescape')).hexdigest()}"
