"""A thread that runs the event loop's tasks one after another. Independent of stores.

``anyio.to_thread`` does that too, for any number of threads, but takes 0.28 ms for a round trip instead of 0.12: every
call with budgets waits for it.
"""

import asyncio
import math
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

import anyio

_T = TypeVar("_T")


class Worker:
    """The thread: started by its first task, ended by ``close``."""

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._jobs: queue.SimpleQueue[_StoreJob[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run this after all earlier tasks, and return its result.

        Cancelled before its start, it never runs; cancelled later, it completes, and its result is returned.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        job = _StoreJob(work)
        self._jobs.put(job)
        # Not shielded from the start: to enter a scope takes as long as to wake the thread.
        try:
            await job.done()
        except asyncio.CancelledError:
            if job.begin():
                raise
            with anyio.CancelScope(shield=True):
                await job.done()
            if anyio.current_effective_deadline() != -math.inf:
                raise  # a cancellation that is not a scope's comes once, and must not be lost
        return job.result()

    def close(self) -> None:
        """End the thread. Every caller has waited for its task, so this waits for nothing."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            if job.begin():
                job.do()


class _StoreJob(Generic[_T]):
    """A task and its outcome."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._begun = threading.Lock()
        self._ended = False
        self._waiting: asyncio.Future[None] | None = None
        self._result: _T
        self._problem: BaseException | None = None

    def begin(self) -> bool:
        """Return whether this is the first to ask: the thread, which then runs it, or its caller, and it never runs."""
        return self._begun.acquire(blocking=False)

    def do(self) -> None:
        try:
            self._result = self._work()
        except BaseException as problem:  # noqa: BLE001 - raised in its caller
            self._problem = problem
        with suppress(RuntimeError):  # the loop is closed, and no task waits
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._ended = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def done(self) -> None:
        """Wait until it is done; may be cancelled, and called again."""
        if not self._ended:
            self._waiting = self._loop.create_future()
            await self._waiting

    def result(self) -> _T:
        """Return its result, or raise its exception."""
        if self._problem is not None:
            raise self._problem
        return self._result
