"""Sandboxes whose covers are others by now go; what differs in anything else stays."""

from dataclasses import replace

import pytest
from tests.fixtures.pools import COLD, PLAN, Fake, Scene, a_scene, jumping, sandbox_of

from glovebox_sandboxes.contract.base import Plan
from glovebox_sandboxes.pool import pool as pools

both = pytest.mark.parametrize("quick", [False, True], ids=["alone", "zygote"])


def masked(*masks: str, plan: Plan = PLAN) -> Plan:
    """A plan with these covers."""
    return replace(plan, spec=replace(plan.spec, masks=masks))


async def call(scene: Scene, plan: Plan) -> object:
    """One call's sandbox."""
    async with scene.pool.take(scene.driver, plan, replace(plan, action=COLD.action)) as proved:
        return sandbox_of(proved)


@both
@jumping
async def test_those_with_other_covers_go_and_all_else_stays(*, quick: bool) -> None:
    """At once, long before they would be idle. The control differs in what it may write."""
    other = replace(PLAN, spec=replace(PLAN.spec, output=True))
    async with a_scene(Fake(quick=quick), masked(".env")) as scene:
        await call(scene, masked(".env"))
        await call(scene, masked(".env", plan=other))
        queue, kept = (scene.pool.prepare(scene.driver, each) for each in (masked(".env"), masked(".env", plan=other)))
        before = await scene.settle()
        assert queue.ready
        assert kept.ready
        await call(scene, masked(".env", "b/.env"))
        await scene.settle()
        assert not queue.ready
        assert kept.ready
        assert sum(each.dead for each in before) == len(before) - len(kept.ready)


@both
@jumping
async def test_a_call_that_is_under_way_keeps_its_sandbox(*, quick: bool) -> None:
    """Whatever others are covered by meanwhile; its queue is refilled for the next call with its covers."""
    async with a_scene(Fake(quick=quick), masked(".env")) as scene:
        await call(scene, masked(".env"))
        await scene.settle()
        async with scene.take() as mine:
            await call(scene, masked())
            await scene.settle()
            assert not mine.dead
        await call(scene, masked(".env"))
        assert [each for each in await scene.settle() if each is not mine]


@both
@jumping
async def test_a_workspace_whose_secrets_come_and_go_leaves_no_queues_behind(
    monkeypatch: pytest.MonkeyPatch, *, quick: bool
) -> None:
    """There are as many as may be and one; the control is that they were that many."""
    monkeypatch.setattr(pools, "MOST_QUEUES", 8)
    most = 0
    async with a_scene(Fake(quick=quick), masked()) as scene:
        for number in range(40):
            await call(scene, masked(f"{number}.env"))
            await scene.settle()
            most = max(most, len(scene.pool._queues))
    assert most == 8
