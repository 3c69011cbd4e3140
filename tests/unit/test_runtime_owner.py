"""M10: what runs in every sandbox lies where nobody else could have written or exchanged it, or no sandbox starts."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fixtures.access_lists import let_in

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host import permissions
from glovebox_sandboxes.runtime import runtime

STRANGER = 4321


def _tree(directory: Path) -> Path:
    """A data directory as ``glovebox setup`` leaves it, but for what is in it."""
    data = directory / "above" / "data"
    for name in ("runtime-0123/root", "guest-0123-3.11.2", "environments"):
        (data / name).mkdir(parents=True)
    return data


def _shared(path: Path) -> None:
    os.chown(path, -1, STRANGER)
    path.chmod(0o775)


SPOILT: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "another's": (".", lambda path: os.chown(path, STRANGER, -1), f"belongs to user {STRANGER}"),
    "another's runtime": ("runtime-0123", lambda path: os.chown(path, STRANGER, -1), f"belongs to user {STRANGER}"),
    "another's root": ("runtime-0123/root", lambda path: os.chown(path, STRANGER, -1), f"belongs to user {STRANGER}"),
    "another's guest": ("guest-0123-3.11.2", lambda path: os.chown(path, STRANGER, -1), f"belongs to user {STRANGER}"),
    "open": (".", lambda path: path.chmod(0o777), "is writable by every user"),
    "another's environments": ("environments", lambda path: path.chmod(0o777), "is writable by every user"),
    "open root": ("runtime-0123/root", lambda path: path.chmod(0o757), "is writable by every user"),
    "a list's": ("runtime-0123", lambda path: let_in(path, STRANGER, 7), "is writable by whom its access list names"),
    "below a list's": ("..", lambda path: let_in(path, STRANGER, 7), "is writable by whom its access list names"),
    "a group's": ("runtime-0123", _shared, f"is writable by group {STRANGER}"),
    "below another's": ("..", lambda path: os.chown(path, STRANGER, -1), f"belongs to user {STRANGER}"),
    "below an open one": ("..", lambda path: path.chmod(0o777), "is writable by every user"),
}


@pytest.mark.parametrize("name", SPOILT)
async def test_a_data_directory_others_could_change_is_refused(name: str, tmp_path: Path) -> None:
    """M10: driver and set-up say which place, why, and the command; the same directory unspoilt is only empty."""
    data = _tree(tmp_path)
    _, lacking = await runtime.usable(data)
    assert lacking is not None
    assert lacking.what == "the sandbox's Python runtime is not built"
    part, spoil, problem = SPOILT[name]
    place = Path(os.path.normpath(data / part))
    if os.geteuid() != 0:
        pytest.skip("changing the owner of a directory needs root, and only root's server looks above")
    spoil(place)
    found, lacking = await runtime.usable(data)
    assert not found
    assert lacking is not None
    assert lacking.fatal
    assert lacking.what == f"{place} {problem}, who could change what runs in every sandbox"
    assert lacking.fix.endswith(f" {place}`.")
    with pytest.raises(SandboxError, match=problem):
        await runtime.build(data, lambda _: None)


async def test_a_directory_in_a_sticky_one_is_nobody_elses(tmp_path: Path) -> None:
    """As below /tmp: everybody may write there, and nobody can move what is not his."""
    data = _tree(tmp_path)
    data.parent.chmod(0o1777)
    _, lacking = await runtime.usable(data)
    assert lacking is not None
    assert lacking.what == "the sandbox's Python runtime is not built"


def test_root_and_this_user_are_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A normal user's server uses what root made and what he made; what a third one made it does not."""
    if os.geteuid() != 0:
        pytest.skip("changing the owner of a directory needs root")
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    for owner, trusted in ((0, True), (1234, True), (STRANGER, False)):
        os.chown(tmp_path, owner, -1)
        assert (permissions.flaw(tmp_path) is None) == trusted


async def test_a_data_directory_in_an_empty_home_is_only_not_built(tmp_path: Path) -> None:
    """On a new machine what is above it is not there either; whoever could make it first is still looked for."""
    data = tmp_path / "home" / ".local" / "share" / "glovebox"
    (tmp_path / "home").mkdir()
    _, lacking = await runtime.usable(data)
    assert lacking is not None
    assert lacking.what == "the sandbox's Python runtime is not built"
    if os.geteuid() != 0:
        pytest.skip("only root's server looks above")
    (tmp_path / "home").chmod(0o777)
    _, lacking = await runtime.usable(data)
    assert lacking is not None
    assert lacking.what.startswith(f"{tmp_path / 'home'} is writable by every user")


async def test_a_data_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """As with a home that is not there: which directory, why, and how to name another."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SandboxError, match=r"file/data cannot be made: Not a directory\. Name another"):
        await runtime.build(tmp_path / "file" / "data", lambda _: None)


async def test_a_data_directory_that_another_makes_first_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """M10: between the look and the making, as below /tmp; nothing is built in it."""
    data = tmp_path / "data"

    def faster(directory: Path) -> None:
        directory.mkdir()
        directory.chmod(0o777)

    monkeypatch.setattr(runtime, "_make", faster)
    with pytest.raises(SandboxError, match="data is writable by every user"):
        await runtime.build(data, lambda _: None)
    assert list(data.iterdir()) == []
