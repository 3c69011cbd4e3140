"""A server that runs as root can give its sandboxes directories below its own closed ones, and nothing else moves."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from glovebox_sandboxes.host.process import Spawner
from glovebox_sandboxes.host.staging import STAGE

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only a server run as root has to become another user")

#: Looks a descriptor's directory up by its path, as bwrap does, and reads a file there.
_READ = 'cat "$(readlink "/proc/self/fd/$0")/file"'


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    """The thread that starts processes."""
    with closing(Spawner()) as running:
        yield running


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A readable directory below one that only root may enter."""
    (tmp_path / "home").mkdir(mode=0o700)
    project = tmp_path / "home" / "project"
    project.mkdir(mode=0o755)
    (project / "file").write_text("first")
    return project


async def _read(spawner: Spawner, descriptor: int) -> tuple[str, str]:
    """What the unprivileged process could read, and what it said about it."""
    words = os.memfd_create("words")
    try:
        process = await spawner.start(
            ["/bin/sh", "-c", _READ, str(descriptor)], stderr=words, descriptors=(descriptor,)
        )
        text = b""
        while True:
            try:
                text += await process.stream.receive()
            except anyio.EndOfStream:
                break
        await process.wait()
        await process.stream.aclose()
        return text.decode(), os.pread(words, 4096, 0).decode()
    finally:
        os.close(words)
        os.close(descriptor)


async def test_a_directory_below_a_closed_one_can_be_reached_by_path(spawner: Spawner, closed: Path) -> None:
    """It is found under a path everybody may enter. Control: its own path is refused to the same process."""
    assert await _read(spawner, *await spawner.places([closed])) == ("first", "")
    text, words = await _read(spawner, os.open(closed, os.O_PATH))
    assert not text
    assert "Permission denied" in words


async def test_a_directory_that_was_replaced_is_seen_anew(spawner: Spawner, closed: Path) -> None:
    """A workspace may be removed and made again while the server runs; sandboxes see the new one."""
    os.close(*await spawner.places([closed]))
    closed.rename(closed.with_name("old"))
    closed.mkdir(mode=0o755)
    (closed / "file").write_text("second")
    assert await _read(spawner, *await spawner.places([closed])) == ("second", "")


async def test_nothing_is_mounted_for_anybody_else(spawner: Spawner, closed: Path) -> None:
    """The place stays an empty directory outside the thread, and no new mount is seen there."""
    before = Path("/proc/self/mountinfo").read_text()
    os.close(*await spawner.places([closed]))
    assert not list(STAGE.iterdir())
    assert Path("/proc/self/mountinfo").read_text() == before


async def test_a_directory_that_is_missing_leaves_no_descriptor_open(spawner: Spawner, closed: Path) -> None:
    """The caller hears it as the error it is, and those before it are closed."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(FileNotFoundError):
        await spawner.places([closed, closed / "none"])
    assert len(list(Path("/proc/self/fd").iterdir())) == before
