"""M10: the state directory, in which keys, tokens, log and artifacts lie, is its server's own, or nothing starts."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.fixtures.access_lists import let_in

from glovebox_server.cli.main import main
from glovebox_server.exits import OK, UNAVAILABLE
from glovebox_server.receipts.keys import Signer
from glovebox_server.secret_files import SecretFileError, prepare_state

STRANGER = 4321


def _shared(path: Path) -> None:
    os.chown(path, -1, STRANGER)
    path.chmod(0o775)


SPOILT: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "another's": ("state", lambda path: os.chown(path, STRANGER, -1), f"it belongs to user {STRANGER}"),
    "readable": ("state", lambda path: path.chmod(0o755), "others have access to it (mode 755)"),
    "a group may search it": ("state", lambda path: path.chmod(0o710), "others have access to it (mode 710)"),
    "writable": ("state", lambda path: path.chmod(0o702), "others have access to it (mode 702)"),
    "below another's": (".", lambda path: os.chown(path, STRANGER, -1), f"belongs to user {STRANGER}"),
    "a list's": ("state", lambda path: let_in(path, STRANGER, 7), "others have access to it (mode 774)"),
    "below a list's": (".", lambda path: let_in(path, STRANGER, 7), "is writable by whom its access list names"),
    "below an open one": (".", lambda path: path.chmod(0o777), "is writable by every user"),
    "below a group's": (".", _shared, f"is writable by group {STRANGER}"),
}


@pytest.mark.parametrize("name", SPOILT)
@pytest.mark.parametrize("linked", [False, True])
def test_a_state_directory_of_others_is_refused(name: str, tmp_path: Path, *, linked: bool) -> None:
    """Itself or behind a link; the sentence says what and the command. The same directory unspoilt is used."""
    part, spoil, problem = SPOILT[name]
    above = tmp_path / "above"
    state = above / "state"
    above.mkdir()
    if linked:
        (tmp_path / "link").symlink_to(state)
    used = tmp_path / "link" if linked else state
    prepare_state(state)
    prepare_state(used)
    if os.geteuid() != 0 and ("another" in name or part == "." or name == "below a group's"):
        pytest.skip("changing an owner needs root, and only root's server looks above")
    spoil(above / part)
    with pytest.raises(SecretFileError) as caught:
        Signer.load(used)
    assert problem in caught.value.reason
    assert any(fix in caught.value.fix for fix in ("`ch", "`setfacl -b ", "Run Glovebox as that user"))
    assert not (state / "keys").exists()


@pytest.mark.parametrize(
    "command",
    [
        ("receipt", "key"),
        ("client-config", "--transport", "http", "--token", "x"),
        ("call", "x"),
        ("serve",),
        ("clean", "--dry-run"),
    ],
)
def test_whatever_keeps_something_there_makes_and_checks_it(command: tuple[str, ...], tmp_path: Path) -> None:
    """Whichever command comes first makes it for its owner alone; each refuses one that is open, with exit 4."""
    state, workspace = tmp_path / "new/state", tmp_path / "workspace"
    workspace.mkdir()
    places = ["--state-dir", str(state), "--workspace", str(workspace)]
    CliRunner().invoke(main, ["receipt", "key", *places])
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    (state / "keys/receipts.pem").unlink()
    (state / "keys").rmdir()
    state.chmod(0o755)
    done = CliRunner().invoke(main, [*command, *places])
    assert done.exit_code == UNAVAILABLE, done.output
    assert f"state directory {state}: others have access to it (mode 755)" in done.stderr
    assert f"`chmod 700 {state}`" in done.stderr
    assert list(state.iterdir()) == []


def test_the_first_command_makes_it_for_its_owner_alone(tmp_path: Path) -> None:
    """With the tokens as with the key, whatever the umask: it used to be open to others where the tokens came first."""
    before = os.umask(0)
    try:
        for number, command in enumerate(
            (("receipt", "key"), ("client-config", "--transport", "http", "--token", "x"))
        ):
            state = tmp_path / str(number)
            assert CliRunner().invoke(main, [*command, "--state-dir", str(state)]).exit_code == OK
            assert stat.S_IMODE(state.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_a_log_is_read_wherever_it_lies(tmp_path: Path) -> None:
    """A copy of another user's can be verified: nothing is kept there. The control is that it is the same log."""
    state = tmp_path / "state"
    done = CliRunner().invoke(main, ["call", "x", "--state-dir", str(state)])
    state.chmod(0o755)
    assert CliRunner().invoke(main, ["audit", "verify", "--state-dir", str(state)]).exit_code == OK, done.output
