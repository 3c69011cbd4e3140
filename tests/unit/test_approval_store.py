"""The store of approvals where it fails, and where somebody would fill it."""

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
