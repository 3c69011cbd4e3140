"""Calls that have begun and not ended: which still need an end, and which records fit no call."""

from dataclasses import dataclass

from glovebox_audit.chain import Head, Record
from glovebox_audit.events import EVENTS, WHOSE, CallDecided, CallLost, LossCause, ReceiptSigned

#: Calls that are remembered. A server runs 16 at once, so this is thousands of killed servers. Beyond it the oldest is
#: evicted, and nothing is reported about an unknown call.
MAX_UNDER_WAY = 65_536


@dataclass(slots=True, kw_only=True)
class Begun:
    """A call without an end, so far."""

    before: Head
    """The end of the chain before its first record."""
    server: str
    decided: str
    """Time of its first record."""
    whose: dict[str, str]
    last: str
    """Kind of its last record."""


class OpenCalls:
    """The calls that have begun and not ended. Give it every record, or all of one server, in the chain's order.

    The log's writer learns which calls still need an end, the verifier which records fit no call.
    """

    def __init__(self, *, forgot: bool = False) -> None:
        """Begin; in the middle of the chain, with unknown calls under way, if ``forgot``."""
        self._begun: dict[str, Begun] = {}
        self._ended: str | None = None
        self._forgot = forgot

    def __contains__(self, call_id: object) -> bool:
        return call_id in self._begun

    def ids(self) -> list[str]:
        """Return the calls, in the order in which they began."""
        return list(self._begun)

    def since(self, tail: Head) -> Head:
        """Return where the chain's records of these calls begin; ``tail``, its end, if there are none."""
        return next((each.before for each in self._begun.values()), tail)

    def note(self, record: Record, before: Head) -> str:
        """Note the next record and return why it cannot belong to one life of its call, or "".

        ``before`` is the end of the chain before it.
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
            # A lost call has no receipt.
            self._ended = None if record.kind == CallLost.kind else call
        else:
            self._begun[call].last = record.kind
        return ""

    def lost(self, call: str, cause: LossCause, reason: str) -> CallLost:
        """Return the record that ends a call under way without another end."""
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
            if len(self._begun) > MAX_UNDER_WAY:
                del self._begun[next(iter(self._begun))]
                self._forgot = True
        return ""
