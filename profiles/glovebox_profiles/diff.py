"""Compares two versions of a profile, and reports whether the new one lets a tool do more. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from glovebox_profiles import egress, words
from glovebox_profiles.model import Profile, effective
from glovebox_profiles.order import DESCRIPTIVE, DIMENSIONS, value_at

Direction = Literal["widening", "narrowing", "neutral"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """A key that differs."""

    key: str
    """Dotted, as in the file; ``profile`` where a whole profile came or went."""
    before: Any
    """JSON-compatible value, every default filled in; None where there was no profile."""
    after: Any
    direction: Direction
    """``widening`` if anything becomes reachable or spendable that was not, whatever is removed in exchange."""
    sentence: str


def diff(a: Profile | None, b: Profile | None) -> tuple[KeyChange, ...]:
    """Return every change from ``a`` to ``b``, in the order of the file; None stands for no profile.

    Without a profile every call is refused, so a new profile widens and a removed one narrows. A change of hosts is
    judged rule by rule and in doubt called widening, such as two new rules that one old rule covered only together.

    Raises:
        ValueError: The profiles are for different tools.
    """
    if a is None or b is None:
        return _whole(a, b)
    if a.tool != b.tool:
        raise ValueError(f"{a.tool} and {b.tool} are different tools; compare versions of one.")
    changes: list[KeyChange] = []
    for each in DIMENSIONS:
        before, after = each.of(a), each.of(b)
        if before == after:
            continue
        if not each.within(after, before):
            direction: Direction = "widening"
        else:
            direction = "neutral" if each.within(before, after) else "narrowing"
        changes.append(_change(each.key, a, b, direction))
    changes.extend(_change(key, a, b, "neutral") for key in DESCRIPTIVE if value_at(a, key) != value_at(b, key))
    return tuple(sorted(changes, key=lambda change: tuple(words.LABELS).index(change.key)))


def diff_sets(a: Mapping[str, Profile], b: Mapping[str, Profile]) -> dict[str, tuple[KeyChange, ...]]:
    """Return the changes of every tool that differs between two sets of profiles, by tool name."""
    changes = {tool: diff(a.get(tool), b.get(tool)) for tool in sorted({*a, *b})}
    return {tool: found for tool, found in changes.items() if found}


def _whole(a: Profile | None, b: Profile | None) -> tuple[KeyChange, ...]:
    if a is None and b is None:
        return ()
    return (
        KeyChange(
            key="profile",
            before=effective(a) if a else None,
            after=effective(b) if b else None,
            direction="narrowing" if a else "widening",
            sentence="The profile is gone: every call of the tool is refused."
            if a
            else "The profile is new: calls that were refused for want of one are now decided by it.",
        ),
    )


def _change(key: str, a: Profile, b: Profile, direction: Direction) -> KeyChange:
    before, after = value_at(a, key), value_at(b, key)
    if key == "network.allow":
        sentence = _hosts(before, after)
    elif key == "example":
        sentence = f"{words.LABELS[key]}: changed; they are checked at load and grant nothing."
    else:
        sentence = f"{words.LABELS[key]}: {words.value(key, before)} → {words.value(key, after)}."
    return KeyChange(key=key, before=_json_at(a, key), after=_json_at(b, key), direction=direction, sentence=sentence)


def _hosts(before: tuple[egress.EgressRule, ...], after: tuple[egress.EgressRule, ...]) -> str:
    added = [words.rule(each) for each in after if not egress.covers_all(before, [each])]
    removed = [words.rule(each) for each in before if not egress.covers_all(after, [each])]
    parts = [f"{name} {words.listed(rules)}" for name, rules in (("now also", added), ("no longer", removed)) if rules]
    return f"{words.LABELS['network.allow']}: {'; '.join(parts) or 'written differently, the same in effect'}."


def _json_at(profile: Profile, key: str) -> Any:
    value: Any = effective(profile)
    for part in key.split("."):
        value = value[part]
    return value
