"""What a yes is bound to, and the store of approvals where it fails or somebody would fill it."""

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fixtures.approving import ASKING, Person, a_desk, proposal

from glovebox_audit.place import AuditError
from glovebox_profiles.egress.targets import parse_url
from glovebox_profiles.policy.model import Lift
from glovebox_server.errors import StoreError
from glovebox_server.guards.approvals import store
from glovebox_server.guards.approvals.approvals import Approvals
from glovebox_server.guards.approvals.question import QuestionSubject, canonical

SUBJECT = QuestionSubject(
    principal="local:1000",
    run="r_1",
    tool="run_python",
    arguments=canonical({"code": "print(1)"}),
    profile_digest="sha256:a",
    policy_digest="sha256:b",
    inputs=(("artifact://1", "aa"),),
    workspace="1:2:sha256:c",
    environment="sha256:d",
    rules=("approval.programs",),
)


@pytest.mark.parametrize("name", [field.name for field in fields(QuestionSubject)])
def test_every_part_of_the_subject_changes_its_digest(name: str) -> None:
    """A yes is bound to all of it; the control is that the same subject has the same digest."""
    other = {"inputs": (), "rules": ("approval.hosts",), "lifted": "host"}.get(name, "other")
    assert replace(SUBJECT, **{name: other}).digest != SUBJECT.digest  # type: ignore[arg-type]  # each its own type
    assert replace(SUBJECT).digest == SUBJECT.digest


def test_arguments_have_one_spelling() -> None:
    assert canonical({"b": 1, "a": "x"}) == canonical({"a": "x", "b": 1}) == '{"a":"x","b":1}'


def test_text_that_is_no_unicode_is_not_approved_as_if_it_were_its_escape() -> None:
    """The log writes half a surrogate pair as its escape; a yes to one program would be a yes to two."""
    assert canonical({"code": r"'\ud800'"})
    with pytest.raises(ValueError, match="non-UTF-8"):
        canonical({"code": "'\ud800'"})


async def test_a_store_that_fails_while_a_call_waits_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as a task group's error, which nobody foresaw: the call is decided anew, and refused by the store's rule."""
    async with a_desk(tmp_path / "s") as desk:
        question = await desk.asked(proposal())
        broken = StoreError("reading it", "is broken", "Mend it.")

        def fail(*_: object) -> bool:
            raise broken

        monkeypatch.setattr(store.Questions, "undecided", fail)
        assert await desk.approvals.settle(question, Person(waits=True)) == "pending"
        monkeypatch.setattr(store.Questions, "standing", fail)
        assert await desk.approvals.settle(question, Person(waits=True)) == "pending"


async def test_a_caller_cannot_fill_the_store_with_questions_that_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its oldest are forgotten, and nobody else's; what waits or was denied stays."""
    monkeypatch.setattr(store, "MAX_OVER", 3)
    async with a_desk(tmp_path / "s") as desk:
        other = await desk.asked(proposal(principal="token:b"))
        await desk.approvals.withdraw(other.id, "local:0")
        denied = await desk.asked(proposal("denied"))
        await desk.answer(denied, allow=False)
        over = [await desk.asked(proposal(f"print({number})")) for number in range(1)]
        for number in range(1, 8):
            desk.clock.pass_(1)
            await desk.approvals.withdraw(over[-1].id, "local:0")
            over.append(await desk.asked(proposal(f"print({number})")))
        left = [each.id for each in over if await desk.approvals.standing(each.id) is not None]
        assert left == [each.id for each in over[-4:]]
        assert await desk.approvals.standing(other.id) is not None
        assert await desk.approvals.standing(denied.id) is not None


@pytest.mark.parametrize("problem", [StoreError("keep", "is full", "x"), AuditError("record", "is full", "x")])
async def test_a_call_that_has_run_keeps_its_result_where_its_question_cannot_be_kept(problem: Exception) -> None:
    """What it was refused stays refused; the control is a mistake of ours, which is not passed over."""
    raised = problem

    class Full(Approvals):
        async def _write(self, *_: Any) -> Any:
            raise raised

    full = object.__new__(Full)
    lifts = (Lift(what="host"),)
    targets = [parse_url("GET", "https://a.org/")]
    ran = cast("Any", SimpleNamespace(refused_targets=targets, profile=ASKING, rights=SimpleNamespace(lifts=lifts)))
    assert await full.ask_about_hosts(ran) == ()
    raised = RuntimeError("a mistake")
    with pytest.raises(RuntimeError):
        await full.ask_about_hosts(ran)
