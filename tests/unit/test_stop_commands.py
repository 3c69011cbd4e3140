"""``glovebox stop``, ``resume`` and ``stops``: recorded before they act, and in effect whatever the disk does."""

import json
import os
import shutil
import signal
import subprocess  # noqa: TID251 - a whole command is killed
import sys
from pathlib import Path
from threading import Event

import pytest
from click.testing import CliRunner
from tests.fixtures.audit_logs import log_lines
from tests.unit.test_stops import a_stop, full

from glovebox_audit.verify import verify
from glovebox_server.cli.main import main
from glovebox_server.exits import NO_SERVER, OK, UNAVAILABLE, USAGE
from glovebox_server.guards.stops import stops
from glovebox_server.guards.stops.stops import stops_of
from glovebox_server.requests import load_key
from glovebox_server.secret_files import SecretFileError
from glovebox_server.upkeep import stopping


def run(place: Path, *words: str) -> tuple[int, str]:
    """One command on the state directory."""
    found = CliRunner().invoke(main, [*words, "--state-dir", str(place)])
    return found.exit_code, found.output


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state directory that nobody has used."""
    return tmp_path / "state"


def test_stopping_listing_and_resuming_are_on_record(state: Path) -> None:
    """Two events that say what, why and who; the log is whole."""
    status, text = run(state, "stop", "--tool", "run_python", "--because", "it went\x1b[2J wild", "--json")
    found = json.loads(text)
    assert (status, found["recorded"], found["everything"]) == (NO_SERVER, True, False)
    identity = found["stop"]["id"]
    assert found["stop"]["because"] == "it went\\x1b[2J wild"
    status, text = run(state, "stops", "list")
    assert status == OK
    assert identity in text
    assert "tool run_python" in text
    assert run(state, "resume", identity) == (OK, f"1 stop lifted in {state} (no live server).\n")
    assert json.loads(run(state, "stops", "list", "--json")[1]) == {"stops": [], "damaged": []}
    records = [json.loads(line) for line in log_lines(state / "audit")]
    assert [each["kind"] for each in records] == ["stop.made", "stop.lifted"]
    assert records[0]["data"]["stop"] == records[1]["data"]["stop"] == identity
    assert verify(state / "audit").ok


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("stop", "--because", "x"), "Say what to stop"),
        (("stop", "--all", "--tool", "run_python", "--because", "x"), "Say what to stop"),
        (("stop", "--principal", "token:ci"), "There are: none"),
        (("stop", "--all", "--because", " "), "1 to 500 characters"),
        (("stop", "--tool", "run_pyton", "--because", "x"), "not one of 'fetch_url'"),
        (("stop", "--call", "last", "--because", "x"), "a call's id"),
        (("stop", "--run", "r_1", "--because", "x"), "a run's id"),
        (("stop", "--principal", "ci", "--because", "x"), "token:ci"),
        (("stop", "--principal", "token:*", "--because", "x"), "token:ci"),
        (("stop", "--principal", "token:c\u0456", "--because", "x"), "token:ci"),
        (("stop", "--principal", "token:ci\udcff", "--because", "x"), "token:ci"),
        (("stop", "--principal", "local:me", "--because", "x"), "token:ci"),
        (("stop", "--principal", "oauth:https://id.example", "--because", "x"), "token:ci"),
        (("stop", "--workflow", "No!", "--because", "x"), "policy.toml"),
        (("stop", "--workflow", "1.release", "--because", "x"), "policy.toml"),
        (("resume",), "Name one stop"),
        (("resume", "x", "--all"), "Name one stop"),
        (("resume", "s_1"), "there is no stop s_1"),
    ],
)
def test_a_slip_stops_nothing_and_says_what_to_write(words: tuple[str, ...], told: str, state: Path) -> None:
    """A stop that names nobody would be believed."""
    status, text = run(state, *words)
    assert status == USAGE
    assert told in text
    assert stops_of(state).read().items == ()


def test_a_stop_that_cannot_be_recorded_still_stops_and_says_so(state: Path) -> None:
    """The log's place is taken by a file; lifting it needs the record, and waits for that."""
    state.mkdir(mode=0o700)
    (state / "audit").write_text("")
    status, text = run(state, "stop", "--all", "--because", "now")
    assert status == NO_SERVER
    assert "not in the audit log" in text
    (stop,) = stops_of(state).read().items
    assert run(state, "resume", stop.id)[0] == UNAVAILABLE
    assert stops_of(state).read().items == (stop,)
    (state / "audit").unlink()
    assert run(state, "resume", "--all")[0] == OK


