"""Canaries: which are looked for and seen, and how ``glovebox canary`` plants, lists and removes them."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.test_stops import a_call
from tests.unit.test_watch import attempted, decision, planted, watching

from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.cli.main import main
from glovebox_server.exits import OK, UNAVAILABLE, USAGE
from glovebox_server.guards.watch import watch
from glovebox_server.guards.watch.canaries import canaries_of, plant, remove


async def test_what_lies_where_a_canary_was_is_no_canary(tmp_path: Path) -> None:
    """What else is in its place is hidden as any secret is, and leaves nothing open; the control is the canary."""
    async with watching(tmp_path) as seen:
        canary = planted(tmp_path)
        workspace = Path(canary.workspace)
        await seen.watch.decided(a_call(), decision("allow"), workspace)
        assert await seen.watch.planted(workspace) == (canary.path,)
        moved = canary.file.rename(tmp_path / "moved")
        canary.file.symlink_to(moved)
        assert await seen.watch.planted(workspace) == ()
        canary.file.unlink()
        os.mkfifo(canary.file)
        assert await seen.watch.planted(workspace) == ()
        canary.file.unlink()
        canary.file.mkdir()
        before = len(list(Path("/proc/self/fd").iterdir()))
        assert await seen.watch.planted(workspace) == ()
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        canary.file.rmdir()
        canary.file.write_text(f"{canary.text}TOKEN=real\n")
        assert await seen.watch.planted(workspace) == ()


async def test_a_call_that_may_run_sees_the_canaries_of_its_workspace(tmp_path: Path) -> None:
    """And to read one is told; the controls are a call that may not, and one without a workspace."""
    async with watching(tmp_path) as seen:
        canary = planted(tmp_path)
        reads = a_call(tool="read_workspace_file", arguments={"path": canary.path})
        for effect, workspace, paths in (
            ("deny", Path(canary.workspace), [".env"]),
            ("allow", None, [".env"]),
            ("allow", Path(canary.workspace), [".env", canary.path]),
        ):
            assert seen.alarms() == []
            call = attempted(reads, decision(effect), workspace)
            call.now.reveal = [".env"]
            await seen.watch.look_at_decision(call)
            assert call.now.reveal == paths
        assert seen.alarms() == [("canary", "stop", "arguments", canary.id)]


async def test_a_canary_that_cannot_be_read_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And each further one; those that can be read are looked for all the same."""
    async with watching(tmp_path) as seen:
        marker, names = planted(tmp_path).marker, ["y_" + each * 26 for each in "01"]
        for name in names:
            assert seen.alarms() == []
            canaries_of(tmp_path).add(name, b"{}")
            await seen.watch.decided(a_call(), decision("allow"), None)
        await seen.watch.decided(a_call(arguments={"code": marker}), decision("allow"), None)
        assert [each[0] for each in seen.alarms()] == ["canary"]
    logged = [each.getMessage() for each in caplog.records if each.name == watch.__name__]
    assert [name for line in logged for name in names if name in line] == names


def run(place: Path, *words: str) -> tuple[int, str]:
    """One command."""
    places = ["--state-dir", str(place / "state"), "--workspace", str(place / "workspace")]
    found = CliRunner().invoke(main, [*words, *places])
    return found.exit_code, found.output


def test_a_canary_is_planted_listed_and_removed(tmp_path: Path) -> None:
    """Its marker is printed nowhere, and is in its file alone; sandboxes can read it."""
    (tmp_path / "workspace").mkdir()
    status, text = run(tmp_path, "canary", "plant", "--json")
    identity = json.loads(text)["canary"]["id"]
    (canary,) = canaries_of(tmp_path / "state").read().items
    assert (status, canary.id) == (OK, identity)
    assert canary.marker in canary.file.read_text()
    assert canary.file.stat().st_mode & 0o777 == 0o644
    assert run(tmp_path, "canary", "list")[1].count("yes") == 1
    assert canary.marker not in text + run(tmp_path, "canary", "list")[1]
    assert run(tmp_path, "canary", "remove", identity) == (OK, "1 file removed.\n")
    assert list((tmp_path / "workspace").iterdir()) == []
    assert json.loads(run(tmp_path, "canary", "list", "--json")[1]) == {"canaries": [], "damaged": []}


def test_no_file_of_anybodys_is_touched(tmp_path: Path) -> None:
    """Neither one that is there, nor one that is not what was planted, nor one outside."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "mine.txt").write_text("mine")
    for name in ("mine.txt", "../out.txt", "/etc/out.txt", "no/such/folder.txt", "."):
        status, text = run(tmp_path, "canary", "plant", "--name", name)
        assert status == UNAVAILABLE
        assert "Name " in text
    assert canaries_of(tmp_path / "state").read().items == ()
    assert run(tmp_path, "canary", "plant", "--name", "b.env")[0] == OK
    (workspace / "b.env").write_text("changed")
    assert " no" in run(tmp_path, "canary", "list")[1]
    assert run(tmp_path, "canary", "remove", "--all")[0] == OK
    assert {each.name for each in workspace.iterdir()} == {"mine.txt", "b.env"}
    assert not (tmp_path / "out.txt").exists()
    for words in (("remove",), ("remove", "x", "--all"), ("remove", "x")):
        assert run(tmp_path, "canary", *words)[0] == USAGE


def test_a_damaged_canary_is_told(tmp_path: Path) -> None:
    """It is not looked for, and the list says so; the control is its removal."""
    (tmp_path / "workspace").mkdir()
    canaries_of(tmp_path / "state").add("y_" + "0" * 26, b"{}")
    status, text = run(tmp_path, "canary", "list")
    assert status == UNAVAILABLE
    assert "Not looked for" in text
    assert run(tmp_path, "canary", "remove", "y_" + "0" * 26)[0] == OK
    assert run(tmp_path, "canary", "list") == (OK, "0 in all.\n")


@pytest.mark.parametrize("name", ["a\udcff.env", "a\nb.env", "a\u202eb.env"])
def test_a_canary_that_no_tool_could_name_is_not_planted(name: str, tmp_path: Path) -> None:
    """Nothing is written, anywhere; the control is a name that people can read."""
    (tmp_path / "work").mkdir()
    given = ["canary", "plant", "--workspace", str(tmp_path / "work"), "--state-dir", str(tmp_path / "state")]
    done = CliRunner().invoke(main, [*given, "--name", name])
    assert done.exit_code == UNAVAILABLE
    assert "Name a path of printable characters" in done.output
    assert not [*(tmp_path / "work").iterdir()]
    assert CliRunner().invoke(main, [*given, "--name", "naïve.env"]).exit_code == OK


def test_a_canary_whose_file_cannot_be_removed_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told which and why; the control is its removal afterwards."""
    tmp_path.chmod(0o700)
    canary = plant(tmp_path, tmp_path, "deploy.env")

    def fail(_path: Path) -> None:
        raise OSError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        with pytest.raises(DiagnosedError, match="Operation not permitted") as caught:
            remove(tmp_path, canary)
    assert str(canary.file) in caught.value.what
    assert canaries_of(tmp_path).read().items == (canary,)
    remove(tmp_path, canary)
    assert canaries_of(tmp_path).read().items == ()
    assert not canary.file.exists()
