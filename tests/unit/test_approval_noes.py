"""An operator can always say no: to every question, and to a yes that is left."""

from pathlib import Path

import pytest
from tests.fixtures.approving import ASKING, a_desk, again, proposal

from glovebox_profiles.policy.model import Approval, By
from glovebox_sandboxes.contract.errors import RefusedError


@pytest.mark.parametrize("by", ["client", "either", "operator"])
async def test_an_operator_can_say_no_to_every_question(by: By, tmp_path: Path) -> None:
    """Also to one that the person at the client is asked; the control is their yes, which does not count there."""
    rules = (Approval(name="programs", by=by),)
    async with a_desk(tmp_path / "s") as desk:
        made = proposal(profile=ASKING.model_copy(update={"approval": "none"}), rules=rules)
        question = await desk.asked(made)
        if by == "client":
            with pytest.raises(RefusedError) as caught:
                await desk.answer(question)
            assert caught.value.rule == "approval.channel"
        assert await desk.answer(question, allow=False) == "denied"
        assert (await desk.decided(again(made))).rule == "approval.denied"


@pytest.mark.parametrize("reach", ["call", "run"])
async def test_an_operators_no_takes_back_a_yes_that_is_left(reach: str, tmp_path: Path) -> None:
    """And holds; the person's at the client comes too late, and so does one after the call has run."""
    rules = (Approval(name="programs", reach="run"),)
    async with a_desk(tmp_path / "s") as desk:
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
        with pytest.raises(RefusedError) as caught:
            await desk.answer(question)
        assert caught.value.rule == "approval.over"
        desk.clock.pass_(601)
        asked = await desk.asked(again(made))
        await desk.answer(asked)
        ran = again(made)
        assert (await desk.decided(ran)).effect == "allow"
        with pytest.raises(RefusedError) as caught:
            await desk.answer(asked, allow=False)
        assert caught.value.rule == "approval.over"
        assert ran.request.id in caught.value.hint
