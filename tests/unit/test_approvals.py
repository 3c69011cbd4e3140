"""Approvals of one state directory: what a yes lets through, and everything that it does not."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.fixtures.approving import ASKING, Desk, HostClock, Person, a_desk, again, but, forms, proposal

from glovebox_audit.receipts.parts import Input
from glovebox_audit.verify import verify
from glovebox_profiles.model import CallLimits, FileRules, Network, Profile
from glovebox_profiles.policy.model import Approval, Lift
from glovebox_sandboxes.contract.errors import Refusal, RefusedError
from glovebox_server.calls import Decision
from glovebox_server.core.call import Attempt
from glovebox_server.guards.admission.admission import WAIT_SECONDS
from glovebox_server.guards.approvals import approvals as module
from glovebox_server.guards.approvals import store
from glovebox_server.guards.approvals.approvals import Approvals
from glovebox_server.guards.approvals.question import Question
from glovebox_server.stores.database import Database
from glovebox_server.tools import TOOLS


async def test_a_yes_lets_one_retry_through_and_is_used_up(tmp_path: Path) -> None:
    async with a_desk(tmp_path / "s") as desk:
        made = proposal()
        question = await desk.asked(made)
        pending = await desk.decided(again(made), settled="pending")
        assert (pending.effect, pending.rule, pending.approval) == ("ask", "approval.pending", question.id)
        assert await desk.answer(question) == "allowed"
        ran = await desk.decided(again(made))
        assert (ran.effect, ran.approval, ran.rule) == ("allow", question.id, "approval.ask")
        assert (await desk.asked(again(made))).id != question.id
        assert desk.kinds()[:2] == ["approval.requested", "approval.answered"]
        asked, answered = (each.data for each in desk.records()[:2])
        assert asked["digest"] == answered["digest"] == question.digest
        assert asked["approval"] == answered["approval"] == question.id
        assert ran.approved_by == (answered["answered_by"],)
        assert asked["asked_by"] == made.request.id
    assert verify(tmp_path / "s" / "audit").ok


def _narrower(limits: CallLimits) -> Profile:
    return ASKING.model_copy(update={"limits": limits})


ARTIFACT = Input(name="a.txt", uri="artifact://" + "0" * 32, sha256="a" * 64, bytes=1)

PROGRAMS = (
    "print(2)", "print(1) ", " print(1)", "print(1)\n", "print(1)\r\n", "print(1)#", "print(1);import os", "print(１)",
    "print(1)\u200b", "print(1)\u202e", "\ufeffprint(1)", "print(1)\x00", "prin\u0442(1)", "print(1.0)",
    "print(1)\u00a0",
    "", "print(1)" * 2, "PRINT(1)", r"print(1)\u200b", "print(1)\\",
)  # fmt: skip
"""Programs that are not ``print(1)``, some of which look like it."""


def _program(code: str) -> Callable[[Path], Attempt]:
    return lambda _: proposal(code)


STRETCHES: dict[str, Callable[[Path], Attempt]] = {
    **{f"program {number}": _program(code) for number, code in enumerate(PROGRAMS)},
    "argument added": lambda _: proposal(timeout_seconds=1.0),
    "argument null": lambda _: proposal(timeout_seconds=None),
    "argument reordered into code": lambda _: proposal('print(1)","timeout_seconds":1'),
    "profile with more time": lambda _: proposal(profile=_narrower(CallLimits(wall_seconds=30))),
    "profile with less time than before": lambda _: proposal(profile=_narrower(CallLimits(cpu_seconds=2))),
    "profile with the workspace": lambda _: proposal(
        profile=ASKING.model_copy(update={"files": FileRules(workspace="read")})
    ),
    "profile in words alone": lambda _: proposal(profile=ASKING.model_copy(update={"description": "For another."})),
    "profile of another sandbox": lambda _: proposal(profile=ASKING.model_copy(update={"isolation": ("docker",)})),
    "principal": lambda _: proposal(principal="token:other"),
    "principal that begins the same": lambda _: proposal(principal="local:10000"),
    "principal in another case": lambda _: proposal(principal="LOCAL:1000"),
    "run": lambda _: proposal(run="r_2"),
    "no run": lambda _: proposal(run=""),
    "run in the principal": lambda _: proposal(principal="local:1000\nr_1", run=""),
    "policy": lambda _: proposal(policy="sha256:other"),
    "policy where there was none": lambda _: proposal(policy="sha256:0"),
    "rule besides": lambda _: proposal(rules=(Approval(name="second"),)),
    "rule instead": lambda _: proposal(
        profile=ASKING.model_copy(update={"approval": "none"}), rules=(Approval(name="second"),)
    ),
    "input": lambda _: proposal(inputs=(ARTIFACT,)),
    "workspace": lambda place: proposal(profile=_reading(), workspace=_made(place / "w2")),
    "workspace that was replaced": lambda place: proposal(profile=_reading(), workspace=_replaced(place / "w")),
    "environment": lambda _: proposal(),
}
"""Forty ways to stretch a yes."""
assert len(STRETCHES) == 42


def _reading() -> Profile:
    return ASKING.model_copy(update={"files": FileRules(workspace="read")})


def _made(place: Path) -> Path:
    place.mkdir(exist_ok=True)
    return place


def _replaced(place: Path) -> Path:
    place.rename(place.with_name("gone"))
    (place.with_name("other")).mkdir()
    (place.with_name("other")).rename(place)
    return place


@pytest.mark.parametrize("name", STRETCHES)
async def test_a_yes_is_not_stretched_and_not_used_up_by_trying(name: str, desk: Desk, tmp_path: Path) -> None:
    """Another program, profile, principal, run, policy, workspace: none runs; the control is the same call after it."""
    place = _made(tmp_path / "w")
    uses_workspace = name.startswith("workspace")
    made = proposal(profile=_reading(), workspace=place) if uses_workspace else proposal()
    question = await desk.asked(made)
    assert await desk.answer(question) == "allowed"
    if name == "environment":
        desk.environment[0] = "sha256:others"
    stretched = await desk.approvals.consult(STRETCHES[name](tmp_path), None)
    assert isinstance(stretched, Question) or stretched.effect != "allow"
    if name == "environment":
        desk.environment[0] = "sha256:packages"
    if name == "workspace that was replaced":
        place.rmdir()
        place.with_name("gone").rename(place)
    legitimate = await desk.decided(again(made))
    assert (legitimate.effect, legitimate.approval) == ("allow", question.id)


@pytest.mark.long
async def test_of_64_retries_in_two_server_processes_one_runs(tmp_path: Path) -> None:
    """The store's transaction decides, nothing in memory does."""
    state = tmp_path / "s"
    async with a_desk(state, HostClock()) as desk:
        question = await desk.asked(proposal())
        await desk.answer(question)
        command = [sys.executable, "-m", "tests.fixtures.approving", str(state), "32"]
        counts: list[int] = []

        async def server() -> None:
            counts.append(int((await anyio.run_process(command)).stdout))

        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(server)
        assert sum(counts) == 1
        assert await desk.state_of(question) == "used"
        # Those that came too late ask anew, and all of them the same.
        assert desk.kinds().count("approval.requested") == 2
    assert verify(state / "audit").ok


