"""Whose request is read next: each caller has a share of the event loop's time, and one that spent it waits. No I/O.

Reading is the one thing a server does for a caller before anybody has counted its calls. It is done one body after the
other for each caller, so that many at once keep nobody waiting but whoever sent them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import anyio

from glovebox_server.transport import messages

#: Of the loop's time, for one caller's requests. Ordinary ones take a thousandth of it.
SHARE = 0.25

#: What a body costs in all, by what its first reading took: the SDK reads it again, and models check it (measured).
WHOLE = 4.0

#: Seconds of the loop that a caller may be ahead of its share.
AHEAD_SECONDS = 0.02


@dataclass(slots=True)
class _Account:
    turn: anyio.Lock = field(default_factory=lambda: anyio.Lock(fast_acquire=True))
    paid: float = 0.0
    """When what was spent so far will have been the caller's share."""


class Reading:
    """Reads the requests of all callers. One per server."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        """Take the clock, in seconds."""
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    async def value_of(self, caller: str, text: bytes) -> Any:
        """The value of a caller's message, when it is its turn.

        Args:
            caller: a principal's id; there are as many as tokens.
            text: the message.

        Raises:
            Malformed: see ``messages.value_of``.
        """
        account = self._accounts.setdefault(caller, _Account())
        async with account.turn:
            debt = account.paid - self._clock() - AHEAD_SECONDS / SHARE
            if debt > 0:
                await anyio.sleep(debt)
            began = self._clock()
            try:
                return messages.value_of(text)
            finally:
                ended = self._clock()
                account.paid = max(account.paid, began) + (ended - began) * WHOLE / SHARE
