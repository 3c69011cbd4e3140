"""How many calls may be under way, and what the one too many is told."""

from collections import Counter

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.guards.admission import admission
from glovebox_server.guards.admission.admission import Admission


class Hall:
    """Calls that stay until they are told to go."""

    def __init__(self, gate: Admission, tasks: anyio.abc.TaskGroup) -> None:
        self.gate = gate
        self.tasks = tasks
        self.running: list[tuple[str, anyio.Event]] = []
        self.refused: Counter[str] = Counter()
        self._made = 0

    async def come(self, principal: str, calls: int, turns: int | None = None) -> None:
        for _ in range(calls):
            self._made += 1
            self.tasks.start_soon(self._one, principal, self._made, turns)
        await anyio.wait_all_tasks_blocked()

    async def end(self, principal: str) -> None:
        which = next(each for each in self.running if each[0] == principal)
        which[1].set()
        await anyio.wait_all_tasks_blocked()

    async def _one(self, principal: str, number: int, turns: int | None) -> None:
        me = principal, anyio.Event()
        try:
            async with self.gate.enter(principal, "run_python", {"n": number}, turns):
                self.running.append(me)
                await me[1].wait()
                self.running.remove(me)
        except RefusedError as problem:
            self.refused[problem.rule] += 1

    @property
    def taken(self) -> Counter[str]:
        return Counter(principal for principal, _ in self.running)


async def test_one_principal_leaves_turns_for_others() -> None:
    """M7, with the numbers that ship: 300 calls of one principal get twelve turns of 16, and others one at once."""
    async with anyio.create_task_group() as tasks:
        hall = Hall(Admission(shared=True), tasks)
        await hall.come("alice", 300)
        assert hall.taken == {"alice": 12}
        assert hall.refused == {"busy.calls": 300 - 256}
        await hall.come("bob", 10)
        await hall.come("carol", 10)
        assert hall.taken == {"alice": 12, "bob": 3, "carol": 1}
        # From here on turns that end go to those who have fewer, until all who want more have as many; one is left.
        await hall.come("dave", 2)
        await hall.end("alice")
        assert hall.taken["dave"] == 1
        for _ in range(6):
            await hall.end("alice")
        assert hall.taken == {"alice": 5, "bob": 4, "carol": 4, "dave": 2}
        tasks.cancel_scope.cancel()


async def test_a_role_with_fewer_turns_has_no_more_of_them_at_work() -> None:
    """Its further calls wait, and take no turn meanwhile; the control is one whose role says nothing."""
    async with anyio.create_task_group() as tasks:
        hall = Hall(Admission(shared=True), tasks)
        await hall.come("alice", 5, turns=2)
        await hall.come("bob", 5)
        assert hall.taken == {"alice": 2, "bob": 5}
        await hall.end("alice")
        assert hall.taken == {"alice": 2, "bob": 5}
        for _ in range(4):
            await hall.end("alice")
        assert hall.taken == {"bob": 5}
        await hall.come("alice", 3, turns=2)
        assert hall.taken["alice"] == 2
        tasks.cancel_scope.cancel()


async def test_of_several_roles_of_a_principal_the_one_with_the_fewest_turns_counts() -> None:
    """Never more at work than the role of any allows, in order of arrival; the control is another principal."""
    async with anyio.create_task_group() as tasks:
        hall = Hall(Admission(shared=True), tasks)
        await hall.come("alice", 3, turns=2)
        await hall.come("alice", 8, turns=5)
        assert hall.taken == {"alice": 2}
        await hall.come("bob", 4, turns=8)
        assert hall.taken == {"alice": 2, "bob": 4}
        for _ in range(2):
            await hall.end("alice")
            assert hall.taken["alice"] == 2  # the third of two turns, and beside it the first of five
        await hall.end("alice")
        assert hall.taken["alice"] == 5
        await hall.come("alice", 1, turns=2)
        # The three of five that came before it, then it waits until it may be the second.
        for left in (5, 5, 5, 4, 3, 2, 2):
            await hall.end("alice")
            assert hall.taken["alice"] == left
        tasks.cancel_scope.cancel()


