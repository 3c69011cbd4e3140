"""The rules that ask about a call, the denials that policy may lift, and what an approval is bound to. No store.

Liftable are a public host outside the allow-list, a tool outside the role, and a spent budget. Never isolation, a
non-public address, a hidden file, a record or a stop. A lifted host passes the gate as any other.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from glovebox_profiles.egress.rules import EgressRule
from glovebox_profiles.egress.rules import decide as decide_egress
from glovebox_profiles.egress.targets import EgressTarget, parse_url
from glovebox_profiles.model import Profile
from glovebox_profiles.policy.model import Approval, By, Lift
from glovebox_sandboxes.contract.errors import Refusal, RefusedError
from glovebox_sandboxes.plural import counted
from glovebox_server.calls import Grant, ToolCall
from glovebox_server.core.call import Attempt, Call, Decide, Inputs
from glovebox_server.core.rights import Rights
from glovebox_server.guards.approvals.question import Lifted, QuestionSubject, RequiredApproval, canonical
from glovebox_server.tools.base import Tool

PROFILE_ASKS: Final = Approval(name="ask")
"""Of a profile's ``approval = "ask"``: each call, answered by anyone, one approval for one call."""
WATCH_ASKS: Final = Approval(name="watch", by="operator")
"""Of a watch rule's ``ask``: each call, by an operator, since the caller's run looks suspicious."""
CHANGES_ASK: Final = Approval(name="changes")
"""Of every call that would change host files, whatever its profile: one approval for one call."""
_WORDS: Final = {
    "host": "it wants to reach {target}, which no rule of its profile names",
    "tool": "the caller's role does not have {target}",
    "budget": "the budget {target} is spent",
}
_BUDGET: Final = "budget."


@dataclass(frozen=True, slots=True, kw_only=True)
class Escalation:
    """One denial that an approval would lift."""

    what: Lifted
    target: str
    """``https://host:443``, the tool, or the budget."""
    lift: Lift


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """The combined demands of the rules that ask about one call."""

    rules: tuple[str, ...]
    """Their ids, ``approval.NAME``, in the order of the policy."""
    why: str
    lifted: Escalation | None = None
    asked: RequiredApproval
    """The strictest of each rule's demands, so that one approval satisfies all of them."""


def asked_about(now: Attempt) -> Asking | None:
    """Return what its changes, its profile, watch rules and its role ask about a call, or None."""
    call = now.request
    about = [(rule, _why(rule, now)) for rule in _rules_of(now) if rule.tool in {None, call.tool}]
    found = [(rule, reason) for rule, reason in about if reason]
    if not found:
        return None
    return Asking(
        rules=tuple(f"approval.{rule.name}" for rule, _ in found),
        why=f"A call of {call.tool} is asked about: {'; '.join(dict.fromkeys(reason for _, reason in found))}.",
        asked=together(
            [
                RequiredApproval(
                    by=rule.by, quorum=rule.quorum, another_principal=rule.another_principal, reach=rule.reach,
                    minutes=rule.expires_minutes,
                )
                for rule, _ in found
            ]
        ),
    )  # fmt: skip


def _rules_of(now: Attempt) -> Iterator[Approval]:
    if now.changes:
        # Over HTTP a caller need not be the host's user, and what is shown holds lines of the operator's files.
        here = now.request.principal.transport in ("stdio", "cli")
        yield CHANGES_ASK if here else CHANGES_ASK.model_copy(update={"by": "operator"})
    if now.profile.approval == "ask":
        yield PROFILE_ASKS
    if now.decision.rule.startswith("watch."):
        yield WATCH_ASKS
    yield from now.rights.approvals


def _why(rule: Approval, now: Attempt) -> str:
    """Return why a rule asks, as the end of a sentence; empty if it does not. Nothing here is the caller's own word."""
    arguments, profile = now.request.arguments, now.profile
    if rule.when == "always":
        return "every one is"
    if rule.when == "leaves":
        leaving = len(arguments.get("inputs", ())) if profile.network.mode != "none" else 0
        return f"it could send {counted(leaving, 'artifact')} of earlier calls away" if leaving else ""
    seconds = arguments.get("timeout_seconds") or profile.limits.wall_seconds
    if rule.seconds is None or seconds <= rule.seconds:
        return ""
    return f"it may take {seconds:g} seconds, which is more than {rule.seconds:g}"


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


def with_lift(lifted: Escalation, tool: str, asks: Asking | None = None) -> Asking:
    """Add the lift of a denial to what is asked: one question for all of it."""
    why = f"A call of {tool} would be refused: {_WORDS[lifted.what].format(target=lifted.target)}."
    # The approver chooses between this call and the run.
    asked = RequiredApproval(by=lifted.lift.by, reach="run", minutes=lifted.lift.expires_minutes)
    names: tuple[str, ...] = (f"lift.{lifted.what}",)
    if asks is not None:
        names, why, asked = (*names, *asks.rules), f"{why} {asks.why}", together([asked, asks.asked])
    return Asking(rules=names, why=why, lifted=lifted, asked=asked)


