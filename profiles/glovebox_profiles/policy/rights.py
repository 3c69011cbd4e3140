"""The roles of a principal, and what they together leave of the profiles. Pure.

A principal's own role, the role its token gives and the role of its workflow must all allow: permissions are
intersected, and demands are added up. So neither their order nor a further role widens what the others permit. The
workspace comes from the roles that name one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, product
from typing import Any

from pydantic import ValidationError

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.model import Profile, effective
from glovebox_profiles.order import DIMENSIONS, meet, put_value
from glovebox_profiles.policy.model import Approval, Budget, Lift, Narrow, Policy, Rate, Role
from glovebox_sandboxes.contract.errors import Refusal

_FIX = "A role only takes away; what a tool may do at most stands in its profile."


def narrow_profile(profile: Profile, keys: Narrow) -> Profile:
    """Return what both the profile and a role's keys permit: the profile itself if no key is narrower.

    Raises:
        ProfileError: A key would permit more than the profile, or cannot be combined with it.
    """
    given = _by_key(keys.model_dump(exclude_unset=True))
    if not given:
        return profile
    wanted = _wanted(profile, given)
    for each in DIMENSIONS:
        if each.key in given and not each.within(each.of(wanted), each.of(profile)):
            before, after = (each.words(each.of(side)) for side in (profile, wanted))
            reason = f"would widen the profile of {profile.tool}, which a role cannot: {each.label}"
            raise ProfileError(profile.tool, None, each.key, f"{reason}: {before} → {after}", _FIX)
    return meet(profile, wanted)


def _by_key(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested tables by their dotted keys."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= _by_key(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def _wanted(profile: Profile, given: Mapping[str, Any]) -> Profile:
    values = effective(profile) | {"example": []}
    for key, value in given.items():
        put_value(values, key, value)
    network, python = values["network"], values["python"]
    if "network.allow" not in given and given.get("network.mode") == "none":
        network["allow"] = []
    if "network.mode" not in given and given.get("network.allow", True) in ([], ()):
        network["mode"] = "none"
    if python["start"] == "cold" or python["environment"] != profile.python.environment:
        python["preload"] = []
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
        sentence = first["msg"].removeprefix("Value error, ").rstrip(".")
        raise ProfileError(profile.tool, None, key, f"{sentence[:1].lower()}{sentence[1:]}", _FIX) from None


#: Joins the names of roles that are in effect together.
AND = "+"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRights:
    """The rights of one principal, in one workflow."""

    role: str
    """The name of the role in effect; of several, all of them, joined by ``+``."""
    profiles: Mapping[str, Profile]
    """By tool: only the tools of every role, each with its profile as narrowed by all of them."""
    workspace: str | None
    """The folder its calls may read; None for the server's."""
    conflict: bool
    """True if its roles name different workspaces, so that none is served."""
    artifacts_mib: int | None
    turns: int | None
    budgets: tuple[Budget, ...]
    approvals: tuple[Approval, ...]
    lifts: tuple[Lift, ...]
    rates: tuple[Rate, ...]


def role_named(policy: Policy, principal: str) -> str | None:
    """Return the role in ``[principals]``: by the whole name, else by the longest prefix with a star."""
    if principal in policy.principals:
        return policy.principals[principal]
    begun = [each for each in policy.principals if each.endswith("*") and principal.startswith(each[:-1])]
    return policy.principals[max(begun, key=len)] if begun else None


def roles_in_force(
    policy: Policy, principal: str, granted: Iterable[str] = (), workflow: str | None = None
) -> tuple[str, ...] | Refusal:
    """Return the names of the roles that all have to allow, or the reason why nothing is allowed.

    Of several roles that a token has ``granted``, the first in the file counts.
    """
    found: list[str] = []
    if (own := role_named(policy, principal)) is not None:
        found.append(own)
    if given := tuple(granted):
        first = next((name for name in policy.roles if name in given), None)
        if first is None:
            reason = "Your token's role is not one of the operator's policy, so you may call nothing."
            return Refusal(rule="policy.role", reason=reason, hint="The operator can add the role, or give another.")
        found.append(first)
    if not found:
        if policy.default is None:
            reason = "The operator's policy gives you no role, so you may call nothing."
            return Refusal(rule="policy.principal", reason=reason, hint="The operator can add you to [principals].")
        found.append(policy.default)
    if workflow is not None:
        if workflow not in policy.workflows:
            reason = "The operator's policy does not know the workflow you work in, so you may call nothing."
            return Refusal(rule="policy.workflow", reason=reason, hint="The operator can add it to [workflows].")
        found.append(policy.workflows[workflow])
    return tuple(dict.fromkeys(found))


