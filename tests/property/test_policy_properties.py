"""Roles as algebra: whatever roles say, and however many apply, nobody may do more than the profile says."""

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.fixtures.profile_texts import profiles

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.model import Profile, effective
from glovebox_profiles.order import DIMENSIONS, within
from glovebox_profiles.policy.diff import diff
from glovebox_profiles.policy.model import Approval, Budget, Lift, Narrow, Policy, Role
from glovebox_profiles.policy.rights import RoleRights, combine_roles, narrow_profile, roles_in_force
from glovebox_sandboxes.contract.errors import Refusal

TOOL = "probe"


def keys_of(profile: Profile, names: set[str]) -> Narrow:
    """What a role would say that wants these keys to be as in this profile."""
    values: dict[str, Any] = {}
    for name in names:
        at: Any = effective(profile)
        into = values
        *tables, last = name.split(".")
        for table in tables:
            at, into = at[table], into.setdefault(table, {})
        into[last] = at[last]
    return Narrow.model_validate(values)


_KEYS = st.sets(st.sampled_from([each.key for each in DIMENSIONS]), max_size=6)


@st.composite
def roles(draw: st.DrawFn, name: str = "a") -> Role:
    """A role with or without the tool, with some narrowing, budgets, approvals and lifts."""
    has = draw(st.booleans())
    keys = keys_of(draw(profiles()), draw(_KEYS))
    calls = draw(st.none() | st.integers(1, 9))
    asks = draw(st.booleans())
    lifts = draw(st.sets(st.sampled_from(["host", "tool", "budget"])))
    return Role(
        tools=(TOOL,) if has else (),
        narrow={TOOL: keys} if has and draw(st.booleans()) else {},
        turns=draw(st.none() | st.integers(1, 16)),
        artifacts_mib=draw(st.none() | st.integers(1, 64)),
        budget=(Budget(name=f"{name}-calls", per="run", every="run", calls=calls),) if calls else (),
        approval=(Approval(name=f"{name}-asks", quorum=draw(st.integers(1, 3))),) if asks else (),
        lift=tuple(
            Lift(what=what, by=draw(st.sampled_from(["client", "operator", "either"])))
            for what in ("host", "tool", "budget")
            if what in lifts
        ),
    )


def left(policy: Policy, names: tuple[str, ...], base: Mapping[str, Profile]) -> RoleRights | None:
    """What roles leave; None where one would widen, which no policy that loads has."""
    try:
        return combine_roles(policy, names, base)
    except ProfileError:
        return None


@given(profiles(), profiles(), _KEYS)
def test_what_a_role_narrows_is_within_the_profile_or_an_error(base: Profile, other: Profile, names: set[str]) -> None:
    """An error names a key that the role gave; otherwise each key has the value asked for, or a narrower one."""
    keys = keys_of(other, names)
    found, wrong = base, ""
    try:
        found = narrow_profile(base, keys)
    except ProfileError as problem:
        wrong = problem.key
    if wrong:
        assert wrong in names or wrong.rpartition(".")[0] in {name.rpartition(".")[0] for name in names}
        return
    assert within(found, base)
    for each in DIMENSIONS:
        if each.key in names and each.key not in ("network.mode", "network.allow"):
            assert each.within(each.of(found), each.of(other)), each.key


@given(profiles(), roles("a"), roles("b"))
def test_a_further_role_never_widens(base: Profile, one: Role, other: Role) -> None:
    """Fewer tools, narrower profiles, lower shares; and everything that either demands is demanded."""
    policy = Policy(version=1, roles={"a": one, "b": other})
    alone, both = left(policy, ("a",), {TOOL: base}), left(policy, ("a", "b"), {TOOL: base})
    if alone is None or both is None:
        return
    assert both.profiles.keys() <= alone.profiles.keys()
    assert all(
        within(profile, alone.profiles[tool]) and within(profile, base) for tool, profile in both.profiles.items()
    )
    for name in ("turns", "artifacts_mib"):
        before, after = getattr(alone, name), getattr(both, name)
        assert before is None or (after is not None and after <= before)
    assert set(alone.budgets) <= set(both.budgets)
    assert set(alone.approvals) <= set(both.approvals)
    assert {each.what for each in both.lifts} <= {each.what for each in alone.lifts}
    assert all(lift.by in (mine.by, "client", "operator") for lift in both.lifts for mine in alone.lifts
               if mine.what == lift.what and mine.by in ("either", lift.by))  # fmt: skip


