"""Three sides of every field: a difference on either measured side is found and named; what is unknown says so."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fixtures import receipt_fields
from tests.unit.test_measure import EXPECTED, HOST, MEASURED

from glovebox_sandboxes.contract.attestation import Attestation, Field, compare, kernel_version, made_with
from glovebox_sandboxes.contract.measure import MeasuredMount, parse
from glovebox_sandboxes.drivers.docker import usage
from glovebox_sandboxes.host.cgroup import Cgroup, GroupFiles, Hierarchy
from glovebox_sandboxes.host.host_view import HostView, groups_of, look, only_child, unseen

KERNEL = {"kernel": kernel_version()}
OUTSIDE = HostView(
    parts={
        "uids": (2_000_000_001,),
        "gids": (2_000_000_001,),
        "groups": (),
        "inner_uids": (65532,),
        "inner_gids": (65532,),
        "inner_groups": (),
        "capabilities": 0,
        "no_new_privs": True,
        "seccomp": 2,
        "inner_pid": 1,
        "namespaces": MEASURED["namespaces"],
        "interfaces": ("lo",),
        "mounts": tuple(MeasuredMount(**each) for each in MEASURED["mounts"]),
    }
)


def changed(**parts: Any) -> HostView:
    return replace(OUTSIDE, parts={**OUTSIDE.parts, **parts})


def table(outside: HostView, **measured: Any) -> Attestation:
    return compare(EXPECTED, parse({**MEASURED, **KERNEL, **measured}), outside, HOST)


def row(found: Attestation, name: str) -> dict[str, Any]:
    (row,) = [each for each in found.rows if each["field"] == name]
    return row


def test_the_control_both_sides_agree_with_the_plan() -> None:
    """No difference, and every verdict is "ok"."""
    found = table(OUTSIDE)
    assert found.differences == ()
    assert {each["verdict"] for each in found.rows} == {"ok"}


@pytest.mark.parametrize(
    ("change", "field", "told"),
    [
        ({"inner_uids": (0,)}, "uid", "0 from outside"),
        ({"inner_uids": (0, 65532)}, "uid", "[0, 65532] from outside"),
        ({"inner_uids": (65534,)}, "uid", "65534 from outside"),
        ({"inner_gids": (0,)}, "gid", "0 from outside"),
        ({"inner_groups": (27,)}, "groups", "[27] from outside"),
        ({"capabilities": 1 << 21}, "capabilities", "0x200000 from outside"),
        ({"no_new_privs": False}, "no_new_privs", "False from outside"),
        ({"seccomp": 0}, "seccomp", "0 from outside"),
        ({"interfaces": ("lo", "eth0")}, "interfaces", "['eth0', 'lo'] from outside"),
        ({"inner_pid": 7}, "number in its pid namespace", "7 from outside"),
        ({"uids": (0, 5)}, "root on the host", "True from outside"),
        ({"groups": (0,)}, "groups on the host beyond its own", "[0] from outside"),
    ],
)
def test_what_only_the_host_sees_is_a_difference(change: dict[str, Any], field: str, told: str) -> None:
    """The guest's own word is as planned, and does not help."""
    if field.startswith("groups on") and os.geteuid() != 0 and 0 in os.getgroups():
        pytest.skip("this user is in the group 0 himself")
    (difference,) = table(changed(**change)).differences
    assert (difference.field, difference.measured) == (field, told)
    (difference,) = table(replace(OUTSIDE, compared={"limit pids.max": ("64", "max")})).differences
    assert (difference.field, difference.measured) == ("limit pids.max", "max from outside")


