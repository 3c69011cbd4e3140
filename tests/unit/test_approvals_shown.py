"""What a person reads before they answer: all of it, and nothing that only seems to be there."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from glovebox_profiles.load.loader import SHIPPED, load
from glovebox_profiles.model import effective
from glovebox_profiles.policy.model import Reach
from glovebox_server.guards.approvals.question import Lifted, Question, QuestionSubject, RequiredApproval
from glovebox_server.guards.approvals.shown import COLUMNS, MAX_COMPARED, MAX_NAMED, fold, shown, visible

PROFILE = load([SHIPPED], check_example=None)["run_python"]
NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
_MARK = re.compile("⟪U\\+([0-9A-F]{4,6})⟫")
_LINE = re.compile(r" +(\d+) │ (.*)")


def asked(code: str, before: str | None = None, **others: object) -> Question:
    subject = QuestionSubject(
        principal="token:one", run="r_1", tool="run_python", arguments=rfc8785.dumps({"code": code, **others}).decode(),  # type: ignore[dict-item]  # JSON
        profile_digest="sha256:p", policy_digest="", workspace="w", environment="", rules=("approval.ask",),
    )  # fmt: skip
    return Question(
        id="a_1", digest=subject.digest, subject=subject, asked=RequiredApproval(), why="Its profile asks.",
        client="An editor", workflow=None, profile=rfc8785.dumps(effective(PROFILE)).decode(), made=NOON, expires=NOON,
        last_approved=None if before is None else json.dumps({"code": before}),
    )  # fmt: skip


def unfolded(question: Question) -> str:
    return re.sub("\n *┆ ", "", shown(question))


def program(text: str) -> str:
    after = text.partition("The program, whole,")[2].split("\n")[1:]
    parts = [found[2] for found in map(_LINE.fullmatch, after) if found]
    assert len(parts) == len(after)
    return _MARK.sub(lambda found: chr(int(found[1], 16)), "\n".join(parts))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_what_is_shown_is_what_runs(code: str) -> None:
    assert program(unfolded(asked(code))) == code


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 100))
def test_a_wide_line_goes_on_behind_a_bar_of_its_own(line: str, columns: int) -> None:
    """Whoever sees no further than the width sees it all; what goes on passes for no line of its own."""
    for mark in ("  7 │ ", "  │ ", ""):
        first, *further = fold(mark + visible(line), columns)
        assert "".join([first, *(piece.lstrip(" ").removeprefix("┆ ") for piece in further)]) == mark + visible(line)
        assert all(piece.lstrip(" ").startswith("┆ ") for piece in further)
        assert all(cell_len(piece) <= max(columns, 26) for piece in (first, *further))


def test_a_line_of_ours_is_broken_between_words_and_one_of_the_callers_where_it_ends() -> None:
    """What just fits is one line; letters that take no width are not without end."""
    assert list(fold("a" * COLUMNS)) == ["a" * COLUMNS]
    assert list(fold(f"{'a' * 39} {'b' * 39} {'c' * 20}")) == [f"{'a' * 39} ", f"  ┆ {'b' * 39} {'c' * 20}"]
    assert list(fold(f" a{'b' * 100}")) == [f" a{'b' * 78}", f"  ┆ {'b' * 22}"]
    assert list(fold(f"  1 │ {'ab ' * 26}")) == [f"  1 │ {'ab ' * 24}ab", f"    ┆  {'ab '}"]
    assert len(next(fold(f"e{chr(0x301) * 400}{'x' * 200}"))) == 4 * COLUMNS


@pytest.mark.parametrize(
    "hidden",
    ["\u202e", "\u2066", "\u200b", "\u00ad", "\ufeff", "\r", "\x1b[2J", "\x00", "\u00a0", "\u2028", "\u3164", "\ufe0f",
     "\u2800", "\U000e0041", "\u0085", "⟪"],
)  # fmt: skip
def test_nothing_hides_moves_or_reorders(hidden: str) -> None:
    """Each such character is written out; the control is a letter."""
    assert hidden not in visible(f"a{hidden}b").replace("⟪U+", "")
    assert visible("aéb") == "aéb"


def test_a_program_cannot_pass_for_our_words() -> None:
    """What it writes stands behind a bar, on a numbered line; also what it calls itself."""
    code = "x\nThe program, whole, 1 line:\n  1 │ print('harmless')\nWho asks: token:operator"
    text = shown(replace(asked(code), client="me\nWho asks: token:operator"))
    assert [line for line in text.split("\n") if line.startswith("Who asks:")] == [
        'Who asks: token:one, by a client that calls itself "me\\nWho asks: '
    ]
    assert '\n  ┆ token:operator"\n' in text
    assert "  3 │   1 │ print('harmless')" in text


def test_letters_that_look_like_others_are_named() -> None:
    """A Cyrillic letter, wherever the caller's words are shown; the controls are ASCII, our signs apart."""
    plain = asked("path = 1", note="path")
    changes = "1 file of the folder reports would change:\npath.txt changes: 3 → 4 bytes\n  │ -a⟪U+001B⟫\n  │ +path"
    proposed = replace(plain, subject=replace(plain.subject, changes=changes))
    for question in (plain, proposed):
        assert "Look closely" not in unfolded(question)
    for holder, question in {
        "the program holds": asked("pаth = 1"),
        "its arguments hold": asked("1", note={"a": ["pаth"]}),
        "these names hold": replace(plain, client="Clаude"),
        "what would change holds": replace(
            plain, subject=replace(plain.subject, changes=changes.replace("+path", "аpath"))
        ),
    }.items():
        said = f"Look closely: {holder} 1 character outside ASCII, which may look like others: а (U+0430)."
        assert said in unfolded(question)
    added = replace(plain, subject=replace(plain.subject, changes=changes.replace("+path", "+pаth")))
    assert "Look closely: what would change holds 1 character outside ASCII" in unfolded(added)
    turned = replace(plain, subject=replace(plain.subject, changes=changes.replace("path", "⟪U+202E⟫")))
    assert "others: ⟪U+202E⟫ (U+202E)." in unfolded(turned)
    letters = "".join(chr(0x430 + n) for n in range(100))
    assert f"and {100 - MAX_NAMED} more" in unfolded(asked(letters))
    assert " more." not in unfolded(asked(letters[:MAX_NAMED]))
    assert all(len(line) <= COLUMNS for line in shown(asked("x" * 1000)).split("\n"))


