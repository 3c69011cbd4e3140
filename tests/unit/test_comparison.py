"""The comparison with other systems: what is asked is fair, how they are run, and that the page says what was found."""

import json
import re
from pathlib import Path

import pytest
from tests.comparison import page, running
from tests.comparison.compare import DOCS, KEYS, NOTHING
from tests.comparison.getting import PEERS
from tests.comparison.portable import (
    Ended,
    Portable,
    Seen,
    Word,
    described,
    judge,
    read_json,
    selection,
    text,
    unpromised,
)
from tests.comparison.running import Ran
from tests.comparison.systems import Docker, LlmSandbox, McpRunPython, SandboxRuntime

from glovebox_sandboxes.conformance.case import LIMITS, load

CASES = {case.id: case for case in load()}
SELECTION = selection()
KEPT = read_json(DOCS / "comparison.json")
NAMES = {"hostname": "the-host"}
ATTEMPT = "workspace-write"
PROGRAM = "memory-bomb"


def word(name: str, how: Portable, seen: Seen, again: Seen | None = None) -> Word:
    return judge(CASES[name], how, seen, again, NAMES)[0]


def answered(name: str, answer: str) -> Seen:
    return Seen(ended="ended", stdout=f'\n{{"{name}": "{answer}"}}\n')


def test_every_shipped_case_is_portable_or_says_why_not() -> None:
    """None is left out without a reason; a fork bomb is let loose nowhere, its control is."""
    assert SELECTION.portable.keys() | SELECTION.elsewhere.keys() == CASES.keys()
    assert not SELECTION.portable.keys() & SELECTION.elsewhere.keys()
    assert all(SELECTION.elsewhere.values())
    assert "while True" in (CASES["fork-bomb"].program or "")
    assert "while True" not in text(CASES["fork-bomb"], SELECTION.portable["fork-bomb"], forks=True)


@pytest.mark.parametrize("name", SELECTION.portable)
def test_what_stops_an_attack_here_is_no_success_of_it_elsewhere(name: str) -> None:
    case, how = CASES[name], SELECTION.portable[name]
    assert bool(how.through) or case.attempt is None
    if case.attempt is not None and re.fullmatch(r"[A-Z]+|lo|found False|0 \w+|changed \\\[\\\]", case.answer):
        assert word(name, how, answered(name, case.answer.replace("\\", ""))) == "stopped"
    if case.attempt is not None and case.control.answer == "ok":
        assert word(name, how, answered(name, "ok")) == "through"


@pytest.mark.parametrize(
    ("how", "seen", "expected"),
    [
        (Portable(through="held", shown="begun"), Seen(ended="ended", stdout="begun\nheld 1 GiB\n"), "through"),
        (Portable(through="held", shown="begun"), Seen(ended="stopped", stdout="begun\n"), "stopped"),
        (Portable(through="held", shown="begun"), Seen(ended="ended", stderr="SyntaxError"), "unclear"),
        (Portable(through="held"), Seen(ended="ended", stderr="x\nModuleNotFoundError: no fcntl"), "absent"),
        (Portable(through="held"), Seen(ended="running"), "unclear"),
        (Portable(running=True), Seen(ended="running"), "through"),
        (Portable(running=True), Seen(ended="timed_out", seconds=1), "stopped"),
        (Portable(through="held"), Seen(ended="timed_out", seconds=1), "unclear"),
        (Portable(through="held"), Seen(ended="failed", seconds=1), "unclear"),
        (Portable(running=True), Seen(ended="ended", seconds=0.1), "unclear"),
        (Portable(running=True, early=True), Seen(ended="ended", seconds=0.1), "stopped"),
        (Portable(flood=True), Seen(ended="flood"), "through"),
        (Portable(flood=True), Seen(ended="running"), "through"),
        (Portable(through="held"), Seen(ended="flood"), "unclear"),
        (Portable(left=True), Seen(ended="ended", left=("process 7",)), "through"),
        (Portable(through="held"), Seen(ended="stopped", changed=True), "through"),
    ],
)
def test_programs_are_judged_by_what_they_got(how: Portable, seen: Seen, expected: Word) -> None:
    assert word(PROGRAM, how, seen) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("ok", "through"),
        ("EROFS", "stopped"),
        ("ENOENT", "stopped"),
        ("AttributeError", "absent"),
        ("ENOSYS", "absent"),
    ],
)
def test_attempts_are_judged_by_their_answer(answer: str, expected: Word) -> None:
    """Any refusal will do; a function that does not exist is none."""
    assert word(ATTEMPT, SELECTION.portable[ATTEMPT], answered(ATTEMPT, answer)) == expected


def test_what_proves_nothing_is_no_answer() -> None:
    """Nor is a failed sandbox, or a condition that would hold always; twins are told, and a host by its name."""
    assert word(ATTEMPT, SELECTION.portable[ATTEMPT], Seen(ended="ended", note="no image")) == "unclear"
    how = SELECTION.portable["randomness"]
    one, two = (Seen(ended="ended", stdout=f"{letter * 16} 0.5\n") for letter in "ab")
    assert word("randomness", how, one, one) == "through"
    assert word("randomness", how, one, two) == "stopped"
    how = SELECTION.portable["host-name"]
    assert word("host-name", how, answered("host-name", "the-host the-host the-host")) == "through"
    assert word("host-name", how, answered("host-name", "abc abc abc")) == "stopped"
    with pytest.raises(ValueError, match="thruogh"):
        Portable.model_validate({"thruogh": "ok"})
    with pytest.raises(ValueError, match="no way to see"):
        Portable()


