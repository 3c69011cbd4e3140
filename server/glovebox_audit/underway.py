"""Keeps the calls that have begun and not ended, from their records alone, in order. Pure: no I/O, no clock.

The log's writer learns from it which calls it still owes an end, and the verifier which records fit no call. Must
import nothing but events and chain.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from glovebox_audit.chain import Head, Record
from glovebox_audit.events import EVENTS, WHOSE, CallDecided, CallLost, LossCause, ReceiptSigned

#: Calls that are remembered. A server has 16 at work at once, so this is thousands of servers that were cut off; beyond
#: it the oldest is forgotten and nothing more is said about a call that is not known.
MAX_CALLS = 65_536


@dataclass(slots=True, kw_only=True)
class Begun:
    """A call without an end, so far."""

    before: Head
    """The end of the chain before its first record."""
    server: str
    """Id of the server process that decided about it."""
    decided: str
    """When: time of its first record."""
    whose: dict[str, str]
    """Its tool, principal and client, as that record has them."""
    last: str
    """Kind of its newest record."""


class UnderWay:
    """Calls under way. Give it every record, or all those of one server, in the order of the chain."""

    def __init__(self) -> None:
        """Start with no call."""
        self._begun: dict[str, Begun] = {}
        self._ended: str | None = None
        self._forgot = False

    @property
    def forgot(self) -> bool:
        """Whether there may be calls under way that are not known here."""
        return self._forgot

    def resume(self, calls: Iterable[str], *, forgot: bool) -> None:
        """Begin in the middle of the chain, where these calls are under way, and others unknown if ``forgot``."""
        self._begun = {call: Begun(before=Head(), server="", decided="", last="", whose={}) for call in calls}
        self._ended, self._forgot = None, forgot

    def __contains__(self, call_id: object) -> bool:
        """Whether this call has begun and not ended."""
        return call_id in self._begun

    def ids(self) -> list[str]:
        """The calls, in the order in which they began."""
        return list(self._begun)

    def since(self, tail: Head) -> Head:
        """From where on the chain holds records of these calls; ``tail``, its end, if there are none."""
        return next((each.before for each in self._begun.values()), tail)

    def note(self, record: Record, before: Head) -> str:
        """Take the next record, and the end of the chain before it.

        Returns:
            Why this record cannot belong to one life of its call; empty if it can.
        """
        just_ended, self._ended = self._ended, None
        call = record.call_id
        if call is None or record.kind not in EVENTS:
            return ""
        if record.kind == CallDecided.kind:
            return self._begin(call, record, before)
        if record.kind == ReceiptSigned.kind:
            return "" if just_ended == call else f"it is not right after the end of call {call}"
        if call not in self._begun:
            return "" if self._forgot else f"call {call} is not under way here: it never began, or has ended before"
        if EVENTS[record.kind].ends_call:
            del self._begun[call]
            # What is lost has no receipt.
            self._ended = None if record.kind == CallLost.kind else call
        else:
            self._begun[call].last = record.kind
        return ""

    def lost(self, call: str, cause: LossCause, reason: str) -> CallLost:
        """The record that ends a call that is under way and has no other end."""
        begun = self._begun[call]
        return CallLost(
            call_id=call, cause=cause, reason=reason, run_by=begun.server, decided=begun.decided, last=begun.last,
            **begun.whose,
        )  # fmt: skip

    def _begin(self, call: str, record: Record, before: Head) -> str:
        if call in self._begun:
            return f"call {call} begins a second time"
        if record.data.get("effect") == "allow":
            whose = {name: record.data[name] for name in WHOSE if name in record.data}
            self._begun[call] = Begun(
                before=before, server=record.server, decided=record.time, last=record.kind, whose=whose
            )
            if len(self._begun) > MAX_CALLS:
                del self._begun[next(iter(self._begun))]
                self._forgot = True
        return ""
