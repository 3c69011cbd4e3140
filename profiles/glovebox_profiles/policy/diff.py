"""Compares two versions of a policy, and reports which changes allow more. Pure.

In doubt a change is called widening: another workspace, another window of a budget, another condition of an approval. A
role's narrowing of a profile is compared as profiles are, by ``glovebox_profiles.diff``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import PurePosixPath
from typing import Any, Final

from glovebox_profiles import diff as profile_diff
from glovebox_profiles.diff import Direction, KeyChange
from glovebox_profiles.model import KeyedError, Profile
from glovebox_profiles.policy.explain import approval_words, budget_words, lift_words
from glovebox_profiles.policy.model import SPENDING, Approval, Budget, Lift, Narrow, Policy, Rate, Role, WatchAction
from glovebox_profiles.policy.narrow import narrow_profile
from glovebox_profiles.policy.rights import role_named

_WATCH: Final = ("off", "record", "slow", "ask", "stop")
"""Actions of a watch rule, weakest first."""
_UNKNOWN: Final[Mapping[str, WatchAction]] = {}


def diff(
    a: Policy, b: Policy, profiles: Mapping[str, Profile], watch: Mapping[str, WatchAction] = _UNKNOWN
) -> tuple[KeyChange, ...]:
    """Return every change from ``a`` to ``b``, in the order of the file.

    The roles narrow ``profiles``. ``watch`` has the action of each watch rule unless a policy overrides it.
    """
    roles = {name: tuple(_role(a.roles.get(name), b.roles.get(name), profiles)) for name in {**a.roles, **b.roles}}
    changes = list(_assigned(a, b, profiles))
    for name, found in roles.items():
        changes.extend(_at(f"roles.{name}", each) for each in found)
    changes.extend(_watch(a, b, watch))
    changes.extend(_promote(a.promote.into, b.promote.into))
    if a.example != b.example:
        sentence = "Examples changed; they are checked at load and grant nothing."
        changes.append(_change("example", len(a.example), len(b.example), "neutral", sentence))
    return tuple(changes)


def _assigned(a: Policy, b: Policy, profiles: Mapping[str, Profile]) -> Iterator[KeyChange]:
    """Yield changes of role assignments, each version's role as that version defines it."""

    def change(
        key: str, before: str | None, after: str | None, direction: Direction | None = None
    ) -> Iterator[KeyChange]:
        if before != after or direction:
            judged = direction or _reassigned(a, b, before, after, profiles)
            words = f"{_role_words(before)} → {_role_words(after)}"
            alone = "; what its token gives counts alone now" if direction and key.startswith("principals") else ""
            yield _change(key, before, after, judged, f"{words}{alone}.")

    yield from change("default", a.default, b.default)
    for name in {**a.principals, **b.principals}:
        before, after = role_named(a, name), role_named(b, name)
        # An own role narrows the one that the token gives, which otherwise counts alone.
        more = name.startswith("token:") or (name.startswith("oauth:") and bool(b.scopes))
        doubt: Direction | None = "widening" if before and not after and more else None
        yield from change(f'principals."{name}"', before or a.default, after or b.default, doubt)
    for name in {**a.scopes, **b.scopes}:
        before, after = a.scopes.get(name), b.scopes.get(name)
        # Of the roles that a token's scopes give the first counts, and the first may have changed.
        doubt = "widening" if before != after and None in {before, after} and b.scopes else None
        yield from change(f'scopes."{name}"', before, after or (None if b.scopes else b.default), doubt)
    for name in {**a.workflows, **b.workflows}:
        yield from change(f"workflows.{name}", a.workflows.get(name), b.workflows.get(name))
    given = [name for name in dict.fromkeys(a.scopes.values()) if name in b.roles]
    if any(_order(a, pair) != _order(b, pair) for pair in combinations(given, 2)):
        sentence = "The roles stand in another order: of those that a token's scopes give the first counts."
        yield _change("roles", list(a.roles), list(b.roles), "widening", sentence)


def _order(policy: Policy, pair: tuple[str, str]) -> bool:
    names = list(policy.roles)
    return names.index(pair[0]) < names.index(pair[1])


