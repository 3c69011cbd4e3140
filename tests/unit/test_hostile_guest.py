"""A guest that keeps its server busy, in processor time, and the loop that measures its own stalls."""

import gc
import time
from collections.abc import Iterator

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from tests.fixtures.wire_peers import frame, opening, running
from tests.perf import stalls_guest
from tests.perf.stalls import BOUND_MS

from _glovebox_guest.wire import WINDOW
from glovebox_server import event_loop

INPUTS = list(stalls_guest.inputs())


@pytest.fixture
def processor_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(event_loop, "monotonic", time.thread_time)
    yield
    gc.unfreeze()


@pytest.mark.long
@pytest.mark.usefixtures("processor_time")
@pytest.mark.parametrize(("before", "after"), [each[1:] for each in INPUTS], ids=[each[0] for each in INPUTS])
def test_whatever_a_guest_says_others_have_their_turn(before: bytes, after: bytes) -> None:
    """Before its job and after it; the control is below."""
    assert 0 < stalls_guest.stall(before, after) < BOUND_MS


@pytest.mark.usefixtures("processor_time")
def test_a_flood_of_tiny_frames_that_is_read_at_once_is_a_stall() -> None:
    """The control: the same 100,000 frames as above, as they were read before."""

    async def read() -> float | None:
        host, _ = running()
        event_loop.restart()
        assert len(host.receive(opening(1) + frame(3, 1, b"x") * (WINDOW // 10))) > 100_000
        await anyio.lowlevel.checkpoint()
        return event_loop.longest_stall_ms()

    stalled = event_loop.run(read)
    assert stalled is not None
    assert stalled > BOUND_MS


def test_the_longest_time_without_a_turn_is_measured() -> None:
    """What one callback takes, and not what nobody has to do: a wait is no stall (control)."""

    async def main() -> list[float | None]:
        event_loop.restart()
        await anyio.sleep(0.2)
        waited = event_loop.longest_stall_ms()
        time.sleep(0.1)  # noqa: ASYNC251 - the stall
        await anyio.lowlevel.checkpoint()
        stalled = event_loop.longest_stall_ms()
        event_loop.restart()
        return [waited, stalled, event_loop.longest_stall_ms()]

    waited, stalled, again = event_loop.run(main)
    assert waited is not None
    assert stalled is not None
    assert waited < 90
    assert 100 <= stalled < 190
    assert again == 0


def test_a_thread_that_holds_the_interpreter_is_a_stall_too() -> None:
    """The loop was to come back after a millisecond, and could not: reading in a thread helps nobody."""

    async def main() -> float | None:
        event_loop.restart()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, lambda: sum([0] * 30_000_000))
            for _ in range(50):
                await anyio.sleep(0.001)
        return event_loop.longest_stall_ms()

    stalled = event_loop.run(main)
    assert stalled is not None
    assert stalled > 20


def test_another_loop_is_not_measured() -> None:
    async def main() -> float | None:
        event_loop.restart()
        return event_loop.longest_stall_ms()

    assert anyio.run(main) is None
