"""Comparing and intersecting rules, for ``profiles diff`` and for ``meet``. Pure.

A rule is a product of sets, so the intersection of two lists is exact: the union of the pairwise products.
"""

from collections.abc import Sequence

from glovebox_profiles.egress.hosts import pattern_covers
from glovebox_profiles.egress.rules import EgressRule, path_matches


def covers(wide: EgressRule, narrow: EgressRule) -> bool:
    """Whether ``wide`` alone allows everything that ``narrow`` allows."""
    return (
        pattern_covers(wide.host, narrow.host)
        and wide.schemes >= narrow.schemes
        and wide.ports >= narrow.ports
        and wide.methods >= narrow.methods
        and all(any(_path_covers(path, other) for path in wide.paths) for other in narrow.paths)
    )


def covers_all(wide: Sequence[EgressRule], narrow: Sequence[EgressRule]) -> bool:
    """Whether ``wide`` allows everything that ``narrow`` allows. Conservative: may say no, never wrongly yes.

    Each narrow rule has to be covered by one wide rule; two wide rules that only cover it together are not found.
    """
    return all(any(covers(rule, other) for rule in wide) for other in narrow)


def meet(first: Sequence[EgressRule], second: Sequence[EgressRule]) -> tuple[EgressRule, ...]:
    """Return rules that allow exactly what both lists allow, without rules that another one covers."""
    met: list[EgressRule] = []
    for one in first:
        for other in second:
            rule = _intersection(one, other)
            if rule is None or any(covers(kept, rule) for kept in met):
                continue
            met = [kept for kept in met if not covers(rule, kept)]
            met.append(rule)
    return tuple(met)


def _intersection(one: EgressRule, other: EgressRule) -> EgressRule | None:
    if pattern_covers(one.host, other.host):
        host = other.host
    elif pattern_covers(other.host, one.host):
        host = one.host
    else:
        return None
    schemes, ports = one.schemes & other.schemes, one.ports & other.ports
    methods = one.methods & other.methods
    paths = {path for path in one.paths if any(_path_covers(wide, path) for wide in other.paths)}
    paths |= {path for path in other.paths if any(_path_covers(wide, path) for wide in one.paths)}
    if not (schemes and ports and methods and paths):
        return None
    return EgressRule(host=host, schemes=schemes, ports=ports, methods=methods, paths=frozenset(paths))


def _path_covers(wide: str, narrow: str) -> bool:
    """Whether every path that ``narrow`` names is named by ``wide`` (the star of ``narrow`` is one more character)."""
    if narrow.endswith("/*"):
        return wide.endswith("/*") and narrow[:-1].startswith(wide[:-1])
    return path_matches(wide, narrow)
