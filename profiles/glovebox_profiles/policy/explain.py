"""A policy for one principal, in plain words: sections of sentences, as ``explain`` has them for a tool. Pure."""

from collections.abc import Mapping

from glovebox_profiles import words
from glovebox_profiles.explain import Section
from glovebox_profiles.model import Profile
from glovebox_profiles.order import diff
from glovebox_profiles.policy.model import CALLER_MINUTES, SPENDING, Budget, By, Lift, Rate, Rule
from glovebox_profiles.policy.rights import RoleRights
from glovebox_sandboxes.plural import counted

_UNITS: Mapping[str, tuple[str, str]] = {
    "calls": ("call", ""), "failures": ("failed call", ""), "wall_seconds": ("second", " of real time"),
    "cpu_seconds": ("second", " of processor time"), "disclosed_bytes": ("", " read by the model"),
    "fetched_bytes": ("", " fetched"), "connections": ("connection", ""), "artifacts": ("file", " given back"),
}  # fmt: skip
_PER = {
    "run": "each of its runs",
    "principal": "this principal",
    "workflow": "all principals of the workflow together",
    "tool": "each tool, for this principal",
}
_EVERY = {"run": "in all", "minute": "in a minute", "hour": "in an hour", "day": "in a day"}
_BY: Mapping[By, str] = {
    "client": "the person at the caller's client",
    "operator": "an operator, by `glovebox approvals`",
    "either": "the person at the caller's client or an operator, the first of them",
}
_WHEN = {
    "always": "every call{of}",
    "leaves": "a call{of} by which an artifact would leave quarantine",
    "longer_than": "a call{of} that may take longer than {seconds}",
}
_WHAT = {
    "host": "a public host that the profile does not allow",
    "tool": "a tool that the role does not have",
    "budget": "a spent budget",
}
_REACH = {
    "call": "for this call alone",
    "run": "for identical calls of the run",
    "caller": "for one such call of this caller in any run",
}


def explain(rights: RoleRights, profiles: Mapping[str, Profile], *, principal: str, served: str) -> tuple[Section, ...]:
    """Return what a principal may call, read, reach and spend, the approvals it needs, and what may be lifted."""
    spent = (*map(rule_words, rights.budgets), *map(rule_words, rights.rates))
    return (
        Section("In which role", _roles(rights, principal)),
        Section("What it may call", _tools(rights, profiles)),
        Section("What it may read", _read(rights, served)),
        Section("What one call may do", _calls(rights, profiles)),
        Section("What it may spend", spent or ("No budget bounds it, beyond each call's limits.",)),
        Section("Calls that wait for an approval", _asked(rights)),
        Section("What may be lifted", _lifted(rights)),
    )


def rule_words(rule: Rule) -> str:
    """Write one rule of a role: what it bounds or asks for, of what, who answers, and how long an approval stands."""
    match rule:
        case Budget():
            given = [(*_UNITS[key], value) for key in SPENDING if (value := getattr(rule, key)) is not None]
            amounts = words.listed(
                (counted(value, noun) if noun else words.size(int(value))) + of for noun, of, value in given
            )
            of = f" of {rule.tool}" if rule.tool else ""
            return f"{rule.name}: {amounts}{of} {_EVERY[rule.every]}, for {_PER[rule.per]}."
        case Rate():
            return f"{rule.host}: {counted(rule.connections, 'connection')} {_EVERY[rule.every]}."
        case Lift():
            lasts = counted(rule.expires_minutes, "minute")
            return f"{_WHAT[rule.what]}. Who answers: {_BY[rule.by]}. An approval lasts {lasts}."
    of = f" of {rule.tool}" if rule.tool else ""
    what = _WHEN[rule.when].format(of=of, seconds=counted(rule.seconds or 0, "second"))
    many = f"; {rule.quorum} different principals must agree" if rule.quorum > 1 else ""
    lasts = counted(CALLER_MINUTES if rule.reach == "caller" else rule.expires_minutes, "minute")
    who = f"Who answers: {_BY[rule.by]}{many}. An approval is {_REACH[rule.reach]}, and stands for {lasts}."
    return f"{rule.name}: {what}. {who}"


def _roles(rights: RoleRights, principal: str) -> tuple[str, ...]:
    first, *others = rights.role.split("+")
    if not others:
        return (f"{principal} is in the role {first}.",)
    together = "Each of these roles has to allow: what they permit is what all permit, what they demand adds up."
    return f"{principal} is in the roles {words.listed((first, *others))}.", together


def _tools(rights: RoleRights, profiles: Mapping[str, Profile]) -> tuple[str, ...]:
    others = [tool for tool in profiles if tool not in rights.profiles]
    without = f"Not: {', '.join(others)}. It does not see them either." if others else "There is no other tool."
    return (f"{words.listed(rights.profiles)}.", without) if rights.profiles else ("Nothing.",)


def _read(rights: RoleRights, served: str) -> tuple[str, ...]:
    if rights.conflict:
        return ("No workspace: its roles name different ones.",)
    where = f"{rights.workspace}, which its role names" if rights.workspace else served
    kept = (
        f"at most {rights.artifacts_mib} MiB" if rights.artifacts_mib else "the share that the server gives everybody"
    )
    turns = f"At most {counted(rights.turns, 'call')} at a time" if rights.turns else "Calls at a time: as others"
    return (
        f"Workspace: {where}. Only tools whose profile grants it see it.",
        f"Its own artifacts, for which it has {kept}; nobody else's.",
        f"{turns}; further ones wait their turn.",
    )


def _calls(rights: RoleRights, profiles: Mapping[str, Profile]) -> tuple[str, ...]:
    lines = []
    for tool, profile in rights.profiles.items():
        limits = profile.limits
        spends = f"{counted(limits.wall_seconds, 'second')}, {words.size(limits.memory)} of memory"
        hosts = words.listed(dict.fromkeys(rule.host for rule in profile.network.allow), none="no host")
        lines.append(f"{tool}: {spends}; reaches {hosts}.")
        changes = [each for each in diff(profiles[tool], profile) if each.direction != "neutral"]
        lines += [f"{tool}, less than its profile allows: {each.sentence}" for each in changes]
    return (*lines, "`glovebox profiles explain TOOL` has the rest of each profile.") if lines else ("Nothing.",)


def _asked(rights: RoleRights) -> tuple[str, ...]:
    lines = [*map(rule_words, rights.approvals)]
    if profiles := ", ".join(tool for tool, profile in rights.profiles.items() if profile.approval == "ask"):
        lines.append(f"approval.ask: every call of {profiles}, by its profile. Who answers: {_BY['either']}.")
    if not lines:
        return ("Nothing: its calls run at once, or are refused.",)
    own = [each.name for each in rights.approvals if not each.another_principal]
    if own or profiles:
        names = words.listed([*own, *(["approval.ask"] if profiles else [])])
        lines.append(
            f"{names}: the answer can be the caller's own. What comes from the caller's client, or from a command "
            "under the caller's own user, counts as that: fine for one person at a desk, and not four eyes."
        )
    if apart := [each.name for each in rights.approvals if each.another_principal]:
        lines.append(
            f"{words.listed(apart)}: only another principal's yes counts. An agent that also has a shell of the "
            "server's user could give it: run the server under another user than the agent."
        )
    return tuple(lines)


def _lifted(rights: RoleRights) -> tuple[str, ...]:
    lines = [rule_words(lift) for lift in rights.lifts]
    never = "Never: isolation, addresses that are not public, hidden files, records and stops."
    return (*(f"{line[:1].upper()}{line[1:]}" for line in lines), never) if lines else ("Nothing.",)
