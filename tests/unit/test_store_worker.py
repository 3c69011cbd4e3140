"""The thread of a store: what it is given is done in order, and a cancelled caller knows whether it was."""

import asyncio
import threading
from collections.abc import Iterator

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from glovebox_server.stores.database import Worker

NAME = "glovebox-tried"


@pytest.fixture
def worker() -> Iterator[Worker]:
    """One that ends with the test."""
    found = Worker(NAME)
    yield found
    found.close()
    assert NAME not in {each.name.removesuffix("_0") for each in threading.enumerate()}


class Held:
    """Work that says that it has begun, and waits for the test."""

    def __init__(self) -> None:
        """Begin with neither."""
        self.begun, self.go_on, self.ended = threading.Event(), threading.Event(), False

    def __call__(self) -> str:
        """Wait."""
        self.begun.set()
        assert self.go_on.wait(10)
        self.ended = True
        return "done"


async def test_what_it_is_given_is_done_in_order_in_one_thread_that_ends(worker: Worker) -> None:
    """Its thread begins with the first; what was raised is raised to whoever asked, and the next is done."""
    assert NAME not in {each.name.removesuffix("_0") for each in threading.enumerate()}
    done: list[int] = []

    async def one(number: int) -> None:
        def work() -> str:
            done.append(number)
            return threading.current_thread().name

        assert await worker.run(work) == f"{NAME}_0"

    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(one, number)
    assert done == list(range(50))
    with pytest.raises(ZeroDivisionError):
        await worker.run(lambda: 1 / 0)
    assert await worker.run(lambda: 1) == 1


async def test_what_is_cancelled_before_it_is_begun_is_never_done(worker: Worker) -> None:
    """And what is under way is done, with its result for whoever asked: the control."""
    held, results, done = Held(), [], []

    async def asks() -> None:
        results.append(await worker.run(held))
        await anyio.lowlevel.checkpoint()
        results.append("went on")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(asks)
        await anyio.to_thread.run_sync(held.begun.wait, 10)
        tasks.start_soon(worker.run, lambda: done.append(1))
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        later = threading.Timer(0.1, held.go_on.set)
        later.start()
    later.join()
    assert results == ["done"]
    await worker.run(lambda: None)
    assert not done


async def test_a_cancellation_that_is_no_scopes_is_not_lost(worker: Worker) -> None:
    """As a web server's, which cancels a task once: what is under way ends first, and then the task does."""
    held, went_on = Held(), False

    async def asks() -> None:
        nonlocal went_on
        await worker.run(held)
        went_on = True

    task = asyncio.get_running_loop().create_task(asks())
    await anyio.to_thread.run_sync(held.begun.wait, 10)
    task.cancel()
    await anyio.lowlevel.checkpoint()
    assert not task.done()
    held.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (held.ended, went_on) == (True, False)