async def test_a_yes_for_the_run_is_good_for_identical_calls_of_it_alone(desk: Desk) -> None:
    """Where the rule permits it; the control is another program of the run, and the same one of another."""
    rules = (Approval(name="programs", reach="run"),)
    quiet = ASKING.model_copy(update={"approval": "none"})
    made = proposal(profile=quiet, rules=rules)
    question = await desk.asked(made)
    assert await desk.answer(question, reach="run") == "allowed"
    for _ in range(3):
        assert (await desk.decided(again(made))).approval == question.id
    await desk.asked(proposal("print(2)", profile=quiet, rules=rules))
    await desk.asked(proposal(profile=quiet, rules=rules, run="r_2"))


async def test_a_no_holds_for_the_same_call_until_its_time_is_over(desk: Desk) -> None:
    """So a model that asks again and again gets nobody to say yes in the end."""
    made = proposal()
    question = await desk.asked(made)
    assert await desk.answer(question, allow=False) == "denied"
    refused = await desk.decided(again(made))
    assert (refused.effect, refused.rule, refused.approval) == ("deny", "approval.denied", question.id)
    assert desk.kinds().count("approval.requested") == 1
    desk.clock.pass_(601)
    assert (await desk.asked(again(made))).id != question.id


@pytest.mark.parametrize(
    ("wrong", "rule", "reason", "hint"),
    [
        (
            {"digest": "sha256:" + "0" * 64}, "approval.mismatch",
            "The answer is to another question: what would run differs from what was shown.",
            "Look at the question again, and answer what it shows now.",
        ),
        (
            {"channel": "client"}, "approval.channel",
            "Only an operator may answer this question.", "Have them answer it.",
        ),
        (
            {"by": "local:1000"}, "approval.own",
            "This question wants another principal than the caller, and local:1000 is the caller.",
            "Have somebody else answer, as another user of this host.",
        ),
        (
            {"reach": "run"}, "approval.reach",
            "An approval of this question is for one call, not for the run.", "Answer without --run.",
        ),
    ],
)  # fmt: skip
async def test_an_answer_that_does_not_fit_is_refused_and_costs_nothing(
    wrong: dict[str, Any], rule: str, reason: str, hint: str, desk: Desk
) -> None:
    """Mismatched, by the wrong way, or the caller's own; the control is the legitimate one after it."""
    rules = (Approval(name="four-eyes", by="operator", another_principal=True),)
    made = proposal(profile=ASKING.model_copy(update={"approval": "none"}), rules=rules)
    question = await desk.asked(made)
    with pytest.raises(RefusedError) as caught:
        await desk.answer(question, **wrong)
    assert caught.value.refusal == Refusal(rule=rule, reason=reason, hint=hint)
    last = desk.records()[-1]
    given = {"answered_by": wrong.get("by", "local:0"), "channel": wrong.get("channel", "operator")}
    assert (last.kind, last.data) == ("approval.refused", {"approval": question.id, "rule": rule, **given})
    assert await desk.answer(question) == "allowed"
    with pytest.raises(RefusedError) as caught:
        await desk.answer(question)
    assert caught.value.refusal == Refusal(
        rule="approval.over", reason=f"Question {question.id} is allowed already, and no answer changes that.",
        hint="A call that asks again gets a question of its own.",
    )  # fmt: skip
    assert (await desk.decided(again(made))).effect == "allow"


