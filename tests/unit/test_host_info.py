"""What is around a server is named as far as it can be told from within; on a plain host nothing is."""

from pathlib import Path

import pytest

from glovebox_sandboxes.host.surroundings import control_groups, inside


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
        "container", "bubblewrap", "user namespace", "system-call filter", "AppArmor profile docker-default",
    ]  # fmt: skip


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
