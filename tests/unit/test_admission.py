"""How many calls may be under way, and what the one too many is told."""

import anyio
import anyio.lowlevel
import pytest

from glovebox_server.broker import admission
from glovebox_server.broker.admission import Admission
from glovebox_server.errors import Refused


async def test_calls_run_in_order_and_never_more_than_promised() -> None:
    """Ten calls, two turns: two at a time, first come first served."""
    gate, running, order = Admission(running=2), 0, []

    async def one(number: int) -> None:
        nonlocal running
        async with gate.enter("p", "tool", {"n": number}):
            running += 1
            assert running <= 2
            order.append(number)
            await anyio.lowlevel.checkpoint()
            running -= 1

    async with anyio.create_task_group() as tasks:
        for number in range(10):
            tasks.start_soon(one, number)
    assert order == list(range(10))


async def test_one_principal_cannot_take_all_places() -> None:
    """M7: the bound is per principal; another one still gets in; a place that is left is free again."""
    gate = Admission(running=8, per_principal=2)
    async with gate.enter("alice", "t", {"n": 1}):
        async with gate.enter("alice", "t", {"n": 2}):
            with pytest.raises(Refused, match="2 calls of yours") as raised:
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
                with pytest.raises(Refused, match="already running") as raised:
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
    """A turn that never comes is a refusal, and the place is free afterwards."""
    monkeypatch.setattr(admission, "WAIT_SECONDS", 0.01)
    gate = Admission(running=1, per_principal=2)
    async with gate.enter("alice", "t", {"n": 1}):
        for _ in range(3):
            with pytest.raises(Refused, match="no turn came") as raised:
                async with gate.enter("alice", "t", {"n": 2}):
                    pass
            assert raised.value.rule == "busy.waiting"


async def test_a_caller_that_leaves_while_waiting_leaves_no_trace() -> None:
    """Cancelled in the queue: neither a place nor a turn is lost."""
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