def test_a_difference_is_found_from_either_side() -> None:
    """A shared namespace, another process's, a writable mount, another kernel, whatever the guest says."""
    shared = {**MEASURED["namespaces"], "net": HOST["net"]}
    both = table(changed(namespaces=shared)).differences
    assert [each.field for each in both] == ["namespaces shared with the host", "namespaces"]
    other = {**MEASURED["namespaces"], "net": 12345}
    assert [each.field for each in table(changed(namespaces=other)).differences] == ["namespaces"]
    more = (*OUTSIDE.parts["mounts"], MeasuredMount(target="/mnt", type="ext4", writable=True))
    found = table(changed(mounts=more)).differences
    assert [each.field for each in found] == ["writable mounts beyond the plan", "mounts of host files"]
    (difference,) = table(OUTSIDE, kernel="Linux 5.0 #1").differences
    assert (difference.field, difference.measured) == ("kernel", "another than the host's from outside")
    (difference,) = table(changed(seccomp=0), seccomp=1).differences
    assert difference.measured == "1, 0 from outside"


def test_what_could_not_be_seen_says_why() -> None:
    """Never silently: the reason stands in the value's place; without any measurement the verdict is its own."""
    found = table(unseen("the pid is unknown", {"image": ("sha256:1", None)}))
    assert found.differences == ()
    assert row(found, "seccomp") == {
        "field": "seccomp", "planned": 2, "inside": 2, "outside": "not measurable: the pid is unknown", "verdict": "ok",
    }  # fmt: skip
    for name in ("root on the host", "image"):
        assert row(found, name)["verdict"] == "not measurable"
        assert row(found, name)["outside"] == "not measurable: the pid is unknown"
    assert "outside" not in row(found, "dumpable")
    found = table(replace(changed(namespaces=None), unread={"namespaces": "namespaces cannot be read: not permitted"}))
    assert row(found, "namespaces")["outside"] == "not measurable: namespaces cannot be read: not permitted"
    assert row(found, "seccomp")["outside"] == 2
    assert row(found, "kernel")["outside"].startswith("not measurable")
    assert [Field("x", "y", found).verdict for found in ("", "y")] == ["differs", "ok"]


def test_under_another_kernel_only_what_is_the_hosts_is_compared() -> None:
    """gVisor: the process the host sees is the kernel itself, with rights of its own behind its own wall."""
    expected = replace(EXPECTED, system="gvisor")
    measured = parse({**MEASURED, "system": "gvisor"})
    view = changed(seccomp=0, capabilities=1 << 21, namespaces=dict.fromkeys(HOST, 7))
    found = compare(expected, measured, view, HOST)
    assert found.differences == ()
    assert "gvisor" in row(found, "seccomp")["outside"]
    assert row(found, "namespaces shared with the host")["outside"] == []
    shared = compare(expected, measured, changed(seccomp=0, capabilities=1 << 21, namespaces=HOST), HOST)
    assert [each.field for each in shared.differences] == ["namespaces shared with the host"]


def test_looking_at_ourselves() -> None:
    found = look(os.getpid())
    assert found.unread == {}
    assert found.parts["uids"] == (os.geteuid(),)
    assert found.parts["inner_uids"] == found.parts["uids"]
    assert found.parts["namespaces"]["net"] == int(str(Path("/proc/self/ns/net").readlink())[5:-1])
    assert "lo" in found.parts["interfaces"]
    assert "/" in {each.target for each in found.parts["mounts"]}


def test_a_process_that_is_gone_or_writes_garbage_says_so(tmp_path: Path) -> None:
    found = look(4_000_000)
    assert not found.parts
    assert found.why("uids") == "its process cannot be looked at: No such file or directory"
    assert only_child(4_000_000) is None
    (tmp_path / "1").mkdir()
    empty = look(1, proc=tmp_path)
    assert not {"capabilities", "mounts"} & empty.parts.keys()
    assert empty.why("status") == "status cannot be read: No such file or directory"
    assert empty.why("uids") == "uids cannot be read: it is not in the form that was expected"
    assert empty.why("mounts") == "mounts cannot be read: No such file or directory"
    (tmp_path / "1" / "status").write_text("Uid:\tx\nSeccomp:\t2\n")
    found = look(1, proc=tmp_path)
    assert found.parts["seccomp"] == 2
    assert not {"uids", "gids"} & found.parts.keys()
    assert found.why("uids") == "uids cannot be read: it is not in the form that was expected"


