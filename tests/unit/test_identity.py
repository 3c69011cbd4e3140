"""Who a sandbox would be to the kernel: its root is recognised by whatever number a user namespace gives it."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from glovebox_sandboxes.host import identity
from glovebox_sandboxes.host.identity import changes_user, is_kernels_root, kernels_root, unprivileged


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


def test_root_with_nobody_else_to_become_is_not_started_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bwrap --uid 0 makes it. The control: with other users, the command is that of one of them."""
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


def test_the_kernels_root_under_another_name_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root that calls itself 1000, as bwrap --uid 1000 makes it; the control is an ordinary 1000."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(identity, "kernels_root", lambda: 1000)
    assert is_kernels_root()
    monkeypatch.setattr(identity, "kernels_root", lambda: 0)
    assert not is_kernels_root()
