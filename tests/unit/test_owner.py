"""What a server made is only taken for an orphan when its server is certainly gone."""

import os
from dataclasses import replace

import pytest

from glovebox_sandboxes.host.owner import is_of_another_boot, is_orphan, new_owner


def test_a_living_server_keeps_its_containers() -> None:
    """Control: the mark of the process that asks is no orphan's."""
    assert not is_orphan(new_owner().mark())


def test_a_process_that_is_gone_leaves_orphans() -> None:
    """Numbers above the kernel's largest belong to nobody."""
    assert is_orphan(replace(new_owner(), pid=2**22 + 1).mark())


def test_a_reused_number_is_not_the_same_server() -> None:
    """Our own number with another start: the server is gone although its number is in use."""
    ours = new_owner()
    assert is_orphan(replace(ours, started=ours.started + 1).mark())


@pytest.mark.parametrize("change", [{"boot": "another-kernel"}, {"pid_namespace": "1"}])
def test_a_server_of_another_world_is_never_judged(change: dict[str, str]) -> None:
    """Another kernel's or another pid namespace's server: we cannot see it, so its containers are not ours to take."""
    assert not is_orphan(replace(new_owner(), pid=2**22 + 1, **change).mark())  # type: ignore[arg-type]


def test_another_boot_is_told_from_this_one_and_from_what_is_no_mark() -> None:
    """For what this machine alone writes: a server of an earlier boot is gone."""
    ours = new_owner()
    assert is_of_another_boot(replace(ours, boot="another-kernel").mark())
    assert not is_of_another_boot(ours.mark())
    assert not is_of_another_boot(replace(ours, pid_namespace="1").mark())
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
    assert new_owner().mark() != new_owner().mark()