async def test_a_quorum_wants_different_principals_and_one_no_outweighs_it(desk: Desk) -> None:
    rules = (Approval(name="two", quorum=2),)
    made = proposal(profile=ASKING.model_copy(update={"approval": "none"}), rules=rules)
    question = await desk.asked(made)
    assert await desk.answer(question, by="local:1") == "pending"
    with pytest.raises(RefusedError) as caught:
        await desk.answer(question, by="local:1")
    reason = "local:1 has said yes already, and 2 different principals have to."
    assert caught.value.refusal == Refusal(rule="approval.twice", reason=reason, hint="Have somebody else answer.")
    assert (await desk.decided(again(made), settled="pending")).rule == "approval.pending"
    assert await desk.answer(question, by="local:2") == "allowed"
    assert (await desk.decided(again(made))).effect == "allow"
    question = await desk.asked(proposal(profile=ASKING.model_copy(update={"approval": "none"}), rules=rules))
    await desk.answer(question, by="local:1")
    assert await desk.answer(question, by="local:1", allow=False) == "denied"


async def test_identical_questions_join_and_a_ninth_is_refused(desk: Desk) -> None:
    questions = [await desk.asked(proposal(f"print({number})")) for number in range(store.MAX_PENDING)]
    assert (await desk.asked(proposal("print(0)"))).id == questions[0].id
    assert (await desk.decided(proposal("print(9)"))).rule == "approval.many"
    await desk.asked(proposal("print(9)", principal="token:b"))
    await desk.answer(questions[0])
    await desk.asked(proposal("print(9)"))


@pytest.mark.parametrize("state", ["pending", "allowed", "before a reboot", "withdrawn"])
async def test_time_a_reboot_and_whoever_takes_it_back_end_a_yes(state: str, desk: Desk) -> None:
    """And a question. After a reboot the boot clock begins anew, so nobody knows how long it was."""
    made = proposal()
    question = await desk.asked(made)
    if state != "pending":
        desk.clock.pass_(300)  # its time begins with it
        await desk.answer(question)
    if state == "before a reboot":
        desk.clock.boot, desk.clock.at = "boot-2", 1.0
    elif state == "withdrawn":
        await desk.approvals.withdraw(question.id, "local:0")
        assert (desk.records()[-1].kind, desk.records()[-1].data["by"]) == ("approval.withdrawn", "local:0")
    else:
        desk.clock.pass_(599)
        assert await desk.state_of(question) == state
        desk.clock.pass_(2)
    if state == "pending":
        with pytest.raises(RefusedError) as caught:
            await desk.answer(question)
        assert caught.value.rule == "approval.over"
    assert (await desk.asked(again(made))).id != question.id
    if state == "withdrawn":
        with pytest.raises(RefusedError):
            await desk.approvals.withdraw(question.id, "local:0")


@pytest.mark.parametrize("jump", [-86_400, 86_400])
async def test_a_wall_clock_that_jumps_ends_nothing_and_keeps_nothing_alive(jump: float, desk: Desk) -> None:
    """Time is the boot clock's, which nobody sets."""
    made = proposal()
    question = await desk.asked(made)
    await desk.answer(question)
    desk.clock.wall += jump
    desk.clock.pass_(599)
    assert (await desk.decided(again(made))).approval == question.id
    second = await desk.asked(again(made))
    await desk.answer(second)
    desk.clock.wall -= jump
    desk.clock.at += 601
    assert (await desk.asked(again(made))).id != second.id


async def test_the_person_at_the_client_is_asked_and_answers(desk: Desk) -> None:
    for says, state in ((True, "allowed"), (False, "denied")):
        person = Person(says)
        made = proposal(f"print({says})")
        question = await desk.asked(made)
        assert await desk.approvals.settle(question, person) == state
        assert person.asked == [question]
        effect = (await desk.decided(again(made), settled=state)).effect
        assert effect == ("allow" if says else "deny")


