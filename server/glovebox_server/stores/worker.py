"""A thread that runs the event loop's tasks one after another. Independent of stores.

``anyio.to_thread`` does that too, for any number of threads, but takes twice as long for a round trip: every call with
budgets waits for it.
"""

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeVar

import anyio

_T = TypeVar("_T")


class Worker:
    """The thread: started by its first task, ended by ``close``."""

    def __init__(self, name: str) -> None:
        self._name: Final = name
        self._pool = ThreadPoolExecutor(1, initializer=self._begin)

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run this after all earlier tasks, and return its result.

        Cancelled before its start, it never runs; cancelled later, it completes, and its result is returned.
        """
        job = self._pool.submit(work)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            if job.cancel():
                raise
            with anyio.CancelScope(shield=True), suppress(Exception):  # which its result raises below
                await asyncio.wrap_future(job)
            if anyio.current_effective_deadline() != -math.inf:
                raise  # a cancellation that is not a scope's comes once, and must not be lost
        return job.result()

    def close(self) -> None:
        """End the thread. Every caller has waited for its task, so this waits for nothing."""
        self._pool.shutdown()

    def _begin(self) -> None:
        threading.current_thread().name = self._name