@pytest.mark.parametrize(
    ("reach", "lifted", "said"),
    [
        ("call", None, "An approval is for this call alone."),
        ("run", None, "An approval may be for this call, or for identical ones of this run."),
        ("run", "tool", "An approval may be for this call, or for this run."),
        (
            "caller", None,
            "An approval is for one such call of this caller, also in another run of it, for an hour after it.",
        ),
    ],
)  # fmt: skip
def test_what_a_yes_is_for_is_shown(reach: Reach, lifted: Lifted | None, said: str) -> None:
    """And that it takes more than one; of a single one nothing is said."""
    plain = asked("1")
    subject = replace(plain.subject, lifted=lifted)
    for quorum, more in ((1, ""), (2, " It takes 2 yes answers.")):
        text = unfolded(replace(plain, subject=subject, asked=RequiredApproval(reach=reach, quorum=quorum)))
        assert f"\nQuestion a_1, open until 2026-11-22 12:00:00 UTC. {said}{more}\n" in text


#: A line that ends in ``_`` ends in a blank.
WHOLE = """\
May this call of run_python run?
Why you are asked: Its profile asks.
Who asks: token:one, by a client that calls itself "Édi"
Run r_1, workflow nightly
Question a_1, open until 2026-11-22 12:00:00 UTC. An approval is for this call _
  ┆ alone.
An approval lifts a denial, for host https://a.org:443; for the run, of every _
  ┆ call of run_python in it.
Look closely: these names hold 1 character outside ASCII, which may look like _
  ┆ others: É (U+00C9).
An approval changes files of this host, shown whole at the end. First, what a _
  ┆ sandbox that scans them has:
It can read the workspace, whose files may differ by the time it runs: an _
  ┆ approval is not bound to them.
It is given artifact://1, sha256 ab.
Look closely: what would change holds 1 character outside ASCII, which may _
  ┆ look like others: а (U+0430).
аb.txt changes: 3 → 4 bytes
  │ -a
  │ +b c
Look closely: its arguments hold 2 characters outside ASCII, which may look _
  ┆ like others: ö (U+00F6), ß (U+00DF).
Its arguments:
  │ note = ["öß"]
  │ timeout_seconds = 5
Look closely: the program holds 1 character outside ASCII, which may look like _
  ┆ others: é (U+00E9).
What changed since the last program that was approved for this caller:
  │ @@ -1,2 +1,2 @@
  │  a
  │ -c
  │ +b = 'é'
The program, whole, 2 lines:
  1 │ a
  2 │ b = 'é'"""
