"""Orders profiles: decides key by key whether one permits no more than another. Pure; used by ``meet`` and ``diff``.

Each key that grants or bounds something is one dimension with two matching operations. ``within(a, b)`` is true if
``b`` permits everything that ``a`` permits; ``meet(a, b)`` is the most that both permit. Keys that only describe are
listed apart, so that a new key is in one of the lists (a test compares with the model).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from typing import Any

from glovebox_profiles import egress
from glovebox_profiles.model import Profile, Revealed
from glovebox_sandboxes.contract.spec import DEFAULT
from glovebox_sandboxes.drivers.registry import NAMES

RISKS = ("low", "medium", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """A key of a profile that grants or bounds something."""

    key: str
    """Dotted, as in the file."""
    within: Callable[[Any, Any], bool]
    meet: Callable[[Any, Any], Any]

    def of(self, profile: Profile) -> Any:
        """Return the key's value."""
        return value_at(profile, self.key)


def value_at(profile: Profile, key: str) -> Any:
    """Return the value at a dotted key, as the model holds it."""
    return reduce(getattr, key.split("."), profile)


def isolation_within(a: tuple[str, ...], b: tuple[str, ...]) -> bool:
    """Return whether ``a`` accepts no driver that ``b`` does not, and prefers none weaker.

    The list is an order of preference. A weaker driver before a stronger one widens: on a host with both, calls would
    now run in the weaker. The reverse does not.
    """
    return set(a) <= set(b) and all(
        not (_stronger(first, second) and b.index(first) < b.index(second)) for second, first in combinations(a, 2)
    )


def isolation_meet(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    """Return the drivers both accept: in the same order if the lists are the same, otherwise strongest first.

    Keeping more of either order would make the result depend on which two of three profiles are met first.
    """
    if a == b:
        return a
    return tuple(sorted(set(a) & set(b), key=NAMES.index, reverse=True))


def _stronger(one: str, other: str) -> bool:
    return NAMES.index(one) > NAMES.index(other)


def _ladder(key: str, *rungs: object) -> Dimension:
    """Order a choice: narrowest first."""
    return Dimension(
        key=key,
        within=lambda a, b: rungs.index(a) <= rungs.index(b),
        meet=lambda a, b: rungs[min(rungs.index(a), rungs.index(b))],
    )


def _at_most(key: str) -> Dimension:
    return Dimension(key=key, within=lambda a, b: bool(a <= b), meet=min)


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


DIMENSIONS: tuple[Dimension, ...] = (
    Dimension(key="isolation", within=isolation_within, meet=isolation_meet),
    _ladder("approval", "ask", "none"),
    _ladder("files.workspace", "none", "read", "overlay"),
    _ladder("files.output", False, True),
    _ladder("files.scan", True, False),
    _ladder("files.inputs", False, True),
    Dimension(key="files.reveal", within=reveal_within, meet=reveal_meet),
    _ladder("network.mode", "none", "egress"),
    Dimension(key="network.allow", within=lambda a, b: egress.covers_all(b, a), meet=egress.meet),
    # Both allow and refuse the same requests; but with `inspect` ordinary programs can make them.
    _ladder("network.tls", "tunnel", "inspect"),
    _at_most("network.max_bytes"),
    _at_most("network.max_redirects"),
    _at_most("network.max_connections"),
    # A credential is injected as it stands or not at all: of two different ones neither is narrower.
    Dimension(
        key="network.credential",
        within=lambda a, b: all(each in b for each in a),
        meet=lambda a, b: tuple(sorted((each for each in a if each in b), key=lambda each: each.name)),
    ),
    _at_most("limits.wall_seconds"),
    _at_most("limits.cpu_seconds"),
    _at_most("limits.memory"),
    _at_most("limits.pids"),
    _at_most("limits.processors"),
    _at_most("limits.scratch"),
    _at_most("limits.workspace.bytes"),
    _at_most("limits.workspace.files"),
    _at_most("limits.output.bytes"),
    _at_most("limits.output.files"),
    _at_most("limits.stream"),
    _ladder("limits.enforce", "cgroup", "any"),
    # Of two different sets of packages neither is narrower; the default, which every sandbox may have, is below all.
    Dimension(
        key="python.environment",
        within=lambda a, b: a in (b, DEFAULT),
        meet=lambda a, b: a if a == b else DEFAULT,
    ),
    _ladder("python.start", "cold", "warm"),
    Dimension(
        key="audit.keep",
        within=lambda a, b: set(a) <= set(b),
        meet=lambda a, b: tuple(sorted(set(a) & set(b))),
    ),
    _ladder("result.redact", "refuse", "mask", "none"),
)

DESCRIPTIVE: tuple[str, ...] = ("tool", "description", "risk", "python.preload", "example")
"""Keys that grant nothing. A preloaded module is one the program could import itself."""


def within(a: Profile, b: Profile) -> bool:
    """Return whether ``b`` permits everything that ``a`` permits: never wrongly True."""
    return a.tool == b.tool and all(each.within(each.of(a), each.of(b)) for each in DIMENSIONS)
