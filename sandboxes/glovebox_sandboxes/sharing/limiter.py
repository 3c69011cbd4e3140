"""Bounds what goes on at one time, in fair turns: ``Turns`` on an event loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from glovebox_sandboxes.sharing.turns import Turns


class FairLimiter:
    """As ``anyio.CapacityLimiter``, with fair turns for each key instead of an order of arrival."""

    def __init__(self, most: int, *, shared: bool) -> None:
        """See ``Turns``."""
        self._turns: Turns[anyio.Event] = Turns(most, shared=shared)

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Hold a turn for the length of the block, as soon as it comes."""
        await self.acquire(key)
        try:
            yield
        finally:
            self.release(key)

    async def acquire(self, key: str, bound: int | None = None) -> None:
        """Wait for a turn; the caller releases it.

        Args:
            key: whose turn it is.
            bound: turns that the key may have while this is one of them; None for any number.
        """
        granted = anyio.Event()
        self._turns.ask(key, granted, bound)
        self._grant()
        if granted.is_set():
            return
        try:
            await granted.wait()
        except BaseException:
            if granted.is_set():
                self.release(key, bound)
            else:
                self._turns.withdraw(key, granted)
                self._grant()
            raise

    def release(self, key: str, bound: int | None = None) -> None:
        """End a turn that was asked for with this bound."""
        self._turns.release(key, bound)
        self._grant()

    def _grant(self) -> None:
        for granted in self._turns.granted():
            granted.set()
