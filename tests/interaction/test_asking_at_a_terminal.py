"""Whoever makes a call at a terminal is asked there; and what an operator is shown is the same text."""

import io
import os
import re
import select
import signal
import subprocess  # noqa: TID251 - commands at a terminal are processes of their own
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.interaction.test_asking import CODE, kinds, operate, options
from tests.interaction.test_real_server import GLOVEBOX

from glovebox_server.cli.terminal import Terminal, print_question
from glovebox_server.exits import OK, REFUSED

__all__ = ["options"]

pytestmark = [pytest.mark.driver("bubblewrap"), pytest.mark.usefixtures("runtime_dir")]

PROMPT = "May it run? [y/N] "
IDENTIFIER = re.compile(r"\ba_[0-9a-z]{26}\b")
SECONDS = 30


@dataclass
class Typed:
    """A command at a terminal of its own, and what was seen there so far."""

    process: subprocess.Popen[str]
    terminal: int
    seen: str = ""

    def type_(self, keys: str) -> None:
        """Press keys."""
        os.write(self.terminal, keys.encode())

    def until(self, words: str) -> str:
        """Read until these words are seen."""
        end = time.monotonic() + SECONDS
        while words not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self.terminal], [], [], 0.2)[0]:
                self.seen += os.read(self.terminal, 65536).decode()
        return self.seen.replace("\r\n", "\n")

    def ended(self) -> tuple[int, str]:
        """Exit code, and what went to standard output."""
        printed, _ = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, printed


@contextmanager
def typed(options: list[str], *more: str) -> Iterator[Typed]:
    """Make a call at a terminal; its standard output goes elsewhere."""
    terminal, theirs = os.openpty()
    command = [GLOVEBOX, "call", "run_python", "--code", CODE, *more, *options]
    with subprocess.Popen(
        command, stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        os.close(theirs)
        try:
            yield Typed(process, terminal)
        finally:
            process.kill()
            os.close(terminal)


def test_whoever_calls_is_asked_and_shown_what_an_operator_is_shown(options: list[str], tmp_path: Path) -> None:
    """A yes runs it. What was typed before the question answers nothing."""
    with typed(options) as person:
        person.type_("n\n")
        seen = person.until(PROMPT)
        (identifier,) = set(IDENTIFIER.findall(seen))
        folder, line, rest = operate(["approvals", "show", identifier], options).partition(
            "May this call of run_python run?\n"
        )
        assert folder.startswith("Folder on this host, which clients are not shown: ")
        whole = line + rest
        assert f"  1 │ {CODE}\n" in whole
        unfolded = [line for line in whole.splitlines() if len(line) < 60]
        assert [line for line in unfolded if line not in seen] == []
        person.type_("y\n")
        assert person.ended() == (OK, "42\n")
    assert kinds(tmp_path) == ["approval.requested", "approval.answered", "call.decided", "call.finished"]


@pytest.mark.parametrize("keys", ["\n", "n\n", "yess\n", "\x04"])
def test_anything_but_yes_is_no(keys: str, options: list[str], tmp_path: Path) -> None:
    """Also an end of input. The control is the test before."""
    with typed(options) as person:
        person.until(PROMPT)
        person.type_(keys)
        code, printed = person.ended()
    assert code == REFUSED
    assert "approval.denied" in printed or "approval.denied" in person.seen
    assert kinds(tmp_path) == ["approval.requested", "approval.answered", "call.decided"]


def test_an_answer_on_another_terminal_counts_too(options: list[str], tmp_path: Path) -> None:
    """The prompt waits no longer."""
    with typed(options) as person:
        (identifier,) = set(IDENTIFIER.findall(person.until(PROMPT)))
        operate(["approvals", "allow", identifier], options)
        assert person.ended() == (OK, "42\n")
    assert kinds(tmp_path).count("approval.answered") == 1


def test_who_interrupts_leaves_no_question(options: list[str], tmp_path: Path) -> None:
    """It is withdrawn: nobody is asked about a call that is gone."""
    with typed(options) as person:
        person.until(PROMPT)
        person.process.send_signal(signal.SIGINT)
        assert person.ended()[0] not in (OK, REFUSED)
    assert kinds(tmp_path) == ["approval.requested", "approval.withdrawn"]


def test_for_a_program_that_reads_the_answer_nobody_is_asked(options: list[str]) -> None:
    """With --json another program reads on; the question waits for `glovebox approvals`."""
    with typed(options, "--json") as person:
        (identifier,) = IDENTIFIER.findall(person.until("Waiting for somebody to approve it"))
        operate(["approvals", "deny", identifier], options)
        code, printed = person.ended()
        assert (code, '"approval.denied"' in printed) == (REFUSED, True)
        assert PROMPT not in person.seen


def test_what_is_too_long_for_a_terminal_goes_on_behind_the_bar() -> None:
    """A terminal that broke the line would begin the next one with the caller's words; into a pipe it stays whole."""
    line = "  1 │ " + " " * 54 + "Who asks: token:operator"
    shown = io.StringIO()
    print_question(Terminal(file=shown, force_terminal=True, width=60), f"Why:\n{line}")
    assert shown.getvalue() == f"Why:\n{line[:60]}\n    ┆ Who asks: token:operator\n"
    piped = io.StringIO()
    print_question(Terminal(file=piped, width=60), line)
    assert piped.getvalue() == line + "\n"
