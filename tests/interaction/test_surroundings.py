"""Whatever a user does to a command's surroundings: a sentence and the documented exit code, never a traceback.

Each condition is tried on every command there is, found by walking the command line, so a new command is held too. Each
runs in a process of its own with what it inherits; all are forked from one that has imported everything, because
starting five hundred would take minutes.
"""

import json
import os
import subprocess  # noqa: TID251 - whole processes, with what they inherit
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import click
import pytest
from tests.fixtures.consoles import walk_commands
from tests.fixtures.whole_commands import traceless

from glovebox_server.cli.main import main
from glovebox_server.exits import OK

FORKED = """
import atexit, gc, io, json, os, sys
from pathlib import Path
from glovebox_server.cli import entry, failures, main
import anyio._backends._asyncio, click._textwrap, docker, encodings.utf_16_be, glovebox_sandboxes.runtime.trial
from glovebox_server.cli import artifact, call, serve as serving
from glovebox_server.cli.evidence import audit, receipt
from glovebox_server.cli.host import backup, console, doctor, environment, notify
from glovebox_server.cli.rules import approvals, policy, profiles, stop, token
from glovebox_server.transport import serve

def become(job):
    os.chdir(job["place"])
    for number, name in ((0, os.devnull), (1, "out"), (2, "err")):
        opened = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(job["environment"])
    exec(job["prepare"])
    sys.argv = ["glovebox", *job["arguments"]]
    try:
        entry.run()
    except SystemExit as ended:
        if job["to its end"]:
            raise
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(ended.code or 0)

gc.freeze()  # what is collected at a child's end would be copied first: a quarter of a second each
for line in sys.stdin:
    statuses = []
    for job in json.loads(line):
        child = os.fork()
        if not child:
            become(job)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(json.dumps(statuses), flush=True)
"""
#: What a command needs to get as far as it can without a sandbox.
ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "call": ("no_such_tool",),
    "setup": ("--docker", "--base", "-"),
    "artifact save": ("artifact://" + "0" * 32,),
    "profiles show": ("run_python",),
    "profiles explain": ("run_python",),
    "profiles check": ("none.toml",),
    "profiles diff": ("a.toml", "b.toml"),
    "policy check": ("none.toml",),
    "policy explain": ("token:alice",),
    "policy diff": ("a.toml", "b.toml"),
    "audit show": ("c_0",),
    "receipt show": ("c_0",),
    "receipt verify": ("none.json", "--key", "none.pem"),
}


COMMANDS = tuple(" ".join(words) for words, found in walk_commands(main) if not isinstance(found, click.Group))


def words(command: str, place: Path) -> list[str]:
    """One command with what it needs; nothing is ever built."""
    given = [*command.split(), *ARGUMENTS.get(command, ())]
    if command == "client-config":  # of a folder with the state in it, there is none
        given += ["--workspace", str(place / "workspace")]
    # A file where the runtime should be: `setup` ends there.
    return given if command != "setup" else ["setup", "--data-dir", str(place / "file" / "data")]


def test_every_command_is_walked() -> None:
    """The control of the walk: it finds commands of commands, and no argument is for one that is gone."""
    assert {"serve", "call", "audit tail", "receipt verify"} <= set(COMMANDS)
    assert {*ARGUMENTS, *ENDLESS} <= set(COMMANDS)


