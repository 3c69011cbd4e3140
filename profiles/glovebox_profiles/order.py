"""Orders profiles: decides key by key whether one permits no more than another. Pure; used by ``meet`` and ``diff``.

Each key that grants or bounds something is one dimension with two matching operations. ``within(a, b)`` is true if
``b`` permits everything that ``a`` permits; ``meet(a, b)`` is the most that both permit. ``KEYS`` has every key with
its words, also those that only describe (a test compares with the model).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from operator import getitem
from typing import Any, Literal

from pydantic import ValidationError

from glovebox_profiles import words
from glovebox_profiles.egress import rules as egress
from glovebox_profiles.errors import ProfileError
from glovebox_profiles.model import Profile, Revealed, effective
from glovebox_sandboxes.contract.base import DEFAULT
from glovebox_sandboxes.drivers.registry import NAMES

RISKS = ("low", "medium", "high")
Direction = Literal["widening", "narrowing", "neutral"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of a profile, for a reviewer."""

    key: str
    """Dotted, as in the file."""
    label: str
    """Its name."""
    words: Callable[[Any], str] = str
    """Writes a value."""

    def of(self, profile: Profile) -> Any:
        """Return the key's value."""
        return value_at(profile, self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension(Key):
    """A key that grants or bounds something."""

    within: Callable[[Any, Any], bool]
    meet: Callable[[Any, Any], Any]


def value_at(profile: Profile, key: str) -> Any:
    """Return the value at a dotted key, as the model holds it."""
    return reduce(getattr, key.split("."), profile)


def isolation_within(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    """Return whether ``a`` accepts no driver that ``b`` does not, and prefers none weaker.

    The list is an order of preference. A weaker driver before a stronger one widens: on a host with both, calls would
    now run in the weaker. The reverse does not.
    """
    return set(a) <= set(b) and all(
        NAMES.index(first) <= NAMES.index(second) or b.index(first) > b.index(second)
        for second, first in combinations(a, 2)
    )


def isolation_meet(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    """Return the drivers both accept: in the same order if the lists are the same, otherwise strongest first.

    Keeping more of either order would make the result depend on which two of three profiles are met first.
    """
    if a == b:
        return a
    return tuple(sorted(set(a) & set(b), key=NAMES.index, reverse=True))


def _ladder(key: str, label: str, choices: Mapping[Any, str]) -> Dimension:
    """Order a choice: narrowest first, each with its words."""
    rungs = tuple(choices)
    return Dimension(
        key=key,
        label=label,
        words=choices.__getitem__,
        within=lambda a, b: rungs.index(a) <= rungs.index(b),
        meet=lambda a, b: rungs[min(rungs.index(a), rungs.index(b))],
    )


def _at_most(key: str, label: str, write: Callable[[Any], str] = words.number) -> Dimension:
    return Dimension(key=key, label=label, words=write, within=lambda a, b: bool(a <= b), meet=min)


def _each(write: Callable[[Any], str], none: str) -> Callable[[Any], str]:
    return lambda given: words.listed(map(write, given), none=none)


def reveal_within(a: tuple[Revealed, ...], b: tuple[Revealed, ...]) -> bool:
    """Return whether ``a`` shows no path that ``b`` hides; a folder includes its content."""
    return all(_covers(b, each) for each in a)


def reveal_meet(a: tuple[Revealed, ...], b: tuple[Revealed, ...]) -> tuple[Revealed, ...]:
    """Return the paths that both show, each once; the reason does not depend on the order of the sides."""
    both = [each for each in a if _covers(b, each)] + [each for each in b if _covers(a, each)]
    found: dict[str, Revealed] = {}
    for each in sorted(both, key=lambda each: (each.path, each.reason)):
        if not _covers(tuple(found.values()), each):
            found[each.path] = each
    return tuple(found.values())


def _covers(those: tuple[Revealed, ...], one: Revealed) -> bool:
    return any(f"{one.path}/".startswith(f"{each.path}/") for each in those)


KEYS: tuple[Key, ...] = (
    Key(key="tool", label="Tool"),
    Key(key="description", label="Description"),
    Key(key="risk", label="Stated risk"),
    Dimension(key="isolation", label="Accepted isolation, preferred first", words=words.listed,
              within=isolation_within, meet=isolation_meet),
    _ladder("approval", "Approval by a person", {"ask": "asked for before every call", "none": "not asked for"}),
    _ladder("files.workspace", "Workspace",
            {"none": "not visible", "read": "readable", "overlay": "readable, with writes kept apart"}),
    _ladder("files.output", "Giving files back", {False: "no", True: "yes"}),
    _ladder("files.scan", "Looking into files given back", {True: "yes", False: "no"}),
    _ladder("files.inputs", "Taking files of earlier calls as input", {False: "no", True: "yes"}),
    Dimension(key="files.reveal", label="Files shown though named as secrets are", words=_each(words.revealed, "none"),
              within=reveal_within, meet=reveal_meet),
    _ladder("network.mode", "Network", {"none": "none at all", "egress": "the listed hosts only"}),
    Dimension(key="network.allow", label="Hosts it may reach", words=_each(words.rule, "no host"),
              within=lambda a, b: egress.covers_all(b, a), meet=egress.meet),
    # Both allow and refuse the same requests; but with `inspect` ordinary programs can make them.
    _ladder("network.tls", "Programs' own TLS",
            {"tunnel": "passed unread, by CONNECT rules only", "inspect": "ended inside, each request decided"}),
    _at_most("network.max_bytes", "Size of one response", words.size),
    _at_most("network.max_redirects", "Redirects followed"),
    _at_most("network.max_connections", "Connections in all"),
    # A credential is injected as it stands or not at all: of two different ones neither is narrower.
    Dimension(key="network.credential", label="Keys injected into its requests", words=_each(words.credential, "none"),
              within=lambda a, b: all(each in b for each in a),
              meet=lambda a, b: tuple(sorted((each for each in a if each in b), key=lambda each: each.name))),
    _at_most("limits.wall_seconds", "Seconds of real time"),
    _at_most("limits.cpu_seconds", "Seconds of processor time"),
    _at_most("limits.memory", "Memory", words.size),
    _at_most("limits.pids", "Processes and threads at a time"),
    _at_most("limits.processors", "Processors at a time"),
    _at_most("limits.scratch", "Scratch space in /tmp", words.size),
    _at_most("limits.workspace.bytes", "Size of the workspace's copy", words.size),
    _at_most("limits.workspace.files", "Files in the workspace's copy"),
    _at_most("limits.output.bytes", "Size of all files given back", words.size),
    _at_most("limits.output.files", "Number of files given back"),
    _at_most("limits.stream", "Kept of stdout and of stderr, each", words.size),
    _ladder("limits.enforce", "Required enforcement of limits",
            {"cgroup": "for the sandbox as a whole (cgroup)", "any": "per process where the host has no cgroup"}),
    # Of two different sets of packages neither is narrower; the default, which every sandbox may have, is below all.
    Dimension(key="python.environment", label="Python packages",
              within=lambda a, b: a in (b, DEFAULT), meet=lambda a, b: a if a == b else DEFAULT),
    _ladder("python.start", "Sandboxes", {"cold": "started when a call comes", "warm": "ready before a call comes"}),
    Key(key="python.preload", label="Modules imported ahead of the call", words=words.listed),
    Dimension(key="audit.keep", label="Recorded in full in the audit log", words=words.listed,
              within=lambda a, b: set(a) <= set(b), meet=lambda a, b: tuple(sorted(set(a) & set(b)))),
    _ladder("result.redact", "Secrets in output",
            {"refuse": "withhold the result", "mask": "are replaced by their kind", "none": "are given back"}),
    Key(key="example", label="Examples"),
)  # fmt: skip
"""In the order of the file. What is no dimension grants nothing; a program can import preloaded modules itself."""

DIMENSIONS = tuple(each for each in KEYS if isinstance(each, Dimension))


def within(a: Profile, b: Profile) -> bool:
    """Return whether ``b`` permits everything that ``a`` permits: never wrongly True."""
    return a.tool == b.tool and all(each.within(each.of(a), each.of(b)) for each in DIMENSIONS)


def meet(a: Profile, b: Profile) -> Profile:
    """Return the profile that permits what both sides permit, so it is never wider than either.

    Commutative, associative and idempotent in effect. The text is ``a``'s; of two risks the higher is stated. Modules
    are preloaded if both preload them from the same environment. It has no examples: those of either side may expect
    more than is left.

    Raises:
        ProfileError: The profiles are for different tools, or no driver is in both.
    """
    if a.tool != b.tool:
        reason = f'"{a.tool}" and "{b.tool}" are different tools'
        raise ProfileError("meet", None, "tool", reason, "Narrow a tool by its own profile.")
    values: dict[str, Any] = {}
    for dimension in DIMENSIONS:
        put_value(values, dimension.key, dimension.meet(dimension.of(a), dimension.of(b)))
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
        reason = f'the two profiles of "{a.tool}" have nothing in common here'
        raise ProfileError("meet", None, key, reason, "Accept one driver in both.") from None


def put_value(values: dict[str, Any], key: str, value: object) -> None:
    """Set the value at a dotted key of nested tables, making those that are missing."""
    *tables, name = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
    values[name] = value


@dataclass(frozen=True, slots=True)
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
    if a is None:
        if b is None:
            return ()
        sentence = "The profile is new: calls that were refused for want of one are now decided by it."
        return (KeyChange("profile", None, effective(b), "widening", sentence),)
    if b is None:
        sentence = "The profile is gone: every call of the tool is refused."
        return (KeyChange("profile", effective(a), None, "narrowing", sentence),)
    if a.tool != b.tool:
        raise ValueError(f"{a.tool} and {b.tool} are different tools; compare versions of one.")
    return tuple(_change(each, a, b) for each in KEYS if each.of(a) != each.of(b))


def diff_sets(a: Mapping[str, Profile], b: Mapping[str, Profile]) -> dict[str, tuple[KeyChange, ...]]:
    """Return the changes of every tool that differs between two sets of profiles, by tool name."""
    changes = {tool: diff(a.get(tool), b.get(tool)) for tool in sorted({*a, *b})}
    return {tool: found for tool, found in changes.items() if found}


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
    old, new = (reduce(getitem, each.key.split("."), effective(side)) for side in (a, b))
    return KeyChange(each.key, old, new, direction, sentence)


def _hosts(before: tuple[egress.EgressRule, ...], after: tuple[egress.EgressRule, ...]) -> str:
    added = [words.rule(each) for each in after if not egress.covers_all(before, [each])]
    removed = [words.rule(each) for each in before if not egress.covers_all(after, [each])]
    parts = [f"{name} {words.listed(rules)}" for name, rules in (("now also", added), ("no longer", removed)) if rules]
    return "; ".join(parts) or "written differently, the same in effect"
