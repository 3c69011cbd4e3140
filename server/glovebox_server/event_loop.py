"""The server's event loop, which measures its longest stall: how long nobody else had a turn. Knows nothing of ours.

Between two looks at what is ready (``select``) the loop runs callbacks, and nobody else is served. Looking at the clock
before and after each look is exact, wakes nothing up, and costs half a microsecond.
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
"""Longest that a thread which has waited for the interpreter waits on, a tenth of Python's default. The log's thread
needs it for every record: beside calls that print without end, a record took 9 to 15 ms where it takes 3."""

_Returned = TypeVar("_Returned")


class _Selector(selectors.EpollSelector):
    """Notes the longest time between two looks, and how late the latest came back."""

    def __init__(self) -> None:
        """Start counting."""
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
            # Another thread that holds the interpreter keeps this one from coming back when its time is up.
            stall = max(stall, now - began - max(timeout, 0.0))
        self.longest = max(self.longest, stall)
        return found

    def restart(self) -> None:
        """Count from now on."""
        self.longest = 0.0
        self._since = monotonic()


class MeasuredLoop(asyncio.SelectorEventLoop):
    """An event loop that knows its longest stall."""

    def __init__(self) -> None:
        """Make one; see ``run``."""
        self.measured = _Selector()
        super().__init__(self.measured)


def run(main: Callable[[], Awaitable[_Returned]]) -> _Returned:
    """Like ``anyio.run``, in a loop that is measured, and that other threads interrupt sooner."""
    sys.setswitchinterval(SWITCH_SECONDS)
    return anyio.run(main, backend_options={"loop_factory": MeasuredLoop})


def settled() -> None:
    """A start is over: what it took kept nobody waiting, and what it made is not looked at for garbage any more.

    A look at everything the SDK and the drivers bring takes 50 to 200 ms, and whoever has much read brings it about.
    """
    gc.freeze()
    restart()


def restart() -> None:
    """Forget the stalls so far."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, MeasuredLoop):
        loop.measured.restart()


def longest_stall_ms() -> float | None:
    """Longest stall since the start, in milliseconds; None in a loop that is not measured."""
    loop = asyncio.get_running_loop()
    return round(loop.measured.longest * 1000, 1) if isinstance(loop, MeasuredLoop) else None
