"""`glovebox artifact`: a whole new file, or one sentence and nothing."""

import os
import resource
import subprocess  # noqa: TID251 - a standard output of its own
import sys
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest
from click.testing import CliRunner

from server.calls import Principal
from server.cli import main
from server.exits import OK, UNAVAILABLE, USAGE
from server.saving import CannotSave, save
from tests.artifact_stores import Clock, a_store, keep

ROOT = Path(__file__).parents[2]
CONTENT = b"kept\n" * 10_000


@pytest.fixture
def uri(tmp_path: Path) -> str:
    """The address of an artifact of this user's, in a state of its own."""

    async def make() -> str:
        (tmp_path / "state").mkdir(mode=0o700)
        clock = Clock(datetime.now(UTC))
        async with a_store(tmp_path / "state" / "artifacts", clock) as store:
            me = Principal(id=f"local:{os.getuid()}", transport="cli")
            return (await keep(store, "a.txt", CONTENT, principal=me)).uri

    return anyio.run(make)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process can grow beyond 4 KiB: the disk as good as full."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, old)


def artifact(directory: Path, uri: str, *options: str) -> list[str]:
    """The command's arguments."""
    return ["artifact", uri, *options, "--workspace", str(directory), "--state-dir", str(directory / "state")]


def test_an_artifact_is_saved_whole(uri: str, tmp_path: Path) -> None:
    """Exit 0: the control of the others."""
    done = CliRunner().invoke(main, artifact(tmp_path, uri, "-o", str(tmp_path / "out")))
    assert done.exit_code == OK, done.stderr
    assert (tmp_path / "out").read_bytes() == CONTENT


def test_a_file_that_exists_is_kept(uri: str, tmp_path: Path) -> None:
    """Exit 2 and one sentence, no traceback; what was there is there."""
    (tmp_path / "out").write_text("mine")
    done = CliRunner().invoke(main, artifact(tmp_path, uri, "-o", str(tmp_path / "out")))
    assert done.exit_code == USAGE
    assert done.stderr == f"{tmp_path}/out cannot be written: File exists. Name another file.\n"
    assert (tmp_path / "out").read_text() == "mine"


def test_a_directory_that_is_not_there_is_told(uri: str, tmp_path: Path) -> None:
    """Exit 4: it cannot be made either."""
    done = CliRunner().invoke(main, artifact(tmp_path, uri, "-o", str(tmp_path / "none" / "out")))
    assert done.exit_code == UNAVAILABLE
    assert "No such file or directory. Name another file." in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_standard_output_that_fails_is_told_once(uri: str, tmp_path: Path) -> None:
    """Exit 4: neither here nor at the interpreter's end a traceback."""
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "server.cli", *artifact(tmp_path, uri)]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == UNAVAILABLE
    assert done.stderr == "standard output cannot be written: No space left on device. Name a file with -o.\n"


@pytest.mark.usefixtures("small_files")
async def test_of_a_file_that_could_not_be_finished_nothing_is_left(tmp_path: Path) -> None:
    """A part of an artifact would look like the artifact; with room it is written (control: above)."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b"x" * 4096

    with pytest.raises(CannotSave, match=r"File too large\. Make room") as raised:
        await save(chunks(), tmp_path / "out")
    assert not raised.value.named_wrongly
    assert list(tmp_path.iterdir()) == []
