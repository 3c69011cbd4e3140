"""F2: whoever may rename the workspace, or a folder above it, cannot have another directory mounted in its place."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from glovebox_sandboxes.host.process import Spawner


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    """The thread that opens what sandboxes mount."""
    with closing(Spawner()) as running:
        yield running


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A workspace, and beside it a directory nobody was meant to see."""
    workspace = tmp_path.resolve() / "projects" / "workspace"
    workspace.mkdir(parents=True)
    (tmp_path / "secret" / "workspace").mkdir(parents=True)
    return workspace


async def _opens(spawner: Spawner, directory: Path) -> bool:
    """Whether the directory, and no other, is what would be mounted."""
    (descriptor,) = await spawner.places([directory])
    try:
        return os.path.samestat(os.fstat(descriptor), directory.stat())
    finally:
        os.close(descriptor)


async def test_the_workspace_itself_is_mounted(spawner: Spawner, workspace: Path) -> None:
    """The control: by its name, and under a new name of its own once it has been moved."""
    assert await _opens(spawner, workspace)
    moved = workspace.rename(workspace.with_name("moved"))
    assert await _opens(spawner, moved)


@pytest.mark.parametrize("seen_before", [False, True])
async def test_a_link_in_place_of_the_workspace_is_refused(
    spawner: Spawner, workspace: Path, tmp_path: Path, *, seen_before: bool
) -> None:
    """Put there before the first call or between two; the directory it leads to exists and could be opened."""
    if seen_before:
        assert await _opens(spawner, workspace)
    workspace.rename(workspace.with_name("moved"))
    workspace.symlink_to(tmp_path / "secret")
    assert workspace.is_dir()
    with pytest.raises(OSError, match="leads elsewhere by a link"):
        await spawner.places([workspace])


async def test_a_link_in_place_of_a_folder_above_is_refused(spawner: Spawner, workspace: Path, tmp_path: Path) -> None:
    """The workspace's own name is still that of a directory, of another one."""
    workspace.parent.rename(tmp_path / "moved")
    workspace.parent.symlink_to(tmp_path / "secret")
    assert not workspace.is_symlink()
    with pytest.raises(OSError, match="leads elsewhere by a link"):
        await spawner.places([workspace])