def _reassigned(
    a: Policy, b: Policy, before: str | None, after: str | None, profiles: Mapping[str, Profile]
) -> Direction:
    if before is None or after is None:
        return "widening" if before is None else "narrowing"
    directions = {each.direction for each in _role(a.roles.get(before), b.roles.get(after), profiles)}
    return next((each for each in ("widening", "narrowing") if each in directions), "neutral")


def _role_words(name: str | None) -> str:
    return f"The role {name}" if name else "No role, so nothing"


def _role(a: Role | None, b: Role | None, profiles: Mapping[str, Profile]) -> Iterator[KeyChange]:
    """Yield every change from one role to another; keys are below the role's own."""
    if a is None or b is None:
        if a is not b:
            direction: Direction = "widening" if a is None else "narrowing"
            sentence = "The role is new." if a is None else "The role is gone: whoever had it may call nothing."
            yield _change("", None, None, direction, sentence)
        return
    added, removed = ([tool for tool in x.tools if tool not in y.tools] for x, y in ((b, a), (a, b)))
    if added or removed:
        parts = [f"{word} {', '.join(tools)}" for word, tools in (("now also", added), ("no longer", removed)) if tools]
        yield _change("tools", a.tools, b.tools, "widening" if added else "narrowing", f"Tools: {'; '.join(parts)}.")
    if a.workspace != b.workspace:
        below = bool(a.workspace and b.workspace and PurePosixPath(b.workspace).is_relative_to(a.workspace))
        sentence = f"Workspace: {a.workspace or 'the server’s'} → {b.workspace or 'the server’s'}."
        yield _change("workspace", a.workspace, b.workspace, "narrowing" if below else "widening", sentence)
    for key, what in (("artifacts_mib", "MiB of artifacts"), ("turns", "Calls at a time")):
        before, after = getattr(a, key), getattr(b, key)
        if before != after:
            share = "the server's share"
            yield _change(key, before, after, _less(before, after), f"{what}: {before or share} → {after or share}.")
    for tool in {**a.narrow, **b.narrow}:
        if tool in a.tools and tool in b.tools:
            yield from (_at(f"narrow.{tool}", each) for each in _narrow(tool, a, b, profiles))
    yield from _demands("budget", _by_name(a.budget), _by_name(b.budget), _budget)
    yield from _demands("approval", _by_name(a.approval), _by_name(b.approval), _approval)
    yield from _lifts({each.what: each for each in a.lift}, {each.what: each for each in b.lift})
    before, after = ({f"{each.host} a {each.every}": each for each in role.rate} for role in (a, b))
    yield from _demands("rate", before, after, _rate)


def _by_name(given: Sequence[Budget] | Sequence[Approval]) -> dict[str, Budget | Approval]:
    return {each.name: each for each in given}


def _narrow(tool: str, a: Role, b: Role, profiles: Mapping[str, Profile]) -> Iterator[KeyChange]:
    before, after = (each.narrow.get(tool, Narrow()) for each in (a, b))
    if before == after:
        return
    if tool in profiles:
        try:
            found = profile_diff.diff(*(narrow_profile(profiles[tool], each) for each in (before, after)))
        except KeyedError:
            found = None
        if found is not None:
            yield from (each for each in found if each.direction != "neutral")
            return
    sentence = "What it narrows changed, and does not fit the profile in force: it cannot be compared."
    yield _change("", _json(before), _json(after), "widening", sentence)


def _demands(
    table: str, a: Mapping[str, Any], b: Mapping[str, Any], compare: Callable[[Any, Any], set[Direction]]
) -> Iterator[KeyChange]:
    """Yield changes of demands on calls: a new one narrows, a removed one widens."""
    for name in {**a, **b}:
        before, after = a.get(name), b.get(name)
        if before == after:
            continue
        if before is None or after is None:
            direction: Direction = "narrowing" if before is None else "widening"
        else:
            found = compare(before, after)
            direction = "widening" if "widening" in found else "narrowing" if found else "neutral"
        yield _change(f"{table}.{name}", _json(before), _json(after), direction, _from_to(before, after))


