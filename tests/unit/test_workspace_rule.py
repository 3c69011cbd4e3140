"""Which directory is served: the one rule, as a table; and what asks it, on directories of this host."""

import json
import os
import re
import subprocess  # noqa: TID251 - a whole command, where something is mounted
from pathlib import Path, PurePath

import pytest
from click.testing import CliRunner
from tests.fixtures.brokered import submitted
from tests.fixtures.whole_commands import GLOVEBOX

from glovebox_sandboxes.contract.errors import MisnamedError
from glovebox_server import app as apps
from glovebox_server import workspace
from glovebox_server.cli.main import main
from glovebox_server.exits import OK, REFUSED, USAGE
from glovebox_server.settings import Settings
from glovebox_server.workspace import Location, find, objection

DATA = Settings().data_dir  # before any test has another home
HOME = Location(path=Path("/home/ada"), origin=("8:1", PurePath("/home/ada")))
STATE = "/home/ada/.local/state/glovebox"
OWN = {
    "state": Location(path=Path(STATE), origin=("8:1", PurePath(STATE))),
    "data": Location(path=Path("/srv/glovebox/data"), origin=("8:2", PurePath("/glovebox/data"))),
}


def at(path: str, device: str = "", origin: str = "") -> Location:
    """A directory; of a file system whose root is mounted at ``/`` unless another is given."""
    return Location(path=Path(path), origin=(device, PurePath(origin)) if device else None)


@pytest.mark.parametrize(
    ("directory", "named", "unnamed"),
    [
        (at("/"), "contains the server's state", ""),
        (at("/home"), "contains the server's state", ""),
        (at("/home/ada"), "contains the server's state", ""),
        (at("/home/ada/.local/state/glovebox"), "is the server's state", ""),
        (at("/home/ada/.local/state/glovebox/artifacts"), "lies in the server's state", ""),
        (at("/srv"), "contains the server's data", ""),
        (at("/srv/glovebox/data/runtime"), "lies in the server's data", ""),
        # The same by a bind mount: of what holds it, of itself, of what lies in it, of a directory above both.
        (at("/mnt/local", "8:1", "/home/ada/.local"), "contains the server's state", ""),
        (at("/mnt/own", "8:1", STATE), "is the server's state", ""),
        (at("/mnt/keys", "8:1", f"{STATE}/keys"), "lies in the server's state", ""),
        (at("/mnt/disk", "8:2", "/"), "contains the server's data", ""),
        # Only for a directory that nobody named.
        (at("/home/ada/.ssh"), "", "lies in /home/ada/.ssh"),
        (at("/home/ada/.config/app/x"), "", "lies in /home/ada/.config"),
        (at("/mnt/ssh", "8:1", "/home/ada/.ssh"), "", "lies in /home/ada/.ssh"),
        # Neighbours.
        (at("/home/ada/project"), "", ""),
        (at("/home/ada/project/.hidden"), "", ""),
        (at("/home/ada2"), "", ""),
        (at("/home/grace"), "", ""),
        (at("/srv/glovebox/data2"), "", ""),
        (at("/mnt/project", "8:1", "/home/ada/project"), "", ""),
        (at("/mnt/other", "8:3", "/glovebox/data"), "", ""),
        (at("/mnt/other", "8:3", "/"), "", ""),
    ],
    ids=lambda value: str(value.path) if isinstance(value, Location) else "",
)
def test_the_rule(directory: Location, named: str, unnamed: str) -> None:
    """By path and by place on the disk; the same words for what nobody named, and more, unless the table says so."""
    for wanted, homes in ((named, ()), (unnamed or named, (HOME,))):
        found = objection(directory, OWN, homes)
        assert bool(found) == bool(wanted), found
        assert re.match(wanted, found)


