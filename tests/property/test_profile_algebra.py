"""Meet and diff as algebra: whatever the profiles, a meet is never wider and a diff never hides a widening."""

import pytest
from hypothesis import given
from tests.fixtures.profile_texts import profile, profiles

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.load.reading import valid_keys
from glovebox_profiles.model import Profile
from glovebox_profiles.order import DIMENSIONS, KEYS, diff, meet, within


def met(*all_of: Profile) -> Profile | None:
    """Meet from left to right; None when nothing can run."""
    result, *others = all_of
    for other in others:
        if not set(result.isolation) & set(other.isolation):
            with pytest.raises(ProfileError, match=r"isolation: .* nothing in common"):
                meet(result, other)
            return None
        result = meet(result, other)
    return result


def same_effect(a: Profile | None, b: Profile | None) -> bool:
    """Whether two profiles permit the same."""
    if a is None or b is None:
        return a is b
    return within(a, b) and within(b, a)


@given(profiles(), profiles())
def test_a_meet_is_never_wider_than_either_side_in_any_dimension(a: Profile, b: Profile) -> None:
    """For each key that grants or bounds something, the meet's value is within both sides' values."""
    both = met(a, b)
    if both is None:
        return
    for dimension in DIMENSIONS:
        for side in (a, b):
            assert dimension.within(dimension.of(both), dimension.of(side)), dimension.key


@given(profiles(), profiles())
def test_a_meet_is_commutative_and_takes_no_more_than_it_must(a: Profile, b: Profile) -> None:
    """Where one side is within the other, it permits what that does; but for drivers, settled by strength."""
    assert same_effect(met(a, b), met(b, a))
    both = met(a, b)
    if both is not None and within(a, b):
        changed = {change.key for change in diff(a, both) if change.direction != "neutral"}
        assert changed <= {"isolation"}


@given(profiles(), profiles(), profiles())
def test_a_meet_is_associative_in_effect(a: Profile, b: Profile, c: Profile) -> None:
    """Narrowing by workflow and then principal is narrowing by principal and then workflow."""
    bc = met(b, c)
    assert same_effect(met(a, b, c), None if bc is None else met(a, bc))


@given(profiles())
def test_a_profile_with_itself_is_the_same(a: Profile) -> None:
    """A meet is idempotent, also in the order of drivers; of a diff no line."""
    assert same_effect(met(a, a), a)
    assert diff(a, a) == ()


@given(profiles(), profiles())
def test_diff_calls_something_widening_exactly_when_the_new_is_not_within_the_old(a: Profile, b: Profile) -> None:
    """No widening hides behind a narrowing, nor the other way round; backwards all changes, a narrowing widens."""
    widened = any(change.direction == "widening" for change in diff(a, b))
    assert widened == (not within(b, a))
    there = {change.key: change.direction for change in diff(a, b)}
    back = {change.key: change.direction for change in diff(b, a)}
    assert there.keys() == back.keys()
    assert all(back[key] == "widening" for key, direction in there.items() if direction == "narrowing")


@given(profiles(), profiles(), profiles())
def test_within_is_an_order_in_every_dimension(a: Profile, b: Profile, c: Profile) -> None:
    """Reflexive and transitive, so a chain of narrowings is a narrowing."""
    for each in DIMENSIONS:
        x, y, z = each.of(a), each.of(b), each.of(c)
        assert each.within(x, x)
        assert each.within(x, z) or not (each.within(x, y) and each.within(y, z)), each.key


def test_every_key_of_the_model_is_a_dimension_or_descriptive() -> None:
    """A new key cannot be forgotten by meet and diff."""
    ordered = {each.key for each in KEYS}
    leaves = set()
    for key in valid_keys():
        name = ".".join(key)
        covered_above = any(name.startswith(f"{each}.") for each in ordered)
        has_below = any(".".join(other).startswith(f"{name}.") for other in valid_keys())
        if not covered_above and (name in ordered or not has_below):
            leaves.add(name)
    assert leaves == ordered


@pytest.mark.parametrize(
    ("before", "after", "direction"),
    [
        (["docker"], ["docker", "bubblewrap"], "widening"),
        (["docker", "bubblewrap"], ["docker"], "narrowing"),
        (["docker", "bubblewrap"], ["bubblewrap", "docker"], "widening"),
        (["bubblewrap", "docker"], ["docker", "bubblewrap"], "narrowing"),
        (["docker"], ["gvisor"], "widening"),
    ],
)
def test_the_order_of_drivers_counts(before: list[str], after: list[str], direction: str) -> None:
    """Accepting another driver widens; so does preferring a weaker one to a stronger one."""
    a, b = (profile().model_copy(update={"isolation": tuple(each)}) for each in (before, after))
    assert [(change.key, change.direction) for change in diff(a, b)] == [("isolation", direction)]


def test_profiles_of_different_tools_do_not_meet() -> None:
    """A narrowing is for one tool; mixing two up is an error, not a guess."""
    other = profile().model_copy(update={"tool": "other"})
    with pytest.raises(ProfileError, match="different tools"):
        meet(profile(), other)
    with pytest.raises(ValueError, match="different tools"):
        diff(profile(), other)
