"""Combines a profile with a role's narrower keys. Pure.

A role is checked first: a key that would permit more is an error that names it. ``meet`` alone would leave it without
effect, and its writer would rely on it.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from glovebox_profiles.errors import ProfileError
from glovebox_profiles.meet import meet
from glovebox_profiles.model import Profile, effective
from glovebox_profiles.order import DIMENSIONS
from glovebox_profiles.policy.model import Narrow

_FIX = "A role only takes away; what a tool may do at most stands in its profile."


def narrow_profile(profile: Profile, keys: Narrow) -> Profile:
    """Return what both the profile and a role's keys permit: the profile itself if no key is narrower.

    Raises:
        ProfileError: A key would permit more than the profile, or cannot be combined with it.
    """
    given = keys.model_dump(exclude_unset=True)
    if not given:
        return profile
    wanted = _wanted(profile, given)
    for each in DIMENSIONS:
        if not _has(given, each.key) or each.within(each.of(wanted), each.of(profile)):
            continue
        before, after = (each.words(each.of(side)) for side in (profile, wanted))
        reason = f"would widen the profile of {profile.tool}, which a role cannot: {each.label}"
        raise ProfileError(profile.tool, None, each.key, f"{reason}: {before} → {after}", _FIX)
    return meet(profile, wanted)


def _wanted(profile: Profile, given: Mapping[str, Any]) -> Profile:
    values = effective(profile) | {"example": []}
    _put(values, given)
    network, python = values["network"], values["python"]
    if _has(given, "network.mode") and not _has(given, "network.allow") and network["mode"] == "none":
        network["allow"] = []
    if _has(given, "network.allow") and not _has(given, "network.mode") and not network["allow"]:
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


def _put(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if isinstance(value, dict):
            _put(values[key], value)
        else:
            values[key] = value


def _has(given: Mapping[str, Any], key: str) -> bool:
    value: Any = given
    for part in key.split("."):
        if part not in value:
            return False
        value = value[part]
    return True
