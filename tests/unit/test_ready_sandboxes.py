"""Sandboxes that wait for calls: used once, never dead, never another's; and what fails costs a call nothing but time.

Sources, servers and the clock are in memory (``tests/fixtures/worker_scene.py``).
"""

from pathlib import Path

import pytest
from tests.fixtures.pools import PLAN
from tests.fixtures.worker_scene import LiveSandbox, Makes, Scene, Server, of, worker_scene

from glovebox_sandboxes.contract.base import WORKSPACE, Mount, Plan
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host.mounts import MountWatch
from glovebox_sandboxes.sharing import STARTING
from glovebox_sandboxes.worker import answering, queue

GIB = 2**30
both = pytest.mark.parametrize("quick", [False, True], ids=["starting", "forking"])
BROKEN = SandboxError("Preparing", "the daemon is down", "Start it.")


@both
def test_after_the_first_call_one_waits_and_the_next_call_gets_it(*, quick: bool) -> None:
    """Used once, and gone with its call; ready again for the one after."""
    with worker_scene(Makes(quick=quick)) as (scene, server):
        seen = set()
        server.call()
        for _ in range(20):
            waiting = scene.settle()
            used = server.call()
            assert used is waiting[0]
            assert used not in seen
            seen.add(used)
            scene.settle()
            assert used.dead
        assert server.told() == [("opened", "")]


@both
def test_what_can_wait_waits_for_a_call_that_is_under_way_but_not_for_long(*, quick: bool) -> None:
    """The next one is prepared, and a used one ended, between calls; or after a while without one."""
    for seconds, over in ((answering.DEFER_SECONDS / 2, False), (answering.DEFER_SECONDS * 1.5, True)):
        with worker_scene(Makes(quick=quick)) as (scene, server):
            for plan in (PLAN, of(output=True)):
                server.prepare(plan)
            scene.settle()
            other = server.ask(plan=of(output=True))
            before, used = scene.makes.made, server.call()
            assert used is not None
            scene.pass_time(seconds)
            assert (used.dead, scene.makes.made > before) == (over, over)
            server.end(other)
            scene.settle()
            assert used.dead
            assert scene.makes.made > before


def test_what_another_call_waits_for_does_not_wait() -> None:
    """A call that finds none ready is the reason to prepare one, whatever else is under way."""
    with worker_scene() as (scene, server):
        server.warm()
        began, held = scene.now, [server.ask() for _ in range(6)]
        scene.pass_time(6 * scene.makes.seconds)
        assert all(server.got(each) for each in held)
        assert scene.now < began + answering.DEFER_SECONDS


@both
@pytest.mark.parametrize("end", ["dead", "spoke"])
@pytest.mark.parametrize("seen", [True, False], ids=["before", "at once"])
def test_what_ended_or_spoke_unasked_is_replaced_and_given_to_nobody(end: str, seen: bool, *, quick: bool) -> None:
    """A guest that was asked nothing says nothing; whatever it is, it is not used, nor where nobody saw it yet."""
    with worker_scene(Makes(quick=quick)) as (scene, server):
        bad = server.warm()

        def happen() -> None:
            for each in bad:
                if end == "dead":
                    each.guest.close()
                else:
                    each.guest.send(b"x")

        if not seen:
            assert server.got(server.ask(meanwhile=happen)) not in bad
        else:
            happen()
            good = scene.settle()
            assert len(good) == len(bad)
            assert not {*good} & {*bad}
        for _ in range(10):
            assert server.call() not in bad
        scene.settle()
        assert all(each.dead for each in bad)


def mounted(directory: Path) -> Plan:
    """A plan with this workspace."""
    return of(mounts=(Mount(source=str(directory), target=WORKSPACE),))


@both
def test_a_replaced_workspace_is_never_seen_again(tmp_path: Path, *, quick: bool) -> None:
    """The same path, another directory: what waits has the old one mounted, and so has a zygote."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    plan = mounted(workspace)
    with worker_scene(Makes(quick=quick)) as (scene, server):
        old = server.warm(plan)
        assert {each.inode for each in old} == {workspace.stat().st_ino}
        workspace.rename(tmp_path / "before")
        workspace.mkdir()
        assert server.call(plan) is None
        for _ in range(20):
            new = scene.settle()
            assert {each.inode for each in new} == {workspace.stat().st_ino}
            assert server.call(plan) in new
        assert all(each.dead for each in old)


def test_a_call_does_not_wait_for_what_is_prepared_of_a_replaced_workspace(tmp_path: Path) -> None:
    """Those are for nobody: others are prepared beside them."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    with worker_scene(Makes(seconds=5)) as (scene, server):
        server.call(mounted(workspace))
        scene.pass_time(1)
        workspace.rename(tmp_path / "before")
        workspace.mkdir()
        began = scene.now
        assert server.call(mounted(workspace)) is None
        assert scene.now < began + 1
        scene.settle(10)
        assert [each.inode for each in scene.settle()] == [workspace.stat().st_ino] * 2


