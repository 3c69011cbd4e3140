"""`glovebox artifact`: a whole new file, or one sentence and nothing."""

import json
import os
import subprocess  # noqa: TID251 - a standard output of its own
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
from click.testing import CliRunner
from tests.fixtures.artifact_stores import Clock, a_store, files, keep

from glovebox_server.calls import Principal
from glovebox_server.cli.main import main
from glovebox_server.exits import OK, REFUSED, UNAVAILABLE, USAGE

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


#: In a process of its own: the limit would hold for pytest's own output too, where that is a file.
IN_SMALL_FILES = """
import resource, sys
from pathlib import Path
import anyio
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.cli import saving

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

async def chunks():
    for _ in range(4):
        yield b"x" * 4096

place = Path(sys.argv[1])
try:
    if sys.argv[2] == "save":
        anyio.run(saving.save, chunks(), place)
    else:
        saving.write_new_file(place, b"x" * 16384)
except DiagnosedError as problem:
    print(type(problem).__name__, problem)
else:
    print("saved")
"""


def artifact(directory: Path, uri: str, *options: str) -> list[str]:
    """The command's arguments."""
    return ["artifact", uri, *options, "--state-dir", str(directory / "state")]


def test_an_artifact_is_saved_whole(uri: str, tmp_path: Path) -> None:
    """Exit 0: the control of the others."""
    done = CliRunner().invoke(main, artifact(tmp_path, uri, "-o", str(tmp_path / "out")))
    assert done.exit_code == OK, done.stderr
    assert done.stderr == f"{tmp_path / 'out'}: {len(CONTENT)} bytes.\n"
    assert (tmp_path / "out").read_bytes() == CONTENT


def test_the_marks_of_an_artifact_are_told_beside_its_bytes(tmp_path: Path) -> None:
    """On standard error, so that what is piped on stays exactly the file; a harmless one has none (control: above)."""

    async def make() -> str:
        async with a_store(tmp_path / "state" / "artifacts", Clock(datetime.now(UTC))) as store:
            me = Principal(id=f"local:{os.getuid()}", transport="cli")
            return (await keep(store, "claude.md", CONTENT, principal=me)).uri

    (tmp_path / "state").mkdir(mode=0o700)
    done = CliRunner().invoke(main, artifact(tmp_path, anyio.run(make)))
    assert done.stdout_bytes == CONTENT
    assert "'claude.md': agents read it as instructions" in done.stderr


def test_an_operator_saves_any_callers_artifact(uri: str, tmp_path: Path) -> None:
    """Whose it is has to be said: another's, and somebody's who has none, are unknown (control: above)."""
    stranger = ["artifact", "save", uri, "--principal", "token:alice", "--state-dir", str(tmp_path / "state")]
    done = CliRunner().invoke(main, stranger)
    assert done.exit_code == REFUSED
    assert "There is no artifact of yours at this address" in done.stderr
    signed_in = "oauth:https://id.example#alice%20b"
    assert CliRunner().invoke(main, [signed_in if word == "token:alice" else word for word in stranger]).exit_code == (
        REFUSED
    )
    mine = f"local:{os.getuid()}"
    done = CliRunner().invoke(main, [mine if word == "token:alice" else word for word in stranger])
    assert (done.exit_code, done.stdout_bytes) == (OK, CONTENT)


@pytest.mark.parametrize("given", ["regions.xlsx", "0" * 32, "artifact://x", "file:///etc/passwd", "\x1b[2J"])
def test_what_is_no_address_is_no_unknown_artifact(given: str, tmp_path: Path) -> None:
    """Exit 2, with the command that shows addresses; an address of nobody's is the control, above."""
    done = CliRunner().invoke(main, artifact(tmp_path, given))
    assert done.exit_code == USAGE
    assert "an address is artifact://…, and `glovebox artifact list` shows them." in " ".join(done.stderr.split())
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    "principal", ["alice", "token:", "token:../x", "token:Alice", "local:me", "oauth:https://id.example", ""]
)
def test_what_is_no_principal_is_refused(principal: str, uri: str, tmp_path: Path) -> None:
    """By its form, for both commands; the control is above."""
    for command in (["list"], ["save", uri]):
        given = ["artifact", *command, "--principal", principal, "--state-dir", str(tmp_path / "state")]
        done = CliRunner().invoke(main, given)
        assert done.exit_code == USAGE
        assert "is no principal" in done.stderr


