"""Measured against planned: each way an isolation can fall short is found, and named."""

import os
from dataclasses import replace
from typing import Any

import pytest

from glovebox_sandboxes.contract.attestation import Field, compare
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.contract.measure import NAMESPACES, Expected, more_groups, parse
from glovebox_sandboxes.drivers.bubblewrap import driver
from glovebox_sandboxes.host.host_view import unseen

HOST = {name: 100 + number for number, name in enumerate(NAMESPACES)}
EXPECTED = Expected(
    uid=65532,
    interfaces=("lo",),
    writable=("/dev/null", "/output", "/proc", "/tmp"),  # noqa: S108 - inside the sandbox
    mounts=("/", "/guest", "/workspace"),
    namespaces=NAMESPACES,
    hidden=("/run/docker.sock",),
)


def mount(target: str, kind: str = "ext4", *, writable: bool = False) -> dict[str, Any]:
    """One measured mount."""
    return {"target": target, "type": kind, "writable": writable}


MOUNTS = [
    mount("/"), mount("/guest"), mount("/proc", "proc", writable=True), mount("/dev", "tmpfs"),
    mount("/dev/null", "devtmpfs", writable=True), mount("/dev/pts", "devpts"),
    mount("/tmp", "tmpfs", writable=True),  # noqa: S108 - inside the sandbox
    mount("/output", "tmpfs", writable=True), mount("/workspace"),
]  # fmt: skip
MEASURED: dict[str, Any] = {
    "uid": 65532, "gid": 65532, "groups": [], "capabilities": 0, "no_new_privs": True, "seccomp": 2, "dumpable": 0,
    "namespaces": {name: 900 + number for number, name in enumerate(NAMESPACES)}, "mounts": MOUNTS,
    "interfaces": ["lo"], "descriptors": [], "landlock": 4, "pid": 1, "hostname": "sandbox", "kernel": "Linux 6",
    "python": "3.11.2", "present": [],
}  # fmt: skip


def differences(expected: Expected = EXPECTED, **changes: Any) -> tuple[Field, ...]:
    """What the comparison says of a measurement with these changes."""
    return compare(expected, parse({**MEASURED, **changes}), unseen("not here"), HOST).differences


def test_what_was_planned_is_no_difference() -> None:
    """The control: only what the plan names is demanded; a workspace may be a mount of any kind."""
    assert differences() == ()
    assert differences(groups=[65532]) == ()
    expected = replace(EXPECTED, namespaces=tuple(name for name in NAMESPACES if name != "user"))
    assert differences(expected, namespaces={**MEASURED["namespaces"], "user": HOST["user"]}) == ()
    assert (
        differences(mounts=[mount("/workspace", "tmpfs") if m["target"] == "/workspace" else m for m in MOUNTS]) == ()
    )


@pytest.mark.parametrize(
    ("changes", "field", "found"),
    [
        ({"uid": 0}, "uid", "0"),
        ({"uid": -1}, "uid", "-1"),
        ({"gid": 0}, "gid", "0"),
        ({"groups": [65532, 0]}, "groups", "[0]"),
        ({"capabilities": 1 << 21}, "capabilities", "0x200000"),
        ({"no_new_privs": False}, "no_new_privs", "False"),
        ({"seccomp": 0}, "seccomp", "0"),
        ({"seccomp": 1}, "seccomp", "1"),
        ({"dumpable": 1}, "dumpable", "1"),
        ({"interfaces": ["lo", "eth0"]}, "interfaces", "['eth0', 'lo']"),
        ({"interfaces": []}, "interfaces", "[]"),
        ({"descriptors": [7]}, "open descriptors", "[7]"),
        ({"landlock": 0}, "landlock", "False"),
        ({"present": ["/run/docker.sock"]}, "paths that must not exist", "['/run/docker.sock']"),
    ],
)
def test_each_difference_is_found_and_named(changes: dict[str, Any], field: str, found: str) -> None:
    """One field is not as planned, and exactly that one is told."""
    (difference,) = differences(**changes)
    assert (difference.field, difference.measured) == (field, found)
    assert difference.planned != difference.measured