async def test_a_call_that_gives_up_keeps_nobody_waiting_behind_it() -> None:
    """It waited for its role's turn; the one behind it, of a role with more, comes at once."""
    gate, order = Admission(), list[str]()

    async def one(name: str, turns: int, *, task_status: anyio.abc.TaskStatus[anyio.CancelScope]) -> None:
        with anyio.CancelScope() as scope:
            task_status.started(scope)
            async with gate.enter("alice", "tool", {"n": name}, turns):
                order.append(name)
                await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        await tasks.start(one, "eight", 8)
        strict = await tasks.start(one, "one", 1)
        await tasks.start(one, "eight again", 8)
        await anyio.wait_all_tasks_blocked()
        assert order == ["eight"]
        strict.cancel()
        await anyio.wait_all_tasks_blocked()
        assert order == ["eight", "eight again"]
        tasks.cancel_scope.cancel()


async def test_a_principal_that_is_alone_has_every_turn() -> None:
    """The control, and what stdio and the command line have: nothing is kept, and one that comes then waits."""
    async with anyio.create_task_group() as tasks:
        hall = Hall(Admission(), tasks)
        await hall.come("alice", 250)
        await hall.come("bob", 1)
        assert hall.taken == {"alice": 16}
        # Even then not behind all of hers.
        await hall.end("alice")
        assert hall.taken == {"alice": 15, "bob": 1}
        tasks.cancel_scope.cancel()


async def test_one_principal_cannot_take_all_places() -> None:
    """M7: the bound is per principal; another one still gets in; a place that is left is free again."""
    gate = Admission(running=8, per_principal=2)
    async with gate.enter("alice", "t", {"n": 1}):
        async with gate.enter("alice", "t", {"n": 2}):
            with pytest.raises(RefusedError, match="2 calls of yours") as raised:
                async with gate.enter("alice", "t", {"n": 3}):
                    pass
            assert raised.value.rule == "busy.calls"
            async with gate.enter("bob", "t", {"n": 3}):
                pass
        async with gate.enter("alice", "t", {"n": 3}):
            pass


async def test_retries_of_a_running_call_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """M7: two tries that are old and still running are enough; another call, or another caller, is not affected."""
    now = 0.0
    monkeypatch.setattr(anyio, "current_time", lambda: now)
    gate = Admission(running=16)
    same = {"code": "while True: pass"}
    async with gate.enter("alice", "t", same):
        now = 60.0
        async with gate.enter("alice", "t", same):
            now = 65.0
            async with gate.enter("alice", "t", same):  # the second try is too young to be given up
                now = 120.0
                with pytest.raises(RefusedError, match="already running") as raised:
                    async with gate.enter("alice", "t", same):
                        pass
                assert raised.value.rule == "busy.retries"
                async with gate.enter("alice", "t", {"code": "1"}), gate.enter("bob", "t", same):
                    pass


async def test_identical_calls_at_one_time_are_no_retries() -> None:
    """The control: a client that wants the same thing eight times at once gets it."""
    gate = Admission(running=16)
    async with anyio.create_task_group() as tasks:

        async def one() -> None:
            async with gate.enter("alice", "t", {"code": "1"}):
                await anyio.lowlevel.checkpoint()

        for _ in range(8):
            tasks.start_soon(one)


async def test_waiting_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "WAIT_SECONDS", 0.01)
    gate = Admission(running=1, per_principal=2)
    async with gate.enter("alice", "t", {"n": 1}):
        for _ in range(3):
            with pytest.raises(RefusedError, match="no turn came") as raised:
                async with gate.enter("alice", "t", {"n": 2}):
                    pass
            assert raised.value.rule == "busy.waiting"


async def test_a_caller_that_leaves_while_waiting_leaves_no_trace() -> None:
    gate = Admission(running=1, per_principal=2)

    async def wait() -> None:
        async with gate.enter("alice", "t", {"n": 2}):
            raise AssertionError("never reached")

    async with gate.enter("alice", "t", {"n": 1}), anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    async with gate.enter("alice", "t", {"n": 3}), anyio.create_task_group():
        pass
    assert not gate._calls
