"""What an approval is bound to, that an operator can always say no, and the store where it fails or is filled."""

import unicodedata
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.fixtures.approving import ASKING, Desk, Person, again, proposal

from glovebox_audit.place import AuditError
from glovebox_profiles.egress.targets import parse_url
from glovebox_profiles.policy.model import Approval, By, Lift
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.errors import StoreError
from glovebox_server.guards.approvals import store
from glovebox_server.guards.approvals.approvals import Approvals
from glovebox_server.guards.approvals.question import canonical, digest_of


def test_arguments_have_one_spelling_and_text_that_is_no_unicode_none() -> None:
    """The log writes half a surrogate pair as its escape; a yes to one program would be a yes to two."""
    assert canonical({"code": r"'\ud800'"})
    with pytest.raises(ValueError, match="non-UTF-8"):
        canonical({"code": "'\ud800'"})
    text = "caf\u00e9 \ufb01"
    for form in ("NFD", "NFKC", "NFKD"):  # what looks the same, and what Python reads as the same name
        assert canonical({"code": unicodedata.normalize(form, text)}) != canonical({"code": text})
    assert canonical({"b": 1, "a": "x"}) == canonical({"a": "x", "b": 1}) == '{"a":"x","b":1}'
    assert digest_of("é") == "sha256:4a99557e4033c3539de2eb65472017cad5f9557f7a0625a09f1c3f6e2ba69c4c"


async def test_a_store_that_fails_while_a_call_waits_is_said(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a task group's error, which nobody foresaw: the call is decided anew, and refused by the store's rule."""
    question = await desk.asked(proposal())
    broken = StoreError("reading it", "is broken", "Mend it.")

    def fail(*_: object) -> bool:
        raise broken

    monkeypatch.setattr(store.Questions, "undecided", fail)
    assert await desk.approvals.settle(question, Person(waits=True)) == "pending"
    monkeypatch.setattr(store.Questions, "standing", fail)
    assert await desk.approvals.settle(question, Person(waits=True)) == "pending"
    monkeypatch.setattr(store.Questions, "standing", lambda *_: None)  # it is over so long that it is forgotten
    assert await desk.approvals.settle(question, Person(waits=True)) == "expired"


async def test_a_caller_cannot_fill_the_store_with_old_questions(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its oldest are forgotten, and nobody else's; what waits or was denied stays."""
    monkeypatch.setattr(store, "MAX_OVER", 3)
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


@pytest.mark.parametrize("by", ["client", "either", "operator"])
async def test_an_operator_can_say_no_to_every_question(by: By, desk: Desk) -> None:
    """Also to one that the person at the client is asked; the control is their yes, which does not count there."""
    rules = (Approval(name="programs", by=by),)
    made = proposal(profile=ASKING.model_copy(update={"approval": "none"}), rules=rules)
    question = await desk.asked(made)
    if by == "client":
        with pytest.raises(RefusedError) as caught:
            await desk.answer(question)
        said = caught.value.rule, caught.value.reason
        assert said == ("approval.channel", "Only the person at the client may answer this question.")
    assert await desk.answer(question, allow=False) == "denied"
    assert (await desk.decided(again(made))).rule == "approval.denied"


@pytest.mark.parametrize("reach", ["call", "run"])
async def test_an_operators_no_takes_back_a_yes_that_is_left(reach: str, desk: Desk) -> None:
    """And holds; the person's at the client comes too late, and so does one after the call has run."""
    rules = (Approval(name="programs", reach="run"),)
    made = proposal(profile=ASKING.model_copy(update={"approval": "none"}), rules=rules)
    question = await desk.asked(made)
    assert await desk.answer(question, reach=reach) == "allowed"
    with pytest.raises(RefusedError) as caught:
        await desk.answer(question, allow=False, by="local:1000", channel="client")
    assert caught.value.rule == "approval.over"
    if reach == "run":
        assert (await desk.decided(again(made))).effect == "allow"
    assert await desk.answer(question, allow=False) == "denied"
    assert (await desk.decided(again(made))).rule == "approval.denied"
    for allow, ran in ((True, False), (False, reach == "run")):
        with pytest.raises(RefusedError) as caught:
            await desk.answer(question, allow=allow)
        assert caught.value.rule == "approval.over"
        assert caught.value.hint.startswith("To end the call that ran" if ran else "A call that asks again")
    desk.clock.pass_(601)
    asked = await desk.asked(again(made))
    await desk.answer(asked)
    call = again(made)
    assert (await desk.decided(call)).effect == "allow"
    with pytest.raises(RefusedError) as caught:
        await desk.answer(asked, allow=False)
    hint = f"To end the call that ran on it: `glovebox stop --call {call.request.id}`."
    assert (caught.value.rule, caught.value.hint) == ("approval.over", hint)
