"""Bounds how many calls are under way: per caller, in all, and of one kind. Refuses instead of piling up.

A call that keeps failing, the same tool and arguments in the same run, is slowed, then refused: kept in memory of one
server process, with and without a policy. A waiting call holds neither a turn nor a sandbox.
"""

import hashlib
import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import anyio

from glovebox_sandboxes.contract.errors import Refusal, RefusedError
from glovebox_sandboxes.sharing import RUNNING, FairLimiter
from glovebox_server.calls import ToolCall
from glovebox_server.core.call import Call

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


class Admission:
    """The count of running calls. One per server."""

    def __init__(self, *, shared: bool = False, running: int = RUNNING, per_principal: int = PER_PRINCIPAL) -> None:
        """Take the bounds.

        ``shared``: there are several principals, so that each leaves turns for others.
        """
        self._turns = FairLimiter(running, shared=shared)
        self._per_principal = per_principal
        self._calls: defaultdict[str, list[tuple[bytes, float]]] = defaultdict(list)  # fingerprints, since when

    @asynccontextmanager
    async def enter(
        self, principal: str, tool: str, arguments: Mapping[str, Any], turns: int | None = None, pause: float = 0.0
    ) -> AsyncIterator[None]:
        """Hold one place for a call, waiting for a fair turn; calls of one principal run in order of arrival.

        ``turns`` are the running calls of its principal, itself included, whatever their roles; None for the server's
        limit. It asks for a turn after a ``pause``. Raises RefusedError if the caller has too many calls, repeats one
        that is still running, or no turn came within ``WAIT_SECONDS``: nothing was started.
        """
        call = fingerprint(tool, arguments), anyio.current_time()
        mine = self._calls[principal]
        self._check(call, mine)
        mine.append(call)
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
                yield
        finally:
            mine.remove(call)
            if not mine:  # without a trace: subjects of an authorization server are many
                del self._calls[principal]

    async def wait_for_turn(self, call: Call) -> None:
        """Hold one place and one fair turn, after the call's delay. RefusedError of ``enter`` is not recorded."""
        request, delay = call.request, call.delay
        call.delay = 0.0  # a call that waited for a person does not wait again
        turn = self.enter(request.principal.id, request.tool, request.arguments, call.rights.turns, delay)
        await call.stack.enter_async_context(turn)

    def _check(self, call: tuple[bytes, float], mine: Sequence[tuple[bytes, float]]) -> None:
        if len(mine) >= self._per_principal:
            raise RefusedError("busy.calls", f"The server is busy: {len(mine)} calls of yours are under way.", _LATER)
        same, now = call
        twins = sum(other == same and since <= now - RETRY_AGE_SECONDS for other, since in mine)
        if twins >= RETRIES:
            reason = f"The server is busy: this same call is already running {twins} times for you."
            raise RefusedError("busy.retries", reason, _LATER)


def fingerprint(tool: str, arguments: Mapping[str, Any]) -> bytes:
    """Return a digest of a tool and its arguments: equal for equal calls."""
    return hashlib.sha256(json.dumps([tool, dict(arguments)], sort_keys=True).encode()).digest()


PAUSES: Final = (0.0, 0.0, 0.0, 1.0, 2.0, 4.0)
"""Delay by failures in a row, the last for any more: people do try a second and a third time."""
MOST: Final = 8
"""Failures in a row before it is refused."""
REFUSED_SECONDS: Final = 60.0
"""Time after the last failure until one try is allowed."""
FORGOTTEN_SECONDS: Final = 600.0
"""Time without a failure that resets the count."""
MAX_FAILING: Final = 4096
"""Remembered calls; beyond it one is evicted, of the caller that has most."""


@dataclass(slots=True, kw_only=True)
class _Failing:
    times: int
    last: float


class Repeats:
    """Calls that failed. One per server."""

    def __init__(self, now: Callable[[], float] = anyio.current_time) -> None:
        self._now = now
        self.failing: OrderedDict[tuple[str, str | None, bytes], _Failing] = OrderedDict()
        """Nearly always empty: then no call is looked at."""

    def pause(self, call: ToolCall) -> float:
        """Return the seconds that it waits before it may ask for a turn."""
        found = self._found(call)
        return 0.0 if found is None or found.times >= MOST else PAUSES[min(found.times, len(PAUSES) - 1)]

    def refusal(self, call: ToolCall) -> Refusal | None:
        """Return why it is not tried now, or None."""
        found = self._found(call)
        if found is None or found.times < MOST:
            return None
        left = found.last + REFUSED_SECONDS - self._now()
        if left <= 0:
            return None
        reason = f"This same call has failed {found.times} times in a row in this run."
        hint = f"Change it: the error of the last time says what is wrong. The same is tried again in {left:.0f} s."
        return Refusal(rule="repeat.failing", reason=reason, hint=hint)

    async def slow(self, call: Call) -> None:
        """Delay a call that failed several times in a row."""
        if pause := self.pause(call.request):
            call.listener.progress(f"Waiting {pause:g} s: this same call has just failed several times")
            call.delay = max(call.delay, pause)

    def note(self, call: ToolCall, *, failed: bool) -> None:
        """Note how a call ended; success clears its failures."""
        self._forget()
        if not failed and not self.failing:
            return
        key = _key(call)
        known = self.failing.pop(key, None)
        if not failed:
            return
        self.failing[key] = _Failing(times=(known.times if known else 0) + 1, last=self._now())
        if len(self.failing) > MAX_FAILING:
            make_room(self.failing, lambda key, _: key[0])

    def _found(self, call: ToolCall) -> _Failing | None:
        self._forget()
        return self.failing.get(_key(call)) if self.failing else None

    def _forget(self) -> None:
        """Drop expired ones; the oldest failure stands first."""
        while self.failing and self._now() - next(iter(self.failing.values())).last > FORGOTTEN_SECONDS:
            self.failing.popitem(last=False)


def make_room(table: OrderedDict[Any, Any], whose: Callable[[Any, Any], str]) -> None:
    """Evict the oldest entry of the owner that has most, so that no owner evicts others."""
    owners = [whose(*item) for item in table.items()]
    del table[list(table)[owners.index(Counter(owners).most_common(1)[0][0])]]


def _key(call: ToolCall) -> tuple[str, str | None, bytes]:
    arguments = call.arguments
    if isinstance(code := arguments.get("code"), str):  # a blank or a line of comment more makes no other program
        lines = (line.rstrip() for line in code.splitlines())
        told = "\n".join(line for line in lines if line and not line.lstrip().startswith("#"))
        arguments = {**arguments, "code": told}
    return call.principal.id, call.run, fingerprint(call.tool, arguments)