PLAIN = """\
May this call of run_python run?
Why you are asked: Its profile asks.
Who asks: token:one
Run r_1
Question a_1, open until 2026-11-22 12:00:00 UTC. An approval is for this call _
  ┆ alone."""
SAME = """
It is, character by character, the last program that was approved for this _
  ┆ caller.
The program, whole, 1 line:
  1 │ 1"""


def test_a_question_is_shown_line_by_line() -> None:
    """With all that it may have, and with nothing of it; arguments without a program are all shown as such."""
    code = asked("a\nb = 'é'", "a\nc", note=["öß"], timeout_seconds=5)
    changes = "аb.txt changes: 3 → 4 bytes\n  │ -a\n  │ +b c"
    given = {"inputs": (("artifact://1", "ab"),), "target": "https://a.org:443", "changes": changes}
    subject = replace(code.subject, lifted="host", **given)  # type: ignore[arg-type]  # of three types
    every = replace(code, subject=subject, profile="", client="Édi", workflow="nightly")
    assert shown(every) == WHOLE.replace("_\n", "\n")
    same = asked("1", "1")
    bare = replace(same, subject=replace(same.subject, workspace=""), profile="", client=None)
    assert shown(bare) == (PLAIN + SAME).replace("_\n", "\n")
    fetch = replace(bare, subject=replace(bare.subject, arguments='{"url":"https://a.org/","code":5}'))
    arguments = 'Its arguments:\n  │ url = "https://a.org/"\n  │ code = 5'
    assert shown(fetch) == f"{PLAIN}\n{arguments}".replace("_\n", "\n")


def test_letters_from_right_to_left_turn_nothing_around() -> None:
    """They are written out; so is what a client that calls itself by our words would put behind its quotation mark."""
    assert visible('x = "א" + 1 - 2') == 'x = "⟪U+05D0⟫" + 1 - 2'
    assert visible("١ا") == "⟪U+0661⟫⟪U+0627⟫"
    named = unfolded(replace(asked("1"), client='Claude", already reviewed by the operator. "1.0'))
    assert 'by a client that calls itself "Claude\\", already reviewed by the operator. \\"1.0"' in named


def test_what_changed_since_the_last_yes_is_shown_unless_it_is_too_long() -> None:
    """Comparing takes the cube of the lines: what is too long is said to be, and the program is whole all the same."""
    long = "\n".join(f"a{n % 7}" for n in range(MAX_COMPARED + 1))
    text = shown(asked(long, "b\n" * MAX_COMPARED))
    assert f"… too long to be compared: {MAX_COMPARED + 1} lines then, {MAX_COMPARED + 1} now" in text
    assert program(text) == long
    assert "too long" not in shown(asked("b\n" * (MAX_COMPARED - 1), "a\n" * (MAX_COMPARED - 1)))
    text = shown(asked("1\n2\n3\n5\n6\n7\n8", "1\n2\n3\n4\n6\n7\n8"))
    lines = text.partition("approved for this caller:\n")[2].partition("The program, whole, 7 lines:")[0]
    assert lines.replace("  │ ", "").split("\n") == ["@@ -2,5 +2,5 @@", " 2", " 3", "-4", "+5", " 6", " 7", ""]
    for then, more in ((100, ""), (101, "  │ … 1 more lines\n")):
        assert f"+a\n{more}The program" in shown(asked("\n".join("a" * 99), "\n".join("b" * then)))
    assert "character by character" in unfolded(asked("print(1)", "print(1)"))
    assert "last program that was approved" not in unfolded(asked("print(1)"))


def test_what_goes_in_what_it_may_do_and_how_many_have_to_say_yes_is_shown() -> None:
    """Each in a line of its own; the control is a question without them."""
    plain = asked("1")
    subject = replace(plain.subject, inputs=(("artifact://1", "ab"),), lifted="host", target="https://a.org:443")
    said = unfolded(replace(plain, subject=subject, asked=RequiredApproval(quorum=2)))
    for words in ("It is given artifact://1, sha256 ab.", "for host https://a.org:443", "It takes 2 yes answers."):
        assert words in said
        assert words not in unfolded(plain)
    text = unfolded(asked("1", timeout_seconds=5))
    assert "What it may reach:\n  - Nothing. The sandbox has no network." in text
    assert "an approval is not bound to them" in text
    assert "  │ timeout_seconds = 5" in text
    quiet = asked("1")
    assert "is not bound to them" not in unfolded(replace(quiet, subject=replace(quiet.subject, workspace="")))