def test_a_log_that_does_not_answer_holds_no_stop_up(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that hangs is not waited for longer than the bound."""
    hanging = Event()
    monkeypatch.setattr(stopping, "recording", lambda _settings: hanging.wait())
    monkeypatch.setattr(stops, "RECORD_SECONDS", 0.05)
    status, text = run(state, "stop", "--all", "--because", "now")
    hanging.set()
    assert status == NO_SERVER
    assert "did not answer in time" in text
    assert len(stops_of(state).read().items) == 1


def test_where_the_disk_is_full_everything_is_stopped_instead(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file without content needs no room; the control is a disk with room, where one tool is."""
    full(monkeypatch, also_empty=False)
    status, text = run(state, "stop", "--tool", "run_python", "--because", "now")
    assert status == NO_SERVER
    assert "so everything is" in text
    status, text = run(state, "stops", "list")
    assert status == UNAVAILABLE
    assert "Everything is stopped" in text
    full(monkeypatch, also_empty=True)  # where nothing at all can be made, the command fails
    assert run(state, "stop", "--all", "--because", "now")[0] == UNAVAILABLE
    monkeypatch.undo()
    assert run(state, "resume", "--all") == (OK, f"1 stop lifted in {state} (no live server).\n")
    assert run(state, "stops", "list") == (OK, f"0 stops in effect in {state} (no live server).\n")


FULL_DISK = """
import errno, os, sys
from click.testing import CliRunner
from glovebox_server.cli.main import main
from glovebox_server.cli.rules import stop as stop_command
place = sys.argv[1]
filler = os.open(place + "/filler", os.O_WRONLY | os.O_CREAT, 0o600)
try:
    while True:
        os.write(filler, bytes(512))
except OSError as problem:
    assert problem.errno == errno.ENOSPC
def run(*words):
    found = CliRunner().invoke(main, [*words, "--state-dir", place + "/state"])
    print(found.exit_code, found.output)
    return found
os.mkdir(place + "/state", 0o700)
assert "so everything is" in run("stop", "--tool", "run_python", "--because", "now").output
assert "Everything is stopped" in run("stops", "list").output
os.ftruncate(filler, 0)
assert run("resume", "--all").exit_code == 0
assert run("stop", "--tool", "run_python", "--because", "now").exit_code == 5
assert "tool run_python" in run("stops", "list").output
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_of_its_own_has_room_for_a_stop(tmp_path: Path) -> None:
    """A real one; the control is the same command once there is room."""
    place = tmp_path / "small"
    place.mkdir(mode=0o700)
    script = f'mount -t tmpfs -o size=512k,mode=700 none {place} && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", FULL_DISK, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_half_of_a_stop_is_none(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is nearly full takes a part of a write and says nothing; the control is one that takes all of it."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[: len(data) // 2]))
    status, text = run(state, "stop", "--tool", "run_python", "--because", "now")
    assert status == NO_SERVER
    assert "so everything is" in text
    monkeypatch.undo()
    assert run(state, "resume", "--all")[0] == OK
    assert "so everything is" not in run(state, "stop", "--tool", "run_python", "--because", "now")[1]


def test_stops_whose_place_is_gone_are_not_said_to_be_none(state: Path) -> None:
    """Servers that run stop everything then; the controls are a place that nobody used, and one made anew."""
    stops_of(state).add("s_" + "2" * 26, b"")
    shutil.rmtree(state / "governance" / "stops")
    assert run(state, "stops", "list") == (OK, f"0 stops in effect in {state} (no live server).\n")
    load_key(state)
    for words in ((), ("--json",)):
        status, text = run(state, "stops", "list", *words)
        assert status == UNAVAILABLE
        assert "it is gone" in text
        assert "glovebox resume --all" in text
    assert run(state, "resume", "--all")[0] == OK
    assert run(state, "stops", "list") == (OK, f"0 stops in effect in {state} (no live server).\n")


def test_there_are_never_more_stops_than_are_looked_at(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused with what to do; the control is the last that fits."""
    state.mkdir(mode=0o700)
    files = stops_of(state)
    files._most = 2
    for _ in range(2):
        stop = a_stop()
        files.add(stop.id, stop.encoded())
    with pytest.raises(SecretFileError, match="2 files already"):
        files.add("s_" + "2" * 26, b"")


KILLED = """
import os, signal, sys
from glovebox_server.secret_files import Files
Files.add = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
from glovebox_server.cli.entry import run
sys.argv = ["glovebox", "stop", "--all", "--because", "now", "--state-dir", sys.argv[1]]
sys.exit(run())
"""


def test_killed_between_the_record_and_the_act_it_is_made_again(state: Path) -> None:
    """The record is there and no stop: never the other way round, and nothing is in the next one's way."""
    done = subprocess.run([sys.executable, "-c", KILLED, str(state)], check=False, capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert b'"kind":"stop.made"' in log_lines(state / "audit")[-1]
    assert stops_of(state).read().items == ()
    assert run(state, "stop", "--all", "--because", "again")[0] == NO_SERVER
    assert len(stops_of(state).read().items) == 1
    assert verify(state / "audit").ok