@both
def test_what_was_mounted_inside_the_workspace_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, quick: bool
) -> None:
    """None of those that wait is used; the driver then refuses, as for any call."""
    with worker_scene(Makes(quick=quick)) as (scene, server):
        plan = mounted(tmp_path)
        old = server.warm(plan)
        assert server.call(plan) in old
        old = scene.settle()
        monkeypatch.setattr(MountWatch, "inside", lambda *_: ("secret",))
        scene.makes.problem = scene.makes.source_problem = BROKEN
        assert server.call(plan) is None
        scene.settle()
        assert all(each.dead for each in old)


def burst(server: Server, count: int, keys: tuple[str, ...] = ("",)) -> list[LiveSandbox | None]:
    """So many calls at one time."""
    leases = [server.ask(keys[number % len(keys)]) for number in range(count)]
    found: list[LiveSandbox | None] = []
    while leases:
        lease = leases.pop(0)
        while not {"granted", "refused"} & {*server.said(lease)}:
            server.scene.pass_time(0.001)
        server.send(kind="started", lease=lease)
        found.append(server.got(lease))
        server.end(lease)
    return found


@both
def test_demand_raises_how_many_wait_and_idleness_lowers_and_clears_it(*, quick: bool) -> None:
    """Many after a burst, below the ceiling; fewer with every look; none, and no zygote, after a long pause."""
    with worker_scene(Makes(quick=quick)) as (scene, server):
        server.call()
        few = len(scene.settle())
        for _ in range(6):
            burst(server, queue.MOST_READY)
            assert len(scene.settle()) <= queue.MOST_READY
        many = len(scene.settle())
        assert few <= 2 < many <= queue.MOST_READY
        fewer = len(scene.settle(queue.REVIEW_SECONDS * 8))
        assert 1 <= fewer < many
        assert len(scene.settle(queue.REVIEW_SECONDS * 40)) <= 2
        assert scene.settle(queue.IDLE_SECONDS) == []
        assert scene.makes.sources == 0
        assert [what for what, _ in server.told()] == ["opened", "cleared"]
        assert server.warm()
        assert [what for what, _ in server.told()] == ["opened", "cleared", "opened"]


def test_sandboxes_that_wait_take_a_bounded_share_of_what_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceiling follows the host, is on the record, and a call is served even where nothing may wait."""
    available = 8 * GIB
    monkeypatch.setattr(queue, "_available_bytes", lambda: available)
    with worker_scene(Makes(quick=False, bytes_each=GIB // 8)) as (scene, server):
        server.warm()
        burst(server, 16)
        assert len(scene.settle()) == 8 * GIB // queue.MEMORY_SHARE // (GIB // 8) == 8
        available = 2 * GIB
        assert len(scene.settle(queue.REVIEW_SECONDS)) <= 2
        assert [what for what, _ in server.told()] == ["opened", "limited"]
        assert server.heard[-1]["most"] == 2
        available = 0
        assert scene.settle(queue.REVIEW_SECONDS) == []
        assert server.call() is None
        assert scene.settle() == []
        available = 8 * GIB
        scene.settle(queue.REVIEW_SECONDS)
        assert server.warm()


@both
@pytest.mark.parametrize("where", ["source", "make"])
def test_a_source_that_fails_is_told_once_costs_no_call_and_recovers(where: str, *, quick: bool) -> None:
    """Calls start sandboxes of their own meanwhile; it is tried again, but not by every call."""
    with worker_scene(Makes(quick=quick)) as (scene, server):
        makes = scene.makes
        makes.problem, makes.source_problem = (BROKEN, None) if where == "make" else (None, BROKEN)
        assert [server.call() for _ in range(100)] == [None] * 100
        first, last = queue.RETRY_SECONDS
        assert len(makes.tried) == 1
        for _ in range(100):
            assert server.call() is None
            scene.settle(first)
        waits = [round(after - before, 1) for before, after in zip(makes.tried, makes.tried[1:], strict=False)]
        assert waits == sorted(waits)
        assert first <= waits[0] <= 3 * first
        assert waits[-1] <= last + 2 * first
        assert server.told()[-1] == ("failed", "Preparing: the daemon is down")
        assert [what for what, _ in server.told()].count("failed") == 1
        makes.problem = makes.source_problem = None
        scene.settle(last)
        waiting = server.warm()
        assert server.call() in waiting
        assert server.told()[-1][0] == "recovered"
        assert "cleared" not in dict(server.told())


def test_a_failure_of_what_was_replaced_meanwhile_is_none(tmp_path: Path) -> None:
    """A covered file was replaced while one was prepared: others are prepared at once."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    with worker_scene(Makes(seconds=2)) as (scene, server):
        plan = mounted(workspace)
        server.call(plan)
        scene.pass_time(1)
        workspace.rename(tmp_path / "before")
        workspace.mkdir()
        scene.makes.problem = BROKEN
        scene.pass_time(2)
        scene.makes.problem = None
        server.call(plan)
        assert scene.settle(3)
        assert "failed" not in dict(server.told())


