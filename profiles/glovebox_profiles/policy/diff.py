"""Compares two versions of a policy, and reports which changes allow more. Pure.

In doubt a change is called widening: another workspace, another window of a budget, another condition of an approval. A
role's narrowing of a profile is compared as profiles are, by ``glovebox_profiles.order``.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Final

from glovebox_profiles import order
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.model import Profile
from glovebox_profiles.order import Direction, KeyChange
from glovebox_profiles.policy.explain import rule_words
from glovebox_profiles.policy.model import SPENDING, Narrow, Policy, Role, Rule, WatchAction
from glovebox_profiles.policy.rights import narrow_profile, role_named

_WATCH: Final = ("off", "record", "slow", "ask", "stop")
"""Actions of a watch rule, weakest first."""
_TABLES: Final = ("budget", "approval", "lift", "rate")
"""A role's tables of rules, in the order of the file."""
_UNKNOWN: Final[Mapping[str, WatchAction]] = {}


def diff(
    a: Policy, b: Policy, profiles: Mapping[str, Profile], watch: Mapping[str, WatchAction] = _UNKNOWN
) -> tuple[KeyChange, ...]:
    """Return every change from ``a`` to ``b``, in the order of the file.

    The roles narrow ``profiles``. ``watch`` has the action of each watch rule unless a policy overrides it.
    """
    changes = list(_assigned(a, b, profiles))
    for name in {**a.roles, **b.roles}:
        found = _role(a.roles.get(name), b.roles.get(name), profiles)
        changes.extend(_at(f"roles.{name}", each) for each in found)
    changes.extend(_watch(a, b, watch))
    old, new = a.promote.into, b.promote.into
    for name in (each for each in {**old, **new} if old.get(each) != new.get(each)):
        sentence = f"Files may be promoted into: {old.get(name, 'none')} → {new.get(name, 'none')}."
        direction: Direction = "widening" if name in new else "narrowing"
        changes.append(KeyChange(f"promote.into.{name}", old.get(name), new.get(name), direction, sentence))
    if a.example != b.example:
        sentence = "Examples changed; they are checked at load and grant nothing."
        changes.append(KeyChange("example", len(a.example), len(b.example), "neutral", sentence))
    return tuple(changes)


def _assigned(a: Policy, b: Policy, profiles: Mapping[str, Profile]) -> Iterator[KeyChange]:
    """Yield changes of role assignments, each version's role as that version defines it."""
    found: list[tuple[str, str | None, str | None, bool]] = [("default", a.default, b.default, False)]
    for name in {**a.principals, **b.principals}:
        before, after = role_named(a, name), role_named(b, name)
        # An own role narrows the one that the token gives, which otherwise counts alone.
        more = name.startswith("token:") or (name.startswith("oauth:") and bool(b.scopes))
        doubt = before is not None and after is None and more
        found.append((f'principals."{name}"', before or a.default, after or b.default, doubt))
    for name in {**a.scopes, **b.scopes}:
        before, after = a.scopes.get(name), b.scopes.get(name)
        # Of the roles that a token's scopes give the first counts, and the first may have changed.
        doubt = before != after and None in {before, after} and bool(b.scopes)
        found.append((f'scopes."{name}"', before, after or (None if b.scopes else b.default), doubt))
    old, new = a.workflows, b.workflows
    found += [(f"workflows.{name}", old.get(name), new.get(name), False) for name in {**old, **new}]
    for key, before, after, doubt in found:
        if before == after and not doubt:
            continue
        direction: Direction = "narrowing" if after is None else "widening"
        if doubt:
            direction = "widening"
        elif before is not None and after is not None:
            direction = _worst({each.direction for each in _role(a.roles.get(before), b.roles.get(after), profiles)})
        alone = "; what its token gives counts alone now" if doubt and key.startswith("principals") else ""
        words = f"{_role_words(before)} → {_role_words(after)}{alone}."
        yield KeyChange(key, before, after, direction, words)
    given = {name for name in a.scopes.values() if name in b.roles}
    if [name for name in a.roles if name in given] != [name for name in b.roles if name in given]:
        sentence = "The roles stand in another order: of those that a token's scopes give the first counts."
        yield KeyChange("roles", list(a.roles), list(b.roles), "widening", sentence)


def _role_words(name: str | None) -> str:
    return f"The role {name}" if name else "No role, so nothing"


