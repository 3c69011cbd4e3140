"""Sandboxes that wait: used once, never dead, never another's; and a pool that fails costs a call nothing but time.

Drivers, sandboxes and the clock are in memory (``tests/fixtures/pools.py``).
"""

from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from tests.fixtures.pools import COLD, PLAN, Fake, Sandbox, Scene, a_scene, jumping, sandbox_of

from glovebox_sandboxes import sharing
from glovebox_sandboxes.contract.base import WORKSPACE, Mount, Plan
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host.mounts import MountWatch
from glovebox_sandboxes.pool import pool as pools
from glovebox_sandboxes.pool import ready_queue as state
from glovebox_sandboxes.session.connection import GuestConnection

GIB = 2**30
both = pytest.mark.parametrize("quick", [False, True], ids=["starting", "forking"])


@both
@jumping
async def test_after_the_first_call_one_waits_and_the_next_call_gets_it(*, quick: bool) -> None:
    """Used once, and gone with its call; ready again for the one after."""
    async with a_scene(Fake(quick=quick)) as scene:
        seen = {(await scene.call()).id}
        for _ in range(50):
            waiting = await scene.settle()
            assert waiting
            used = await scene.call()
            assert used is waiting[0]
            assert used.id not in seen
            seen.add(used.id)
        assert scene.told() == ["opened"]


@both
@jumping
async def test_what_can_wait_waits_for_a_call_that_is_under_way_but_not_for_long(*, quick: bool) -> None:
    """The next one is prepared, and a used one removed, between calls; or after a while without one."""
    for seconds, over in ((sharing.DEFER_SECONDS / 2, False), (sharing.DEFER_SECONDS * 1.1, True)):
        async with a_scene(Fake(quick=quick)) as scene:
            await scene.call()
            await scene.settle()
            with scene.pool.call():
                opened = scene.driver.opened
                async with scene.take() as sandbox:
                    pass
                await anyio.sleep(seconds)
                for _ in range(50):
                    await anyio.lowlevel.checkpoint()
                assert (sandbox.dead, scene.driver.opened > opened) == (over, over)
            await scene.settle()
            assert sandbox.dead
            assert scene.driver.opened > opened


@jumping
async def test_what_another_call_waits_for_does_not_wait() -> None:
    """A call that finds none ready is the reason to prepare one, whatever else is under way."""
    async with a_scene(Fake(quick=True)) as scene:
        await scene.call()
        await scene.settle()
        began = anyio.current_time()
        with scene.pool.call():
            for _ in range(5):
                async with scene.take():
                    assert anyio.current_time() - began < sharing.ANSWER_SECONDS


@both
@jumping
async def test_a_call_gets_what_became_ready_while_it_said_that_it_has_to_wait(*, quick: bool) -> None:
    """What it says goes to disk, and takes longer than a fork."""
    async with a_scene(Fake(quick=quick, steps=100)) as scene:
        await scene.call()
        ready: list[Sandbox] = []

        async def waits() -> None:
            ready.extend(await scene.settle())

        began = anyio.current_time()
        async with scene.pool.take(scene.driver, PLAN, COLD, waits=waits) as proved:
            assert sandbox_of(proved) in ready
            assert anyio.current_time() - began < 1