LOOP = "os.symlink('loop', 'loop')"
CONDITIONS: Mapping[str, tuple[str, Mapping[str, str | None]]] = {
    "as it is": ("", {}),
    "no HOME": ("", {"HOME": None}),
    "HOME is a file": ("", {"HOME": "/etc/passwd"}),
    "HOME cannot be made": ("", {"HOME": "/proc/none"}),
    "HOME is not whole": ("", {"HOME": "home"}),
    "HOME with spaces": ("", {"HOME": "{place}/my home"}),
    "umask 077": ("os.umask(0o077)", {}),
    "an old locale": ("sys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'ascii')", {"LC_ALL": "C"}),
    "width 1": ("", {"COLUMNS": "1", "FORCE_COLOR": "1"}),
    "no input": ("os.close(0); sys.stdin = None", {}),
    "no output": ("os.close(1); sys.stdout = None", {}),
    "no error output": ("os.close(2); sys.stderr = None", {}),
    "nothing open": ("os.closerange(0, 3); sys.stdin = sys.stdout = sys.stderr = None", {}),
    "a full disk for output": ("os.dup2(os.open('/dev/full', os.O_RDWR), 1)", {}),
    "no directory": ("os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')", {}),
    "a directory that is not UTF-8": ("os.mkdir(b'x\\xff'); os.chdir(b'x\\xff')", {}),
    "a workspace that is missing": ("", {"GLOVEBOX_WORKSPACE": "/proc/none"}),
    "a workspace that is a file": ("", {"GLOVEBOX_WORKSPACE": "/etc/passwd"}),
    "a workspace in a circle": (LOOP, {"GLOVEBOX_WORKSPACE": "loop"}),
    "a workspace with the state in it": ("", {"GLOVEBOX_WORKSPACE": "{place}"}),
    "a workspace without a name": ("", {"GLOVEBOX_WORKSPACE": ""}),
    "profiles without a name": ("", {"GLOVEBOX_PROFILES_DIR": ""}),
    "profiles that are missing": ("", {"GLOVEBOX_PROFILES_DIR": "/proc/none"}),
    "profiles in a circle": (LOOP, {"GLOVEBOX_PROFILES_DIR": "loop"}),
    "state in a circle": (LOOP, {"GLOVEBOX_STATE_DIR": "loop"}),
    "state that cannot be made": ("", {"GLOVEBOX_STATE_DIR": "/proc/none"}),
    "state that is a file": ("", {"GLOVEBOX_STATE_DIR": "/etc/passwd"}),
    "data in a circle": (LOOP, {"GLOVEBOX_DATA_DIR": "loop"}),
    "data that is a file": ("", {"GLOVEBOX_DATA_DIR": "/etc/passwd"}),
    "a setting that is none": ("", {"GLOVEBOX_ARTIFACT_HOURS": "soon"}),
}
#: What is amiss with the three files that every process has, and nothing.
FILES = {"as it is", "no input", "no output", "no error output", "nothing open", "a full disk for output"}
#: There the interpreter's own end is a part of what prints and of what is refused. It is the same for the others,
#: where it is left out: half of the time, spent on copied pages.
TO_THEIR_END = {"profiles list", "call", "audit tail", "doctor", "serve"}
#: What needs nothing but a place to write.
FINE = {"profiles list", "client-config", "receipt key"}
#: What ends by a signal alone.
ENDLESS = {"approvals watch", "console serve"}
#: Only as it is an Engine is asked, if there is one: what it says is not of the surroundings.
NO_ENGINE: Mapping[str, str] = {"DOCKER_HOST": "unix:///nonexistent"}
#: These ask every driver, which takes a second; the others look at the same surroundings.
ASK_DRIVERS = {"capabilities", "doctor", "serve"}
ASKED_IN = {"as it is", "HOME is a file", "no output", "data in a circle", "width 1"}


def jobs(condition: str, place: Path, refused: Collection[str] = ()) -> Iterator[dict[str, object]]:
    """Every command in one condition but those that are refused whatever it is, each in a place of its own."""
    prepare, environment = CONDITIONS[condition]
    for number, command in enumerate(COMMANDS):
        if command in {*ENDLESS, *refused} or (command in ASK_DRIVERS and condition not in ASKED_IN):
            continue
        own = place / f"{condition.replace(' ', '-')}-{number}"
        (own / "home").mkdir(parents=True)
        (own / "workspace").mkdir()
        (own / "file").touch()
        wanted = {"PATH": os.environ["PATH"], "HOME": str(own / "home"), **environment}
        wanted |= NO_ENGINE if condition != "as it is" else {}
        found = {key: value.replace("{place}", str(own)) for key, value in wanted.items() if value is not None}
        if "HOME" not in found:  # nobody's own home is touched
            found |= {f"GLOVEBOX_{name}_DIR": str(own / name) for name in ("STATE", "DATA")}
        yield {
            "command": command, "arguments": words(command, own), "place": str(own), "environment": found,
            "prepare": prepare,
            "fine": condition in ("as it is", "umask 077", "HOME with spaces") and command in FINE,
            "to its end": condition in FILES and command in TO_THEIR_END,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Forking:
    """What forks a process for each command: it reads jobs and prints exit codes."""

    jobs: IO[str]
    statuses: IO[str]

    def run(self, wanted: Sequence[dict[str, object]]) -> Iterator[tuple[dict[str, object], int, str]]:
        """Each with its exit code and all that it printed."""
        print(json.dumps(wanted), file=self.jobs, flush=True)
        for job, status in zip(wanted, json.loads(self.statuses.readline()), strict=True):
            place = Path(str(job["place"]))
            yield job, status, "".join((place / name).read_text(errors="replace") for name in ("out", "err"))


@pytest.fixture(scope="module")
def forking() -> Iterator[Forking]:
    """Start it once."""
    command = [sys.executable, "-I", "-c", FORKED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        yield Forking(started.stdin, started.stdout)
        started.stdin.close()


@pytest.fixture(scope="module")
def refused(forking: Forking, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Commands that need more words than they are given here: what refuses them has looked at nothing else yet."""
    wanted = [*jobs("umask 077", tmp_path_factory.mktemp("refused"))]
    return {str(job["command"]) for job, _, printed in forking.run(wanted) if printed.startswith("Usage: ")}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_no_surroundings_bring_a_traceback(forking: Forking, refused: set[str], condition: str, tmp_path: Path) -> None:
    """Exit 0 to 4 for every command; the control is that as it is, what needs nothing ends with 0."""
    shown = condition in FILES | {"an old locale", "width 1"}
    for job, status, text in forking.run([*jobs(condition, tmp_path, () if shown else refused)]):
        traceless(f"{job['place']} {job['arguments']}: {text}", status)
        assert status == OK or not job["fine"], text
