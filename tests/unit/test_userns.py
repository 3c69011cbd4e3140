"""Where user namespaces are refused: the likely cause is named, with what to do about it."""

from pathlib import Path

import pytest

from sandboxes.userns import fix

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
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "apparmor_restrict_unprivileged_userns=0`"),
        ("user/max_user_namespaces", "0", "`sysctl -w user.max_user_namespaces=15000`"),
    ],
)
def test_a_switch_that_refuses_is_named_with_the_command(name: str, value: str, words: str, root: Path) -> None:
    """As it is to be typed."""
    (root / "proc/sys" / name).write_text(f"{value}\n")
    assert words in fix(DENIED, root)


def test_a_chroot_is_told_as_root(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The root of process 1 is another directory."""
    (root / "proc/1/root").unlink()
    (root / "proc/1/root").symlink_to(tmp_path_factory.mktemp("elsewhere"))
    assert "inside a chroot: enter it with pivot_root" in fix(DENIED, root)


def test_a_chroot_is_told_as_anybody(root: Path) -> None:
    """Process 1 cannot be looked at, but nothing is mounted at our root."""
    (root / "proc/1/root").unlink()
    (root / "proc/self/mountinfo").write_text("22 1 0:5 / /proc rw - proc proc rw\n")
    assert "inside a chroot" in fix(DENIED, root)


@pytest.mark.parametrize(
    ("words", "told"), [(DENIED, "seccomp=PROFILE"), ("bwrap: Can't mount proc on /newroot/proc", "systempaths")]
)
def test_a_container_is_told_with_its_option(words: str, told: str, root: Path) -> None:
    """Which one depends on what bwrap could not do; both name the better way."""
    (root / ".dockerenv").touch()
    assert told in fix(words, root)
    assert "on the host or in a virtual machine" in fix(words, root)