@both
@jumping
async def test_a_watch_that_breaks_costs_no_call_its_end(*, quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is listened to; should that fail, nobody waits for it to be over."""

    async def breaks(_link: GuestConnection) -> None:
        await anyio.sleep(0.5)
        raise RuntimeError("of the test")

    async with a_scene(Fake(quick=quick)) as scene:
        monkeypatch.setattr(GuestConnection, "wait_while_quiet", breaks)
        await scene.call()
        await scene.settle(1)
        with anyio.fail_after(30):
            await scene.call()


async def ended(scene: Scene, end: str) -> list[Sandbox]:
    """Have those that wait end, or speak unasked."""
    bad = await scene.settle()
    for each in bad:
        if end == "dead":
            each.die()
        else:
            each.channel.to_host.send_nowait(b"x")
    return bad


@both
@pytest.mark.parametrize("end", ["dead", "spoke"])
@jumping
async def test_what_ended_or_spoke_unasked_is_replaced_and_given_to_nobody(end: str, *, quick: bool) -> None:
    """A guest that was asked nothing says nothing; whatever it is, it is not used."""
    async with a_scene(Fake(quick=quick)) as scene:
        await scene.call()
        bad = await ended(scene, end)
        good = await scene.settle()
        assert len(good) == len(bad)
        assert not set(good) & set(bad)
        assert all(each.dead for each in bad)
        for _ in range(10):
            assert await scene.call() not in bad


@pytest.mark.parametrize("end", ["dead", "spoke"])
@jumping
async def test_what_ended_in_the_same_moment_is_given_to_nobody(end: str) -> None:
    """Before anybody had a turn to see it."""
    async with a_scene() as scene:
        await scene.call()
        bad = await ended(scene, end)
        opened: list[int] = []

        async def waits() -> None:
            opened.append(scene.driver.opened)

        before = scene.driver.opened
        async with scene.pool.take(scene.driver, PLAN, COLD, waits=waits) as proved:
            assert sandbox_of(proved) not in bad
        # Whatever it met on its way: told before anything was done for it.
        assert opened
        assert set(opened) == {before}


def mounted(directory: Path) -> Plan:
    """A plan with this workspace."""
    return replace(PLAN, spec=replace(PLAN.spec, mounts=(Mount(source=str(directory), target=WORKSPACE),)))


@both
@jumping
async def test_a_replaced_workspace_is_never_seen_again(tmp_path: Path, *, quick: bool) -> None:
    """The same path, another directory: what waits has the old one mounted, and so has a zygote."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    async with a_scene(Fake(quick=quick), mounted(workspace)) as scene:
        await scene.call()
        old = await scene.settle()
        assert {each.inode for each in old} == {workspace.stat().st_ino}
        workspace.rename(tmp_path / "before")
        workspace.mkdir()
        for _ in range(20):
            assert (await scene.call()).inode == workspace.stat().st_ino
            assert all(each.inode == workspace.stat().st_ino for each in await scene.settle())
        assert all(each.dead for each in old)


@both
@jumping
async def test_what_was_mounted_inside_the_workspace_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, quick: bool
) -> None:
    """None of those that wait is used; the driver then refuses, as for any call."""
    async with a_scene(Fake(quick=quick), mounted(tmp_path)) as scene:
        await scene.call()
        old = await scene.settle()
        assert await scene.call() in old
        old = await scene.settle()
        monkeypatch.setattr(MountWatch, "inside", lambda *_: ("secret",))
        scene.driver.problem = scene.driver.source_problem = SandboxError("Mounting", "mounted inside", "")
        assert (await scene.call()).how == "cold"
        assert all(each.dead for each in old)


async def burst(scene: Scene, count: int) -> list[Sandbox]:
    """So many calls at one time, each a little while under way."""
    found: list[Sandbox] = []

    async def one() -> None:
        async with scene.take() as sandbox:
            found.append(sandbox)
            assert not sandbox.dead
            await anyio.sleep(0.01)

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(one)
    return found


@both
@jumping
async def test_demand_raises_how_many_wait_and_idleness_lowers_and_clears_it(*, quick: bool) -> None:
    """Many after a burst, below the ceiling; fewer with every look; none, and no zygote, after a long pause."""
    async with a_scene(Fake(quick=quick)) as scene:
        await scene.call()
        few = len(await scene.settle())
        for _ in range(6):
            await burst(scene, state.MOST_READY)
            assert len(await scene.settle()) <= state.MOST_READY
        many = len(await scene.settle())
        assert few <= 2 < many <= state.MOST_READY
        fewer = len(await scene.settle(state.REVIEW_SECONDS * 8))
        assert 1 <= fewer < many
        assert len(await scene.settle(state.REVIEW_SECONDS * 40)) <= 2
        assert await scene.settle(state.IDLE_SECONDS) == []
        assert scene.driver.sources == 0
        assert scene.told() == ["opened", "cleared"]
        await scene.call()
        assert await scene.settle()
        assert scene.told() == ["opened", "cleared", "opened"]


