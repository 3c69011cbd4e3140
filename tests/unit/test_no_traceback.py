"""Readers that leave, signals, others' directories, mistakes of ours: a sentence and an exit code, no traceback."""

import json
import os
import signal
import subprocess  # noqa: TID251 - whole processes, with what they inherit
import sys
from pathlib import Path

import psutil
import pytest
from tests.fixtures.whole_commands import GLOVEBOX, started, traceless

from glovebox_server.exits import INTERRUPTED, NOBODY_READS, OK, TERMINATED, UNAVAILABLE, UNFORESEEN, USAGE  # fmt: skip

pytestmark = pytest.mark.long

NOBODY = 65534


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["profiles", "show", "run_python"], ["client-config", "--workspace", "/usr"], ["--version"]],
)
def test_a_reader_that_leaves_is_no_failure(arguments: list[str], tmp_path: Path) -> None:
    """Exit 141 and not a word, as other programs that die of SIGPIPE; the control is a reader that stays."""
    gone = started(arguments, tmp_path, script='exec 3> >(true); wait $!; "$@" >&3')
    assert gone.communicate(timeout=60) == ("", "")
    assert gone.returncode == NOBODY_READS
    stays = started(arguments, tmp_path, script='set -o pipefail; "$@" | cat')
    assert stays.communicate(timeout=60)[0]
    assert stays.returncode == OK


