"""The roles of a principal, and what they together leave of the profiles. Pure.

A principal's own role, the role its token gives and the role of its workflow must all allow: permissions are
intersected, and demands are added up. So neither their order nor a further role widens what the others permit. The
workspace comes from the roles that name one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.meet import meet
from glovebox_profiles.model import Profile
from glovebox_profiles.policy.model import Approval, Budget, Lift, Policy, Rate, Role
from glovebox_profiles.policy.narrow import narrow_profile
from glovebox_sandboxes.contract.errors import Refusal

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
        profiles=_profiles(roles, profiles),
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
    roles = [policy.roles[name] for name in names]
    return _narrowed(
        {
            tool: (profile, [each for each in roles if tool in each.tools])
            for tool, profile in profiles.items()
            if not all(tool in each.tools for each in roles)
        }
    )


def _profiles(roles: Sequence[Role], profiles: Mapping[str, Profile]) -> dict[str, Profile]:
    had = {tool: profile for tool, profile in profiles.items() if all(tool in each.tools for each in roles)}
    return _narrowed({tool: (profile, roles) for tool, profile in had.items()})


def _narrowed(profiles: Mapping[str, tuple[Profile, Sequence[Role]]]) -> dict[str, Profile]:
    """Narrow each profile by its roles; drop those that cannot be."""
    found = {}
    for tool, (profile, roles) in profiles.items():
        try:
            found[tool] = reduce(
                lambda one, other: one if one == other else meet(one, other),
                (narrow_profile(profile, each.narrow[tool]) for each in roles if tool in each.narrow),
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
    for one in a:
        for other in b:
            if one.what != other.what:
                continue
            ways = {one.by, other.by} - {"either"}
            if len(ways) > 1:
                continue
            by = ways.pop() if ways else "either"
            found.append(Lift(what=one.what, by=by, expires_minutes=min(one.expires_minutes, other.expires_minutes)))
    return tuple(found)
