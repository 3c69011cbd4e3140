"""Compares the plan with measurements from inside and outside, with a verdict for each field. Pure.

A field differs if any measurement of it differs from the plan. A failed measurement says so in its place.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from glovebox_sandboxes.contract.base import Driver, Plan
from glovebox_sandboxes.contract.measure import (
    Difference,
    Expected,
    Measured,
    foreign,
    inside,
    more_groups,
    shared,
    writable,
)
from glovebox_sandboxes.host.host_view import HostView
from glovebox_sandboxes.host.identity import changes_user, kernels_root

Verdict = Literal["ok", "differs", "not measurable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMeasured:
    """Stands for a value that could not be read here."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One property of the isolation from three sides. Values are JSON; None for a side that can never know it."""

    name: str
    planned: Any
    inside: Any = None
    outside: Any = None

    @property
    def _found(self) -> dict[str, Any]:
        sides = {"inside": self.inside, "outside": self.outside}
        return {side: value for side, value in sides.items() if not (value is None or isinstance(value, NotMeasured))}

    @property
    def verdict(self) -> Verdict:
        """Return whether every measurement there is equals the plan."""
        found = self._found.values()
        if not found:
            return "not measurable"
        return "ok" if all(each == self.planned for each in found) else "differs"

    def difference(self) -> Difference:
        """Return the difference for a message."""
        wrong = {side: value for side, value in self._found.items() if value != self.planned}
        measured = ", ".join(
            f"{value}" if side == "inside" else f"{value} from outside" for side, value in wrong.items()
        )
        return Difference(field=self.name, planned=str(self.planned), measured=measured)

    def row(self) -> dict[str, Any]:
        """Return the field for the record."""
        row: dict[str, Any] = {"field": self.name, "planned": self.planned}
        for side, value in (("inside", self.inside), ("outside", self.outside)):
            if value is not None:
                row[side] = f"not measurable: {value.reason}" if isinstance(value, NotMeasured) else value
        return {**row, "verdict": self.verdict}


@dataclass(frozen=True, kw_only=True)
class Attestation:
    """The measured isolation of one sandbox."""

    fields: tuple[Field, ...]

    @cached_property
    def differences(self) -> tuple[Difference, ...]:
        """Return every field that is not as planned; empty means the isolation is as planned."""
        return tuple(each.difference() for each in self.fields if each.verdict == "differs")

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """Return the table as JSON."""
        return tuple(each.row() for each in self.fields)


def compare(
    expected: Expected, measured: Measured, outside: HostView, host_namespaces: Mapping[str, int]
) -> Attestation:
    """Compare both views with the plan, and with each other."""
    seen = _seen(expected, measured, outside, host_namespaces)
    fields = [
        Field(name=name, planned=planned, inside=found, outside=seen.get(name))
        for name, planned, found in inside(expected, measured, host_namespaces)
    ]
    fields += _host_only(expected, measured, outside)
    fields += _forked(expected, measured, outside)
    for name, (planned, found) in outside.compared.items():
        fields.append(Field(name=name, planned=planned, outside=_or_why(outside, name, found)))
    return Attestation(fields=tuple(fields))


def kernel_version() -> str:
    """Return the host's kernel, in the guest's words for its own."""
    kernel = os.uname()
    return f"{kernel.sysname} {kernel.release} {kernel.version}"


def made_with(driver: Driver, plan: Plan) -> dict[str, str]:
    """Return versions and digests of a sandbox's parts, by names that include their source on the host.

    The runtime's digest is from its manifest, written at build time: hashing 300 MiB again would be slow.
    """
    action = plan.action
    parts = {
        "kernel": kernel_version(),
        "mechanism": driver.capabilities.version,
        "runtime_declared": action.get("runtime"),
        "image": action.get("Image"),
        "seccomp": action.get("seccomp"),
    }
    return {name: value for name, value in parts.items() if value}


# Fields of the guest's that the host can measure too, if the guest runs on the host's kernel.
_BOTH = ("uid", "gid", "groups", "capabilities", "no_new_privs", "seccomp", "interfaces", "mounts of host files",
         "writable mounts beyond the plan", "kernel")  # fmt: skip


