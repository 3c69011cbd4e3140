"""Who a sandbox would be to the kernel, by whatever number root has; and what is around a server."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from glovebox_sandboxes.host import identity
from glovebox_sandboxes.host.identity import changes_user, is_kernels_root, kernels_root, unprivileged
from glovebox_sandboxes.host.surroundings import control_groups, inside


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """An imagined /proc: ``owner`` is who its settings belong to by our numbers, ``outside`` whose we are outside."""
    told = {"owner": 0, "outside": 0, "first": 0}
    (tmp_path / "self").mkdir()
    monkeypatch.setattr(Path, "stat", lambda _: SimpleNamespace(st_uid=told["owner"]))
    monkeypatch.setattr(Path, "read_text", lambda _: f"{told['first']} {told['outside']} 1\n")
    return told


@pytest.mark.parametrize(
    ("owner", "first", "outside", "found"),
    [(0, 0, 0, 0), (1000, 1000, 0, 1000), (65534, 1000, 1000, None), (65534, 65534, 0, 65534), (65534, 65534, 7, None)],
)
def test_the_kernels_root_has_the_number_its_settings_belong_to(
    proc: dict[str, int], owner: int, first: int, outside: int, found: int | None
) -> None:
    """65534 stands for everybody without a number, and may also be one: then the map decides."""
    proc.update(owner=owner, first=first, outside=outside)
    assert kernels_root() == found


def test_root_is_recognised_and_alone_is_not_started_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bwrap --uid 0 makes it, or --uid 1000. The controls: other users to become, and an ordinary 1000."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(identity, "mapped", lambda _: True)
    assert unprivileged(["x"])[0] == identity.SETPRIV
    monkeypatch.setattr(identity, "mapped", lambda _: False)
    assert not changes_user()
    assert unprivileged(["x"]) == ["x"]
    monkeypatch.setattr(identity, "kernels_root", lambda: 0)
    assert is_kernels_root()
    monkeypatch.setattr(identity, "kernels_root", lambda: None)
    assert not is_kernels_root()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(identity, "kernels_root", lambda: 1000)
    assert is_kernels_root()
    monkeypatch.setattr(identity, "kernels_root", lambda: 0)
    assert not is_kernels_root()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A plain host, and a process of a shell's on it."""
    for pid, name, parent in (("self", "python3", 70), ("70", "a (b) sh", 1), ("1", "systemd", 0)):
        (tmp_path / "proc" / pid).mkdir(parents=True)
        (tmp_path / "proc" / pid / "stat").write_text(f"7 ({name}) S {parent} 7 7 0\n")
    (tmp_path / "proc/1/root").symlink_to(tmp_path)
    (tmp_path / "proc/self/uid_map").write_text("         0          0 4294967295\n")
    (tmp_path / "proc/self/status").write_text("Name:\tpython3\nSeccomp:\t0\n")
    return tmp_path


def test_on_a_plain_host_nothing_is_around(root: Path) -> None:
    """The control of the others."""
    assert inside(root) == []


def test_everything_around_is_named(root: Path) -> None:
    (root / ".dockerenv").touch()
    (root / "proc/70/stat").write_text("70 (bwrap) S 1 7 7 0\n")
    (root / "proc/self/uid_map").write_text("         0       1000          1\n")
    (root / "proc/self/status").write_text("Name:\tpython3\nSeccomp:\t2\n")
    (root / "proc/self/attr").mkdir()
    (root / "proc/self/attr/current").write_text("docker-default (enforce)\n")
    assert inside(root) == [
        "container",
        "bubblewrap",
        "user namespace",
        "system-call filter",
        "AppArmor profile docker-default",
    ]


def test_a_chroot_is_named(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (root / "proc/1/root").unlink()
    (root / "proc/1/root").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    assert inside(root) == ["chroot"]


def test_the_version_of_control_groups_is_that_of_what_is_mounted(root: Path) -> None:
    """An empty directory, which every kernel has, is none."""
    place = root / "sys/fs/cgroup"
    place.mkdir(parents=True)
    assert control_groups(place) == "none"
    (place / "memory").mkdir()
    (place / "memory/cgroup.procs").touch()
    assert control_groups(place) == "v1"
    (place / "cgroup.controllers").touch()
    assert control_groups(place) == "v2"
