"""Intersects two profiles: the result permits what both permit. The only way to combine profiles. Pure."""

from typing import Any

from pydantic import ValidationError

from glovebox_profiles import egress
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.model import Profile
from glovebox_profiles.order import DIMENSIONS, RISKS


def meet(a: Profile, b: Profile) -> Profile:
    """Return the profile that permits what both sides permit, so it is never wider than either.

    Commutative, associative and idempotent in effect. The text is ``a``'s; of two risks the higher is stated. Modules
    are preloaded if both preload them from the same environment. It has no examples: those of either side may expect
    more than is left.

    Raises:
        ProfileError: The profiles are for different tools, or no driver is in both.
    """
    if a.tool != b.tool:
        raise ProfileError(
            "meet", None, "tool", f'"{a.tool}" and "{b.tool}" are different tools', "Narrow a tool by its own profile."
        )
    values: dict[str, Any] = {}
    for dimension in DIMENSIONS:
        _put(values, dimension.key, dimension.meet(dimension.of(a), dimension.of(b)))
    allow = values["network"]["allow"]
    values["network"]["mode"] = "egress" if allow else "none"
    # Keys for requests that are no longer allowed are dropped.
    values["network"]["credential"] = [
        each for each in values["network"]["credential"] if egress.meet(allow, [each.rule()])
    ]
    values |= {"tool": a.tool, "description": a.description, "risk": max(a.risk, b.risk, key=RISKS.index)}
    shared = [module for module in a.python.preload if module in b.python.preload]
    same = a.python.environment == b.python.environment  # what one imports, another may not have
    values["python"]["preload"] = shared if same and values["python"]["start"] == "warm" else []
    try:
        return Profile.model_validate(values)
    except ValidationError as error:
        key = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise ProfileError(
            "meet",
            None,
            key,
            f'the two profiles of "{a.tool}" have nothing in common here',
            "Accept one driver in both.",
        ) from None


def _put(values: dict[str, Any], key: str, value: object) -> None:
    *tables, name = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
    values[name] = value
