"""Schedule fair turns by an opaque key for each payer. No I/O.

``FairLimiter`` gives the next turn to one of the waiters. Rule 1: never more than ``most`` turns at one time. Rule 2:
the next turn goes to the key with the fewest; of several, to the one that has waited longest since its last. Rule 3:
where keys share, one takes a turn only while it has fewer than ``SHARE`` times as many as are left. Rule 4: waiters of
one key come in order; one with a bound has its turn only if its key then has no more turns than that, and while it has
it the key gets no more. Rule 5: no turn stays free that rules 3 and 4 give to a waiter.

Rule 3 is the dynamic threshold of shared-memory switches (Choudhury and Hahne, 1998, doi:10.1109/90.664262): a lone key
leaves a part free without knowing of others, and each newcomer gets most of what is left.
"""

import os
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

import anyio.lowlevel

SHARE = 3
"""A lone key gets three turns of four: of 16, twelve keep two or more processors busy, and four are free at once for
others. A second key gets three of those, a third one, and later ones wait for a turn that ends."""

RUNNING = 16
"""Calls at work at one time: of one server, and of all that have one worker. Each may use a profile's whole memory
limit, so more would trade every caller's speed, and on a small host its memory, for nothing."""
STARTING = 2 * (os.cpu_count() or 1)
"""Sandboxes being started at one time, ahead of calls and for them: more would only be slower."""

Granted = Callable[[], None]
"""Called when a waiter has its turn."""


class FairLimiter:
    """A limiter like ``anyio.CapacityLimiter``, with turns by key instead of an order of arrival."""

    def __init__(self, most: int, *, shared: bool) -> None:
        """Allow ``most`` turns at one time; unless keys are ``shared``, none are kept for others."""
        self._most = most
        self.shared = shared
        self._turns: dict[str, list[int | None]] = {}
        """Bounds of the turns that each key has: waiting keys may be many, and are all compared at each grant."""
        self._waiting: dict[str, deque[tuple[Granted, int | None]]] = {}
        """Waiters, each with its bound, in the order in which keys with equally many turns are served."""

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Hold a turn during the block, waiting for it first."""
        await self.acquire(key)
        try:
            yield
        finally:
            self.release(key)

    async def pause(self, key: str) -> None:
        """Let others run until it is this key's turn, and for one turn of the event loop."""
        async with self.turn(key):
            await anyio.lowlevel.checkpoint()

    async def acquire(self, key: str, bound: int | None = None) -> None:
        """Wait for a turn, which the caller releases; ``bound``: how many the key may have with this one."""
        granted = anyio.Event()
        self.ask(key, granted.set, bound)
        if granted.is_set():
            return
        try:
            await granted.wait()
        except BaseException:
            if granted.is_set():
                self.release(key, bound)
            else:
                self.withdraw(key, granted.set)
            raise

    def ask(self, key: str, granted: Granted, bound: int | None = None) -> None:
        """Queue a waiter, which is called when it has its turn: perhaps now."""
        self._waiting.setdefault(key, deque()).append((granted, bound))
        self._grant()

    def withdraw(self, key: str, granted: Granted) -> None:
        """Remove a waiter that has no turn yet; later ones may get one then."""
        self._waiting[key] = deque(entry for entry in self._waiting[key] if entry[0] != granted)
        if not self._waiting[key]:
            del self._waiting[key]
        self._grant()

    def release(self, key: str, bound: int | None = None) -> None:
        """End a turn of this bound."""
        self._turns[key].remove(bound)
        if not self._turns[key]:
            del self._turns[key]
        self._grant()

    def _grant(self) -> None:
        """Give a turn to each waiter that can have one now."""
        while left := self._most - sum(map(len, self._turns.values())):
            key = min(filter(self._within_bounds, self._waiting), key=self._taken, default=None)
            if key is None or (self.shared and not may_take(self._taken(key), left)):
                return
            waiters = self._waiting.pop(key)
            granted, bound = waiters.popleft()
            if waiters:
                self._waiting[key] = waiters
            self._turns.setdefault(key, []).append(bound)
            granted()

    def _taken(self, key: str) -> int:
        return len(self._turns.get(key, ()))

    def _within_bounds(self, key: str) -> bool:
        bounds = [self._waiting[key][0][1], *self._turns.get(key, ())]
        return all(bound is None or len(bounds) <= bound for bound in bounds)


def may_take(taken: int, left: int) -> bool:
    """Return whether a key with ``taken`` turns may have one of those ``left`` where others come too: rule 3."""
    return taken < SHARE * left


class Weighed(Protocol):
    """Anything with a share of processor time."""

    def weigh(self, parts: int) -> None:
        """Set its share to one part in ``parts`` of the default, if possible."""


_Weighed = TypeVar("_Weighed", bound=Weighed)


def weigh_all(running: dict[_Weighed, int]) -> None:
    """Share the default among them by a power of two: most calls begin and end without a write for each sandbox."""
    parts = 1 << max(0, len(running) - 1).bit_length()
    for sandbox, before in running.items():
        if parts != before:
            sandbox.weigh(parts)
            running[sandbox] = parts