@jumping
async def test_sandboxes_that_wait_take_a_bounded_share_of_what_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceiling follows the host, is on the record, and a call is served even where nothing may wait."""
    available = 8 * GIB
    monkeypatch.setattr(state, "_available_bytes", lambda: available)
    async with a_scene(Fake(bytes_each=GIB // 8)) as scene:
        for _ in range(5):
            await burst(scene, 40)
        assert len(await scene.settle()) == 8 * GIB // state.MEMORY_SHARE // (GIB // 8) == 8
        available = 2 * GIB
        assert len(await scene.settle(state.REVIEW_SECONDS)) <= 2
        assert scene.told() == ["opened", "limited"]
        assert scene.events[-1].most == 2
        available = 0
        assert await scene.settle(state.REVIEW_SECONDS) == []
        await scene.call()
        assert await scene.settle() == []
        available = 8 * GIB
        await scene.settle(state.REVIEW_SECONDS)
        await scene.call()
        assert await scene.settle()


@both
@pytest.mark.parametrize("where", ["source", "open"])
@jumping
async def test_a_source_that_fails_is_told_once_costs_no_call_and_recovers(where: str, *, quick: bool) -> None:
    """Calls get sandboxes of their own meanwhile; it is tried again, but not by every call."""
    problem = SandboxError("Preparing", "the daemon is down", "Start it.")
    async with a_scene(Fake(quick=quick)) as scene:
        driver = scene.driver
        driver.problem, driver.source_problem = (problem, None) if where == "open" else (None, problem)
        for _ in range(100):
            assert (await scene.call()).how == "cold"
        assert await scene.settle() == []
        assert len(driver.tried) == 1
        first, last = state.RETRY_SECONDS
        for _ in range(100):
            assert (await scene.call()).how == "cold"
            await scene.settle(first)
        waits = [round(after - before, 6) for before, after in zip(driver.tried, driver.tried[1:], strict=False)]
        assert waits == sorted(waits)
        assert first <= waits[0] <= 3 * first
        assert waits[-1] <= last + 2 * first
        assert [(event.what, event.reason) for event in scene.events if event.what == "failed"] == [
            ("failed", "Preparing: the daemon is down")
        ]
        driver.problem = driver.source_problem = None
        await scene.settle(last)
        await scene.call()
        waiting = await scene.settle()
        assert waiting
        assert await scene.call() in waiting
        assert scene.told()[-1] == "recovered"
        assert "cleared" not in scene.told()


@pytest.mark.long
@pytest.mark.parametrize("problem", [OSError(24, "Too many open files"), ValueError("nobody foresaw this")])
@both
@jumping
async def test_a_failure_nobody_foresaw_ends_no_call_and_no_server(problem: Exception, *, quick: bool) -> None:
    """A pool saves time: where it cannot, calls are what they were."""
    async with a_scene(Fake(quick=quick)) as scene:
        await scene.call()
        await scene.settle()
        scene.driver.problem = problem
        for _ in range(5):
            await scene.call()
            await scene.settle()
        assert "failed" in scene.told()


@both
@jumping
async def test_what_is_not_isolated_as_planned_is_given_to_nobody(*, quick: bool) -> None:
    """It is measured while it waits; the record says what was found."""
    async with a_scene(Fake(quick=quick, measured={"capabilities": 1 << 21})) as scene:
        async with scene.take() as sandbox:
            assert sandbox.how == "cold"  # which the broker measures against its own plan, and refuses
        assert await scene.settle() == []
        (failed,) = [event for event in scene.events if event.what == "failed"]
        assert "capabilities: planned 0x0, found 0x200000" in failed.reason
        scene.driver.measured = {}
        await scene.settle(state.RETRY_SECONDS[1])
        await scene.call()
        assert await scene.settle()


@both
@jumping
async def test_wherever_a_call_is_cancelled_its_sandbox_is_gone(*, quick: bool) -> None:
    """Before its first step, before its second, and so on until it is through; with none, one and two that wait."""
    for ready in range(3):
        async with a_scene(Fake(quick=quick)) as scene:
            if ready:
                await burst(scene, ready)
            for steps in range(200):
                done: list[Sandbox] = []

                async def one(done: list[Sandbox] = done, scene: Scene = scene) -> None:
                    async with scene.take() as sandbox:
                        await anyio.lowlevel.checkpoint()
                    done.append(sandbox)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(one)
                    for _ in range(steps):
                        await anyio.lowlevel.checkpoint()
                    tasks.cancel_scope.cancel()
                await scene.settle()
                assert all(each.how == "prepared" and not each.dead for each in scene.driver.live)
                assert len(scene.driver.live) <= state.MOST_READY
                if done:
                    break
            else:
                pytest.fail("the call never came through")
            assert steps > 3


@both
@jumping
async def test_wherever_the_server_is_stopped_nothing_is_left(*, quick: bool) -> None:
    """With a call under way, one on its way and the queue being filled; ``a_scene`` looks."""
    for steps in range(60):
        with anyio.CancelScope() as scope:
            async with a_scene(Fake(quick=quick)) as scene, anyio.create_task_group() as calls:
                for _ in range(3):
                    calls.start_soon(scene.call)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()


@both
@jumping
async def test_a_burst_larger_than_everything_loses_no_call(*, quick: bool) -> None:
    """Each gets one of its own; no more are started at one time than the machine can do."""
    async with a_scene(Fake(quick=quick)) as scene:
        for _ in range(3):
            found = await burst(scene, 200)
            assert len({each.id for each in found}) == 200
            assert len(await scene.settle()) <= state.MOST_READY
        assert scene.driver.at_once <= pools.MOST_STARTING
        assert "failed" not in scene.told()


@both
@jumping
async def test_what_differs_in_its_modules_alone_is_kept_as_long_as_either_is_used(*, quick: bool) -> None:
    """A call that wants no module keeps those ready for one that does, past idleness and past renewal."""
    other = replace(PLAN, spec=replace(PLAN.spec, preload=("module",)))
    async with a_scene(Fake(quick=quick)) as scene:
        scene.pool.prepare(scene.driver, other)
        queue = scene.pool.prepare(scene.driver, other)
        for _ in range(int(state.RENEW_SECONDS / 300) + 2):
            await scene.call()
            await scene.settle(300)
        assert queue.ready
        await scene.settle(state.IDLE_SECONDS + state.REVIEW_SECONDS)
        assert (len(queue.ready), scene.driver.sources) == (0, 0)
        await scene.call()
        await scene.settle()
        assert queue.ready


@both
@jumping
async def test_a_source_is_renewed_while_calls_that_use_it_finish(*, quick: bool) -> None:
    """What its forks share is shared for a bounded time; a call under way is not cut off."""
    async with a_scene(Fake(quick=quick)) as scene:
        await scene.call()
        old = await scene.settle()
        async with scene.take() as sandbox:
            assert sandbox in old
            for _ in range(int(state.RENEW_SECONDS / state.REVIEW_SECONDS) + 2):
                await scene.call()
                await scene.settle(state.REVIEW_SECONDS)
            assert not sandbox.dead
            assert len(scene.driver.tried) == 2
            new = await scene.settle()
            assert new
            assert not set(new) - {sandbox} & set(old)
        await scene.settle()
        assert scene.driver.sources == 1
        assert await scene.call() in new
        assert "failed" not in scene.told()


@jumping
async def test_a_source_that_failed_is_told_as_failed_also_while_a_call_still_uses_it() -> None:
    """The record is of the source that failed, and not of the one after it."""
    async with a_scene(Fake(quick=True)) as scene:
        await scene.call()
        await scene.settle()
        async with scene.take():
            scene.driver.problem = SandboxError("Preparing", "it broke", "")
            for each in await scene.settle():
                each.die()
            await scene.settle()
            scene.driver.problem = None
            await scene.settle(state.RETRY_SECONDS[1])
            await scene.call()
            await scene.settle()
        await scene.settle()
        assert scene.told() == ["opened", "failed", "recovered"]


@jumping
async def test_a_source_that_cannot_be_closed_takes_nothing_from_the_one_after_it() -> None:
    """It was replaced while a call still used it; what its end does is told, and is no end of the new one."""
    async with a_scene(Fake(quick=True)) as scene:
        await scene.call()
        await scene.settle()
        async with scene.take() as held:
            for _ in range(int(state.RENEW_SECONDS / state.REVIEW_SECONDS) + 2):
                await scene.call()
                waiting = set(await scene.settle(state.REVIEW_SECONDS)) - {held}
            assert waiting
            assert scene.driver.sources == 2
            scene.driver.close_problem = SandboxError("Stopping a zygote", "it will not end", "")
        assert waiting <= set(await scene.settle())
        scene.driver.close_problem = None
        assert await scene.call() in waiting
        assert (scene.driver.sources, len(scene.driver.tried)) == (1, 2)
        (failed,) = [event for event in scene.events if event.what == "failed"]
        assert failed.reason == "Stopping a zygote: it will not end"


@jumping
async def test_nothing_waits_in_a_queue_that_nobody_refills() -> None:
    """Also what was still being prepared when it was cleared."""
    async with a_scene(Fake(steps=5)) as scene:
        await scene.call()
        for _ in range(30):
            waiting = await scene.settle(state.RENEW_SECONDS / 30 - 0.5)
            for each in waiting:
                each.die()  # so that another is on its way at whatever moment
            await scene.call()
        assert await scene.settle(state.IDLE_SECONDS * 2) == []
        assert scene.driver.sources == 0


@jumping
async def test_plans_do_not_share_sandboxes_and_may_have_one_ready_before_the_first_call() -> None:
    """Two profiles, two queues; where a profile asks for it, one is ready before the first call."""
    other = replace(PLAN, spec=replace(PLAN.spec, output=True))
    async with a_scene() as scene:
        await scene.call()
        mine = await scene.settle()
        for _ in range(5):
            async with scene.pool.take(scene.driver, other, COLD) as proved:
                assert sandbox_of(proved) not in mine
            await scene.settle()
        assert await scene.call() is mine[0]
        assert len({event.plan_digest for event in scene.events}) == 2
    async with a_scene() as scene:
        assert await scene.settle() == []
        scene.pool.prepare(scene.driver, PLAN)
        (waiting,) = await scene.settle()
        assert await scene.call() is waiting