def order_conflicts(policy: Policy) -> tuple[str, ...]:
    """Return a warning for each two neighbours in ``[scopes]`` whose roles stand in the other order in ``[roles]``.

    The order in ``[roles]`` alone decides the role of a token with both scopes; the order of ``[scopes]`` may suggest
    otherwise. If no neighbours conflict, no two scopes do.
    """
    rank = {name: number for number, name in enumerate(policy.roles)}
    return tuple(
        f'[scopes] has "{one}" before "{other}", but a token with both has the role {policy.scopes[other]}: [roles] '
        f"has {policy.scopes[other]} before {policy.scopes[one]}. Put both tables in one order."
        for one, other in pairwise(policy.scopes)
        if rank[policy.scopes[one]] > rank[policy.scopes[other]]
    )


def combine_roles(policy: Policy, names: Sequence[str], profiles: Mapping[str, Profile]) -> RoleRights:
    """Return what these roles together leave of the profiles.

    A tool that can run under none of their narrowings together is left out, and one whose profile a role would widen:
    ``load`` refuses such a policy.
    """
    roles = [policy.roles[name] for name in names]
    workspaces = {each.workspace for each in roles if each.workspace is not None}
    return RoleRights(
        role=AND.join(names),
        profiles=_narrowed(roles, profiles, of_all=True),
        workspace=workspaces.pop() if len(workspaces) == 1 else None,
        conflict=len(workspaces) > 1,
        artifacts_mib=_least(each.artifacts_mib for each in roles),
        turns=_least(each.turns for each in roles),
        budgets=tuple(budget for each in roles for budget in each.budget),
        approvals=tuple(approval for each in roles for approval in each.approval),
        lifts=reduce(_lifted_by_both, (each.lift for each in roles)),
        rates=_strictest(rate for each in roles for rate in each.rate),
    )


def profiles_beyond(policy: Policy, names: Sequence[str], profiles: Mapping[str, Profile]) -> dict[str, Profile]:
    """Return the profiles of tools that only some of these roles have, as those roles narrow them."""
    return _narrowed([policy.roles[name] for name in names], profiles, of_all=False)


def _narrowed(roles: Sequence[Role], profiles: Mapping[str, Profile], *, of_all: bool) -> dict[str, Profile]:
    """Narrow the profiles of tools that all roles have, or only some; drop those that cannot be narrowed."""
    found = {}
    for tool, profile in profiles.items():
        having = [each for each in roles if tool in each.tools]
        if (len(having) == len(roles)) != of_all:
            continue
        try:
            found[tool] = reduce(
                lambda one, other: one if one == other else meet(one, other),
                (narrow_profile(profile, each.narrow[tool]) for each in having if tool in each.narrow),
                profile,
            )
        except ProfileError:
            continue
    return found


def _least(values: Iterable[int | None]) -> int | None:
    given = [each for each in values if each is not None]
    return min(given) if given else None


def _strictest(rates: Iterable[Rate]) -> tuple[Rate, ...]:
    """Return the lowest rate for each host and window, since a connection counts against each rate once."""
    found: dict[tuple[str, str], Rate] = {}
    for rate in rates:
        known = found.setdefault((rate.host, rate.every), rate)
        if rate.connections < known.connections:
            found[rate.host, rate.every] = rate
    return tuple(found.values())


def _lifted_by_both(a: tuple[Lift, ...], b: tuple[Lift, ...]) -> tuple[Lift, ...]:
    """Return the lifts of both sides, with the answerers that both accept."""
    found = []
    for one, other in product(a, b):
        ways = {one.by, other.by} - {"either"}
        if one.what == other.what and len(ways) <= 1:
            minutes = min(one.expires_minutes, other.expires_minutes)
            found.append(Lift(what=one.what, by=ways.pop() if ways else "either", expires_minutes=minutes))
    return tuple(found)