def stages(scene: Scene, server: Server) -> list[int]:
    """Calls at every stage: with a sandbox, one for which it has to start one, and two that wait for a turn."""
    server.warm()
    leases = [server.ask("key", bound=3), *(server.ask("key", bound=3) for _ in range(4))]
    leases.append(server.ask("other", of(output=True)))
    return leases


@both
def test_wherever_a_call_ends_or_its_server_goes_nothing_of_it_is_left(*, quick: bool) -> None:
    """At each stage, in each order; other servers' calls go on."""
    for first in range(6):
        with worker_scene(Makes(quick=quick)) as (scene, server):
            other = scene.server()
            leases = stages(scene, server)
            mine = other.ask("mine")
            for lease in (*leases[first:], *leases[:first]):
                server.end(lease)
                scene.pass_time(first / 1000)
            scene.settle()
            again = stages(scene, server)
            assert again
            server.close()
            scene.settle()
            assert {*other.said(mine)} & {"granted", "refused"}
            ready = [each.made for found in scene.queues.values() for each in found.ready]
            assert {*scene.makes.live} <= {*ready, other.got(mine)}


def test_a_call_whose_server_says_nothing_more_is_ended() -> None:
    """Some time after its deadline, with its turn: also where it was to start a sandbox itself."""
    with worker_scene() as (scene, server):
        server.ask()
        scene.settle()
        server.ask()
        scene.settle(140)
        assert (scene.worker.turns._turns, scene.worker.starts._turns) == ({}, {})


@both
def test_a_burst_larger_than_everything_loses_no_call(*, quick: bool) -> None:
    """Each gets one of its own, or its turn to start one; no more are made at one time than the machine can do."""
    with worker_scene(Makes(quick=quick)) as (scene, server):
        for _ in range(3):
            found = [each for each in burst(server, 200) if each is not None]
            assert len({*found}) == len(found)
            assert len(scene.settle()) <= queue.MOST_READY
        assert quick or scene.makes.at_once <= STARTING
        assert "failed" not in dict(server.told())


@both
def test_what_differs_in_its_modules_alone_is_kept_as_long_as_either_is_used(*, quick: bool) -> None:
    """A call that wants no module keeps those ready for one that does, past idleness and past renewal."""
    other = of(preload=("module",))
    with worker_scene(Makes(quick=quick)) as (scene, server):
        server.prepare(other)
        scene.settle()
        found = scene.queues["fake", other.digest]
        for _ in range(int(queue.RENEW_SECONDS / 300) + 2):
            server.call()
            scene.settle(300)
        assert found.ready
        scene.settle(queue.IDLE_SECONDS + queue.REVIEW_SECONDS)
        assert (len(found.ready), scene.makes.sources) == (0, 0)
        server.warm()
        assert found.ready


@both
def test_a_source_is_renewed_while_calls_that_use_it_finish(*, quick: bool) -> None:
    """What its forks share is shared for a bounded time; a call under way is not cut off by that."""
    with worker_scene(Makes(quick=quick)) as (scene, server):
        (old,) = server.warm()[:1]
        for _ in range(5):
            scene.settle(queue.RENEW_SECONDS / 5 - 4 * queue.REVIEW_SECONDS / 5)
            server.warm()
        held = server.ask()
        mine = server.got(held)
        assert mine is not None
        for _ in range(5):
            server.call()
            scene.settle(queue.REVIEW_SECONDS)
        assert mine in scene.makes.live
        assert len(scene.makes.tried) >= 2
        new = scene.settle()
        assert old not in new
        server.end(held)
        scene.settle()
        assert mine not in scene.makes.live
        assert scene.makes.sources == 1
        assert "failed" not in dict(server.told())


