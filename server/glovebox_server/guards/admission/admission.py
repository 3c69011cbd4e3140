"""Bounds how many calls are under way: per caller, in all, and of one kind. Refuses instead of piling up."""

import hashlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import anyio

from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.sharing import FairLimiter
from glovebox_server.core.call import Call

#: Sandboxes at work at one time, over all callers. Each may use a profile's whole memory limit, so more would trade
#: every caller's speed, and on a small host its memory, for nothing; the others wait their turn.
RUNNING = 16

#: Calls of one principal under way or waiting. An agent platform with a few hundred clients on one token fits;
#: beyond it every client would have given up.
PER_PRINCIPAL = 256

#: Longest wait for a turn, in seconds. Clients give up at 60 (the SDKs' default), so an answer at 45 is still read.
WAIT_SECONDS = 45.0

#: A call this old (seconds) whose twin arrives is taken for one its client has given up on and tries again.
RETRY_AGE_SECONDS = 10.0

#: Twins of that age that may be under way: the first try and one retry.
RETRIES = 2
_LATER = "Wait for one of them to end, or cancel it, then call again."


@dataclass(slots=True, kw_only=True, eq=False)
class _AdmittedCall:
    fingerprint: bytes
    since: float


class Admission:
    """The count of running calls. One per server."""

    def __init__(
        self,
        under_way: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        shared: bool = False,
        running: int = RUNNING,
        per_principal: int = PER_PRINCIPAL,
    ) -> None:
        """Take the bounds.

        ``under_way`` is entered while a call has its turn, so that work that can wait for a pause waits.
        ``shared``: there are several principals, so that each leaves turns for others.
        """
        self._under_way = under_way
        self._turns = FairLimiter(running, shared=shared)
        self._per_principal = per_principal
        self._calls: defaultdict[str, set[_AdmittedCall]] = defaultdict(set)

    @asynccontextmanager
    async def enter(
        self, principal: str, tool: str, arguments: Mapping[str, Any], turns: int | None = None, pause: float = 0.0
    ) -> AsyncIterator[None]:
        """Hold one place for a call, waiting for a fair turn; calls of one principal run in order of arrival.

        ``turns`` are the running calls of its principal, itself included, whatever their roles; None for the server's
        limit. It asks for a turn after a ``pause``. Raises RefusedError if the caller has too many calls, repeats one
        that is still running, or no turn came within ``WAIT_SECONDS``: nothing was started.
        """
        call = _AdmittedCall(fingerprint=fingerprint(tool, arguments), since=anyio.current_time())
        mine = self._calls[principal]
        self._check(call, mine)
        mine.add(call)
        try:
            if pause:
                await anyio.sleep(pause)
            async with AsyncExitStack() as held:
                with anyio.move_on_after(WAIT_SECONDS) as wait:
                    await self._turns.acquire(principal, turns)
                    held.callback(self._turns.release, principal, turns)
                if wait.cancelled_caught:
                    reason = f"The server is busy: no turn came within {WAIT_SECONDS:g} seconds."
                    raise RefusedError("busy.waiting", reason, "Nothing was started; call again later.")
                with self._under_way():
                    yield
        finally:
            mine.discard(call)
            if not mine:  # without a trace: subjects of an authorization server are many
                del self._calls[principal]

    async def wait_for_turn(self, call: Call) -> None:
        """Hold one place and one fair turn, after the call's delay. RefusedError of ``enter`` is not recorded."""
        request, delay = call.request, call.delay
        call.delay = 0.0  # a call that waited for a person does not wait again
        turn = self.enter(request.principal.id, request.tool, request.arguments, call.rights.turns, delay)
        await call.stack.enter_async_context(turn)

    def _check(self, call: _AdmittedCall, mine: set[_AdmittedCall]) -> None:
        if len(mine) >= self._per_principal:
            raise RefusedError("busy.calls", f"The server is busy: {len(mine)} calls of yours are under way.", _LATER)
        old = call.since - RETRY_AGE_SECONDS
        twins = sum(other.fingerprint == call.fingerprint and other.since <= old for other in mine)
        if twins >= RETRIES:
            reason = f"The server is busy: this same call is already running {twins} times for you."
            raise RefusedError("busy.retries", reason, _LATER)


def fingerprint(tool: str, arguments: Mapping[str, Any]) -> bytes:
    """Return a digest of a tool and its arguments: equal for equal calls."""
    text = json.dumps([tool, dict(arguments)], sort_keys=True)
    return hashlib.sha256(text.encode()).digest()
