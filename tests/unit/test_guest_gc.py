"""Guests of other versions: removed when nobody can need them, and only then."""

import os
import time
from pathlib import Path

import pytest

from glovebox_sandboxes.runtime import guest_gc

TWO_DAYS = 2 * 24 * 3600


def guest(data: Path, name: str, *, age: float = TWO_DAYS) -> Path:
    path = data / name
    (path / "_glovebox_guest").mkdir(parents=True)
    (path / "_glovebox_guest" / "wire.py").write_text("")
    then = time.time() - age
    os.utime(path, (then, then))
    return path


def test_old_guests_go_and_the_current_one_stays(tmp_path: Path) -> None:
    current = guest(tmp_path, "guest-new")
    young = guest(tmp_path, "guest-young", age=60)
    for name in ("guest-old", ".building-killed"):
        guest(tmp_path, name)
    (tmp_path / "guest-file").write_text("mine")
    elsewhere = guest(tmp_path / "elsewhere", "kept")
    (tmp_path / "guest-link").symlink_to(elsewhere)
    assert guest_gc.remove(tmp_path, [current]) == 2
    kept = {"guest-new", young.name, "guest-file", "guest-link", "elsewhere"}
    assert {path.name for path in tmp_path.iterdir()} == kept
    assert (elsewhere / "_glovebox_guest" / "wire.py").exists()


def test_a_guest_a_server_uses_stays(tmp_path: Path) -> None:
    """Whatever its age; once the server is gone it goes (control)."""
    used = guest(tmp_path, "guest-used")
    with guest_gc.held([used]), guest_gc.held([used]):
        assert guest_gc.remove(tmp_path, [tmp_path / "guest-new"]) == 0
        assert used.is_dir()
    assert guest_gc.remove(tmp_path, [tmp_path / "guest-new"]) == 1
    assert not used.exists()
    with guest_gc.held([]):
        assert guest_gc.remove(tmp_path / "none", [tmp_path]) == 0


def test_runtimes_that_nothing_names_go_with_their_servers(tmp_path: Path) -> None:
    current = guest(tmp_path, "runtime-now")
    for name in ("runtime-old", "runtime-used", "guest-of-then"):
        guest(tmp_path, name)
    with guest_gc.held([tmp_path / "runtime-used", tmp_path / "guest-of-then"]):
        assert {path.name for path in guest_gc.removable(tmp_path, [current])} == {"runtime-old"}
        assert guest_gc.remove(tmp_path, [current]) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"runtime-now", "runtime-used", "guest-of-then"}
    assert guest_gc.remove(tmp_path, [current]) == 2


def test_a_guest_is_not_removed_under_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a guest must not look like a whole one, even if the removal is killed."""
    guest(tmp_path, "guest-old")

    def killed(_: Path) -> None:
        raise OSError

    monkeypatch.setattr("shutil.rmtree", killed)
    guest_gc.remove(tmp_path, [tmp_path / "guest-new"])
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".building-")
