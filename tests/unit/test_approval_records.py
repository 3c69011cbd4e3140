"""What is kept and said of a question, its answers and its grant: each record, row, decision and text, whole."""

import hashlib
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from pydantic import TypeAdapter
from tests.fixtures.approving import ASKING, Desk, again, but, proposal

from glovebox_audit.receipts.parts import Input
from glovebox_profiles.model import digest, effective
from glovebox_profiles.policy.model import Approval, By, Lift
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.calls import Grant, Principal
from glovebox_server.core.call import Attempt
from glovebox_server.guards.approvals import store
from glovebox_server.guards.approvals.question import (
    ApprovalAnswer,
    Question,
    QuestionSubject,
    RequiredApproval,
    digest_of,
)
from glovebox_server.guards.approvals.rules import Escalation
from glovebox_server.guards.approvals.store import Standing

QUIET = ASKING.model_copy(update={"approval": "none"})
READING = QUIET.model_copy(update={"files": QUIET.files.model_copy(update={"workspace": "read"})})
SPENT = Escalation(what="budget", target="calls", lift=Lift(what="budget"))
CODE = '{"code":"print(1)"}'


def _row(desk: Desk, question: Question) -> dict[str, Any]:
    with closing(sqlite3.connect(store.path(desk.state))) as db:
        db.row_factory = sqlite3.Row
        return dict(db.execute("SELECT * FROM questions WHERE id = ?", (question.id,)).fetchone())


def _told(desk: Desk, question: Question) -> list[tuple[str, dict[str, Any]]]:
    """Kind and fields of its records; fields that every one of them has are compared here."""
    about = question.subject
    whose = {"principal": about.principal, "run": about.run, "tool": about.tool}
    every = {"approval": question.id, "digest": question.digest, **whose}
    found = [each for each in desk.records() if each.data["approval"] == question.id]
    assert all(every.items() <= each.data.items() for each in found)
    return [(each.kind, {name: value for name, value in each.data.items() if name not in every}) for each in found]


async def test_a_question_and_its_answers_are_kept_whole(desk: Desk, tmp_path: Path) -> None:
    """As the record, the row and what a command reads of it have it; a call that uses it is named."""
    rules = (Approval(name="two", by="operator", quorum=2, another_principal=True, reach="run", expires_minutes=5),)
    given = (Input(name="a", uri="artifact://1", sha256="1" * 64, bytes=1),)
    caller = Principal(id="token:one", transport="http", client="An editor", workflow="nightly")
    made = proposal(profile=READING, rules=rules, policy="sha256:policy", workspace=tmp_path, inputs=given)
    made = but(made, request=replace(made.request, principal=caller))
    question = await desk.asked(made)
    place, at = tmp_path.stat(), datetime.fromtimestamp(desk.clock.wall, UTC)
    where = f"{place.st_dev}:{place.st_ino}:sha256:{hashlib.sha256(str(tmp_path).encode()).hexdigest()}"
    about = QuestionSubject(
        principal="token:one", run="r_1", tool="run_python", arguments=CODE, profile_digest=digest(READING),
        policy_digest="sha256:policy", inputs=(("artifact://1", "1" * 64),), workspace=where,
        environment="sha256:packages", rules=("approval.two",),
    )  # fmt: skip
    assert re.fullmatch("a_[0-9a-z]{26}", question.id)
    assert question == Question(
        id=question.id, digest=about.digest, subject=about,
        asked=RequiredApproval(by="operator", quorum=2, another_principal=True, reach="run", minutes=5),
        why="A call of run_python is asked about: every one is.", client="An editor", workflow="nightly",
        profile=rfc8785.dumps(effective(READING)).decode(), made=at, expires=at + timedelta(minutes=5),
        asked_by=made.request.id, folder=str(tmp_path),
    )  # fmt: skip
    wall = round(desk.clock.wall * 1000)
    row = {
        "id": question.id, "digest": about.digest, "state": "pending", "principal": "token:one", "tool": "run_python",
        "lifted": "", "reach": "run", "boot": "boot-1", "ends": 1_300_000.0, "made": wall, "changed": wall,
        "callers": 1, "used_by": "", "body": TypeAdapter(Question).dump_json(question).decode(), "answers": "[]",
    }  # fmt: skip
    assert _row(desk, question) == row
    desk.clock.pass_(60)
    await desk.answer(question, by="local:1", reach="run")
    assert _row(desk, question) | {"answers": "[]"} == row
    await desk.answer(question, by="local:2")
    said = [
        ApprovalAnswer(allow=True, by="local:1", channel="operator", reach="run", digest=about.digest, after=60.0),
        ApprovalAnswer(allow=True, by="local:2", channel="operator", digest=about.digest, after=60.0),
    ]
    standing = Standing(
        question=question, state="allowed", reach="call", left=300.0, callers=1, used_by="", answers=tuple(said)
    )
    assert await desk.approvals.standing(question.id) == standing
    desk.clock.pass_(30)
    ran = again(made)
    assert (await desk.decided(ran)).effect == "allow"
    used = replace(standing, state="used", left=270.0, used_by=ran.request.id)
    assert await desk.approvals.standing(question.id) == used
    assert _row(desk, question) == {
        **row, "state": "used", "reach": "call", "ends": 1_360_000.0, "changed": wall + 90_000,
        "used_by": ran.request.id, "answers": TypeAdapter(list[ApprovalAnswer]).dump_json(said).decode(),
    }  # fmt: skip
    answered = {"effect": "allow", "channel": "operator"}
    assert _told(desk, question) == [
        ("approval.requested", {
            "asked_by": made.request.id, "client": "An editor", "workflow": "nightly", "rules": ["approval.two"],
            "arguments_digest": digest_of(CODE), "profile_digest": digest(READING), "policy_digest": "sha256:policy",
            "by": "operator", "quorum": 2, "another_principal": True, "reach": "run", "seconds": 300,
        }),
        ("approval.answered", {**answered, "answered_by": "local:1", "reach": "run", "yes": 1, "state": "pending"}),
        ("approval.answered", {**answered, "answered_by": "local:2", "reach": "call", "yes": 2, "state": "allowed"}),
    ]  # fmt: skip
    desk.clock.boot = "boot-2"
    assert await desk.approvals.standing(question.id) == replace(used, left=-1.0)


