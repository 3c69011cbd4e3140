"""Slows, then refuses, a call that keeps failing in the same way: the same tool and arguments in the same run.

In memory, of one server process, with and without a policy. Whoever waits here holds neither a turn nor a sandbox.
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
"""Seconds before a call that failed so many times in a row, the last for any more: one failure may be chance, and a
second and a third try are what people do."""

MOST: Final = 8
"""Failures in a row after which it is refused."""

REFUSED_SECONDS: Final = 60.0
"""For so long after the last of them; then it may be tried once."""

FORGOTTEN_SECONDS: Final = 600.0
"""After so long without a failure it counts as new."""

MAX_FAILING: Final = 4096
"""Calls that are remembered; beyond it one is forgotten, of the caller that has most of them."""


@dataclass(slots=True, kw_only=True)
class _Failing:
    times: int
    last: float


class Repeats:
    """Calls that failed. One per server."""

    def __init__(self, now: Callable[[], float] = anyio.current_time) -> None:
        """Begin with none."""
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

    def note(self, call: ToolCall, *, failed: bool) -> None:
        """Note how a call ended that ran; one that ended well wipes out its failures."""
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
        """Drop those that are over; the one that failed longest ago stands first."""
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


async def slow(repeats: Repeats, call: Call) -> None:
    """Delay a call that failed several times in a row."""
    if pause := repeats.pause(call.request):
        call.listener.progress(f"Waiting {pause:g} s: this same call has just failed several times")
        call.delay = max(call.delay, pause)