@given(profiles(), roles("a"), roles("b"))
def test_the_order_of_roles_does_not_matter(base: Profile, one: Role, other: Role) -> None:
    """What a workflow's role takes from the principal's, the principal's takes from the workflow's."""
    policy = Policy(version=1, roles={"a": one, "b": other})
    found, back = left(policy, ("a", "b"), {TOOL: base}), left(policy, ("b", "a"), {TOOL: base})
    assert (found is None) == (back is None)
    if found is None or back is None:
        return
    assert found.profiles.keys() == back.profiles.keys()
    for tool, profile in found.profiles.items():
        assert within(profile, back.profiles[tool])
        assert within(back.profiles[tool], profile)
    assert (found.turns, found.artifacts_mib) == (back.turns, back.artifacts_mib)
    assert set(found.budgets) == set(back.budgets)


@given(profiles(), roles("a"), roles("a"))
def test_a_diff_without_widening_leaves_nobody_more(base: Profile, before: Role, after: Role) -> None:
    """What a reviewer is told to be no widening is none: by the rights that are in effect then."""
    a, b = (Policy(version=1, default="a", roles={"a": each}) for each in (before, after))
    old, new = left(a, ("a",), {TOOL: base}), left(b, ("a",), {TOOL: base})
    if old is None or new is None or any(each.direction == "widening" for each in diff(a, b, {TOOL: base})):
        return
    assert new.profiles.keys() <= old.profiles.keys()
    assert all(within(profile, old.profiles[tool]) for tool, profile in new.profiles.items())
    assert {each.name for each in old.budgets} <= {each.name for each in new.budgets}
    assert {each.name for each in old.approvals} <= {each.name for each in new.approvals}
    assert {each.what for each in new.lifts} <= {each.what for each in old.lifts}


@given(profiles(), roles("a"))
def test_a_diff_of_a_policy_with_itself_is_empty(base: Profile, role: Role) -> None:
    """No change, no line."""
    policy = Policy(version=1, default="a", roles={"a": role})
    assert diff(policy, policy, {TOOL: base}) == ()


_NAMES = st.sampled_from(["token:a", "token:ab", "token:a*", "token:*", "oauth:https://i#*", "oauth:https://i#x"])


@given(
    st.dictionaries(_NAMES, st.sampled_from(["a", "b"])),
    st.none() | st.sampled_from(["a", "b"]),
    st.sampled_from(["token:a", "token:ab", "token:abc", "local:0", "oauth:https://i#x", "oauth:https://is#x"]),
    st.lists(st.sampled_from(["a", "b", "gone"]), max_size=3),
    st.none() | st.sampled_from(["known", "unknown"]),
)
def test_whoever_is_nobody_may_do_nothing(
    principals: dict[str, str], default: str | None, who: str, granted: list[str], workflow: str | None
) -> None:
    """Roles are known ones, at least one is in effect, and what is not known is refused, never ignored."""
    policy = Policy(
        version=1, default=default, roles={"a": Role(), "b": Role()}, principals=principals, workflows={"known": "b"}
    )
    found = roles_in_force(policy, who, granted, workflow)
    if isinstance(found, Refusal):
        assert found.rule in {"policy.principal", "policy.role", "policy.workflow"}
        return
    assert found
    assert set(found) <= {"a", "b"}
    assert workflow != "unknown"
    if granted:
        assert set(granted) & set(found)
    if workflow:
        assert "b" in found