def subject(now: Attempt, asks: Asking | None, environment: Callable[[str], str]) -> QuestionSubject:
    """Return everything that an approval of this call is bound to; ``environment`` names what a tool imports from.

    Raises ValueError: the arguments cannot be displayed.
    """
    call, rights, lifted = now.request, now.rights, asks and asks.lifted
    return QuestionSubject(
        principal=call.principal.id,
        run=call.run or "",
        tool=call.tool,
        arguments=canonical(call.arguments),
        profile_digest=now.decision.profile_digest,
        policy_digest=rights.policy_digest or "",
        inputs=tuple((each.uri, each.sha256) for each in (now.inputs or Inputs()).listed),
        workspace=_identity(rights.workspace, now.profile),
        environment=environment(call.tool),
        rules=asks.rules if asks else (),
        lifted=lifted.what if lifted else None,
        target=lifted.target if lifted else "",
        changes=now.changes,
        any_run=asks is not None and asks.asked.reach == "caller",
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


def lift_denial(now: Attempt, tool: Tool, decide: Decide) -> None:
    """Turn a denial that policy may lift into a question, with the rights that an approval would give."""
    denial = now.decision
    lifted = escalation(now.request, tool, now.rights, denial.rule) if denial.effect == "deny" else None
    if lifted is None:
        return
    wider = widened(now.rights, now.request.tool, [lifted])
    then = decide(wider)
    if then.effect != "deny":
        now.rights, now.escalation = wider, lifted
        # The digest stays that of the profile on disk: the record names what was lifted.
        now.decision = replace(then, effect="ask", profile_digest=denial.profile_digest or then.profile_digest)


def lift_budget(call: Call, refusal: Refusal) -> bool:
    """Have a spent budget asked about if policy says so: once, with the rights that lack it; else return False."""
    now = call.now
    wanted = escalation(call.request, call.tool, now.rights, refusal.rule)
    if wanted is None or now.escalation:
        return False
    now.rights, now.escalation = widened(now.rights, call.request.tool, [wanted]), wanted
    return True


def escalation(call: ToolCall, tool: Tool, rights: Rights, rule: str) -> Escalation | None:
    """Return what an approval would have to lift, where this rule denies; None if the policy lifts no such thing."""
    lifts = {each.what: each for each in rights.lifts}
    lift, target = None, None
    if rule == "role.tools" and call.tool in rights.beyond:
        lift, target = lifts.get("tool"), call.tool
    elif rule == "network.allow" and tool.request is not None:
        lift, target = lifts.get("host"), liftable_host(*tool.request(call.arguments), rights.profiles[call.tool])
    elif rule.startswith(_BUDGET):
        lift, target = lifts.get("budget"), rule.removeprefix(_BUDGET)
    return Escalation(what=lift.what, target=target, lift=lift) if lift and target else None


def unnamed(targets: Iterable[EgressTarget], profile: Profile, rights: Rights) -> tuple[Escalation, ...]:
    """Return the same for refused hosts that no rule names. An operator is asked: the program has ended."""
    names = sorted({host_of(each) for each in targets if _may_be_lifted(each, profile)})
    lifts = [each for each in rights.lifts if each.what == "host" and each.by != "client"]
    return tuple(Escalation(what="host", target=name, lift=lift) for lift in lifts for name in names)


def liftable_host(method: str, url: str, profile: Profile) -> str | None:
    """Return a request's host, with scheme and port, if only its name is denied and it may be public."""
    try:
        target = parse_url(method, url)
    except RefusedError:
        return None
    return host_of(target) if _may_be_lifted(target, profile) else None


def _may_be_lifted(target: EgressTarget, profile: Profile) -> bool:
    """Return whether a read is denied only because no rule names its host.

    An address that is not public is no target; what a name resolves to is checked when it is dialled.
    """
    reads = target.method in EgressRule(host="example.org").methods
    return reads and decide_egress(target, profile.network.allow).rule == "egress.host"


def host_of(target: EgressTarget) -> str:
    """Return scheme, host and port, as grants name them."""
    return f"{target.scheme}://{target.host}:{target.port}"


def rule_for(target: str) -> EgressRule:
    """Return the rule that a grant of a host adds: only this host and port, GET and HEAD."""
    scheme, _, rest = target.partition("://")
    host, _, port = rest.rpartition(":")
    return EgressRule.model_validate({"host": host, "schemes": [scheme], "ports": [int(port)]})


def widened(rights: Rights, tool: str, grants: Iterable[Grant | Escalation]) -> Rights:
    """Return the rights with granted or proposed lifts, for calls of one tool."""
    for each in grants:
        if each.what == "budget":
            rights = replace(rights, budgets=tuple(one for one in rights.budgets if one.name != each.target))
            continue
        profile = rights.beyond[tool] if each.what == "tool" else with_host(rights.profiles[tool], each.target)
        rights = replace(rights, profiles=rights.profiles.with_narrower({**rights.profiles, tool: profile}))
    return rights


def reaching(profile: Profile, grants: Iterable[Grant], already: Escalation | None) -> Profile:
    """Return the profile with the hosts that were granted to one call, and are not in it ``already``."""
    for each in grants:
        if each.what == "host" and (already is None or each.target != already.target):
            profile = with_host(profile, each.target)
    return profile


def with_host(profile: Profile, target: str) -> Profile:
    """Return the profile with one more egress rule."""
    network = profile.network.model_copy(update={"allow": (*profile.network.allow, rule_for(target))})
    return profile.model_copy(update={"network": network})


def permanent(what: Lifted, target: str, tool: str) -> tuple[str, ...]:
    """Return the lines of a diff that would make a grant permanent, for a person to apply."""
    if what == "host":
        rule = rule_for(target)
        schemes = "" if rule.schemes == {"https"} else f'schemes = ["{min(rule.schemes)}"], '
        line = f'+  {{ host = "{rule.host}", {schemes}ports = [{min(rule.ports)}] }},'
        return (f"--- {tool}.toml", f"+++ {tool}.toml", " [network]", " allow = [", line)
    file = ("--- policy.toml", "+++ policy.toml")
    if what == "tool":
        return (*file, " [roles.NAME]  # the caller's", " tools = [", f'+  "{target}",')
    return (*file, " [[roles.NAME.budget]]", f' name = "{target}"', "+# and a larger number, or a longer `every`")
