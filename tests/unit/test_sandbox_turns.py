"""Ready sandboxes, turns and processors are shared out by key, over all servers; everything is in memory."""

from typing import Any

import pytest
from tests.fixtures.pools import PLAN
from tests.fixtures.worker_scene import Makes, worker_scene

from glovebox_sandboxes.sharing import RUNNING


def test_the_last_one_ready_is_left_for_others() -> None:
    """M7: a key with many calls waits for the next one, and another key's call finds one ready."""
    for shared in (True, False):
        with worker_scene() as (scene, server):
            server.shared = shared
            server.call()
            for _ in range(10):
                server.ask("greedy")
                scene.settle()
            greedy = server.ask("greedy")
            peer = server.ask("peer")
            # The control: where there is one key only, who comes first takes it.
            assert ("waiting" in server.said(greedy), "waiting" in server.said(peer)) == (shared, not shared)


def test_of_those_who_wait_the_one_with_the_fewest_calls_is_next() -> None:
    """M7: calls of one key wait for sandboxes, then one of another: it gets the first that is ready."""
    with worker_scene(Makes(seconds=0.1)) as (scene, server):
        server.shared = True
        server.warm()
        greedy = [server.ask("greedy") for _ in range(8)]
        peer = server.ask("peer")
        while not server.got(peer):
            scene.pass_time(0.01)
        assert sum(server.got(each) is not None for each in greedy) <= 2


def test_a_call_that_waits_for_what_others_may_have_gets_it_once_it_is_left_over() -> None:
    """M7: some stand ready, left for other keys, so none is prepared for the next call; it goes on as others end."""
    with worker_scene() as (scene, server):
        server.shared = True
        server.call()
        held = []
        for _ in range(6):
            held.append(server.ask("greedy"))
            scene.settle()
        server.end(server.ask("greedy"))  # one more is prepared for it, and it goes away
        scene.settle()
        last = server.ask("greedy")
        scene.pass_time(0.001)
        assert server.got(last) is None
        for lease in held:
            server.end(lease)
        scene.settle()
        assert server.got(last)


def test_more_sandboxes_are_not_more_of_the_processors() -> None:
    """M7: twelve of one key, over two servers, have a sixteenth each, another's the whole default."""
    with worker_scene() as (scene, first):
        servers = [first, scene.server(shared=True)]
        servers[0].call()
        scene.settle()
        mine = servers[0].ask("peer")
        leases = []
        for number in range(10):
            leases.append((servers[number % 2], servers[number % 2].ask("greedy")))
            scene.settle()
        greedy = [server.got(lease) for server, lease in leases]
        peer = servers[0].got(mine)
        assert peer is not None
        assert [each and each.parts for each in greedy] == [16] * 10
        assert peer.parts == 1
        for server, lease in leases[2:]:
            server.end(lease)
        assert [each and each.parts for each in greedy[:2]] == [2, 2]


def test_turns_hold_across_servers() -> None:
    """No more run at one time than may, a key leaves some for others, and its bound holds wherever its calls come."""
    with worker_scene() as (scene, first):
        servers = [first, scene.server(), scene.server()]
        alone = [first.ask("alone") for _ in range(RUNNING)]
        assert all("queued" not in first.said(each) for each in alone)  # the control: nobody shares
        for lease in alone:
            first.end(lease)
        servers[1].shared = True
        leases = [(servers[number % 3], servers[number % 3].ask("greedy")) for number in range(20)]
        scene.settle()
        running = [each for each in leases if "queued" not in each[0].said(each[1])]
        assert len(running) == RUNNING * 3 // 4
        bounded = [servers[number].ask("bounded", bound=2) for number in range(3)]
        scene.settle()
        assert ["queued" in server.said(lease) for server, lease in zip(servers, bounded, strict=True)] == [0, 0, 1]
        servers[0].end(bounded[0])
        scene.settle()
        assert {"granted", "refused"} & {*servers[2].said(bounded[2])}


def test_who_waits_is_not_kept_waiting_by_what_is_left_for_others() -> None:
    """Many stand ready and are reserved: one is prepared for each who waits all the same."""
    with worker_scene() as (scene, server):
        server.shared = True
        server.prepare()
        scene.settle()
        for lease in [server.ask("before") for _ in range(12)]:
            scene.settle()
            server.end(lease)
        assert len(scene.settle()) > 8
        leases = [server.ask("greedy") for _ in range(12)]
        scene.settle()
        assert all(server.got(each) for each in leases)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": "x"}, {"seconds": float("nan")}, {"seconds": -1.0}, {"bound": "x"}, {"bound": 0}, {"bound": True},
        {"key": ["a"]}, {"plan": 1}, {"lease": 1}, {"lease": "1"},
        {"kind": "prepare", "driver": "fake", "shared": None},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_lease_ends_its_server_alone(wrong: dict[str, Any]) -> None:
    """With all of its calls, those that wait for a turn first; others' calls go on, and get the turns that it had."""
    with worker_scene() as (scene, server):
        server.warm()
        bad = scene.server()
        held = [server.ask(f"key{number}") for number in range(6)]
        for _ in range(12):
            bad.ask("bad")
        waiting = [server.ask(f"key{number}") for number in range(6)]
        scene.settle()
        right = {"kind": "lease", "lease": 100, "plan": PLAN.digest, "key": "", "seconds": 1.0, "bound": None}
        bad.send(**{**right, **wrong})
        scene.settle()
        assert all({"granted", "refused"} & {*server.said(each)} for each in (*held, *waiting))
        with pytest.raises(ConnectionError):
            bad.send(**right)