def test_the_tables_are_what_was_found() -> None:
    """Of cases that are asked, without the machine's paths; where nothing stops an attack (the control) each works."""
    found = page.tables(KEPT)
    assert {path.name: path.read_text() for path in DOCS.glob("comparison*.csv")} == found
    for system, excuses in unpromised().items():
        assert system in PEERS
        assert excuses.keys() <= SELECTION.portable.keys()
    assert set(KEPT["systems"]) <= set(KEYS)
    for case in KEPT["cases"]:
        assert case == described(CASES[case["id"]], SELECTION.portable[case["id"]])
    known = {case["id"] for case in KEPT["cases"]}
    for key, system in KEPT["systems"].items():
        assert system["results"].keys() <= known, key
        assert {found["word"] for found in system["results"].values()} <= page.MARKS.keys()
    results = KEPT["systems"][NOTHING]["results"]
    assert {name: found["shown"] for name, found in results.items() if found["word"] != "through"} == {}
    kept = (DOCS / "comparison.json").read_text()
    assert str(Path(__file__).parents[2]) not in kept
    assert "glovebox-conformance-" not in kept


HOME = Path("/nowhere")
RUNTIME = SandboxRuntime(HOME, "0", notes="")
LLM = LlmSandbox(HOME, "image", "0")
PYODIDE = McpRunPython(HOME, "0", notes="")


def lines(*events: dict[str, object]) -> bytes:
    return "".join(json.dumps(event) + "\n" for event in events).encode()


async def test_a_command_is_waited_for_or_broken_off() -> None:
    """At its end or its whole answer; or once its time is up, or its output is a flood, of which the last is kept."""
    ran = await running.run(["sh", "-c", "read a; echo got $a; echo hidden >&2; exit 3"], seconds=20, stdin=b"it\n")
    assert (ran.ended, ran.code, ran.stdout, ran.stderr) == ("ended", 3, b"got it\n", b"hidden\n")
    ran = await running.run(["sh", "-c", "echo begun; sleep 600"], seconds=0.3)
    assert (ran.ended, ran.stdout) == ("running", b"begun\n")
    ran = await running.run(["yes"], seconds=20)
    assert ran.ended == "flood"
    assert len(ran.stdout) <= running.FLOOD_BYTES
    ran = await running.run(["sh", "-c", "echo answer; sleep 600"], seconds=20, complete=lambda text: b"answer" in text)
    assert (ran.ended, ran.stdout) == ("ended", b"answer\n")


@pytest.mark.parametrize(
    ("printed", "ended"),
    [
        (lines({"type": "stdout", "data": "a\n"}, {"type": "exit", "code": 0}), "ended"),
        (lines({"type": "stdout", "data": "a\n"}, {"type": "timeout"}), "timed_out"),
        (lines({"type": "stdout", "data": "a\n"}, {"type": "resource_limit", "reason": "CPU"}), "stopped"),
        (lines({"type": "stdout", "data": "a\n"}, {"type": "error", "message": "no"}), "failed"),
        (b"Traceback", "failed"),
    ],
)
def test_events_of_sandbox_runtime(printed: bytes, ended: Ended) -> None:
    """A limit that it reports is told from a program's end and from a sandbox that never ran."""
    seen = RUNTIME.read(Ran(ended="ended", stdout=printed))
    assert seen.ended == ended
    assert seen.stdout == ("a\n" if b"a\\n" in printed else "")


@pytest.mark.parametrize(
    ("problem", "ended"),
    [("", "ended"), ("SandboxTimeoutError: after 1.0 seconds", "timed_out"), ("APIError: no image", "failed")],
)
def test_results_of_llm_sandbox(problem: str, ended: Ended) -> None:
    """Only its own timeout is one; every other exception means that nothing was tried."""
    printed = lines({"stdout": "a\n", "stderr": "", "code": 0, "problem": problem})
    assert LLM.read(Ran(ended="ended", stdout=b"noise\n" + printed)).ended == ended


def test_results_of_mcp_run_python() -> None:
    content = json.dumps({"status": "run-error", "output": ["a"], "error": "NameError: x"})
    printed = lines({"id": 1, "result": {}}, {"id": 2, "result": {"content": [{"type": "text", "text": content}]}})
    seen = PYODIDE.read(Ran(ended="ended", stdout=printed))
    assert (seen.ended, seen.stdout, seen.stderr) == ("ended", "a\n", "NameError: x")
    assert PYODIDE.read(Ran(ended="ended", stderr=b"no deno")).ended == "failed"


def test_what_is_granted_is_the_same_everywhere() -> None:
    options = Docker("image", "0", hardened=True).options(LIMITS)
    assert {str(LIMITS.pids), f"{LIMITS.memory_bytes}b", "none", "ALL"} <= set(options)
    assert Docker("image", "0", hardened=False).options(LIMITS) == []
    settings = LLM.settings(LIMITS)
    assert (settings["mem_limit"], settings["pids_limit"]) == (LIMITS.memory_bytes, LIMITS.pids)
    job = json.dumps(RUNTIME.job("true", LIMITS, scratch="/scratch", workspace="/w"))
    assert f'"max_memory_mb": {LIMITS.memory_bytes // 2**20}' in job
    assert f'"timeout_seconds": {int(LIMITS.wall_seconds)}' in job
