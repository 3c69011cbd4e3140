"""More ways to stretch a yes: what is nearly the same, what is swapped meanwhile, and who comes at the same time."""

import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.fixtures.approving import ASKING, Desk, a_desk, again, but, proposal

from glovebox_audit.receipts.parts import Input
from glovebox_profiles.model import CallLimits, FileRules
from glovebox_profiles.policy.model import Approval, Lift
from glovebox_sandboxes.contract.errors import Refusal, RefusedError
from glovebox_server.calls import Decision
from glovebox_server.core.call import Attempt, validate_arguments
from glovebox_server.errors import InvalidArgumentsError
from glovebox_server.guards.approvals import store
from glovebox_server.guards.approvals.question import Question, canonical
from glovebox_server.guards.approvals.rules import Escalation
from glovebox_server.guards.approvals.shown import shown
from glovebox_server.tools import TOOLS

ACCENTED = "print('caf\u00e9 \ufb01')"
ONE, OTHER = (Input(name=f"{name}.txt", uri=f"artifact://{name}", sha256=name * 64, bytes=1) for name in "ab")


async def _asks_anew(desk: Desk, made: Attempt, question: Question) -> None:
    found = await desk.approvals.consult(made, None)
    assert isinstance(found, Question)
    assert found.id != question.id


@pytest.mark.parametrize("form", ["NFD", "NFKC", "NFKD"])
async def test_a_program_in_another_unicode_form_is_another(form: Any, desk: Desk) -> None:
    """What looks the same, and what Python reads as the same name; the control is the one that was shown."""
    made = proposal(ACCENTED)
    question = await desk.asked(made)
    await desk.answer(question)
    other = unicodedata.normalize(form, ACCENTED)
    assert other != ACCENTED
    await _asks_anew(desk, proposal(other), question)
    assert (await desk.decided(again(made))).approval == question.id


def _read(**raw: Any) -> Attempt:
    made = proposal()
    return but(made, request=replace(made.request, arguments=validate_arguments(TOOLS["run_python"], raw)))


async def test_arguments_that_mean_the_same_are_one_call_and_run_once(desk: Desk) -> None:
    """In another order, ``1.0`` for ``1``, a default written out: no second run comes of it."""
    same = (
        _read(code="1", timeout_seconds=1),
        _read(timeout_seconds=1.0, code="1"),
        _read(inputs=[], timeout_seconds=1, code="1"),
    )
    question = await desk.asked(same[0])
    await desk.answer(question)
    await _asks_anew(desk, _read(code="1", timeout_seconds=1.0000000000000002), question)
    await _asks_anew(desk, _read(code="1"), question)
    assert (await desk.decided(same[1])).approval == question.id
    for each in same:
        await _asks_anew(desk, each, question)


@pytest.mark.parametrize("value", [True, "1", [1]])
def test_a_truth_is_no_number_of_seconds(value: Any) -> None:
    """Python takes ``True`` for 1: neither does the tool, nor the digest. The control is the number."""
    assert _read(code="1", timeout_seconds=1).request.arguments["timeout_seconds"] == 1
    with pytest.raises(InvalidArgumentsError, match="timeout_seconds"):
        _read(code="1", timeout_seconds=value)
    assert canonical({"a": value}) != canonical({"a": 1})


async def test_what_goes_in_is_bound_by_place_address_and_content(desk: Desk) -> None:
    """The order counts, for the program may read them by it; so do an address and a content by themselves."""
    made = proposal(inputs=(ONE, OTHER))
    question = await desk.asked(made)
    await desk.answer(question)
    swapped = replace(ONE, sha256=OTHER.sha256), replace(OTHER, sha256=ONE.sha256)
    for inputs in ((OTHER, ONE), (ONE,), (ONE, OTHER, ONE), swapped, (ONE, replace(OTHER, uri=ONE.uri))):
        await _asks_anew(desk, proposal(inputs=inputs), question)
    assert (await desk.decided(again(made))).approval == question.id


def _linked(place: Path) -> None:
    place.unlink()
    place.symlink_to(place.with_name("b"))


def _renamed(place: Path) -> None:
    place.with_name("a").rename(place.with_name("gone"))
    place.with_name("b").rename(place.with_name("a"))


def _copied(place: Path) -> None:
    place.with_name("a").rename(place.with_name("gone"))
    place.with_name("a").mkdir()


