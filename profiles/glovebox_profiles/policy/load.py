"""From ``policy.toml`` to a ``Policy``: read as strictly as profiles, and every name in it looked up.

Never import ``server``: tools, watch rules and the function that decides a call are arguments.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from glovebox_profiles.errors import ProfileError, nearest
from glovebox_profiles.load.mistakes import Mistake, failing_examples, parse_model, raise_mistakes
from glovebox_profiles.load.reading import KeyPath, dotted, open_directory, read_bytes
from glovebox_profiles.model import Effect, Profile
from glovebox_profiles.policy.model import Policy, PolicyExample, Role
from glovebox_profiles.policy.rights import narrow_profile

PAGE = "docs/operate/policy.md"

CheckExample = Callable[[Policy, PolicyExample], tuple[Effect, str]]
"""Decides one call under a policy, purely: the effect and the id of the deciding rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNames:
    """The names that a policy may use."""

    profiles: Mapping[str, Profile]
    """In effect, by tool: roles narrow these."""
    watch: Collection[str]
    """Ids of the watch rules."""


def load(path: Path, known: KnownNames, *, check_example: CheckExample | None) -> Policy:
    """Read the policy, look up the names in it, and decide its examples.

    ``check_example`` None skips the examples: only for reading, never for serving.

    Raises:
        ProfileError: The file or its directory is unsafe, unreadable or wrong, uses an unknown name, has a role that
            would widen a profile, or an example that is decided otherwise.
    """
    with open_directory(path.parent, owned=True, above=True):
        data = read_bytes(path)
    return checked(data, path, known, check_example=check_example)


def checked(data: bytes, path: Path, known: KnownNames, *, check_example: CheckExample | None) -> Policy:
    """Check the bytes of a policy as ``load`` does a file; errors name ``path``. Raises as ``load``."""
    policy, lines = parse(data, path)
    raise_mistakes(_mistakes(policy, known), path, lines)
    if check_example:
        decided = ((example, check_example(policy, example)) for example in policy.example)
        raise_mistakes(failing_examples(decided, "policy"), path, lines)
    return policy


def read(path: Path) -> Policy:
    """Read a policy to compare it, without looking up names; raise ProfileError if it cannot be read, or is wrong."""
    return parse(read_bytes(path), path)[0]


def parse(data: bytes, path: Path) -> tuple[Policy, Mapping[KeyPath, int]]:
    """Parse the bytes of a policy without looking up its names; return it and its lines.

    Raises:
        ProfileError: The bytes are not one valid policy. ``path`` is only named there.
    """
    policy, positions = parse_model(data, path, Policy, PAGE)
    lines = positions.lines
    first = lines.get(("example", 0))
    if first is None:
        reason = "there is none, so the file may have lost its end"
        raise ProfileError(path, None, "example", reason, "End it with an [[example]] of what is refused.")
    # Truncated, a role would lose its narrowing, or a principal the role that narrows.
    if behind := [key for key, line in lines.items() if key[0] != "example" and line >= first]:
        reason, fix = "stands behind an example, and a file that was cut short would lose it", "Put the examples last."
        raise ProfileError(path, lines[behind[0]], dotted(behind[0]), reason, fix)
    return policy, lines


def _mistakes(policy: Policy, known: KnownNames) -> Iterator[Mistake]:
    """Yield mistakes of a well-formed policy: unknown names, and roles that would widen."""
    if policy.default is not None and policy.default not in policy.roles:
        yield _absent(("default",), "role", policy.default, policy.roles)
    for table in ("principals", "scopes", "workflows"):
        for name, role in getattr(policy, table).items():
            if role not in policy.roles:
                yield _absent((table, name), "role", role, policy.roles)
    for name, given in policy.roles.items():
        yield from _of_role(("roles", name), given, known.profiles)
    for rule in policy.watch:
        if rule not in known.watch:
            yield _absent(("watch", rule), "watch rule", rule, known.watch)
    for index, example in enumerate(policy.example):
        if example.call.tool not in known.profiles:
            yield _absent(("example", index, "call", "tool"), "tool", example.call.tool, known.profiles)


def _of_role(at: KeyPath, role: Role, profiles: Mapping[str, Profile]) -> Iterator[Mistake]:
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
