"""The seccomp policy as data: read, checked, digested. No libseccomp here, so every system can explain the policy.

``policy.json`` beside this file is the only source; ``docs/internals/seccomp.md`` says how to read it. Nothing here may
import a driver, a profile or the server.
"""

import errno
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

#: Bits of one system-call argument. The kernel reads most flags as 32 bits, so a comparison says which bits it means.
FULL_MASK = 0xFFFF_FFFF_FFFF_FFFF
#: Arguments of one system call: seccomp_data in seccomp(2).
MAX_ARGUMENTS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One comparison: ``argument & mask`` is one of ``values``."""

    argument: int
    """Position, counted from 0 (at most 5)."""
    mask: int
    """Bits that count; :data:`FULL_MASK` for all."""
    values: tuple[tuple[str, int], ...]
    """Name and value of each alternative."""


def _alternatives(when: tuple[Condition, ...]) -> tuple[tuple[tuple[Condition, int], ...], ...]:
    choices = [[(condition, value) for _, value in condition.values] for condition in when]
    return tuple(itertools.product(*choices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Allow:
    """System calls that programs may make, under every one of the conditions."""

    id: str
    needed_by: str
    syscalls: tuple[str, ...]
    when: tuple[Condition, ...]

    def alternatives(self) -> tuple[tuple[tuple[Condition, int], ...], ...]:
        """Return every combination of one value per condition; one empty combination when there are no conditions."""
        return _alternatives(self.when)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """System calls that are refused on purpose, and the answer a program gets."""

    id: str
    syscalls: tuple[str, ...]
    errno: int
    """0 if the program gets success although nothing is done."""
    why: str
    link: str
    when: tuple[Condition, ...] = ()
    """If the rest of the call is allowed with other arguments: the ones that are refused."""

    def alternatives(self) -> tuple[tuple[tuple[Condition, int], ...], ...]:
        """Return every combination, as :class:`Allow`."""
        return _alternatives(self.when)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeccompPolicy:
    """The system calls of one sandboxed program. Calls that are not allowed are refused."""

    about: str
    source: str
    errno: int
    """Answer to every call that no rule names."""
    newer_errno: int
    """Answer to every call with a number above all numbers in the policy."""
    architectures: tuple[str, ...]
    """As in ``uname -m``; a program of any other architecture is killed at its first call."""
    allow: tuple[Allow, ...]
    refuse: tuple[Refuse, ...]


class PolicyError(ValueError):
    """The packaged policy contradicts itself: an edit to ``policy.json`` must be corrected."""


def _number(text: str) -> int:
    number = int(text, 0)
    if not 0 <= number <= FULL_MASK:
        raise PolicyError(f"policy.json: {text[:40]!r} is no number of 64 bits")
    return number


def _names(entry: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    names = entry[key]
    if type(names) is not list or not all(type(name) is str for name in names):
        raise PolicyError(f"policy.json, {where}: {key} is no list of names")
    return tuple(names)


def _errno(name: str) -> int:
    try:
        return int(getattr(errno, name))
    except AttributeError:
        raise PolicyError(f"policy.json: {name!r} is no errno name") from None


def _keys(entry: Mapping[str, Any], required: set[str], optional: set[str], where: str) -> None:
    found = set(entry)
    if missing := required - found:
        raise PolicyError(f"policy.json, {where}: missing {sorted(missing)}")
    if unknown := found - required - optional:
        raise PolicyError(f"policy.json, {where}: unknown {sorted(unknown)}")


def _condition(entry: Mapping[str, Any], where: str) -> Condition:
    _keys(entry, {"argument", "is"}, {"mask"}, where)
    mask = _number(entry.get("mask", hex(FULL_MASK)))
    values = tuple((name, _number(value)) for name, value in entry["is"].items())
    if not values:
        raise PolicyError(f"policy.json, {where}: a condition without values would allow everything or nothing")
    if any(value & ~mask for _, value in values):
        raise PolicyError(f"policy.json, {where}: a value has bits outside its mask and can never match")
    argument = entry["argument"]
    if type(argument) is not int or argument not in range(MAX_ARGUMENTS):
        raise PolicyError(f"policy.json, {where}: argument is no number from 0 to {MAX_ARGUMENTS - 1}")
    return Condition(argument=argument, mask=mask, values=values)


def _allow(entry: Mapping[str, Any]) -> Allow:
    where = f"allow {entry.get('id')!r}"
    _keys(entry, {"id", "needed_by", "syscalls"}, {"when"}, where)
    names = _names(entry, "syscalls", where)
    return Allow(id=entry["id"], needed_by=entry["needed_by"], syscalls=names, when=_when(entry, where))


def _when(entry: Mapping[str, Any], where: str) -> tuple[Condition, ...]:
    when = tuple(_condition(condition, where) for condition in entry.get("when", ()))
    if len({condition.argument for condition in when}) != len(when):
        # libseccomp accepts one comparison per argument and rule: seccomp_rule_add(3).
        raise PolicyError(f"policy.json, {where}: two conditions on one argument")
    return when


def _refuse(entry: Mapping[str, Any], default: int) -> Refuse:
    where = f"refuse {entry.get('id')!r}"
    _keys(entry, {"id", "syscalls", "why", "link"}, {"errno", "when"}, where)
    told = entry.get("errno")
    answer = default if told is None else 0 if told == "0" else _errno(told)
    names = _names(entry, "syscalls", where)
    when = _when(entry, where)
    return Refuse(id=entry["id"], syscalls=names, errno=answer, why=entry["why"], link=entry["link"], when=when)


def parse(source: bytes) -> SeccompPolicy:
    """Read a policy, strictly.

    Raises:
        PolicyError: It is not JSON of the form that seccomp.md describes; a key is unknown or missing, one name is
            both allowed and refused, or a name is allowed both with and without conditions (these would not count).
    """
    try:
        return _parse(json.loads(source))
    except PolicyError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as problem:
        what = f"{type(problem).__name__}: {str(problem)[:200]}"
        raise PolicyError(f"policy.json: not a policy as docs/internals/seccomp.md describes it ({what})") from problem


def _parse(data: Mapping[str, Any]) -> SeccompPolicy:
    required = {"about", "source", "otherwise", "newer", "foreign", "architectures", "allow", "refuse"}
    _keys(data, required, set(), "top level")
    default = _errno(data["otherwise"]["errno"])
    policy = SeccompPolicy(
        about=data["about"],
        source=data["source"],
        errno=default,
        newer_errno=_errno(data["newer"]["errno"]),
        architectures=_names(data, "architectures", "top level"),
        allow=tuple(_allow(entry) for entry in data["allow"]),
        refuse=tuple(_refuse(entry, default) for entry in data["refuse"]),
    )
    allowed = {name for group in policy.allow for name in group.syscalls}
    refused = {name for group in policy.refuse if not group.when for name in group.syscalls}
    if both := allowed & refused:
        raise PolicyError(f"policy.json: allowed and refused at once: {sorted(both)}")
    _require_apart(policy)
    plain = [name for group in policy.allow if not group.when for name in group.syscalls]
    conditional = {name for group in policy.allow if group.when for name in group.syscalls}
    if loose := conditional.intersection(plain):
        raise PolicyError(f"policy.json: allowed with and without conditions: {sorted(loose)}")
    if len(plain) != len(set(plain)):
        raise PolicyError("policy.json: a name is allowed twice; keep it where its reason is")
    return policy


def _require_apart(policy: SeccompPolicy) -> None:
    """Require that refusing and allowing conditions on one name are about one argument, with other values.

    Raises:
        PolicyError: a call could meet both.
    """
    for refusal in policy.refuse:
        for name in refusal.syscalls if refusal.when else ():
            for group in policy.allow:
                if name in group.syscalls and not _apart(refusal.when, group.when):
                    raise PolicyError(f"policy.json: {refusal.id!r} and {group.id!r} both answer for {name}")


def _apart(first: tuple[Condition, ...], second: tuple[Condition, ...]) -> bool:
    return any(
        one.argument == other.argument
        and one.mask == other.mask
        and not {value for _, value in one.values} & {value for _, value in other.values}
        for one in first
        for other in second
    )


@cache
def source() -> bytes:
    """Return the packaged policy file, byte for byte."""
    return resources.files(__package__).joinpath("policy.json").read_bytes()


@cache
def load() -> SeccompPolicy:
    """Return the packaged policy. Raises PolicyError if the file contradicts itself (see :func:`parse`)."""
    return parse(source())


@cache
def digest() -> str:
    """Return ``sha256:…`` of the policy file, for plans and audit records."""
    return "sha256:" + hashlib.sha256(source()).hexdigest()
