"""Defers refill and teardown until no call runs, or for a short while at most.

See docs/internals/decisions/0021-what-can-wait-waits-for-the-call.md.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

DEFER_SECONDS = 0.02
"""Longest that anything is deferred for calls that are under way."""
ANSWER_SECONDS = 0.002
"""After a call, for its answer to be written before what was deferred begins."""


class IdleGate:
    """Defers refill and teardown until no call runs: they share one event loop and one interpreter with it."""

    def __init__(self) -> None:
        self._running = 0
        self._changed = anyio.Event()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count one call, for the length of the block."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self.notify()

    def notify(self) -> None:
        """Have those who wait for idleness look again."""
        self._changed.set()
        self._changed = anyio.Event()

    async def idle(self, urgent: Callable[[], bool]) -> None:
        """Return when no call is under way, or this is urgent, or it was deferred for long enough."""
        with anyio.move_on_after(DEFER_SECONDS):
            while self._running and not urgent():
                await self._changed.wait()
            if not urgent():
                with anyio.move_on_after(ANSWER_SECONDS):
                    await self._changed.wait()