@pytest.mark.parametrize("name", NAMESPACES)
def test_a_namespace_of_the_host_is_found(name: str) -> None:
    """Shared, or not told at all: either way it is not shown to be another."""
    shared = {**MEASURED["namespaces"], name: HOST[name]}
    missing = {key: number for key, number in MEASURED["namespaces"].items() if key != name}
    for namespaces in (shared, missing):
        (difference,) = differences(namespaces=namespaces)
        assert difference.field == "namespaces shared with the host"
        assert difference.measured == str([name])


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        (mount("/home"), "mounts of host files"),
        (mount("/workspace/sub"), "mounts of host files"),
        (mount("/run", "tmpfs"), "mounts of host files"),  # the host's, perhaps
        (mount("/hostproc", "proc"), "mounts of host files"),
        (mount("/x", "devtmpfs"), "mounts of host files"),
        (mount("/processes", "proc"), "mounts of host files"),
        (mount("/x", "fuse.sshfs"), "mounts of host files"),
        (mount("/dev/sda", "ext4"), "mounts of host files"),
    ],
)
def test_a_mount_beyond_the_plan_is_found(extra: dict[str, Any], field: str) -> None:
    """Of whatever kind, wherever it is; file systems of the kernel are only at home in /proc, /sys and /dev."""
    (difference,) = differences(mounts=[*MOUNTS, extra])
    assert difference.field == field
    assert extra["target"] in difference.measured


@pytest.mark.parametrize("target", ["/", "/workspace", "/dev", "/guest"])
def test_a_writable_mount_beyond_the_plan_is_found(target: str) -> None:
    """A workspace that can be written is not the one that was planned."""
    mounts = [{**each, "writable": True} if each["target"] == target else each for each in MOUNTS]
    (difference,) = differences(mounts=mounts)
    assert (difference.field, difference.measured) == ("writable mounts beyond the plan", str([target]))


def test_a_mount_that_is_missing_is_found_and_several_differences_are_all_told() -> None:
    """The workspace a profile grants must be there; not only the first is told."""
    (difference,) = differences(mounts=[each for each in MOUNTS if each["target"] != "/workspace"])
    assert difference.field == "mounts of host files"
    assert [each.field for each in differences(uid=0, seccomp=0, interfaces=["lo", "eth0"])] == [
        "uid",
        "seccomp",
        "interfaces",
    ]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"uid": "65532"}, "uid"),
        ({"uid": True}, "uid"),
        ({"capabilities": None}, "capabilities"),
        ({"mounts": [{"target": "/", "type": "ext4"}]}, "mounts.0.writable"),
        ({"mounts": [{**mount("/"), "more": 1}]}, "mounts.0.more"),
        ({"mounts": MOUNTS * 100}, "mounts"),
        ({"interfaces": ["x"] * 65}, "interfaces"),
        ({"more": 1}, "more"),
    ],
)
def test_what_is_no_measurement_is_refused(changes: dict[str, Any], where: str) -> None:
    """Strict and bounded; the field is named, the fix is told."""
    with pytest.raises(SandboxError, match="glovebox setup") as problem:
        parse({**MEASURED, **changes})
    assert problem.value.reason.startswith(f"{where}: ")


@pytest.mark.parametrize("field", [name for name in MEASURED if name != "present"])
def test_no_field_may_be_missing(field: str) -> None:
    """What was not measured is not as planned."""
    with pytest.raises(SandboxError, match=f"{field}: Field required"):
        parse({key: each for key, each in MEASURED.items() if key != field})


def test_groups_that_cannot_be_given_up_are_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shown as the overflow group, any other is a difference; root gives them up, a user with none has none to keep."""
    kept = replace(EXPECTED, kept_groups=(65534,))
    assert more_groups(kept, [65532, 65534]) == []
    assert more_groups(kept, [65532, 65534, 0]) == [0]
    assert more_groups(EXPECTED, [65532, 65534]) == [65534], "control: where they could be given up, they must be"
    for uid, groups, wanted in ((1000, [1000, 27], (65534,)), (1000, [1000], ()), (0, [0, 27], ())):
        monkeypatch.setattr(os, "geteuid", lambda uid=uid: uid)
        monkeypatch.setattr(os, "getegid", lambda uid=uid: uid)
        monkeypatch.setattr(os, "getgroups", lambda groups=groups: groups)
        assert driver._kept_groups() == wanted