@pytest.mark.parametrize(
    "swap", [_linked, _renamed, _copied, lambda place: place.with_name("a").rename(place.with_name("gone"))]
)
async def test_a_workspace_that_was_swapped_differs(swap: Callable[[Path], object], desk: Desk, tmp_path: Path) -> None:
    """Below the same path: a link that leads elsewhere, a rename, a new folder, none. The control is its return."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    place = tmp_path / "w"
    place.symlink_to(tmp_path / "a")
    profile = ASKING.model_copy(update={"files": FileRules(workspace="read")})
    made = proposal(profile=profile, workspace=place)
    question = await desk.asked(made)
    await desk.answer(question)
    swap(place)
    await _asks_anew(desk, again(made), question)
    if (tmp_path / "gone").exists():
        if (tmp_path / "a").exists():
            (tmp_path / "a").rename(tmp_path / "other")
        (tmp_path / "gone").rename(tmp_path / "a")
    place.unlink()
    place.symlink_to(tmp_path / "a")
    assert (await desk.decided(again(made))).approval == question.id


async def test_a_profile_that_was_edited_meanwhile_is_another(desk: Desk) -> None:
    """Also by one that says more in words alone; back as it was, its yes is good."""
    made = proposal()
    question = await desk.asked(made)
    await desk.answer(question)
    for edit in ({"limits": CallLimits(wall_seconds=61)}, {"description": "For another."}, {"risk": "medium"}):
        await _asks_anew(desk, proposal(profile=ASKING.model_copy(update=edit)), question)
    assert (await desk.decided(again(made))).approval == question.id


async def test_a_clock_that_is_set_back_brings_no_yes_back(desk: Desk) -> None:
    """One that was used, and one whose time is over; the control is a yes that is good, which stays so."""
    used, late, good = (proposal(f"print({number})") for number in range(3))
    questions = [await desk.asked(each) for each in (used, late)]
    for each in questions:
        await desk.answer(each)
    await desk.decided(again(used))
    desk.clock.pass_(601)
    third = await desk.asked(good)
    await desk.answer(third)
    desk.clock.wall -= 10 * 365 * 86400
    await _asks_anew(desk, again(used), questions[0])
    await _asks_anew(desk, again(late), questions[1])
    assert (await desk.decided(again(good))).approval == third.id


async def _deny(desk: Desk, question: Question) -> str:
    try:
        return await desk.answer(question, allow=False)
    except RefusedError as refused:
        return refused.rule


def _pending(desk: Desk) -> list[Question]:
    with store.opened(desk.state) as database:
        found = database.query_now(lambda db: store.Questions(db, desk.clock()).standings(("pending",)))
    return [each.question for each in found]


async def _ran(desk: Desk, made: Attempt) -> bool:
    found = await desk.approvals.consult(again(made), None)
    return isinstance(found, Decision) and found.effect == "allow"


@pytest.mark.parametrize("no_first", [True, False])
async def test_of_a_no_and_retries_that_race_on_two_servers_one_is_first(tmp_path: Path, *, no_first: bool) -> None:
    """Either one call ran and the no came too late, or none did; and after the no none runs."""
    async with a_desk(tmp_path / "s") as desk, a_desk(tmp_path / "s", desk.clock, "s_2") as other:
        for number in range(12):
            made = proposal(f"print({number})")
            question = await desk.asked(made)
            await desk.answer(question)
            ran, said = list[bool](), list[str]()

            async def retry(server: Desk, made: Attempt, ran: list[bool]) -> None:
                ran.append(await _ran(server, made))

            async def deny(question: Question, said: list[str]) -> None:
                said.append(await _deny(other, question))

            async with anyio.create_task_group() as tasks:
                if no_first:
                    tasks.start_soon(deny, question, said)
                for each in (desk, other, desk):
                    tasks.start_soon(retry, each, made, ran)
                if not no_first:
                    tasks.start_soon(deny, question, said)
            assert (sum(ran), said) in ((1, ["approval.over"]), (0, ["denied"]))
            assert not await _ran(desk, made)
            for left in _pending(desk):
                await _deny(desk, left)


async def test_a_yes_to_another_of_the_same_beginning_is_not_named_by_it(desk: Desk) -> None:
    """Ids are compared whole: half of one, or more than one, answers nothing."""
    made = proposal()
    question = await desk.asked(made)
    for identifier in (question.id[:-1], question.id + "0", question.id.upper(), f"{question.id}\x00"):
        with pytest.raises(RefusedError) as caught:
            await desk.answer(replace(question, id=identifier))
        assert caught.value.refusal == Refusal(
            rule="approval.unknown", reason="No question has this id.",
            hint="`glovebox approvals list` names those there are.",
        )  # fmt: skip
        refused = {"rule": "approval.unknown", "answered_by": "local:0", "channel": "operator"}
        assert (desk.kinds()[-1], desk.records()[-1].data) == ("approval.refused", refused)
    assert await desk.answer(question) == "allowed"
    assert (await desk.decided(again(made))).effect == "allow"


QUIET = ASKING.model_copy(update={"approval": "none"})
OVER_RUNS = (Approval(name="programs", reach="caller"),)


def _of(run: str, code: str = "print(1)", **changed: Any) -> Attempt:
    return proposal(code, **{"profile": QUIET, "rules": OVER_RUNS, "run": run, **changed})


async def test_a_yes_over_runs_is_good_for_one_call_of_the_caller_after_a_reconnect(tmp_path: Path) -> None:
    """Nothing else that a yes is bound to may differ; the control is a rule that says nothing of reach."""
    async with a_desk(tmp_path / "s") as desk:
        question = await desk.asked(_of("r_1"))
        assert "also in another run of it, for an hour after it" in shown(question).replace("\n  ┆ ", "")
        assert await desk.answer(question) == "allowed"
        answered = next(record for record in desk.records() if record.kind == "approval.answered")
        assert (answered.data["run"], answered.data["reach"]) == ("r_1", "caller")
        for other in (
            _of("r_2", "print(2)"),
            _of("r_2", principal="local:1001"),
            _of("r_2", policy="sha256:other"),
            _of("r_2", inputs=(ONE,)),
            _of("r_2", profile=QUIET.model_copy(update={"limits": CallLimits(wall_seconds=61)})),
            _of("r_2", rules=(Approval(name="others", reach="caller"),)),
            _of("r_1", rules=(Approval(name="programs"),)),
            _of("r_2", rules=(Approval(name="programs", reach="run"),)),
        ):
            await _asks_anew(desk, other, question)
        assert (await desk.decided(_of("r_2"))).approval == question.id
        for run in ("r_1", "r_2", "r_3"):
            await _asks_anew(desk, _of(run), question)
    async with a_desk(tmp_path / "control") as desk:
        bound = _of("r_1", "print(3)", rules=(Approval(name="programs"),))
        other_question = await desk.asked(bound)
        await desk.answer(other_question)
        await _asks_anew(desk, _of("r_2", "print(3)", rules=(Approval(name="programs"),)), other_question)
        assert (await desk.decided(again(bound))).effect == "allow"


@pytest.mark.parametrize(("seconds", "effect"), [(3599, "allow"), (3601, "ask")])
async def test_a_yes_over_runs_lasts_an_hour_however_long_its_question(seconds: int, effect: str, desk: Desk) -> None:
    """A rule that leaves the question open for a day does not leave the yes good for one."""
    rules = (Approval(name="programs", reach="caller", expires_minutes=1440),)
    question = await desk.asked(_of("r_1", rules=rules))
    desk.clock.pass_(7200)
    await desk.answer(question)
    desk.clock.pass_(seconds)
    found = await desk.approvals.consult(_of("r_2", rules=rules), None)
    assert (found.effect if isinstance(found, Decision) else "ask") == effect


async def test_a_yes_over_runs_is_used_once_by_runs_that_race_on_two_servers(tmp_path: Path) -> None:
    """Also where several runs have joined the question before it was answered; a no holds in all of them."""
    async with a_desk(tmp_path / "s") as desk, a_desk(tmp_path / "s", desk.clock, "s_2") as other:
        question = await desk.asked(_of("r_0"))
        assert (await other.asked(_of("r_1"))).id == question.id
        await desk.answer(question)
        ran = list[bool]()

        async def attempt(server: Desk, run: str) -> None:
            ran.append(await _ran(server, _of(run)))

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(attempt, (desk, other)[number % 2], f"r_{number}")
        assert sum(ran) == 1
        (left,) = _pending(desk)
        assert await _deny(other, left) == "denied"
        assert (await desk.decided(_of("r_9"))).rule == "approval.denied"


async def test_a_yes_over_runs_stretches_no_other_rule(desk: Desk) -> None:
    """With a rule that binds to the run, or a refusal that is lifted, all is bound to it; nor is it one for a run."""
    lifted = Escalation(what="host", target="https://example.org:443", lift=Lift(what="host"))
    strict = (*OVER_RUNS, Approval(name="strict"))
    per_run = (*OVER_RUNS, Approval(name="per-run", reach="run"))
    stricter: tuple[dict[str, Any], ...] = ({"rules": strict}, {"rules": per_run}, {"profile": ASKING})
    for number, changed in enumerate(stricter):
        made = _of("r_1", f"print({number})", **changed)
        question = await desk.asked(made)
        assert question.asked.reach == "call"
        await desk.answer(question)
        await _asks_anew(desk, _of("r_2", f"print({number})", **changed), question)
        assert (await desk.decided(again(made))).approval == question.id
    made = but(_of("r_1"), escalation=lifted)
    question = await desk.asked(made)
    await desk.answer(question)
    await _asks_anew(desk, but(_of("r_2"), escalation=lifted), question)
    question = await desk.asked(_of("r_1", "print(9)"))
    with pytest.raises(RefusedError) as caught:
        await desk.answer(question, reach="run")
    assert caught.value.rule == "approval.reach"