async def test_a_grant_is_on_record_as_it_is_made_and_as_it_is_taken_back(desk: Desk) -> None:
    """By a no, or withdrawn; the control is one that nobody had answered, which was none."""
    made = but(proposal(profile=QUIET), escalation=SPENT)
    denied, withdrawn = await desk.asked(made), await desk.asked(but(made, changes="a.txt"))
    await desk.answer(denied, reach="run")
    await desk.answer(denied, by="local:7", allow=False, reason="No more.")
    await desk.approvals.withdraw(withdrawn.id, "local:1000")
    asked = {
        "asked_by": made.request.id, "arguments_digest": digest_of(CODE), "profile_digest": digest(QUIET),
        "quorum": 1, "another_principal": False, "lifted": "budget", "target": "calls",
    }  # fmt: skip
    lifts, yes = {"lifted": "budget", "target": "calls"}, {"effect": "allow", "answered_by": "local:0"}
    assert _told(desk, denied) == [
        ("approval.requested", {**asked, "rules": ["lift.budget"], "by": "operator", "reach": "run", "seconds": 3600}),
        ("approval.answered", {**yes, "channel": "operator", "reach": "run", "yes": 1, "state": "allowed"}),
        ("grant.made", {**lifts, "reach": "run", "seconds": 3600}),
        ("approval.answered", {
            "effect": "deny", "answered_by": "local:7", "channel": "operator", "reach": "call", "reason": "No more.",
            "yes": 1, "state": "denied",
        }),
        ("grant.revoked", {**lifts, "by": "local:7"}),
    ]  # fmt: skip
    both = {"rules": ["lift.budget", "approval.changes"], "by": "operator", "reach": "call", "seconds": 600}
    assert _told(desk, withdrawn) == [
        ("approval.requested", asked | both),
        ("approval.withdrawn", {"by": "local:1000"}),
    ]
    revoked = await desk.asked(but(made, changes="b.txt"))
    await desk.answer(revoked)
    assert (await desk.approvals.withdraw(revoked.id, "local:7")).state == "allowed"
    assert _told(desk, revoked)[-1] == ("grant.revoked", {**lifts, "by": "local:7"})
    with pytest.raises(RefusedError) as caught:
        await desk.approvals.withdraw(revoked.id, "local:7")
    reason = f"Question {revoked.id} is withdrawn already."
    assert caught.value.args == (f"{reason} Nothing is left to take.",)
    assert (caught.value.rule, caught.value.reason) == ("approval.over", reason)


async def test_what_is_over_is_listed_for_a_week(desk: Desk) -> None:
    """And then forgotten, with whatever it holds; a denial was over when its time was."""
    over = await desk.asked(proposal())
    await desk.approvals.withdraw(over.id, "local:0")
    desk.clock.pass_(store.KEPT_MS / 1000)
    assert await desk.state_of(over) == "withdrawn"
    desk.clock.pass_(1)
    assert await desk.state_of(over) is None


