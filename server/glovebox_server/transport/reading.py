"""Shares of the server for each caller: of the event loop's time, after which it waits, and of places. No I/O.

A server reads and answers a request before its calls are counted. Bodies of one caller are read one after the other, so
many at once delay only their sender.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sized
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic

import anyio

#: Share of the loop's time for one caller's requests. Ordinary ones take a thousandth of it.
SHARE = 0.25
#: Total cost of a body, as a multiple of its first reading: the SDK reads it again, models check it, and report all
#: errors (measured: up to 5.4).
WHOLE = 6.0
#: Seconds of the loop that any request takes beside its body: `ping` 1.3 ms, `tools/list` 1.7 (measured).
REQUEST_SECONDS = 0.0015
#: Seconds of the loop that a call takes in addition: records, sandbox, answer (measured, `print(1)`).
CALL_SECONDS = 0.008
#: Seconds since another caller's request after which a caller is alone, and delays no other.
ALONE_SECONDS = 10.0
#: Callers with remembered debts, more than arrive in the time in which one could have any.
MAX_ACCOUNTS = 4096
#: Seconds of the loop that a caller may be ahead of its share.
AHEAD_SECONDS = 0.02


@dataclass(slots=True)
class _Account:
    turn: anyio.Lock = field(default_factory=lambda: anyio.Lock(fast_acquire=True))
    paid: float = 0.0
    """Time at which the spending so far equals the caller's share."""
    seen: float = 0.0


class RequestTurns:
    """Reads the requests of all callers. One per server."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    @asynccontextmanager
    async def turn(self, caller: str) -> AsyncIterator[None]:
        """Wait for a caller's turn to have a request served; charge it for the time of the context's body."""
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
        """Charge a caller who is not alone, in its turn, for its request: seconds of the loop."""
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
        # Of the two latest, one is another caller.
        latest = islice(reversed(self._accounts.items()), 2)
        return all(name == caller or each.seen < self._clock() - ALONE_SECONDS for name, each in latest)


class Shares:
    """Shares out a bounded number of places among the callers.

    Tokens are counted, so each has an even share. The subjects of an authorization server are not. Beside tokens they
    have half of the places, and of those one may hold as many as are left. So something is always left, and each
    newcomer gets part of it: the dynamic threshold of ``glovebox_sandboxes.sharing``.
    """

    def __init__(self, most: int, callers: Sized, *, subjects: bool) -> None:
        self._most = most
        self._callers = callers
        self._subjects = subjects

    def allows(self, principal: str, held: Counter[str]) -> bool:
        """Return whether a caller may take one more place, given what each holds."""
        theirs = 0
        if self._subjects:
            theirs = self._most // 2 if len(self._callers) else self._most
        if principal.startswith("token:"):
            return held[principal] < (self._most - theirs) // max(1, len(self._callers))
        left = theirs - sum(count for each, count in held.items() if not each.startswith("token:"))
        return held[principal] < left