def test_a_source_that_failed_is_told_as_failed_also_while_a_call_still_uses_it() -> None:
    """The record is of the source that failed, and not of the one after it."""
    with worker_scene() as (scene, server):
        server.warm()
        held = server.ask()
        scene.makes.problem = BROKEN
        for each in scene.settle():
            each.guest.close()
        scene.settle()
        scene.makes.problem = None
        scene.settle(queue.RETRY_SECONDS[1])
        server.warm()
        server.end(held)
        scene.settle()
        assert [what for what, _ in server.told()] == ["opened", "failed", "recovered"]


def test_a_source_that_cannot_be_closed_takes_nothing_from_the_one_after_it(tmp_path: Path) -> None:
    """It was replaced while a call still used it; what its end does is told, and is no end of the new one."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    with worker_scene() as (scene, server):
        plan = mounted(workspace)
        server.warm(plan)
        held = server.ask(plan=plan)
        workspace.rename(tmp_path / "before")
        workspace.mkdir()
        server.call(plan)
        waiting = server.warm(plan)
        assert waiting
        assert scene.makes.sources == 2
        scene.makes.close_problem = SandboxError("Stopping a zygote", "it will not end", "")
        server.end(held)
        assert {*waiting} <= {*scene.settle()}
        scene.makes.close_problem = None
        assert server.call(plan) in waiting
        assert (scene.makes.sources, len(scene.makes.tried)) == (1, 2)


@both
def test_plans_do_not_share_sandboxes_and_may_have_one_ready_before_the_first_call(*, quick: bool) -> None:
    """Two profiles, two queues; where a profile asks for it, one is ready before the first call."""
    with worker_scene(Makes(quick=quick)) as (scene, server):
        assert scene.settle() == []
        server.prepare(PLAN)
        (waiting,) = scene.settle()
        for _ in range(5):
            assert server.call(of(output=True)) is not waiting
            scene.settle()
        assert server.call() is waiting


@both
def test_those_with_other_covers_go_and_all_else_stays(*, quick: bool) -> None:
    """Long before they would be idle, except for the call under way; the control differs in what it may write."""
    covered, writes = of(masks=(".env",)), of(masks=(".env",), output=True)
    with worker_scene(Makes(quick=quick)) as (scene, server):
        for plan in (covered, writes):
            server.warm(plan)
        gone, kept = (scene.queues["fake", each.digest] for each in (covered, writes))
        assert gone.ready
        held = server.ask(plan=covered)
        server.call(of(masks=(".env", "b/.env")))
        scene.settle(queue.REVIEW_SECONDS)
        assert not gone.ready
        assert kept.ready
        mine = server.got(held)
        assert mine is not None
        assert not mine.dead
        server.end(held)
        scene.settle()
        assert server.warm(covered)


@both
def test_what_is_ready_of_a_plan_that_is_not_in_effect_any_more_is_dropped(*, quick: bool) -> None:
    """At once, not when it is idle; a call under way keeps its own, and other plans theirs (the control)."""
    other = of(output=True)
    with worker_scene(Makes(quick=quick)) as (scene, server):
        for plan in (PLAN, other):
            server.warm(plan)
        dropped, kept = (scene.queues["fake", each.digest] for each in (PLAN, other))
        held = server.ask()
        scene.settle()
        assert dropped.ready
        for digest in (PLAN.digest, "sha256:unknown"):
            server.send(kind="drop", plan=digest)
        ready = scene.settle()
        assert (len(dropped.ready), len(ready)) == (0, len(kept.ready))
        assert kept.ready
        mine = server.got(held)
        assert mine is not None
        assert not mine.dead
        server.end(held)
        assert len(scene.settle()) == len(kept.ready)
        assert ("cleared", "unused for a while, or started anew") in server.told()
        assert server.warm()  # where it is used again, it is prepared again


def test_a_workspace_whose_secrets_come_and_go_leaves_no_queues_behind() -> None:
    """No more than those of one pause between two reviews."""
    with worker_scene() as (scene, server):
        most = 0
        for number in range(40):
            server.call(of(masks=(f"{number}.env",)))
            scene.settle(queue.REVIEW_SECONDS)
            most = max(most, len(scene.queues))
        assert most <= 3
