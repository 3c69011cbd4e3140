"""Where user namespaces are refused: the likely cause is named, with what to do about it."""

from pathlib import Path

import pytest

from glovebox_sandboxes.host.surroundings import fix, nested

DENIED = "bwrap: No permissions to create new namespace"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host on which nothing speaks against user namespaces."""
    for name, value in (("kernel/unprivileged_userns_clone", "1"), ("user/max_user_namespaces", "127000")):
        path = tmp_path / "proc/sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    for process in ("1", "self"):
        (tmp_path / "proc" / process).mkdir()
    (tmp_path / "proc/1/root").symlink_to(tmp_path)
    (tmp_path / "proc/self/mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n")
    return tmp_path


def test_without_a_sign_the_likely_causes_are_named(root: Path) -> None:
    """The control of the others."""
    assert "Likely causes" in fix(DENIED, root)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("kernel/unprivileged_userns_clone", "0", "`sysctl -w kernel.unprivileged_userns_clone=1`"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0`"),
        ("user/max_user_namespaces", "0", "`sysctl -w user.max_user_namespaces=15000`"),
    ],
)
def test_a_switch_that_refuses_is_named_with_the_command(name: str, value: str, words: str, root: Path) -> None:
    """As it is to be typed."""
    (root / "proc/sys" / name).write_text(f"{value}\n")
    assert words in fix(DENIED, root)


def test_a_chroot_is_told(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """As root the root of process 1 is another directory; as anybody nothing is mounted at ours."""
    (root / "proc/1/root").unlink()
    (root / "proc/1/root").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    assert "inside a chroot: enter it with pivot_root" in fix(DENIED, root)
    (root / "proc/1/root").unlink()
    (root / "proc/self/mountinfo").write_text("22 1 0:5 / /proc rw - proc proc rw\n")
    assert "inside a chroot" in fix(DENIED, root)


MASKED = "bwrap: Can't mount proc on /newroot/proc: Operation not permitted"
READ_ONLY = "bwrap: cannot open /proc/sys/user/max_user_namespaces: Read-only file system"
ENOSPC = "bwrap: Creating new namespace failed: nesting depth or /proc/sys/user/max_*_namespaces exceeded (ENOSPC)"


def _filter(root: Path) -> None:
    (root / "proc/self/status").write_text("Name:\tx\nSeccomp:\t2\nSeccomp_filters:\t1\n")


def test_a_container_is_told_every_option_at_once(root: Path) -> None:
    """Those that its state asks for, in one command, so that nobody clears one obstacle to meet the next."""
    (root / ".dockerenv").touch()
    assert "Likely causes" in fix(DENIED, root)  # the control: a mark alone refuses nothing
    _filter(root)
    told = fix(DENIED, root)
    assert "`--security-opt seccomp=unconfined --security-opt systempaths=unconfined`" in told
    assert "This container refuses user namespaces" in told
    assert "on the host or in a virtual machine" in told
    (root / "proc/self/attr").mkdir()
    (root / "proc/self/attr/current").write_text("docker-default (enforce)\n")
    assert "systempaths=unconfined --security-opt apparmor=unconfined`" in fix(DENIED, root)


def test_a_container_that_hides_proc_is_told(root: Path) -> None:
    """Without a filter only that option is named."""
    (root / ".dockerenv").touch()
    assert "hides parts of procfs" in fix(MASKED, root)
    assert "`--security-opt systempaths=unconfined`" in fix(MASKED, root)


def test_a_filter_outside_of_containers_is_told(root: Path) -> None:
    """A unit of systemd's and an outer sandbox are what makes them."""
    _filter(root)
    assert "take RestrictNamespaces= and SystemCallFilter= out" in fix(DENIED, root)


@pytest.mark.parametrize("words", [MASKED, READ_ONLY])
def test_what_hides_proc_outside_of_containers_is_told(words: str, root: Path) -> None:
    """No container's option would help, and a filter that is there as well is not what stands in the way."""
    _filter(root)
    assert fix(words, root).startswith("Something around this process hides parts of procfs")
    assert "take ProtectKernelTunables=" in fix(words, root)
    assert "A filter of system calls" in fix(DENIED, root)  # the control


@pytest.mark.parametrize(("words", "limit"), [(ENOSPC, "127000"), (DENIED, "0")])
def test_an_outer_sandbox_that_forbids_more_of_them_is_told(words: str, limit: str, root: Path) -> None:
    """By its own limit, which cannot be seen from inside, or by ours, which root of the host could not raise."""
    (root / "proc/sys/user/max_user_namespaces").write_text(limit)
    assert "--disable-userns" not in fix(DENIED, root)  # the control: nothing is around us
    (root / "proc/self/uid_map").write_text("         0       1000          1\n")
    assert "as bwrap --disable-userns does" in fix(words, root)


def test_the_initial_user_namespace_is_not_around_anything(root: Path) -> None:
    """Its map is the whole of all numbers."""
    (root / "proc/self/uid_map").write_text("         0          0 4294967295\n")
    assert not nested(root)
    (root / "proc/self/uid_map").write_text("         0          0          1\n")
    assert nested(root)