def test_a_home_is_not_served_unnamed_even_where_nothing_of_the_servers_lies_in_it() -> None:
    """Other programs keep their tokens there; named, it is served, since somebody said so. A folder in it is fine."""
    elsewhere = {"state": at("/var/lib/glovebox")}
    for path, words in (
        ("/home/ada", "is the home directory"),
        ("/home", "contains the home directory"),
        ("/home/ada/x", ""),
    ):
        assert objection(at(path), elsewhere, (Location(path=HOME.path),)).startswith(words)
        assert objection(at(path), elsewhere) == ""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for a home, a project in it, and directories of a server elsewhere."""
    for name in ("home/project", "own/profiles"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def options(place: Path) -> list[str]:
    """Of a command with everything below ``own``."""
    return [f"--{name}-dir={place / 'own' / name}" for name in ("state", "profiles", "data")]


def settings(place: Path, **more: Path) -> Settings:
    """The same for a server, whose runtime is that of the tests."""
    own = Settings(state_dir=place / "own/state", profiles_dir=place / "own/profiles", data_dir=DATA)
    return own.model_copy(update=more)


@pytest.mark.parametrize("transport", ["stdio", "cli", "http"])
def test_a_directory_that_nobody_named(transport: str, places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current one, but for HTTP, where its callers are not; and never a home, the top, or what is the server's."""
    monkeypatch.chdir(places / "home/project")
    found = find(settings(places), transport)
    assert found.path == (None if transport == "http" else places / "home/project")
    for place in (places / "home", places, Path("/"), places / "own/profiles"):
        monkeypatch.chdir(place)
        found = find(settings(places), transport)
        assert found.path is None
        assert "Name one with --workspace or GLOVEBOX_WORKSPACE." in str(found)


