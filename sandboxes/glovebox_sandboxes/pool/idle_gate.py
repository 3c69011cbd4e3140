"""When nobody waits: what can wait, the next sandbox and the end of a used one, is done then.

See docs/internals/decisions/0021-what-can-wait-waits-for-the-call.md.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

LULL_SECONDS = 0.02
"""Longest that anything waits for calls that are under way."""
ANSWER_SECONDS = 0.002
"""After a call, for its answer to be written before that begins."""


class IdleGate:
    """Calls that are under way, for what can wait for them: they share one event loop and one interpreter with it."""

    def __init__(self) -> None:
        self._under_way = 0
        self._changed = anyio.Event()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one call, for the length of the block."""
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            self.notify()

    def notify(self) -> None:
        """Have those who wait for a lull look again."""
        self._changed.set()
        self._changed = anyio.Event()

    async def idle(self, urgent: Callable[[], bool]) -> None:
        """Return when no call is under way, or this is urgent, or it has waited for long enough."""
        with anyio.move_on_after(LULL_SECONDS):
            while self._under_way and not urgent():
                await self._changed.wait()
            if not urgent():
                with anyio.move_on_after(ANSWER_SECONDS):
                    await self._changed.wait()