def test_only_one_child_is_the_child_and_its_control_groups_are_read(tmp_path: Path) -> None:
    place = tmp_path / "5" / "task" / "5"
    place.mkdir(parents=True)
    (tmp_path / "self").symlink_to(str(os.getpid()))
    for text, expected in (("", None), ("7 ", 7), ("7 8 ", None)):
        (place / "children").write_text(text)
        assert only_child(5, tmp_path) == expected
    (place / "children").write_text("7 ")
    (tmp_path / "self").unlink()
    (tmp_path / "self").symlink_to("1234567")  # the numbers here are those of another pid namespace
    assert only_child(5, tmp_path) is None
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "cgroup").write_text("4:memory:/a\n2:cpu,cpuacct:/b\n0::/c:d\n")
    assert groups_of(1, tmp_path) == {"memory": "/a", "cpu": "/b", "cpuacct": "/b", "": "/c:d"}
    assert groups_of(2, tmp_path) == {}


def test_limits_are_what_the_kernel_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back when they were set; what this kernel does not have is told; and whether the process is in the group."""
    hierarchy = Hierarchy(version=2, parents=(tmp_path,))
    (tmp_path / "s1").mkdir()
    for file in ("memory.max", "pids.max"):
        (tmp_path / "s1" / file).write_text("")
    monkeypatch.setattr("os.mkdir", lambda *_, **__: None)
    group = Cgroup(hierarchy, "s1", {"memory.max": "8192", "memory.swap.max": "0", "pids.max": "64"})
    assert group.read_back(None) == {
        "limit memory.max": ("8192", "8192"),
        "limit memory.swap.max": ("0", None),
        "limit pids.max": ("64", "64"),
        "in its control group": (True, None),
    }
    for path, inside in (("/elsewhere", False), ("/a/xs1", False), ("/a/b/s1", True)):
        monkeypatch.setattr("glovebox_sandboxes.host.cgroup.groups_of", lambda _, path=path: {"": path})
        assert group.read_back(1)["in its control group"] == (True, inside)


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limits_are_read_back(version: int, tmp_path: Path) -> None:
    names = ("memory", "pids", "cpu", "") if version == 1 else ("",)
    texts = {
        1: {"memory.limit_in_bytes": "64", "pids.max": "9", "cpu.cfs_quota_us": "1", "cpu.cfs_period_us": "2"},
        2: {"memory.max": "64", "pids.max": "9", "cpu.max": "1 2"},
    }
    for file, text in texts[version].items():
        (tmp_path / file).write_text(text + "\n")
    host = {"Memory": 64, "PidsLimit": 8, "NanoCpus": 1_000_000_000}
    assert usage.limits(GroupFiles(dict.fromkeys(names, str(tmp_path))), host, bounded=False) == {
        "limit memory": ("64", "64"),
        "limit pids": ("8", "9"),
        "limit cpu": ("100000 100000", "1 2"),
    }
    assert {found for _, found in usage.limits(GroupFiles({}), host, bounded=True).values()} == {None}


def test_every_part_is_in_the_docs_with_whoever_observed_it() -> None:
    """A digest that nobody measured is called declared."""
    driver: Any = SimpleNamespace(capabilities=SimpleNamespace(version="bwrap 0.8"))
    plan: Any = SimpleNamespace(action={"runtime": "sha256:r", "Image": "sha256:i", "seccomp": "sha256:s"})
    parts = made_with(driver, plan)
    assert parts.keys() == {name for name, _, _ in receipt_fields.HOST}
    assert parts["runtime_declared"] == "sha256:r"
    assert "runtime" not in parts