def _lifts(a: Mapping[str, Lift], b: Mapping[str, Lift]) -> Iterator[KeyChange]:
    for what in {**a, **b}:
        before, after = a.get(what), b.get(what)
        if before == after:
            continue
        if before is None or after is None:
            direction: Direction = "widening" if before is None else "narrowing"
        else:
            wider = before.by not in (after.by, "either")
            direction = "widening" if wider or after.expires_minutes > before.expires_minutes else "narrowing"
        yield _change(f"lift.{what}", _json(before), _json(after), direction, _from_to(before, after))


def _budget(a: Budget, b: Budget) -> set[Direction]:
    found = {_less(x, y) for key in SPENDING if (x := getattr(a, key)) != (y := getattr(b, key))}
    if a.tool != b.tool:
        found.add("narrowing" if b.tool is None else "widening")
    return found | ({"widening"} if (a.per, a.every) != (b.per, b.every) else set())


def _approval(a: Approval, b: Approval) -> set[Direction]:
    found: set[Direction] = set()
    if a.tool != b.tool:
        found.add("narrowing" if b.tool is None else "widening")
    if a.when != b.when:
        found.add("narrowing" if b.when == "always" else "widening")
    elif a.seconds != b.seconds:
        found.add(_less(a.seconds, b.seconds))
    if a.by != b.by:
        found.add("narrowing" if a.by == "either" else "widening")
    if a.another_principal != b.another_principal:
        found.add("narrowing" if b.another_principal else "widening")
    if a.quorum != b.quorum:
        found.add("narrowing" if b.quorum > a.quorum else "widening")
    if a.expires_minutes != b.expires_minutes:
        found.add(_less(a.expires_minutes, b.expires_minutes))
    if a.reach != b.reach:
        found.add("narrowing" if b.reach == "call" else "widening")
    return found


def _rate(a: Rate, b: Rate) -> set[Direction]:
    return {_less(a.connections, b.connections)}


def _watch(a: Policy, b: Policy, defaults: Mapping[str, WatchAction]) -> Iterator[KeyChange]:
    for rule in {**a.watch, **b.watch}:
        given = a.watch.get(rule), b.watch.get(rule)
        before, after = (each or defaults.get(rule) for each in given)
        if given[0] == given[1]:
            continue
        direction: Direction = "neutral" if before == after else "widening"
        if after == "stop" or (before and after and _WATCH.index(after) > _WATCH.index(before)):
            direction = "neutral" if before == after else "narrowing"
        sentence = f"{before or 'its default'} → {after or 'its default'}."
        yield _change(f"watch.{rule}", *given, direction, sentence)


def _promote(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[KeyChange]:
    for name in {**a, **b}:
        before, after = a.get(name), b.get(name)
        if before != after:
            direction: Direction = "narrowing" if after is None else "widening"
            sentence = f"Files may be promoted into: {before or 'none'} → {after or 'none'}."
            yield _change(f"promote.into.{name}", before, after, direction, sentence)


def _less(before: float | None, after: float | None) -> Direction:
    """Compare two bounds; no bound is the widest."""
    return "narrowing" if after is not None and (before is None or after < before) else "widening"


def _from_to(before: Any, after: Any) -> str:
    if before is None:
        return f"New: {_words(after)}"
    if after is None:
        return f"Gone: {_words(before)}"
    a, b = _json(before), _json(after)
    changed = (f"{key} {_plain(a[key])} → {_plain(b[key])}" for key in a if a[key] != b[key])
    return f"{', '.join(changed)}."


def _plain(value: Any) -> str:
    return "not given" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _words(given: Any) -> str:
    match given:
        case Budget():
            return f"{budget_words(given)}."
        case Approval():
            return approval_words(given)
        case Lift():
            return lift_words(given)
    return f"{given.connections} connections a {given.every} to {given.host}."


def _json(given: Any) -> Any:
    return None if given is None else given.model_dump(mode="json", exclude_unset=isinstance(given, Narrow))


def _change(key: str, before: Any, after: Any, direction: Direction, sentence: str) -> KeyChange:
    return KeyChange(key=key, before=before, after=after, direction=direction, sentence=sentence)


def _at(prefix: str, change: KeyChange) -> KeyChange:
    return replace(change, key=f"{prefix}.{change.key}" if change.key else prefix)