@pytest.mark.parametrize("rule", [Approval(name="o", by="operator"), Approval(name="a", another_principal=True)])
async def test_where_only_others_may_answer_the_client_is_not_asked(rule: Approval, desk: Desk) -> None:
    """A host that answers by itself is never given the chance."""
    person = Person(says=True)
    question = await desk.asked(proposal(profile=ASKING.model_copy(update={"approval": "none"}), rules=(rule,)))
    with anyio.fail_after(30):
        assert await desk.approvals.settle(question, person) == "pending"
    assert person.asked == []


async def test_a_caller_that_waits_hears_an_answer_given_to_another_server(tmp_path: Path) -> None:
    """Within two looks at the store; the one that cannot wait is told at once that nobody has answered."""
    async with a_desk(tmp_path / "s") as desk, a_desk(tmp_path / "s", desk.clock, "s_2") as other:
        question = await desk.asked(proposal())
        with anyio.fail_after(30):
            assert await desk.approvals.settle(question, Person()) == "pending"
        states: list[str] = []

        async def wait() -> None:
            states.append(await desk.approvals.settle(question, Person(waits=True)))

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                await other.answer(question)
        assert states == ["allowed"]


async def test_nobody_waits_for_ever(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.WAIT_SECONDS == WAIT_SECONDS
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.05)
    made = proposal()
    question = await desk.asked(made)
    with anyio.fail_after(30):
        assert await desk.approvals.settle(question, Person(waits=True)) == "pending"
    assert (await desk.decided(again(made), settled="pending")).approval == question.id
    assert await desk.answer(question) == "allowed"


async def test_a_question_whose_only_caller_left_is_withdrawn(desk: Desk) -> None:
    """The control is one that another call has joined: that one stays."""
    for joined, state in ((False, "withdrawn"), (True, "pending")):
        made = proposal(f"print({joined})")
        question = await desk.asked(made)
        if joined:
            await desk.asked(again(made))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.approvals.settle, question, Person(waits=True))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert await desk.state_of(question) == state
        assert [each.data["by"] for each in desk.records() if each.kind == "approval.withdrawn"] == ["local:1000"]


async def test_what_an_approver_would_not_see_as_it_is_is_not_asked_about(desk: Desk) -> None:
    """Half a surrogate pair has no canonical form; its escape has one, and is another program."""
    assert (await desk.decided(proposal("print('\ud800')"))).rule == "approval.arguments"
    await desk.asked(proposal(r"print('\ud800')"))


async def test_a_rule_that_cannot_ask_about_a_call_opens_no_store(tmp_path: Path) -> None:
    """What it asks about is known from the call alone, and so is whether it could use the grant of a host.

    The control is a call that takes longer.
    """
    quiet = ASKING.model_copy(update={"approval": "none", "limits": CallLimits(wall_seconds=60)})
    rules = (Approval(name="leaves", when="leaves"), Approval(name="long", when="longer_than", seconds=30))

    def no_store() -> Database:
        raise AssertionError

    async with a_desk(tmp_path / "s") as desk, forms() as start:
        closed = Approvals(no_store, desk.audit, TOOLS, lambda _: "", start=start, clock=desk.clock)
        short = proposal(profile=quiet, rules=rules, timeout_seconds=30)
        found = await closed.consult(short, None)
        assert isinstance(found, Decision)
        assert found.effect == "allow"
        assert await closed.ask_about_hosts(short) == ()
        online = Network.model_validate({"mode": "egress", "allow": ({"host": "a.org"},)})
        for network, lifts in ((online, ()), (online, (Lift(what="budget"),)), (Network(), (Lift(what="host"),))):
            made = proposal(profile=quiet.model_copy(update={"network": network}))
            assert await closed.consult(but(made, rights=replace(made.rights, lifts=lifts)), None) == made.decision
        with pytest.raises(AssertionError):
            await closed.consult(proposal(profile=quiet, rules=rules, timeout_seconds=31), None)


async def test_the_last_approved_program_comes_with_the_question(desk: Desk) -> None:
    """For the difference that an approver sees; none before the first."""
    made = proposal("print(1)")
    await desk.answer(await desk.asked(proposal("print(0)")), allow=False)
    await desk.asked(proposal("print(0.5)"))
    first = await desk.asked(made)
    assert first.last_approved is None
    await desk.answer(first)
    assert (await desk.asked(proposal("print(1.5)"))).last_approved == '{"code":"print(1)"}'
    await desk.decided(again(made))
    assert (await desk.asked(proposal("print(2)"))).last_approved == '{"code":"print(1)"}'
    assert (await desk.asked(proposal("print(2)", principal="token:b"))).last_approved is None
