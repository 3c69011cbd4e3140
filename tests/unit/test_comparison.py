"""The comparison with other systems: what is asked of them is fair, is all there is, and is what the page says."""

import re
from pathlib import Path

import pytest
from tests.comparison import page
from tests.comparison.compare import DOCS, KEYS, NOTHING
from tests.comparison.getting import PEERS
from tests.comparison.portable import Portable, Seen, Word, described, judge, read_json, selection, text, unpromised

from glovebox_sandboxes.conformance.case import load

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
    """No case is left out without a reason, and none is asked that does not exist."""
    assert SELECTION.portable.keys() | SELECTION.elsewhere.keys() == CASES.keys()
    assert not SELECTION.portable.keys() & SELECTION.elsewhere.keys()
    assert all(SELECTION.elsewhere.values())


@pytest.mark.parametrize("name", SELECTION.portable)
def test_what_stops_an_attack_here_is_no_success_of_it_elsewhere(name: str) -> None:
    case, how = CASES[name], SELECTION.portable[name]
    assert bool(how.through) or case.attempt is None
    if case.attempt is not None and re.fullmatch(r"[A-Z]+|lo|found False|0 \w+|changed \\\[\\\]", case.answer):
        assert word(name, how, answered(name, case.answer.replace("\\", ""))) == "stopped"
    if case.attempt is not None and case.control.answer == "ok":
        assert word(name, how, answered(name, "ok")) == "through"


def test_a_program_that_has_no_end_of_its_own_runs_its_control_elsewhere() -> None:
    """The fork bomb, of all, is not let loose where nothing may stop it."""
    assert "while True" in (CASES["fork-bomb"].program or "")
    assert "while True" not in text(CASES["fork-bomb"], SELECTION.portable["fork-bomb"], forks=True)


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


def test_two_runs_that_print_the_same_are_twins() -> None:
    how = SELECTION.portable["randomness"]
    one, two = (Seen(ended="ended", stdout=f"{letter * 16} 0.5\n") for letter in "ab")
    assert word("randomness", how, one, one) == "through"
    assert word("randomness", how, one, two) == "stopped"


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


def test_an_attempt_without_an_answer_proves_nothing() -> None:
    """A sandbox that failed has stopped nothing."""
    assert word(ATTEMPT, SELECTION.portable[ATTEMPT], Seen(ended="ended", note="no image")) == "unclear"


def test_the_host_s_name_is_told_by_that_name() -> None:
    how = SELECTION.portable["host-name"]
    assert word("host-name", how, answered("host-name", "the-host the-host the-host")) == "through"
    assert word("host-name", how, answered("host-name", "abc abc abc")) == "stopped"


def test_conditions_are_strict() -> None:
    """A condition that is misspelt, or none at all, is refused: it would hold always."""
    with pytest.raises(ValueError, match="thruogh"):
        Portable.model_validate({"thruogh": "ok"})
    with pytest.raises(ValueError, match="no way to see"):
        Portable()


def test_what_others_do_not_promise_is_about_them_and_about_cases() -> None:
    for system, excuses in unpromised().items():
        assert system in PEERS
        assert excuses.keys() <= SELECTION.portable.keys()


def test_the_tables_are_what_was_found() -> None:
    found = page.tables(KEPT)
    assert {path.name: path.read_text() for path in DOCS.glob("comparison*.csv")} == found


def test_every_result_is_of_a_case_that_is_asked() -> None:
    assert set(KEPT["systems"]) <= set(KEYS)
    for case in KEPT["cases"]:
        assert case == described(CASES[case["id"]], SELECTION.portable[case["id"]])
    known = {case["id"] for case in KEPT["cases"]}
    for key, system in KEPT["systems"].items():
        assert system["results"].keys() <= known, key
        assert {found["word"] for found in system["results"].values()} <= page.MARKS.keys()


def test_every_attack_works_where_nothing_stops_it() -> None:
    """In the column of the bare interpreter nothing is stopped: it is the control of all the others."""
    assert {
        name: found["shown"]
        for name, found in KEPT["systems"][NOTHING]["results"].items()
        if found["word"] != "through"
    } == {}


def test_nothing_of_the_machine_is_in_the_results() -> None:
    """What programs printed is kept, and paths of the machine it was printed on are not."""
    kept = (DOCS / "comparison.json").read_text()
    assert str(Path(__file__).parents[2]) not in kept
    assert "glovebox-conformance-" not in kept