def test_what_a_library_logs_cannot_forge_a_line(tmp_path: Path) -> None:
    """Of a command that sets up no log: escapes of a terminal are written as text, and other lines are indented."""
    program = """if True:
        import logging
        from glovebox_server.cli import entry
        from glovebox_server.cli.rules import profiles
        def warn(*_, **__):
            logging.getLogger("urllib3").warning("it said %s", "\\x1b[2J\\nforged")
            logging.getLogger("urllib3").warning("too few %s %s \\x9b", "x")
            return True
        profiles.emit = warn
        entry.run()
    """
    command = [sys.executable, "-I", "-c", program, "profiles", "list", "--state-dir", str(tmp_path / "state")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == "it said \\x1b[2J\n    | forged\ntoo few %s %s \\x9b\n"


def test_what_nobody_foresaw_is_kept_and_told_in_one_sentence(tmp_path: Path) -> None:
    """Exit 70; the story lies in the state directory, for its owner alone, once however often it happens."""
    program = (
        "import sys; from glovebox_server.cli import entry; from glovebox_server.cli.rules import profiles; "
        "profiles.load_profiles = lambda *_, **__: 1 / 0; entry.run()"
    )
    command = [sys.executable, "-I", "-c", program, "profiles", "list", "--state-dir", str(tmp_path / "state")]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == UNFORESEEN
        assert done.stderr.count("\n") == 1
        (story,) = (tmp_path / "state").iterdir()
        assert (
            f"Internal error while running `glovebox profiles list`. Details: {story}. Please report it." in done.stderr
        )
        assert "ZeroDivisionError" in story.read_text()
        assert story.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize("step", ["Copying", "Installing"])
def test_a_signal_ends_a_setup_and_leaves_nothing(step: str, number: signal.Signals, code: int, tmp_path: Path) -> None:
    """Exit 130, 143 or 129 and one sentence; what was half built is gone, and so is every program it had started."""
    setup = started(["setup"], tmp_path, script='exec "$@"')
    assert setup.stderr is not None
    while step not in setup.stderr.readline():
        assert setup.poll() is None
    setup.send_signal(number)
    said = setup.communicate(timeout=60)[1].splitlines()
    assert setup.returncode == code, said
    assert said[-1] == f"glovebox was ended by {number.name}; the same command begins anew."
    assert all(line.startswith("Installing") for line in said[:-1])  # a copy is not ended in its middle
    assert list((tmp_path / ".local/share/glovebox").iterdir()) == []
    assert not [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(each.info["cmdline"])]


def stopped(place: Path) -> list[str]:
    """Why servers stopped, as the log has it."""
    lines = (place / ".local/state/glovebox/audit/audit.jsonl").read_text().splitlines()
    return [each["data"]["reason"] for each in map(json.loads, lines) if each["kind"] == "server.stopped"]


def serving(place: Path, script: str) -> "subprocess.Popen[str]":
    """A server over HTTP that listens, started with this script."""
    server = started(["serve", "--transport", "http", "--port", "0", "--processes", "1"], place, script=script)
    assert server.stderr is not None
    while "listening" not in (line := server.stderr.readline()):
        assert line, "it ended before it listened"
    return server


@pytest.mark.parametrize("name", ["SIGHUP", "SIGQUIT", "SIGUSR1", "SIGXCPU"])
def test_a_server_that_a_signal_ends_has_a_record_of_it(name: str, tmp_path: Path) -> None:
    """A closed terminal sends SIGHUP, and often twice: the reason is in the log, the exit code 0."""
    server = serving(tmp_path, 'exec "$@"')
    server.send_signal(getattr(signal, name))
    server.send_signal(getattr(signal, name))
    assert server.wait(timeout=60) in (OK, 128 + getattr(signal, name))  # the second comes while it ends
    assert stopped(tmp_path) == [name]
    server.communicate()


def test_what_nobody_can_catch_leaves_no_record_and_what_nohup_ignores_is_ignored(tmp_path: Path) -> None:
    """The controls: SIGKILL ends it without a word; under ``nohup`` SIGHUP does not end it."""
    killed = serving(tmp_path, 'exec "$@"')
    killed.kill()
    assert killed.wait(timeout=60) == -signal.SIGKILL
    assert stopped(tmp_path) == []
    stays = serving(tmp_path, 'trap "" HUP; exec "$@"')
    stays.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        stays.wait(timeout=0.5)
    stays.terminate()
    assert stays.wait(timeout=60) == OK
    assert stopped(tmp_path) == ["SIGTERM"]
    for each in (killed, stays):
        each.communicate()


def test_a_server_without_standard_output_is_told(tmp_path: Path) -> None:
    """Exit 4: nobody would get an answer. The control, with an output, ends with its client."""
    for script, code in (('"$@" </dev/null >&-', UNAVAILABLE), ('"$@" </dev/null', OK)):
        done = started(["serve"], tmp_path, script=script)
        said = done.communicate(timeout=60)[1]
        assert done.returncode == code
        assert ("standard output is closed" in said) == (code == UNAVAILABLE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_users_directories_are_told(tmp_path: Path) -> None:
    """What ``nobody`` keeps to himself, exit 4 or 2 with the place; nothing of it is read."""
    # Root without his rights over others' files, and not ``nobody`` himself, who may not read a clone in root's home.
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    os.chown(closed, NOBODY, NOBODY)
    for command in ("receipt key", "audit tail", "profiles list", "client-config --transport http", "call x", "serve"):
        options = [f"--{each}-dir={closed / each}" for each in ("state", "data", "profiles")]
        if "profiles" not in command:
            options = options[:2]
        done = subprocess.run(
            ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *GLOVEBOX, *command.split(), *options],
            cwd="/", env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        traceless(done.stdout + done.stderr, done.returncode)
        assert done.returncode in (USAGE, UNAVAILABLE)
        assert "Permission denied" in done.stdout + done.stderr


#: Interrupts itself as soon as somebody imports what ``__main__`` imports, which nobody else could time so well.
_INTERRUPTED = """
import importlib.abc, os, runpy, signal, sys
class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "glovebox_server.cli.entry":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
{}
"""


@pytest.mark.parametrize(
    ("start", "code"),
    [
        ("runpy.run_module('glovebox_server', run_name='__main__')", -signal.SIGINT),
        pytest.param("import glovebox_server.cli.entry", -signal.SIGINT, id="control"),
    ],
)
def test_an_interrupt_before_there_is_anything_to_take_down_is_silent(start: str, code: int) -> None:
    """Python's own answer, as the control has it, is a traceback out of the middle of an import."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", _INTERRUPTED.format(start)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert ("Traceback" in done.stderr) is ("run_module" not in start), done.stderr
