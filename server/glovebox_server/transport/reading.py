"""Whose request is served next: each caller has a share of the event loop's time, and one that spent it waits. No I/O.

Reading a request, and answering it, is what a server does for a caller before anybody has counted its calls. It is done
one body after the other for each caller, so that many at once keep nobody waiting but whoever sent them.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic

import anyio

#: Of the loop's time, for one caller's requests. Ordinary ones take a thousandth of it.
SHARE = 0.25

#: What a body costs in all, by what its first reading took: the SDK reads it again, models check it, and name all that
#: is wrong (measured: up to 5.4).
WHOLE = 6.0

#: Seconds of the loop that any request takes beside its body: `ping` 1.3 ms, `tools/list` 1.7 (measured).
REQUEST_SECONDS = 0.0015

#: Seconds of the loop that a call takes beside that: records, sandbox, answer (measured, `print(1)`).
CALL_SECONDS = 0.008

#: Seconds since another caller's request in which one is not alone. Who is alone keeps nobody waiting.
ALONE_SECONDS = 10.0

#: Callers whose debts are remembered, more than come in the time in which one could have any.
MAX_ACCOUNTS = 4096

#: Seconds of the loop that a caller may be ahead of its share.
AHEAD_SECONDS = 0.02


@dataclass(slots=True)
class _Account:
    turn: anyio.Lock = field(default_factory=lambda: anyio.Lock(fast_acquire=True))
    paid: float = 0.0
    """When what was spent so far will have been the caller's share."""
    seen: float = 0.0
    """When its latest request came."""


class RequestTurns:
    """Reads the requests of all callers. One per server."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}
        """By principal; who came last stands last."""

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait for a caller's turn to have a request served; it pays for what the body of the context takes."""
        account = self._seen(caller)
        async with account.turn:
            debt = account.paid - self._clock() - AHEAD_SECONDS / SHARE
            if debt > 0:
                await anyio.sleep(debt)
            began = self._clock()
            account.paid = max(account.paid, began)
            try:
                yield
            finally:
                account.paid += (self._clock() - began) * WHOLE / SHARE

    def charge(self, caller: str, seconds: float) -> None:
        """Have a caller who is not alone pay, in its turn, for what its request will take: seconds of the loop."""
        account = self._accounts.get(caller)
        if account is not None and not self._alone(caller):  # None: forgotten while it waited
            account.paid += seconds / SHARE

    def _seen(self, caller: str) -> _Account:
        account = self._accounts.pop(caller, None) or _Account()
        account.seen = self._clock()
        self._accounts[caller] = account
        if len(self._accounts) > MAX_ACCOUNTS:
            del self._accounts[next(iter(self._accounts))]
        return account

    def _alone(self, caller: str) -> bool:
        # Of the two that came last, one is somebody else.
        latest = islice(reversed(self._accounts.items()), 2)
        return all(name == caller or each.seen < self._clock() - ALONE_SECONDS for name, each in latest)
