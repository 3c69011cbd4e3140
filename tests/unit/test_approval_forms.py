"""A form that is open longer than its call waits: a later answer is kept for the call that is made again."""

from contextlib import nullcontext
from unittest.mock import Mock

import anyio
import pytest
from tests.fixtures.approving import Desk, Person, again, proposal

from glovebox_audit.place import AuditError
from glovebox_server.errors import StoreError
from glovebox_server.guards.approvals import approvals as module
from glovebox_server.guards.approvals import store
from glovebox_server.guards.approvals.question import ApprovalAnswer, Question


class Slow(Person):
    """Somebody who reads on while the call is told to try again."""

    def __init__(self, says: bool | None = True) -> None:
        super().__init__(says)
        self.told: list[str] = []
        self.may_answer = anyio.Event()
        self.closed = anyio.Event()

    def progress(self, message: str) -> None:
        self.told.append(message)

    async def ask(self, question: Question) -> ApprovalAnswer | None:
        try:
            await self.may_answer.wait()
            return await super().ask(question)
        finally:
            self.closed.set()


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)


async def _until(desk: Desk, question: Question, state: str) -> None:
    with anyio.fail_after(30):
        while await desk.state_of(question) != state:  # noqa: ASYNC110 - the store tells nobody
            await anyio.sleep(0.01)


@pytest.mark.parametrize(("says", "state", "effect"), [(True, "allowed", "allow"), (False, "denied", "deny")])
async def test_a_late_answer_is_kept_for_the_retry(says: bool, state: str, effect: str, desk: Desk) -> None:
    """A yes lets it run once, a no refuses it; until then it is pending, and once its call waits again it goes on."""
    made, person, other = proposal(), Slow(says), Slow()
    other.may_answer.set()
    question = await desk.asked(made)
    assert await desk.approvals.settle(question, person) == "pending"
    assert (await desk.decided(again(made), settled="pending")).rule == "approval.pending"
    # Whoever calls again meanwhile is not asked twice.
    assert await desk.approvals.settle(await desk.asked(again(made)), other) == "pending"
    person.may_answer.set()
    await _until(desk, question, state)
    ran = await desk.decided(again(made))
    assert (ran.effect, ran.approval) == (effect, question.id)
    assert other.asked == []
    assert desk.kinds().count("approval.requested") == 1
    answered = next(each for each in desk.records() if each.kind == "approval.answered")
    assert (answered.data["answered_by"], answered.data["channel"]) == ("local:1000", "client")
    assert person.told == other.told == [f"Waiting for somebody to approve it: {question.id}"]


async def test_a_call_that_waits_again_hears_the_answer_to_the_form_that_is_open(desk: Desk) -> None:
    """As if it were its own; and if it goes, the form stays with whoever reads it."""
    made, person = proposal(), Slow()
    question = await desk.asked(made)
    assert await desk.approvals.settle(question, person) == "pending"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.approvals.settle, await desk.asked(again(made)), Person(waits=True))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert not person.closed.is_set()
    states: list[str] = []

    async def wait() -> None:
        states.append(await desk.approvals.settle(await desk.asked(again(made)), Person(waits=True)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        person.may_answer.set()
    assert states == ["allowed"]


@pytest.mark.parametrize("how", ["operator", "time", "gone", "gone, and another call asks"])
async def test_a_form_is_open_no_longer_than_its_question(
    how: str, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answered elsewhere, over, or its caller gone while it waited; the control is that it was open until then."""
    made, person = proposal(), Slow()
    question = await desk.asked(made)
    if how.startswith("gone"):
        if how != "gone":
            await desk.asked(again(made))
        monkeypatch.setattr(module, "WAIT_SECONDS", 45)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(desk.approvals.settle, question, person)
            await anyio.wait_all_tasks_blocked()
            assert not person.closed.is_set()
            tasks.cancel_scope.cancel()
        assert await desk.state_of(question) == ("withdrawn" if how == "gone" else "pending")
    else:
        assert await desk.approvals.settle(question, person) == "pending"
        assert not person.closed.is_set()
        if how == "operator":
            await desk.answer(question)
        else:
            desk.clock.pass_(601)
    with anyio.fail_after(30):
        await person.closed.wait()
    assert person.asked == []


class Lost(Slow):
    """Their client breaks while the form is open."""

    async def ask(self, question: Question) -> ApprovalAnswer | None:
        await super().ask(question)
        raise OSError("the client broke")


@pytest.mark.parametrize("how", ["closed", "lost"])
async def test_whoever_closed_the_form_or_lost_it_is_asked_again(how: str, desk: Desk) -> None:
    """By the next call; the control is the person there, whose yes counts."""
    made, person = proposal(), Slow(says=None) if how == "closed" else Lost()
    question = await desk.asked(made)
    assert await desk.approvals.settle(question, person) == "pending"
    person.may_answer.set()
    with anyio.fail_after(30):
        await person.closed.wait()
        await anyio.wait_all_tasks_blocked()
    assert await desk.state_of(question) == "pending"
    assert await desk.approvals.settle(await desk.asked(again(made)), Person(says=True)) == "allowed"


@pytest.mark.parametrize("problem", [StoreError("keep", "is full", "x"), AuditError("record", "is full", "x")])
async def test_a_call_that_is_cancelled_is_so_though_its_question_cannot_be_withdrawn(
    problem: Exception, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller sees no error of ours; the control is a mistake, which is not passed over."""
    for raised, seen in ((problem, False), (ValueError("a mistake"), True)):
        question = await desk.asked(proposal())
        monkeypatch.setattr(store.Questions, "abandon", Mock(side_effect=raised))
        with pytest.raises(ExceptionGroup) if seen else nullcontext():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(desk.approvals.settle, question, Person(waits=True))
                await anyio.wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
        assert await desk.state_of(question) == "pending"


async def _logged(caplog: pytest.LogCaptureFixture, message: str) -> None:
    with anyio.fail_after(30):
        while not caplog.messages:  # noqa: ASYNC110 - the log tells nobody
            await anyio.sleep(0.01)
    assert caplog.messages == [message]
    caplog.clear()


async def test_what_goes_wrong_with_a_form_is_told_and_ends_no_server(
    desk: Desk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = await desk.asked(proposal())
    person = Lost(None)
    assert await desk.approvals.settle(question, person) == "pending"
    person.may_answer.set()
    await _logged(caplog, f"What was said to {question.id} was not taken: the client broke")
    left = await desk.asked(proposal("print(4)"))
    assert await desk.approvals.settle(left, Slow()) == "pending"
    broken = StoreError("reading it", "is broken", "Mend it.")
    with monkeypatch.context() as patch:
        patch.setattr(store.Questions, "undecided", Mock(side_effect=broken))
        await _logged(caplog, f"What was said to {left.id} was not taken: {broken}")

    async def mistaken(_identifier: str) -> None:
        raise ValueError("a mistake of ours")

    with monkeypatch.context() as patch:
        patch.setattr(desk.approvals, "_until_decided", mistaken)
        with pytest.raises(ExceptionGroup) as caught:
            await desk.approvals.settle(await desk.asked(proposal("print(2)")), Person(True))
        assert "a mistake of ours" in repr(caught.value)
    other = await desk.asked(proposal("print(3)"))
    assert await desk.approvals.settle(other, Person(True)) == "allowed"