def test_a_current_directory_that_is_gone_or_has_no_name_in_utf8_is_not_served(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said, and no command fails for it; the control is the test above."""
    for name in (b"gone", b"x\xff"):
        place = places / os.fsdecode(name)
        place.mkdir()
        monkeypatch.chdir(place)
        if name == b"gone":
            place.rmdir()
        assert find(settings(places), "stdio").path is None


def refused(place: Path, named: Path, **more: Path) -> str:
    """What is said of a workspace that was named and must not be served."""
    with pytest.raises(MisnamedError) as caught:
        find(settings(place, workspace=named, **more), "stdio")
    return str(caught.value)


def test_a_named_directory_is_looked_at_behind_its_links_and_before_anything_is_made(places: Path) -> None:
    """The state does not exist yet; links lead there from either side, and one leads nowhere as yet."""
    assert find(settings(places, workspace=places / "home"), "http").path == places / "home"  # the control
    assert "contains the server's state directory" in refused(places, places / "own")
    (places / "link").symlink_to(places / "own")
    assert "contains the server's state directory" in refused(places, places / "link")
    (places / "later").symlink_to(places / "home/project/state")
    assert "contains the server's state directory" in refused(places, places / "home", state_dir=places / "later")
    assert "contains the server's profiles directory" in refused(
        places, places / "home", profiles_dir=places / "home/x"
    )
    assert not (places / "own/state").exists()


def configured(place: Path, named: Path, script: str = "") -> tuple[int, str]:
    """How the quickest command that needs a workspace ends; with a script, after it in a mount namespace of its own."""
    before = ["unshare", "--mount", "sh", "-c", f'{script} && exec "$@"', "sh"] if script else []
    done = subprocess.run(
        [*before, *GLOVEBOX, "client-config", "--workspace", str(named), *options(place)],
        cwd=place, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_bind_mount_is_the_same_place(places: Path) -> None:
    """Bound elsewhere, what holds the state still does, and the other way round; so bound, a neighbour is served."""
    other = places / "other"
    other.mkdir()
    assert configured(places, other)[0] == OK
    assert configured(places, other, f"mount --bind {places / 'home'} {other}")[0] == OK
    code, told = configured(places, other, f"mount --bind {places / 'own'} {other}")
    assert code == USAGE
    assert f"{other} contains the server's state directory, {places / 'own/state'}." in told
    code, told = configured(places, other, f"mount --bind {other} {places / 'own/profiles'}")
    assert code == USAGE
    assert f"{other} is the server's profiles directory" in told


@pytest.mark.driver("bubblewrap")
async def test_the_attack_that_the_rule_is_against(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server started in a home: programs saw what lies there. Without the rule they do, which is the control."""
    (places / "home/.ssh").mkdir()
    (places / "home").chmod(0o755)
    monkeypatch.chdir(places / "home")
    seen = []
    for guarded in (True, False):
        if not guarded:
            monkeypatch.setattr(workspace, "objection", lambda *_: "")
        async with apps.opened(settings(places), "cli") as app:
            ran = await submitted(app, "run_python", {"code": "import os\nos.path.isdir('/workspace/.ssh')"})
            listed = await submitted(app, "list_workspace_files", {})
            seen.append((ran.structured["value"], (listed.structured.get("refused") or {}).get("rule")))
    assert seen == [("False", "workspace.missing"), ("True", None)]
    assert app.workspace.path == places / "home"


def test_a_call_without_a_workspace_says_so(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the caller the rule and who can name one; to whoever runs it also why, with the place."""
    monkeypatch.chdir(places / "home")
    done = CliRunner().invoke(main, ["call", "list_workspace_files", "--json", *options(places)])
    assert done.exit_code == REFUSED
    assert json.loads(done.stdout)["refused"] == {
        "rule": "workspace.missing",
        "reason": "This server serves no workspace.",
        "hint": "Its operator can name one with --workspace or GLOVEBOX_WORKSPACE.",
    }
    assert f"the current directory, {places / 'home'}, is the home directory" in done.stderr


def test_an_artifact_is_not_written_where_the_servers_own_files_are(places: Path) -> None:
    """A program made it: it would be a token, a key or a profile. Elsewhere it is only unknown (control)."""
    for output, code in (("own/profiles/run_python.toml", USAGE), ("own/state/tokens/x", USAGE), ("home/x", REFUSED)):
        asked = ["artifact", "artifact://" + "0" * 32, "--output", str(places / output), *options(places)]
        done = CliRunner().invoke(main, asked)
        assert done.exit_code == code, done.output
        assert not (places / output).exists()


@pytest.mark.parametrize("option", ["workspace", "profiles-dir", "data-dir", "state-dir"])
@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_directory_without_a_name_is_not_the_current_one(option: str, by: str, places: Path) -> None:
    """Exit 2, whoever gives an empty name: a script's variable that was never set. The control is one with a name."""
    variable = f"GLOVEBOX_{option.upper().replace('-', '_')}"
    for name, code in (("", USAGE), (str(places / "own/profiles"), OK)):
        given = [f"--{option}", name] if by == "option" else []
        done = CliRunner().invoke(
            main, ["profiles", "list", *given], env={variable: name} if by == "environment" else {}
        )
        assert done.exit_code == code, done.output
        assert code == OK or variable in done.stderr


def test_what_of_a_workspace_other_users_cannot_read_is_said_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Itself, or what lies in it; a link does not count. Sandboxes of the server's own user are no others."""
    directory = tmp_path / "my project"
    directory.mkdir(mode=0o755)
    (directory / "open").write_text("")
    (directory / "link").symlink_to("open")
    assert workspace.closed(directory) == ""
    (directory / "file").touch(mode=0o600)
    (directory / "sub").mkdir(mode=0o744)
    said = workspace.closed(directory)
    assert f"cannot read 2 of 4 entries of {directory}:" in said
    assert f"If they are to, run `chmod -R o+rX '{directory}/file' '{directory}/sub'`" in said
    directory.chmod(0o750)
    assert f"cannot read {directory}:" in workspace.closed(directory)
    assert f"Run `chmod -R o+rX '{directory}'`" in workspace.closed(directory)
    settings = Settings(workspace=directory, state_dir=tmp_path / "state", data_dir=tmp_path / "data")
    for changes, words in ((True, "chmod"), (False, "")):
        monkeypatch.setattr(workspace, "changes_user", lambda changes=changes: changes)
        assert words in str(find(settings, "stdio"))
        assert bool(find(settings, "stdio").closed) == changes
    assert workspace.closed(tmp_path / "gone") == ""
