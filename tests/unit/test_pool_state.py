"""How many prepared sandboxes are wanted, and what becomes of those whose covers or sources are others by now."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.fixtures.pools import COLD, PLAN, Fake, Scene, a_scene, jumping, sandbox_of
from tests.unit.test_pool import mounted

from glovebox_sandboxes.contract.base import Plan
from glovebox_sandboxes.pool import pool as pools
from glovebox_sandboxes.pool.ready_queue import MOST_READY, ReadyQueue


@contextmanager
def demand(calls: int = 0, over: int = 0, capacity: int = MOST_READY) -> Iterator[ReadyQueue]:
    """After so many calls at one time, of which so many are over."""
    unused: Any = None
    found = ReadyQueue(unused, PLAN, unused, [])
    found.capacity = capacity
    with ExitStack() as under_way, ExitStack() as ended:
        for number in range(calls):
            (ended if number < over else under_way).enter_context(found.in_use("key"))
        ended.close()
        yield found


@pytest.mark.parametrize(
    ("calls", "capacity", "wanted"),
    [(0, MOST_READY, 1), (1, MOST_READY, 2), (5, MOST_READY, 6), (5, 3, 3), (5, 0, 0), (100, 100, MOST_READY + 1)],
)
async def test_as_many_are_wanted_as_calls_ran_at_one_time_and_one_for_the_next(
    calls: int, capacity: int, wanted: int
) -> None:
    """As far as memory allows; a burst is remembered for as many as may be ready."""
    with demand(calls, calls, capacity) as found:
        assert found.wanted == wanted


@pytest.mark.parametrize(
    ("calls", "counts", "missing"),
    [
        ((0, 0), (0, 0, 0), 1),
        ((0, 0), (1, 0, 0), 0),
        ((0, 0), (0, 1, 0), 0),
        ((3, 3), (1, 0, 0), 3),  # nobody runs: all that is wanted
        ((3, 3), (1, 2, 0), 1),
        ((3, 2), (0, 0, 0), 1),  # a call runs: the next one alone
        ((3, 2), (1, 0, 0), 0),
        ((3, 0), (0, 0, 2), 3),  # and one for each that waits
        ((3, 0), (0, 2, 2), 1),
        ((3, 3), (6, 0, 0), -2),
    ],
)
async def test_what_is_missing(calls: tuple[int, int], counts: tuple[int, int, int], missing: int) -> None:
    """While calls run, which it would slow down, one is prepared and no more, but for calls that wait."""
    ready, preparing, waiters = counts
    found: Any
    with demand(*calls) as found:
        found.ready.extend(range(ready))
        found._waiters.extend(range(waiters))
        assert found.missing(preparing) == missing
        found._waiters.clear()


async def test_a_review_forgets_demand_step_by_step_and_says_once_when_memory_limits() -> None:
    """Not below the calls under way, nor more than may be ready; not where memory limits nobody (control)."""
    peaks = []
    with demand(5, 3) as found:
        for _ in range(5):
            assert not found.review(MOST_READY)
            peaks.append(found.peak)
    assert peaks == [4, 3, 2, 2, 2]
    with demand(100) as found:
        found.review(MOST_READY)
        assert found.peak == MOST_READY
    with demand(5, 5) as found:
        assert not found.review(5)
        assert found.review(3)
        assert not found.review(3)
        assert found.wanted == 3
        assert not found.review(MOST_READY)


async def test_a_queue_knows_when_it_was_last_used() -> None:
    """By the beginning of a call, and by its end."""
    before = anyio.current_time()
    with demand() as found:
        with found.in_use("key"):
            begun = found.used_at
            await anyio.sleep(0.001)
        assert before <= begun < found.used_at


async def steps(count: int) -> None:
    """Turns of the event loop."""
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


@jumping
async def test_a_call_does_not_wait_for_what_is_prepared_of_a_replaced_workspace(tmp_path: Path) -> None:
    """Those are for nobody: others are prepared beside them."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    driver = Fake(quick=True, steps=200)
    async with a_scene(driver, mounted(workspace)) as scene:
        queue = scene.pool.prepare(driver, scene.plan)
        queue.peak = 5
        await steps(60)
        workspace.rename(tmp_path / "before")
        workspace.mkdir()
        queue._changed.set()
        await steps(20)
        scene.pool.prepare(driver, scene.plan)
        await steps(20)
        before = anyio.current_time()
        async with scene.take() as sandbox:
            assert sandbox.how == "prepared"
            assert anyio.current_time() - before < 1


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
