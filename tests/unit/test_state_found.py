"""Which state directory a command is about, by whose rights root opens it, and what a stop says of live servers."""

import json
import os
import shlex
import shutil
import subprocess  # noqa: TID251 - the command of a user of its own
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner
from tests.fixtures.audit_logs import log_lines

from glovebox_audit.file import LogFile
from glovebox_sandboxes.drivers import registry
from glovebox_server.cli import state as state_directories
from glovebox_server.cli.main import main
from glovebox_server.exits import FAILED, NO_SERVER, OK, UNAVAILABLE, USAGE
from glovebox_server.failures import own_command
from glovebox_server.guards.stops.stops import stops_of
from glovebox_server.secret_files import prepare_state

STRANGER = 4321
#: The installed program with another settings file of the machine's; a number makes it that user's.
PROGRAM = """
import os, sys
from pathlib import Path
from glovebox_server.cli import failures, main, state  # all before the user changes, who may not read these files
from glovebox_server.cli.rules import stop
from glovebox_server.cli.entry import run
state.MACHINE_FILE, user = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
os.setresuid(user, user, user)
sys.exit(run())
"""


class Machine:
    """A home, and a settings file that names the service's state directory."""

    def __init__(self, place: Path) -> None:
        self.file = place / "etc/glovebox.toml"
        self.served = place / "private/glovebox/state"
        self.own = place / "home/.local/state/glovebox"
        self.file.parent.mkdir()
        self.served.parent.mkdir(parents=True)
        self.served.parent.parent.chmod(0o700)
        self.file.write_text(f'state_dir = "{self.served}"\n')
        self.file.chmod(0o644)
        for directory in (self.served, self.own):
            prepare_state(directory)

    def command(self, *words: str) -> tuple[int, str]:
        """Run a command in this process."""
        found = CliRunner().invoke(main, words)
        return found.exit_code, found.output

    def program(self, *words: str, user: int = 0) -> tuple[int, str]:
        """Run the installed program as this user."""
        command = [sys.executable, "-c", PROGRAM, str(self.file), str(user), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout + done.stderr

    def let_in(self) -> None:
        """Let every user into the home and the settings' directory; only root may enter the service's."""
        for above in (*self.own.parents, self.file.parent):
            above.chmod(above.stat().st_mode | 0o055)

    def stopped(self) -> list[Path]:
        """Return the directories that have a stop."""
        return [place for place in (self.served, self.own) if stops_of(place).read().items]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A machine whose service is known, for a user who names nothing."""
    # Not in pytest's own directory, which each start of pytest on this machine closes to others.
    with TemporaryDirectory(prefix="glovebox-machine-") as place:
        found = Machine(Path(place))
        for name in ("GLOVEBOX_STATE_DIR", "XDG_STATE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", f"{place}/home")
        monkeypatch.setattr(state_directories, "MACHINE_FILE", found.file)
        monkeypatch.setattr(state_directories, "_ROOT", os.geteuid())
        yield found


def live(place: Path, number: int) -> closing[LogFile]:
    """A server process that has the log of a directory open."""
    return closing(LogFile(place / "audit", f"g{number}-1"))


def test_stop_all_covers_every_directory_and_names_its_servers(machine: Machine) -> None:
    """The service's too, whose state lies elsewhere; it used to say the same of the user's own alone."""
    with live(machine.served, 4711):
        status, text = machine.command("stop", "--all")
    assert status == OK
    assert f"everything is stopped in {machine.served} (1 live server: process 4711): s_" in text
    assert f"everything is stopped in {machine.own} (no live server): s_" in text
    assert machine.stopped() == [machine.served, machine.own]
    status, text = machine.command("stop", "--all", "--json", "--state-dir", str(machine.own))
    found = json.loads(text)
    assert (status, found["directories"]) == (NO_SERVER, [{"directory": str(machine.own), "servers": []}])
    assert found["stop"]["because"] == "The operator gave no reason."


def test_with_no_live_server_a_stop_is_stored_and_its_status_says_so(machine: Machine) -> None:
    """The file of a server that was killed is no live one."""
    shutil.copytree(machine.served, machine.served.parent / "copy")
    with live(machine.served, 4711):
        shutil.copytree(machine.served / "audit", machine.own / "audit")
    status, text = machine.command("stop", "--all", "--because", "now")
    assert (status, machine.stopped()) == (NO_SERVER, [machine.served, machine.own])
    assert "No server is live there" in text


def test_a_directory_is_found_by_option_then_variable_then_machine_then_user(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each is taken where the one before is missing."""

    def used(*words: str) -> str:
        status, text = machine.command("stops", "list", *words)
        assert status == OK
        return text.rpartition(" in ")[2].partition(" (")[0]

    monkeypatch.setenv("GLOVEBOX_STATE_DIR", str(tmp_path / "named"))
    assert used("--state-dir", str(tmp_path / "option")) == str(tmp_path / "option")
    assert used() == str(tmp_path / "named")
    monkeypatch.delenv("GLOVEBOX_STATE_DIR")
    assert used() == str(machine.served)
    monkeypatch.setattr(registry, "NAMES", ())
    shutil.rmtree(machine.served / "audit", ignore_errors=True)
    (machine.served / "audit").touch()
    assert json.loads(machine.command("doctor", "--json")[1])["ready"]["log"] is False
    machine.file.unlink()
    assert used() == str(machine.own)
    assert json.loads(machine.command("doctor", "--json")[1])["ready"]["log"] is True


def test_no_command_guesses_between_two_with_live_servers(machine: Machine) -> None:
    """It names both; the controls are the same with one live, and with one named."""
    listing = ("stops", "list")
    with ExitStack() as servers:
        servers.enter_context(live(machine.served, 4711))
        assert machine.command(*listing)[0] == OK
        servers.enter_context(live(machine.own, 4712))
        for words in (listing, ("stop", "--tool", "run_python"), ("resume", "--all"), ("token", "list")):
            status, text = machine.command(*words)
            assert status == USAGE, text
            assert f"{machine.served} (1 live server: process 4711)" in text
            assert f"{machine.own} (1 live server: process 4712)" in text
        assert machine.stopped() == []
        assert machine.command(*listing, "--state-dir", str(machine.own))[0] == OK


def _link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "a group may write": (lambda path: path.chmod(0o664), "others than root can write"),
    "all may write": (lambda path: path.chmod(0o646), "others than root can write"),
    "a group may write above": (lambda path: path.parent.chmod(0o775), "others than root can write"),
    "another's": (lambda path: os.chown(path, STRANGER, -1), "others than root can write"),
    "another's above": (lambda path: os.chown(path.parent, STRANGER, -1), "others than root can write"),
    "a link": (_link, "Too many levels of symbolic links"),
    "no TOML": (lambda path: path.write_text("state_dir = /srv"), "it is not TOML"),
    "a relative path": (lambda path: path.write_text('state_dir = "state"'), "one line and no more"),
    "another key": (lambda path: path.write_text('data_dir = "/srv"'), "one line and no more"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_settings_file_that_others_can_write_is_not_taken(name: str, machine: Machine) -> None:
    """Nor passed over, as commands would then be about another directory. A client's server never reads it."""
    if os.geteuid() != 0 and "another's" in name:
        pytest.skip("changing an owner needs root")
    spoil, problem = SPOILT[name]
    spoil(machine.file)
    for words in (("stop", "--all"), ("stops", "list")):
        status, text = machine.command(*words)
        assert status == UNAVAILABLE
        assert problem in text
    assert machine.stopped() == []
    assert machine.command("client-config")[0] == OK


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_user_without_access_reads_the_line_to_type(machine: Machine) -> None:
    """What can be stopped is, and the status is that of the rest."""
    os.chown(machine.own, STRANGER, STRANGER)
    machine.let_in()
    status, text = machine.program("stop", "--all", "--because", "It runs in circles", user=STRANGER)
    assert status == UNAVAILABLE
    assert f"everything is stopped in {machine.own}" in text
    line = f"sudo {shlex.join(own_command())} stop --all --because 'It runs in circles' --state-dir"
    assert f"Run `{line} {machine.served}`" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode != 0,
    reason="mounts for the length of a command",
)
def test_root_opens_a_directory_as_its_owner_also_below_one_that_root_alone_may_enter(machine: Machine) -> None:
    """As systemd's DynamicUser has it, by a link. Nothing there becomes root's, and the record says who it was."""
    machine.let_in()
    link = machine.file.parent / "lib"
    link.symlink_to(machine.served.parent)
    machine.file.write_text(f'state_dir = "{link}/state"\n')
    for path in (machine.served.parent, machine.served):
        os.chown(path, STRANGER, STRANGER)
    status, text = machine.program("stop", "--all", "--because", "now")
    assert status == NO_SERVER, text
    assert machine.program("token", "create", "ci")[0] == OK
    status, text = machine.program("stops", "list")
    assert (status, "1 stop in effect" in text) == (OK, True)
    failed = [
        machine.program(*words)[0] for words in (("resume",), ("audit", "show", "c_0"), ("policy", "explain", "x"))
    ]
    assert failed == [USAGE, FAILED, USAGE]  # where it cannot read its own installation any more
    assert {path.lstat().st_uid for path in machine.served.rglob("*")} == {STRANGER}
    made = json.loads(next(line for line in log_lines(machine.served / "audit") if b'"kind":"stop.made"' in line))
    assert made["data"]["by"] == "local:0"


def test_an_unknown_token_is_an_error_and_what_may_come_a_warning(machine: Machine) -> None:
    """The nearest name is said; what has made a call is stopped without a word. Names that no call had are stopped."""
    place = ("--state-dir", str(machine.own))
    assert machine.command("token", "create", "ci-main", *place)[0] == OK
    status, text = machine.command("stop", "--principal", "token:ci-mian", *place)
    assert (status, machine.stopped()) == (USAGE, [])
    assert 'The nearest is "token:ci-main".' in text
    assert machine.command("stop", "--principal", "token:ci-main", *place)[0] == NO_SERVER
    coming = (("--principal", "oauth:https://id.example#alice"), ("--workflow", "release"), ("--run", f"r_{'0' * 26}"))
    for option, name in coming:
        status, text = machine.command("stop", option, name, *place)
        assert status == NO_SERVER, text
        assert f"{name} is on record" in text
    assert len(stops_of(machine.own).read().items) == 4
    assert machine.command("resume", "--all", *place)[0] == OK
    machine.command("call", "fetch_url", "--args", '{"url": "https://x.example"}', "--workflow", "release", *place)
    assert "is on record" not in machine.command("stop", "--workflow", "release", *place)[1]