def _seen(
    expected: Expected, measured: Measured, outside: HostView, host_namespaces: Mapping[str, int]
) -> dict[str, Any]:
    spaces = None if outside.namespaces is None else shared(expected, outside.namespaces, host_namespaces)
    namespaces = {"namespaces shared with the host": _or_why(outside, "namespaces", spaces)}
    if expected.system != "linux":
        reason = f"the host sees the process of {expected.system}, not what runs on its kernel"
        return {**namespaces, **dict.fromkeys(_BOTH, NotMeasured(reason=reason))}
    mounts, groups = outside.mounts, outside.inner_groups
    found: dict[str, tuple[str, Any]] = {
        "uid": ("uid_map", _only(outside.inner_uids)),
        "gid": ("gid_map", _only(outside.inner_gids)),
        "groups": ("gid_map", None if groups is None else more_groups(expected, groups)),
        "capabilities": ("capabilities", None if outside.capabilities is None else f"{outside.capabilities:#x}"),
        "no_new_privs": ("no_new_privs", outside.no_new_privs),
        "seccomp": ("seccomp", outside.seccomp),
        "interfaces": ("interfaces", None if outside.interfaces is None else sorted(outside.interfaces)),
        "mounts of host files": ("mounts", None if mounts is None else foreign(expected, mounts)),
        "writable mounts beyond the plan": ("mounts", None if mounts is None else writable(expected, mounts)),
        "kernel": ("namespaces", None if outside.namespaces is None else _kernel(measured)),
    }
    return {**namespaces, **{name: _or_why(outside, part, value) for name, (part, value) in found.items()}}


def _forked(expected: Expected, measured: Measured, outside: HostView) -> list[Field]:
    """Return what the zygote could have left to it, which has rights that a sandbox must not have."""
    zygote = outside.zygote
    if zygote is None:
        return []
    seen = None if outside.namespaces is None else shared(expected, outside.namespaces, zygote.namespaces)
    found = None if zygote.filters is None else outside.filters
    return [
        Field(
            name="namespaces shared with its zygote",
            planned=[],
            inside=shared(expected, measured.namespaces, zygote.namespaces),
            outside=_or_why(outside, "namespaces", seen),
        ),
        Field(
            name="seccomp filters",
            planned=(zygote.filters or 0) + 1,
            outside=_or_why(outside, "filters", found),
        ),
    ]


def _kernel(measured: Measured) -> str:
    return "linux" if measured.kernel == kernel_version() else "another than the host's"


def _only(numbers: tuple[int, ...] | None) -> Any:
    return None if numbers is None else numbers[0] if len(numbers) == 1 else list(numbers)


def _host_only(expected: Expected, measured: Measured, outside: HostView) -> list[Field]:
    """Return what the guest cannot know, and what shows that both examined the same process."""
    own = {*(outside.uids or ()), *(outside.gids or ())}
    allowed = own if changes_user() else own | _own_groups()
    groups = None if outside.groups is None else sorted({*outside.groups} - allowed)
    root = None if outside.uids is None or outside.gids is None else kernels_root() in outside.uids
    number = _or_why(outside, "inner_pid", outside.inner_pid)
    fields = [
        Field(name="root on the host", planned=False, outside=_or_why(outside, "uids", root)),
        Field(name="groups on the host beyond its own", planned=[], outside=_or_why(outside, "groups", groups)),
        Field(name="number in its pid namespace", planned=1, inside=measured.pid, outside=number),
    ]
    if expected.system == "linux":
        # The same numbers on both sides: the guest's measurements are true of the process the host sees.
        there = None if outside.namespaces is None else {name: outside.namespaces[name] for name in measured.namespaces}
        same = _or_why(outside, "namespaces", there)
        fields.append(Field(name="namespaces", planned=dict(measured.namespaces), outside=same))
    return fields


def _own_groups() -> set[int]:
    return {*os.getgroups(), os.getegid()}


def _or_why(outside: HostView, part: str, value: Any) -> Any:
    return NotMeasured(reason=outside.why(part)) if value is None else value
