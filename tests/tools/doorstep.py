"""What a first reader types, on a machine nobody has worked on: the README's commands, and odd surroundings.

Usage: ``python3 -m tests.tools.doorstep root|user DIRECTORY``, with a directory made by ``tests/tools/bare_root make``.
As ``root`` the commands just run. As ``user`` the first one must name the packages that are missing; root installs
those, and then they run. Typed is what README.md marks as run, see tests/repo/pages.py; a command's comment may tell
its exit code ("exit 3"), otherwise that is 0. What it is shown to print in a console it must print. A traceback is a
failure, but for a sandboxed program's own ("exit 1").
Standard library only: it runs before anything is installed.
"""

import re
import shlex
import subprocess  # noqa: TID251 - runs what a reader types; nothing here comes from a sandbox
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.repo.pages import blocks, says, shown

ROOT = Path(__file__).resolve().parents[2]
BARE_ROOT = ROOT / "tests" / "tools" / "bare_root"
USER = "visitor"
TRACEBACK = "Traceback (most recent call last)"
OF_A_PROGRAM = (TRACEBACK, "Traceback (of the program)")
SECONDS = 900
"""For one command: the longest installs packages."""
TOLD = re.compile(r" # exit (\d+)\b")
ELSEWHERE = re.compile(r"git clone\b|make test\b")
"""The clone is there already, and the tests are a lane of their own."""
REMEDY = re.compile(r"^\s*Run:\s+sudo (apt-get install .*)$", re.MULTILINE)
PROGRAM = """.venv/bin/glovebox call run_python --args '{"code": "print(6 * 7)"}'"""
PROGRAM_FAILED, UNREADY = 1, 4
"""The command line's exit codes for a sandboxed program that failed and a machine that is not ready, as in its docs."""
#: What may surround a command, and the exit codes of `doctor`, `setup` and a call in it.
ODD = {
    "umask 077": (0, 0, 0),
    "mkdir -p ~/'a home/.local' && cp -aln ~/.local/share ~/'a home/.local' && export HOME=~/'a home'": (0, 0, 0),
    "unset XDG_DATA_HOME XDG_STATE_HOME XDG_RUNTIME_DIR XDG_CACHE_HOME XDG_CONFIG_HOME": (0, 0, 0),
    "unset HOME": (0, 0, 0),
    "export HOME=/proc": (UNREADY, UNREADY, UNREADY),
}


@dataclass(frozen=True)
class Command:
    """A command as it is typed, the exit code it must have, and what it must print."""

    text: str
    code: int = 0
    shows: str = "…"


def commands(readme: str) -> Iterator[Command]:
    """The commands of its blocks of ``sh`` that are run, each with all of its lines, but for those that run elsewhere.

    Raises:
        ValueError: There is no such block, or the last command of one has no end.
    """
    run = [block for block in blocks("README.md", readme) if block.run]
    if "sh" not in {block.tag for block in run}:
        raise ValueError("README.md has no block of sh that is run")
    consoles = dict(pair for block in run if block.tag == "console" for pair in shown(block))
    for block in run:
        if block.tag == "sh":
            yield from _commands(block.text, consoles)


def _commands(text: str, consoles: Mapping[str, str]) -> Iterator[Command]:
    typed = ""
    for line in text.splitlines():
        typed += line
        if not _whole(typed):
            typed += "\n"
            continue
        if shlex.split(typed, comments=True) and not ELSEWHERE.match(typed):
            told = TOLD.search(typed)
            yield Command(typed, int(told[1]) if told else 0, consoles.get(typed.partition(" #")[0].strip(), "…"))
        typed = ""
    if typed:
        raise ValueError(f"a block of the README ends within a command: {typed}")


def say(words: str) -> None:
    """Show what happens when it happens."""
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def _whole(typed: str) -> bool:
    try:
        shlex.split(typed, comments=True)
    except ValueError:
        return False
    return not typed.endswith("\\")


def problem(command: Command, code: int, output: str) -> str:
    """What was not as it must be; empty if all was."""
    if TRACEBACK in output and command.code != PROGRAM_FAILED:
        return "it showed a traceback"
    if code != command.code:
        return f"it exited with {code}, not {command.code}"
    if not says(output, command.shows):
        return "it did not print what the README shows"
    return "" if code == 0 or output.strip() else "it failed without a word"


class Doorstep:
    """The bare machine, and what went wrong on it."""

    def __init__(self, directory: str) -> None:
        """Take what ``bare_root make`` made."""
        self._directory = directory
        self.problems: list[str] = []

    def type(self, user: str, command: Command) -> str:
        """Run one command as this user, show and return what it says, and note what is wrong with it."""
        say(f"\n{'#' if user == 'root' else '$'} {command.text}")
        code, output = self._run(user, command)
        wrong = problem(command, code, output)
        if wrong:
            self.problems.append(f"{user}: {command.text.splitlines()[0]}: {wrong}")
            say(f"✗ {wrong}")
        return output

    def _run(self, user: str, command: Command) -> tuple[int, str]:
        whole = [str(BARE_ROOT), "enter", self._directory, user, "--", "bash", "-c", command.text]
        said = []
        with subprocess.Popen(
            ["timeout", "--kill-after=10", str(SECONDS), *whole],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said.append(line)
                # A sandboxed program's own must not look like one of ours to whoever reads all of this.
                shown = line.replace(*OF_A_PROGRAM) if command.code == PROGRAM_FAILED else line
                say(f"  {shown.rstrip()}")
        return process.returncode, "".join(said)


def as_root(doorstep: Doorstep, typed: Sequence[Command]) -> None:
    """Everything is installed on the way."""
    for command in typed:
        doorstep.type("root", command)


def as_user(doorstep: Doorstep, typed: Sequence[Command]) -> None:
    """First the sentence that says what is missing, then all of it, then the odd surroundings."""
    # 2 is make's own, whatever its recipe exited with.
    refused = doorstep.type(USER, Command(typed[0].text, 2))
    remedy = REMEDY.search(refused)
    if remedy is None:
        doorstep.problems.append(f"{USER}: {typed[0].text}: it does not name the packages that are missing")
        return
    doorstep.type("root", Command(f"apt-get update -qq && {remedy[1]} -y -qq >/dev/null"))
    for command in typed:
        doorstep.type(USER, command)
    for odd, codes in ODD.items():
        for rest, code in zip((".venv/bin/glovebox doctor", ".venv/bin/glovebox setup", PROGRAM), codes, strict=True):
            doorstep.type(USER, Command(f"{odd}; {rest}", code))


def main() -> int:
    """Type the commands; say at the end what was wrong."""
    kind, directory = sys.argv[1:]
    typed = [*commands((ROOT / "README.md").read_text()), Command("make setup"), Command("make setup")]
    doorstep = Doorstep(directory)
    {"root": as_root, "user": as_user}[kind](doorstep, typed)
    say("")
    for each in doorstep.problems:
        say(f"✗ {each}")
    say(f"{'✗' if doorstep.problems else '✓'} {len(typed)} commands of the README as {kind}")
    return 1 if doorstep.problems else 0


if __name__ == "__main__":
    sys.exit(main())