async def test_a_call_that_was_let_through_is_decided_by_what_let_it(desk: Desk) -> None:
    """A rule's yes, a grant, or both; each word of the decision before it that does not fit is replaced."""
    rules = (Approval(name="long", when="longer_than", seconds=5),)
    made = but(proposal(profile=QUIET, rules=rules, timeout_seconds=6), escalation=SPENT)
    made.decision = replace(made.decision, hint="Ask.", role="a")
    whole = await desk.asked(made)
    short, other = (
        but(proposal(code, profile=QUIET, rules=rules, timeout_seconds=5), escalation=SPENT, decision=made.decision)
        for code in ("print(1)", "print(2)")
    )
    lift = await desk.asked(short)
    await desk.answer(whole, by="local:1")
    await desk.answer(lift, by="local:2", reach="run")
    by_rule, by_lift = (Grant(approval=each.id, what="budget", target="calls") for each in (whole, lift))
    assert await desk.decided(again(made)) == replace(
        made.decision, effect="allow", rule="lift.budget", reason="Somebody approved it.", hint="", grants=(by_rule,),
        approved_by=("local:1",), approval=whole.id,
    )  # fmt: skip
    assert await desk.decided(other) == replace(
        made.decision, effect="allow", rule="lift.budget", reason="Somebody lifted what refuses it.",
        grants=(by_lift,), approved_by=("local:2",),
    )  # fmt: skip
    unlifted = again(but(made, escalation=None))
    question = await desk.asked(unlifted)
    await desk.answer(question, by="local:3")
    allowed = replace(made.decision, effect="allow", rule="approval.long", reason="Somebody approved it.", hint="")
    assert await desk.decided(unlifted) == replace(allowed, approved_by=("local:3",), approval=question.id)


REASON = "A call of run_python is asked about: every one is. "


def _by(by: By = "either", transport: Any = "stdio", run: str = "r_1", changes: str = "") -> Attempt:
    made = proposal(profile=QUIET, rules=(Approval(name="a", by=by),), run=run)
    caller = replace(made.request.principal, transport=transport)
    return but(made, request=replace(made.request, principal=caller), changes=changes)


@pytest.mark.parametrize(
    ("made", "unchanged", "whose"),
    [
        (_by(), "unchanged", "`glovebox approvals allow {}`"),
        (_by("client"), "unchanged", "the person at your client"),
        (_by("operator", "cli"), "with --run r_1", "`glovebox approvals allow {}`"),
        (_by("operator", "cli", ""), "unchanged", "`glovebox approvals allow {}`"),
        (_by("operator", "http"), "unchanged", "`glovebox approvals allow {}`"),
    ],
)
async def test_a_call_that_nobody_answered_is_told_how_to_come_again(
    made: Attempt, unchanged: str, whose: str, desk: Desk
) -> None:
    """By whom it may be allowed, and on a command line with what."""
    question = await desk.asked(made)
    assert await desk.decided(again(made), settled="pending") == replace(
        made.decision, effect="ask", rule="approval.pending", approval=question.id,
        reason=f"{question.why} Nobody has answered question {question.id} yet.",
        hint=f"Tell the user. Retry the same call, {unchanged}, once it is allowed by {whose.format(question.id)}.",
    )  # fmt: skip


ANEW = "Call again to have it asked anew."


@pytest.mark.parametrize(
    ("settled", "changes", "rule", "how", "hint"),
    [
        ("expired", "", "approval.expired", "nobody answered in time", ANEW),
        ("pending", "", "approval.expired", "nobody answered in time", ANEW),
        ("withdrawn", "a", "approval.withdrawn", "the question was taken back", "Ask the user before calling again."),
        ("allowed", "", "approval.used", "the approval was for one call, and another has used it", ANEW),
        ("allowed", "a", "promotion.conflict", "what it would change is no longer what was shown", ANEW),
        (
            "denied", "", "approval.denied", "somebody said no",
            "Do not ask again for the same; ask the user what they want instead.",
        ),
    ],
)  # fmt: skip
async def test_a_call_that_waited_in_vain_is_told_why_and_what_to_do(
    settled: str, changes: str, rule: str, how: str, *, hint: str, desk: Desk
) -> None:
    """Its question is there no more; one that is, is named, and open."""
    made = _by(changes=changes)
    why = f"{REASON}It was not allowed: {how}."
    refused = replace(made.decision, effect="deny", rule=rule, reason=why, hint=hint)
    assert await desk.decided(made, settled=settled) == refused
    question = await desk.asked(made)
    found = await desk.decided(again(made), settled=settled)
    assert (found.rule, found.approval) == ("approval.pending", question.id)


@pytest.mark.parametrize(("reason", "told"), [("", ""), ("...Not X.", ": ...Not X")])
async def test_a_call_that_was_denied_is_told_who_said_no_and_why(reason: str, told: str, desk: Desk) -> None:
    """Of several answers it is the no that counts."""
    made = proposal(profile=QUIET, rules=(Approval(name="a", quorum=2),))
    question = await desk.asked(made)
    await desk.answer(question, by="local:1")
    await desk.answer(question, by="local:2", allow=False, reason=reason)
    hint = "Do not ask again for the same; ask the user what they want instead."
    assert await desk.decided(again(made)) == replace(
        made.decision, effect="deny", rule="approval.denied", hint=hint, approval=question.id,
        reason=f"{REASON}It was not allowed: local:2 said no{told}.",
    )  # fmt: skip
