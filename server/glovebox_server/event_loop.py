"""An event loop that measures its longest stall: how long no other task had a turn. Independent of the server.

Between two calls of ``select`` the loop runs callbacks and serves no other task. Reading the clock before and after
each call is exact, causes no wake-up, and costs half a microsecond.
"""

import asyncio
import gc
import selectors
import sys
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeVar

import anyio

SWITCH_SECONDS = 0.0005
"""Longest wait of a thread for the interpreter, a tenth of Python's default. The log's thread needs it for every
record: beside calls that print without end, a record took 9 to 15 ms instead of 3."""
_Returned = TypeVar("_Returned")


class _Selector(selectors.EpollSelector):
    """Measures the longest time between two selects, and how late the latest returned."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0.0
        self._since = monotonic()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See ``selectors``."""
        began = monotonic()
        stall = began - self._since
        found = super().select(timeout)
        self._since = now = monotonic()
        if timeout is not None:
            # A thread that holds the interpreter keeps this one from returning in time.
            stall = max(stall, now - began - max(timeout, 0.0))
        self.longest = max(self.longest, stall)
        return found

    def restart(self) -> None:
        """Forget the stalls so far."""
        self.longest = 0.0
        self._since = monotonic()


class MeasuredLoop(asyncio.SelectorEventLoop):
    """An event loop that measures its longest stall."""

    def __init__(self) -> None:
        self.measured = _Selector()
        super().__init__(self.measured)


def run(main: Callable[[], Awaitable[_Returned]]) -> _Returned:
    """Run like ``anyio.run``, in a measured loop that other threads interrupt sooner."""
    sys.setswitchinterval(SWITCH_SECONDS)
    return anyio.run(main, backend_options={"loop_factory": MeasuredLoop})


def settled() -> None:
    """End the start phase: forget its stalls, and exempt its objects from garbage collection.

    A collection over all objects of the SDK and the drivers takes 50 to 200 ms, and a caller that has much read
    triggers it.
    """
    gc.freeze()
    restart()


def restart() -> None:
    """Forget the stalls so far."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, MeasuredLoop):
        loop.measured.restart()


def longest_stall_ms() -> float | None:
    """Return the longest stall since the start, in milliseconds; None in a loop that is not measured."""
    loop = asyncio.get_running_loop()
    return round(loop.measured.longest * 1000, 1) if isinstance(loop, MeasuredLoop) else None
