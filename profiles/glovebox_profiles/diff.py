"""Compares two versions of a profile, and reports whether the new one lets a tool do more. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, Literal

from glovebox_profiles import egress, words
from glovebox_profiles.model import Profile, effective
from glovebox_profiles.order import KEYS, Dimension, Key

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
    return tuple(_change(each, a, b) for each in KEYS if each.of(a) != each.of(b))


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


def _change(each: Key, a: Profile, b: Profile) -> KeyChange:
    before, after = each.of(a), each.of(b)
    direction: Direction = "neutral"
    if isinstance(each, Dimension) and not each.within(after, before):
        direction = "widening"
    elif isinstance(each, Dimension) and not each.within(before, after):
        direction = "narrowing"
    if each.key == "network.allow":
        sentence = f"{each.label}: {_hosts(before, after)}."
    elif each.key == "example":
        sentence = f"{each.label}: changed; they are checked at load and grant nothing."
    else:
        sentence = f"{each.label}: {each.words(before)} → {each.words(after)}."
    json = (reduce(getitem, each.key.split("."), effective(side)) for side in (a, b))
    return KeyChange(key=each.key, before=next(json), after=next(json), direction=direction, sentence=sentence)


def _hosts(before: tuple[egress.EgressRule, ...], after: tuple[egress.EgressRule, ...]) -> str:
    added = [words.rule(each) for each in after if not egress.covers_all(before, [each])]
    removed = [words.rule(each) for each in before if not egress.covers_all(after, [each])]
    parts = [f"{name} {words.listed(rules)}" for name, rules in (("now also", added), ("no longer", removed)) if rules]
    return "; ".join(parts) or "written differently, the same in effect"
