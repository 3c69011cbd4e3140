"""Compares the plan with measurements from inside and outside, with a verdict for each field. Pure.

A field differs if any measurement of it differs from the plan. A failed measurement says so in its place.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

from glovebox_sandboxes.contract.base import Driver, Plan
from glovebox_sandboxes.contract.measure import Expected, Measured, foreign, more_groups, shared, writable
from glovebox_sandboxes.host.host_view import HostView
from glovebox_sandboxes.host.identity import changes_user, kernels_root

Verdict = Literal["ok", "differs", "not measurable"]


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """Stands for a value that could not be read here."""

    reason: str


@dataclass(frozen=True, slots=True)
class Field:
    """One property of the isolation from three sides. Values are JSON; None for a side that can never know it."""

    field: str
    planned: Any
    inside: Any = None
    outside: Any = None

    @property
    def _found(self) -> list[tuple[Any, str]]:
        sides = ((self.inside, ""), (self.outside, " from outside"))
        return [(value, side) for value, side in sides if not (value is None or isinstance(value, NotMeasured))]

    @property
    def verdict(self) -> Verdict:
        """Return whether every measurement there is equals the plan."""
        if not self._found:
            return "not measurable"
        return "ok" if all(value == self.planned for value, _ in self._found) else "differs"

    @property
    def measured(self) -> str:
        """Return what differs from the plan, for a message; empty if nothing does."""
        return ", ".join(f"{value}{side}" for value, side in self._found if value != self.planned)

    def row(self) -> dict[str, Any]:
        """Return the field for the record."""
        row: dict[str, Any] = {"field": self.field, "planned": self.planned}
        for side, value in (("inside", self.inside), ("outside", self.outside)):
            if value is not None:
                row[side] = f"not measurable: {value.reason}" if isinstance(value, NotMeasured) else value
        return {**row, "verdict": self.verdict}


_TOLD = 200
"""Characters of one side of a difference in a message; the record has all of it."""
_DIFFERENCES = 4
"""Differences in a message: the first few name the problem."""


def describe(differences: tuple[Field, ...]) -> str:
    """Return differences as one sentence of bounded length, cut between items and never inside one's name."""
    words = [
        f"{each.field}: planned {_short(str(each.planned))}, found {_short(each.measured)}"
        for each in differences[:_DIFFERENCES]
    ]
    more = len(differences) - len(words)
    return "; ".join(words) + (f"; and {more} more differences" if more else "")


def _short(listed: str) -> str:
    end = listed.rfind(", ", 0, _TOLD)
    if len(listed) <= _TOLD or end < 0:
        return listed[:_TOLD]
    return f"{listed[:end]}, … and {listed.count(', ', end)} more"


@dataclass(frozen=True, kw_only=True)
class Attestation:
    """The measured isolation of one sandbox."""

    fields: tuple[Field, ...]

    @cached_property
    def differences(self) -> tuple[Field, ...]:
        """Return every field that is not as planned; empty means the isolation is as planned."""
        return tuple(each for each in self.fields if each.verdict == "differs")

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """Return the table as JSON."""
        return tuple(each.row() for each in self.fields)


def compare(
    expected: Expected, measured: Measured, outside: HostView, host_namespaces: Mapping[str, int]
) -> Attestation:
    """Compare both views with the plan, and with each other."""
    rows = _rows(expected, measured, outside, host_namespaces)
    return Attestation(fields=tuple(Field(*row) for row in rows))


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
        "process_1": action.get("process_1"),
    }
    return {name: value for name, value in parts.items() if value}


_MEASURED = "as measured"
_Row = tuple[str, Any, Any, Any]
"""Name, plan, and both measurements of a field."""


def _rows(
    expected: Expected, measured: Measured, outside: HostView, host_namespaces: Mapping[str, int]
) -> Iterator[_Row]:
    shares = partial(shared, expected, host_namespaces=host_namespaces)
    groups, changed, files = partial(more_groups, expected), partial(writable, expected), partial(foreign, expected)

    def told(part: str, value: Any) -> Any:
        return NotMeasured(outside.why(part)) if value is None else value

    def host(part: str, read: Callable[[Any], Any] = lambda value: value) -> Any:
        found = outside.parts.get(part)
        return told(part, None if found is None else read(found))

    def seen(part: str, read: Callable[[Any], Any] = lambda value: value) -> Any:
        if expected.system != "linux":
            return NotMeasured(f"the host sees the process of {expected.system}, not what runs on its kernel")
        return host(part, read)

    # What the guest measures, and the host too, if the guest runs on the host's kernel.
    capabilities = "{:#x}".format
    yield "uid", expected.uid, measured.uid, seen("inner_uids", _only)
    yield "gid", expected.uid, measured.gid, seen("inner_gids", _only)
    yield "groups", [], groups(measured.groups), seen("inner_groups", groups)
    inside = capabilities(measured.capabilities)
    yield "capabilities", capabilities(expected.capabilities), inside, seen("capabilities", capabilities)
    yield "no_new_privs", expected.no_new_privs, measured.no_new_privs, seen("no_new_privs")
    yield "seccomp", expected.seccomp, measured.seccomp, seen("seccomp")
    yield "dumpable", 0, measured.dumpable, None
    yield "namespaces shared with the host", [], shares(measured.namespaces), host("namespaces", shares)
    yield "interfaces", sorted(expected.interfaces), sorted(measured.interfaces), seen("interfaces", sorted)
    yield "writable mounts beyond the plan", [], changed(measured.mounts), seen("mounts", changed)
    yield "mounts of host files", sorted(expected.mounts), files(measured.mounts), seen("mounts", files)
    yield "open descriptors", [], measured.descriptors, None
    yield "landlock", expected.landlock, measured.landlock > 0, None
    yield "paths that must not exist", [], measured.present, None
    same_kernel = "linux" if measured.kernel == kernel_version() else "another than the host's"
    yield "kernel", expected.system, measured.system, seen("namespaces", lambda _: same_kernel)
    yield "not measurable", sorted(expected.unmeasured), sorted(measured.unmeasured), None

    # What the guest cannot know, and what shows that both examined the same process.
    own = {*outside.parts.get("uids", ()), *outside.parts.get("gids", ())}
    allowed = own if changes_user() else {*own, *os.getgroups(), os.getegid()}
    root = host("uids", lambda uids: kernels_root() in uids if "gids" in outside.parts else None)
    yield "root on the host", False, None, root
    yield "groups on the host beyond its own", [], None, host("groups", lambda found: sorted({*found} - allowed))
    yield "number in its pid namespace", 1, measured.pid, host("inner_pid")
    if expected.system == "linux":
        # The same numbers on both sides: the guest's measurements are true of the process the host sees.
        there = host("namespaces", lambda found: {name: found[name] for name in measured.namespaces})
        yield "namespaces", _MEASURED, None, _MEASURED if there == measured.namespaces else there

    # What its zygote could have left to it, which has rights that a sandbox must not have.
    if (zygote := outside.zygote) is not None:
        kept = partial(shared, expected, host_namespaces=zygote.namespaces)
        yield "namespaces shared with its zygote", [], kept(measured.namespaces), host("namespaces", kept)
        filters = host("filters", lambda found: None if zygote.filters is None else found)
        yield "seccomp filters", (zygote.filters or 0) + 1, None, filters
    for name, (planned, found) in outside.compared.items():
        yield name, planned, None, told(name, found)


def _only(numbers: tuple[int, ...]) -> Any:
    return numbers[0] if len(numbers) == 1 else list(numbers)