async def _three(directory: Path) -> None:
    """Two artifacts of a caller, in two calls, and one of another."""
    clock = Clock(datetime.now(UTC) - timedelta(minutes=90))
    async with a_store(directory / "artifacts", clock) as store:
        await keep(store, "expired.txt", b"x")
        clock.now += timedelta(minutes=80)
        await keep(store, "a.csv", b"1,2\n")
        await keep(store, "claude.md", b"x", principal=Principal(id="local:7", transport="cli"))


def test_artifacts_are_listed_with_whose_they_are(tmp_path: Path) -> None:
    """As a table and as JSON, by caller and by call; what has expired is not there, and nothing is changed."""
    (tmp_path / "state").mkdir(mode=0o700)
    anyio.run(_three, tmp_path / "state")
    before = files(tmp_path)

    def listed(*options: str) -> str:
        done = CliRunner().invoke(main, ["artifact", "list", *options, "--state-dir", str(tmp_path / "state")])
        assert done.exit_code == OK, done.stderr
        return done.stdout

    assert {each["name"]: each["principal"] for each in json.loads(listed("--json"))["artifacts"]} == {
        "a.csv": "token:alice",
        "claude.md": "local:7",
    }
    (only,) = json.loads(listed("--json", "--principal", "token:alice"))["artifacts"]
    assert (only["name"], only["bytes"], only["media_type"], only["risks"]) == ("a.csv", 4, "text/csv", [])
    assert json.loads(listed("--json", "--call", "c_none")) == {"artifacts": []}
    assert len(json.loads(listed("--json", "--call", only["call_id"]))["artifacts"]) == 2
    table = listed()
    assert "a.csv" in table
    assert "1 risk" in table
    assert "10 min" in table
    assert only["uri"] in table
    assert "2 artifacts." in table
    assert files(tmp_path) == before


def test_where_there_is_no_store_there_are_no_artifacts(tmp_path: Path) -> None:
    """And none is made."""
    done = CliRunner().invoke(main, ["artifact", "list", "--state-dir", str(tmp_path / "state")])
    assert (done.exit_code, done.stdout) == (OK, "0 artifacts.\n")
    assert not (tmp_path / "state").exists()


def test_a_place_that_cannot_be_written_is_told(uri: str, tmp_path: Path) -> None:
    """Exit 2 for a file that exists, which is kept, and 4 where there is no directory; one sentence each."""
    (tmp_path / "out").write_text("mine")
    done = CliRunner().invoke(main, artifact(tmp_path, uri, "-o", str(tmp_path / "out")))
    assert done.exit_code == USAGE
    assert done.stderr == f"{tmp_path}/out cannot be written: File exists. Name another file.\n"
    assert (tmp_path / "out").read_text() == "mine"
    done = CliRunner().invoke(main, artifact(tmp_path, uri, "-o", str(tmp_path / "none" / "out")))
    assert done.exit_code == UNAVAILABLE
    assert "No such file or directory. Name another file." in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_standard_output_that_fails_is_told_once(uri: str, tmp_path: Path) -> None:
    """Exit 4: neither here nor at the interpreter's end a traceback."""
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "glovebox_server", *artifact(tmp_path, uri)]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == UNAVAILABLE
    assert done.stderr.startswith("Standard output cannot be written: No space left on device. ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("way", ["save", "write_new_file"])
def test_of_a_file_that_could_not_be_finished_nothing_is_left(way: str, tmp_path: Path) -> None:
    """A part of an artifact, or a bundle, would look like the whole; with room it is written (control: above)."""
    command = [sys.executable, "-c", IN_SMALL_FILES, str(tmp_path / "out"), way]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.startswith("DiagnosedError "), done.stderr
    assert "File too large. Make room" in done.stdout
    assert list(tmp_path.iterdir()) == []