def _role(a: Role | None, b: Role | None, profiles: Mapping[str, Profile]) -> Iterator[KeyChange]:
    """Yield every change from one role to another; keys are below the role's own."""
    if a is None or b is None:
        if a is not b:
            direction: Direction = "widening" if a is None else "narrowing"
            sentence = "The role is new." if a is None else "The role is gone: its callers may call nothing."
            yield KeyChange("", None, None, direction, sentence)
        return
    added, removed = ([tool for tool in x.tools if tool not in y.tools] for x, y in ((b, a), (a, b)))
    if added or removed:
        parts = [f"{word} {', '.join(tools)}" for word, tools in (("now also", added), ("no longer", removed)) if tools]
        yield KeyChange("tools", a.tools, b.tools, "widening" if added else "narrowing", f"Tools: {'; '.join(parts)}.")
    if a.workspace != b.workspace:
        below = bool(a.workspace and b.workspace and PurePosixPath(b.workspace).is_relative_to(a.workspace))
        sentence = f"Workspace: {a.workspace or 'the server’s'} → {b.workspace or 'the server’s'}."
        yield KeyChange("workspace", a.workspace, b.workspace, "narrowing" if below else "widening", sentence)
    share = "the server's share"
    for key, what in (("artifacts_mib", "MiB of artifacts"), ("turns", "Calls at a time")):
        old, new = getattr(a, key), getattr(b, key)
        if old != new:
            yield KeyChange(key, old, new, _less(old, new), f"{what}: {old or share} → {new or share}.")
    for tool in {**a.narrow, **b.narrow}:
        if tool in a.tools and tool in b.tools:
            yield from (_at(f"narrow.{tool}", each) for each in _narrow(tool, a, b, profiles))
    before, after = _named_rules(a), _named_rules(b)
    names = sorted({**before, **after}, key=lambda name: _TABLES.index(name.partition(".")[0]))
    changed = (name for name in names if before.get(name) != after.get(name))
    yield from (_of_rule(name, before.get(name), after.get(name)) for name in changed)


def _named_rules(role: Role) -> dict[str, Rule]:
    """Return a role's rules by table and name."""
    named = [(f"{table}.{each.name}", each) for table in ("budget", "approval") for each in getattr(role, table)]
    lifts = [(f"lift.{each.what}", each) for each in role.lift]
    return dict([*named, *lifts, *((f"rate.{each.host} a {each.every}", each) for each in role.rate)])


def _narrow(tool: str, a: Role, b: Role, profiles: Mapping[str, Profile]) -> Iterator[KeyChange]:
    before, after = (each.narrow.get(tool, Narrow()) for each in (a, b))
    if before == after:
        return
    with suppress(ProfileError, KeyError):
        found = order.diff(*(narrow_profile(profiles[tool], each) for each in (before, after)))
        yield from (each for each in found if each.direction != "neutral")
        return
    sentence = "What it narrows changed, and does not fit the profile in effect: it cannot be compared."
    yield KeyChange("", _json(before), _json(after), "widening", sentence)


def _of_rule(key: str, before: Any, after: Any) -> KeyChange:
    """Judge a new, gone or changed rule: a lift allows, and every other rule demands something of calls."""
    lifts = key.startswith("lift.")
    a, b = _json(before), _json(after)
    if before is None or after is None:
        direction: Direction = "widening" if lifts == (before is None) else "narrowing"
        words = f"New: {rule_words(after)}" if before is None else f"Gone: {rule_words(before)}"
        return KeyChange(key, a, b, direction, words)
    changed = [name for name in a if a[name] != b[name]]
    direction = _worst({_JUDGES[name](a[name], b[name]) if name in _JUDGES else "widening" for name in changed})
    sentence = ", ".join(f"{name} {_plain(a[name])} → {_plain(b[name])}" for name in changed)
    return KeyChange(key, a, b, direction, f"{sentence}.")


def _watch(a: Policy, b: Policy, defaults: Mapping[str, WatchAction]) -> Iterator[KeyChange]:
    for rule in {**a.watch, **b.watch}:
        given = a.watch.get(rule), b.watch.get(rule)
        if given[0] == given[1]:
            continue
        before, after = (each or defaults.get(rule) for each in given)
        stricter = after == "stop" or (before and after and _WATCH.index(after) > _WATCH.index(before))
        direction: Direction = "neutral" if before == after else "narrowing" if stricter else "widening"
        sentence = f"{before or 'its default'} → {after or 'its default'}."
        yield KeyChange(f"watch.{rule}", *given, direction, sentence)


def _less(before: float | None, after: float | None) -> Direction:
    """Compare two bounds; no bound is the widest."""
    return "narrowing" if after is not None and (before is None or after < before) else "widening"


def _plain(value: Any) -> str:
    return "not given" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _worst(found: Collection[Direction]) -> Direction:
    return "widening" if "widening" in found else "narrowing" if "narrowing" in found else "neutral"


def _narrowest(value: object) -> Callable[[Any, Any], Direction]:
    return lambda _before, after: "narrowing" if after == value else "widening"


_JUDGES: Final[Mapping[str, Callable[[Any, Any], Direction]]] = {
    **dict.fromkeys((*SPENDING, "expires_minutes"), _less),
    "seconds": lambda before, after: "neutral" if None in (before, after) else _less(before, after),  # goes with `when`
    "tool": _narrowest(None),
    "when": _narrowest("always"),
    "by": lambda before, _after: "narrowing" if before == "either" else "widening",
    "another_principal": _narrowest(True),
    "quorum": lambda before, after: _less(after, before),
    "reach": _narrowest("call"),
}
"""By the key of a budget, an approval, a lift or a rate: what a change of its value does. In doubt it widens."""


def _json(given: Any) -> Any:
    return None if given is None else given.model_dump(mode="json", exclude_unset=isinstance(given, Narrow))


def _at(prefix: str, change: KeyChange) -> KeyChange:
    return replace(change, key=f"{prefix}.{change.key}" if change.key else prefix)
