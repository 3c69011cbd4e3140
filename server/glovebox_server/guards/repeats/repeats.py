"""Slows, then refuses, a call that keeps failing: the same tool and arguments in the same run.

Kept in memory of one server process, with and without a policy. A waiting call holds neither a turn nor a sandbox.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import anyio

from glovebox_sandboxes.contract.errors import Refusal
from glovebox_server.calls import ToolCall
from glovebox_server.core.call import Call
from glovebox_server.guards.admission.admission import fingerprint

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
