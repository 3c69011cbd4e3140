"""The loop that measures its own stalls."""

import time

import anyio
import anyio.lowlevel
import anyio.to_thread

from glovebox_server import event_loop


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
