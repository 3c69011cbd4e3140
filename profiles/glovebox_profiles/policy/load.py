"""From ``policy.toml`` to a ``Policy``: read as strictly as profiles, and every name in it looked up.

Never import ``server``: tools, watch rules and the function that decides a call are arguments.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from glovebox_profiles.errors import ProfileError, nearest
from glovebox_profiles.load import reading
from glovebox_profiles.load.reading import KeyPath, Mistake, raise_mistakes, read_bytes
from glovebox_profiles.model import Effect, Profile
from glovebox_profiles.policy.model import Policy, Role
from glovebox_profiles.policy.rights import narrow_profile

PAGE = "docs/operate/policy.md"

DecideExamples = Callable[[Policy], Iterable[tuple[Effect, str]]]
"""Decides each example of a policy, purely: the effect and the id of the deciding rule."""
Profiles = Mapping[str, Profile]


def load(path: Path, profiles: Profiles, watch: Collection[str], decide_examples: DecideExamples | None) -> Policy:
    """Read the policy, look up the names in it, and decide its examples.

    Args:
        path: The file.
        profiles: Those in effect, by tool: roles narrow these.
        watch: Ids of the watch rules.
        decide_examples: None skips the examples: only for reading, never for serving.

    Raises:
        ProfileError: The file or its directory is unsafe, unreadable or wrong, uses an unknown name, has a role that
            would widen a profile, or an example that is decided otherwise.
    """
    with reading.open_directory(path.parent, owned=True, above=True):
        data = read_bytes(path)
    return checked(data, path, profiles, watch, decide_examples)


def checked(
    data: bytes, path: Path, profiles: Profiles, watch: Collection[str], decide_examples: DecideExamples | None
) -> Policy:
    """Check the bytes of a policy as ``load`` does a file; errors name ``path``. Raises as ``load``."""
    policy, lines = parse(data, path)
    raise_mistakes(_mistakes(policy, profiles, watch), path, lines)
    if decide_examples:
        decided = zip(policy.example, decide_examples(policy), strict=True)
        raise_mistakes(reading.failing_examples(decided, "policy"), path, lines)
    return policy


def read(path: Path) -> Policy:
    """Read a policy to compare it, without looking up names; raise ProfileError if it cannot be read, or is wrong."""
    return parse(read_bytes(path), path)[0]


def parse(data: bytes, path: Path) -> tuple[Policy, Mapping[KeyPath, int]]:
    """Parse the bytes of a policy without looking up its names; return it and its lines.

    Raises:
        ProfileError: The bytes are not one valid policy. ``path`` is only named there.
    """
    policy, positions = reading.parse_model(data, path, Policy, PAGE)
    lines = positions.lines
    first = lines.get(("example", 0))
    if first is None:
        reason = "there is none, so the file may have lost its end"
        raise ProfileError(path, None, "example", reason, "End it with an [[example]] of what is refused.")
    # Truncated, a role would lose its narrowing, or a principal the role that narrows.
    if behind := [key for key, line in lines.items() if key[0] != "example" and line >= first]:
        reason, fix = "stands behind an example, and a truncated file would lose it", "Put the examples last."
        raise ProfileError(path, lines[behind[0]], reading.dotted(behind[0]), reason, fix)
    return policy, lines


def _mistakes(policy: Policy, profiles: Profiles, watch: Collection[str]) -> Iterator[Mistake]:
    """Yield mistakes of a well-formed policy: unknown names, and roles that would widen."""
    if policy.default is not None and policy.default not in policy.roles:
        yield _absent(("default",), "role", policy.default, policy.roles)
    for table in ("principals", "scopes", "workflows"):
        for name, role in getattr(policy, table).items():
            if role not in policy.roles:
                yield _absent((table, name), "role", role, policy.roles)
    for name, given in policy.roles.items():
        yield from _of_role(("roles", name), given, profiles)
    for rule in policy.watch:
        if rule not in watch:
            yield _absent(("watch", rule), "watch rule", rule, watch)
    for index, example in enumerate(policy.example):
        if example.call.tool not in profiles:
            yield _absent(("example", index, "call", "tool"), "tool", example.call.tool, profiles)


def _of_role(at: KeyPath, role: Role, profiles: Profiles) -> Iterator[Mistake]:
    for index, tool in enumerate(role.tools):
        if tool not in profiles:
            yield _absent((*at, "tools", index), "tool", tool, profiles)
    inside: list[tuple[KeyPath, str | None]] = [((*at, "narrow", tool), tool) for tool in role.narrow]
    inside += [((*at, "budget", index, "tool"), each.tool) for index, each in enumerate(role.budget)]
    inside += [((*at, "approval", index, "tool"), each.tool) for index, each in enumerate(role.approval)]
    for key, of in inside:
        if of is not None and of not in role.tools:
            yield _absent(key, "tool of this role", of, role.tools)
    for tool, keys in role.narrow.items():
        if tool not in profiles:  # already reported
            continue
        try:
            narrow_profile(profiles[tool], keys)
        except ProfileError as problem:
            yield (*at, "narrow", tool, *problem.key.split(".")), problem.reason, problem.fix


def _absent(key: KeyPath, what: str, name: str, there: Iterable[str]) -> Mistake:
    return key, f'there is no {what} "{name}"', nearest(name, sorted(there))
