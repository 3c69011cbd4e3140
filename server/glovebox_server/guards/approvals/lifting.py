"""Denials that policy may lift: which may become a question, and what an approval would change. Pure: no I/O.

A public host outside the allow-list, a tool outside the role, a spent budget. Never isolation, a non-public address,
a hidden file, a record or a stop. A lifted host passes the gate as any other.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from glovebox_profiles.egress.rules import EgressRule
from glovebox_profiles.egress.rules import decide as decide_egress
from glovebox_profiles.egress.targets import EgressTarget, parse_url
from glovebox_profiles.model import Profile
from glovebox_profiles.policy.model import Lift
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.calls import Decision, Grant, ToolCall
from glovebox_server.core.rights import Rights
from glovebox_server.guards.approvals.question import Lifted, RequiredApproval
from glovebox_server.tools.base import Tool

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
    """The policy's terms for it."""

    @property
    def rule(self) -> str:
        """Return the id of the rule that asks."""
        return f"lift.{self.what}"

    @property
    def why(self) -> str:
        """Return the reason as the end of a sentence."""
        return _WORDS[self.what].format(target=self.target)

    @property
    def asked(self) -> RequiredApproval:
        """Return who must approve; the approver chooses between this call and the run."""
        return RequiredApproval(by=self.lift.by, reach="run", minutes=self.lift.expires_minutes)


def considered(
    call: ToolCall, tool: Tool, rights: Rights, decide: Callable[[Rights], Decision]
) -> tuple[Decision, Rights, Escalation | None]:
    """Return the decision on a call; if policy may lift its denial, the decision with those rights.

    ``decide`` returns the policy's decision on this call under given rights.
    """
    decision = decide(rights)
    lifted = escalation(tool, call, rights, decision) if decision.effect == "deny" and rights.lifts else None
    if lifted is None:
        return decision, rights, None
    wider = widened(rights, call.tool, [lifted])
    then = decide(wider)
    if then.effect == "deny":
        return decision, rights, None
    # The digest stays that of the profile on disk: the record names what was lifted.
    return replace(then, effect="ask", profile_digest=decision.profile_digest or then.profile_digest), wider, lifted


def escalation(tool: Tool, call: ToolCall, rights: Rights, denial: Decision) -> Escalation | None:
    """Return what an approval would have to lift for this denial, or None if the policy lifts no such thing."""
    lifts = {each.what: each for each in rights.lifts}
    if "tool" in lifts and denial.rule == "role.tools" and call.tool in rights.beyond:
        return Escalation(what="tool", target=call.tool, lift=lifts["tool"])
    if "host" in lifts and denial.rule == "network.allow" and tool.request is not None:
        target = liftable_host(*tool.request(call.arguments), rights.profiles[call.tool])
        return Escalation(what="host", target=target, lift=lifts["host"]) if target else None
    return None


def budget_escalation(rights: Rights, rule: str) -> Escalation | None:
    """Return the same for a call without remaining budget."""
    lift = next((each for each in rights.lifts if each.what == "budget"), None)
    if lift is None or not rule.startswith(_BUDGET):
        return None
    return Escalation(what="budget", target=rule.removeprefix(_BUDGET), lift=lift)


def unnamed(targets: Iterable[EgressTarget], profile: Profile, rights: Rights) -> tuple[Escalation, ...]:
    """Return the same for refused hosts that no rule names. An operator is asked: the program has ended."""
    lift = next((each for each in rights.lifts if each.what == "host" and each.by != "client"), None)
    if lift is None:
        return ()
    names = sorted({host_of(each) for each in targets if may_be_lifted(each, profile)})
    return tuple(Escalation(what="host", target=each, lift=lift) for each in names)


def liftable_host(method: str, url: str, profile: Profile) -> str | None:
    """Return a request's host, with scheme and port, if only its name is denied and it may be public."""
    try:
        target = parse_url(method, url)
    except RefusedError:
        return None
    return host_of(target) if may_be_lifted(target, profile) else None


def may_be_lifted(target: EgressTarget, profile: Profile) -> bool:
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
