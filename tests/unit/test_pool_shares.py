"""Ready sandboxes and processors are shared out by key. Drivers, sandboxes and the clock are in memory."""

from collections.abc import Awaitable, Callable
from functools import partial

import anyio
from anyio.lowlevel import checkpoint
from tests.fixtures.pools import COLD, PLAN, Fake, Scene, a_scene, jumping


@jumping
async def test_the_last_one_ready_is_left_for_others() -> None:
    """M7: a key with many calls waits for the next one, and another key's call finds one ready."""
    for shared in (True, False):
        async with a_scene(Fake(quick=True), shared=shared) as scene, anyio.create_task_group() as tasks:
            await scene.call()
            for _ in range(12):
                tasks.start_soon(_hold, scene, "greedy")
                await scene.settle()
            waits: list[str] = []

            async def noted(key: str, waits: list[str] = waits) -> None:
                await anyio.lowlevel.checkpoint()
                waits.append(key)

            # Two at once, before another can have got ready.
            for key in ("greedy", "peer"):
                tasks.start_soon(_hold, scene, key, partial(noted, key))
                await anyio.lowlevel.checkpoint()
            await scene.settle()
            # The control: where there is one key only, who comes first takes it.
            assert waits == (["greedy"] if shared else ["peer"])
            tasks.cancel_scope.cancel()


@jumping
async def test_of_those_who_wait_the_one_with_the_fewest_calls_is_next() -> None:
    """M7: twelve calls of one key wait for sandboxes, then one of another: it gets the first that is ready."""
    async with a_scene(Fake(quick=True, steps=30), shared=True) as scene, anyio.create_task_group() as tasks:
        await scene.call()
        await scene.settle()
        order: list[str] = []
        for key in [*["greedy"] * 12, "peer", *["other"] * 2]:
            tasks.start_soon(_hold, scene, key, checkpoint, order)
        await scene.settle(1)
        assert order.index("peer") <= order.count("greedy") - 9
        assert len(order) == 15
        tasks.cancel_scope.cancel()


@jumping
async def test_a_call_that_waits_for_what_others_may_have_gets_it_once_it_is_left_over() -> None:
    """M7: two stand ready, left for other keys, so none is prepared for the seventh call; it goes on as others end."""
    async with a_scene(Fake(quick=True), shared=True) as scene, anyio.create_task_group() as tasks:
        await scene.call()
        async with anyio.create_task_group() as six:
            for _ in range(6):
                six.start_soon(_hold, scene, "greedy")
                await scene.settle()
            order: list[str] = []
            async with anyio.create_task_group() as impatient:
                impatient.start_soon(_hold, scene, "greedy")
                while not scene.driver.starting:  # one more is prepared for it, and it goes away
                    await checkpoint()
                impatient.cancel_scope.cancel()
            assert len(await scene.settle()) == 8
            tasks.start_soon(_hold, scene, "greedy", checkpoint, order)
            await scene.settle()
            assert order == []
            six.cancel_scope.cancel()
        await scene.settle()
        assert order == ["greedy"]
        tasks.cancel_scope.cancel()


@jumping
async def test_more_sandboxes_are_not_more_of_the_processors() -> None:
    """M7: twelve of one key have a sixteenth each, another's the whole default; what is left has more again."""
    async with a_scene(Fake(quick=True), shared=True) as scene:
        async with anyio.create_task_group() as tasks, scene.take("peer") as peer:
            for _ in range(12):
                tasks.start_soon(_hold, scene, "greedy")
                await scene.settle()
            greedy = [each for each in scene.driver.live if each.how != "peer" and each.parts > 1]
            assert [each.parts for each in greedy] == [16] * 12
            assert peer.parts == 1
            # What waits for its call has the default too: who needs it next is not known.
            assert {each.parts for each in scene.driver.live if each not in greedy} == {1}
            tasks.cancel_scope.cancel()
        async with scene.take("greedy") as first:
            async with scene.take("greedy") as second:
                assert (first.parts, second.parts) == (2, 2)
            assert first.parts == 1


async def _hold(
    scene: Scene, key: str, waits: Callable[[], Awaitable[None]] = checkpoint, order: list[str] | None = None
) -> None:
    async with scene.pool.take(scene.driver, PLAN, COLD, key=key, waits=waits):
        if order is not None:
            order.append(key)
        await anyio.sleep_forever()
