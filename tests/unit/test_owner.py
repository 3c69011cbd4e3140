"""What a server made is only taken for an orphan when its server is certainly gone."""

import os

import pytest

from glovebox_sandboxes.host.owner import is_of_another_boot, is_orphan, new_mark

BOOT, SPACE, PID, STARTED, NONCE = new_mark().split(":")


def test_a_living_server_keeps_its_containers() -> None:
    """Control: the mark of the process that asks is no orphan's."""
    assert not is_orphan(new_mark())


def test_a_process_that_is_gone_leaves_orphans() -> None:
    """Numbers above the kernel's largest belong to nobody."""
    assert is_orphan(f"{BOOT}:{SPACE}:{2**22 + 1}:{STARTED}:{NONCE}")


def test_a_reused_number_is_not_the_same_server() -> None:
    """Our own number with another start: the server is gone although its number is in use."""
    assert is_orphan(f"{BOOT}:{SPACE}:{PID}:{int(STARTED) + 1}:{NONCE}")


@pytest.mark.parametrize("world", [f"another-kernel:{SPACE}", f"{BOOT}:1"])
def test_a_server_of_another_world_is_never_judged(world: str) -> None:
    """Another kernel's or another pid namespace's server: we cannot see it, so its containers are not ours to take."""
    assert not is_orphan(f"{world}:{2**22 + 1}:{STARTED}:{NONCE}")


def test_another_boot_is_told_from_this_one_and_from_what_is_no_mark() -> None:
    """For what this machine alone writes: a server of an earlier boot is gone."""
    assert is_of_another_boot(f"another-kernel:{SPACE}:{PID}:{STARTED}:{NONCE}")
    assert not is_of_another_boot(new_mark())
    assert not is_of_another_boot(f"{BOOT}:1:{PID}:{STARTED}:{NONCE}")
    assert not is_of_another_boot("another-kernel:1")


@pytest.mark.parametrize(
    "mark",
    [
        "", ":", "a:b:c:d:e", "::::", pytest.param(f"x:y:{os.getpid()}", id="too short, with a living number"),
        "9" * 5000, "a:b:٣:1:e",
    ],
)  # fmt: skip
def test_a_mark_that_is_none_is_left_alone(mark: str) -> None:
    """Whatever else is written in the label."""
    assert not is_orphan(mark)


def test_two_drivers_of_one_process_have_different_marks() -> None:
    """One that closes must not remove the other's containers."""
    assert new_mark() != new_mark()
