"""The events of the audit log, by family; their table, their drafts, calls under way.

A new event is a frozen dataclass in the module of its family, and an entry in ``EVENTS``.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from glovebox_audit import chain
from glovebox_audit.chain import Head, Record
from glovebox_audit.events.approvals import (
    ApprovalAnswered,
    ApprovalEvent,
    ApprovalRefused,
    ApprovalRequested,
    ApprovalWithdrawn,
    GrantMade,
    GrantRevoked,
)
from glovebox_audit.events.base import (
    NOT_YET,
    WHOSE,
    CallEvent,
    Event,
)
from glovebox_audit.events.calls import (
    ArtifactCollected,
    ArtifactRefused,
    ArtifactScanned,
    CallCancelled,
    CallDecided,
    CallFailed,
    CallFinished,
    CallLost,
    EgressAnswered,
    EgressDecided,
    Input,
    LossCause,
    Output,
    ReceiptSigned,
    SandboxStarted,
)
from glovebox_audit.events.log import (
    GapRecorded,
    RemovalReason,
    SegmentBegun,
    SegmentRemoved,
    SegmentSealed,
)
from glovebox_audit.events.promotions import PromotedFile, PromotionApplied, PromotionRolledBack, ProposalScanned
from glovebox_audit.events.server import (
    PolicyChanged,
    PolicyRefused,
    PoolChanged,
    ProfileLoaded,
    RequestsRefused,
    ServerStarted,
    ServerStopped,
)
from glovebox_audit.events.stops import (
    StopLifted,
    StopMade,
    TokenCreated,
    TokenRevoked,
    WatchAlarm,
)

__all__ = [
    "EVENTS",
    "NOT_YET",
    "WHOSE",
    "ApprovalAnswered",
    "ApprovalEvent",
    "ApprovalRefused",
    "ApprovalRequested",
    "ApprovalWithdrawn",
    "ArtifactCollected",
    "ArtifactRefused",
    "ArtifactScanned",
    "CallCancelled",
    "CallDecided",
    "CallEvent",
    "CallFailed",
    "CallFinished",
    "CallLost",
    "EgressAnswered",
    "EgressDecided",
    "Event",
    "GapRecorded",
    "GrantMade",
    "GrantRevoked",
    "Input",
    "LossCause",
    "OpenCalls",
    "Output",
    "PolicyChanged",
    "PolicyRefused",
    "PoolChanged",
    "ProfileLoaded",
    "PromotedFile",
    "PromotionApplied",
    "PromotionRolledBack",
    "ProposalScanned",
    "ReceiptSigned",
    "RemovalReason",
    "RequestsRefused",
    "SandboxStarted",
    "SegmentBegun",
    "SegmentRemoved",
    "SegmentSealed",
    "ServerStarted",
    "ServerStopped",
    "StopLifted",
    "StopMade",
    "TokenCreated",
    "TokenRevoked",
    "WatchAlarm",
    "draft",
    "draft_receipt",
]

#: Every event by its kind. docs/operate/audit-events.csv is generated from it.
EVENTS: Mapping[str, type[Event]] = {
    event.kind: event
    for event in (
        ServerStarted,
        ServerStopped,
        ProfileLoaded,
        PolicyChanged,
        PolicyRefused,
        PoolChanged,
        RequestsRefused,
        TokenCreated,
        TokenRevoked,
        CallDecided,
        SandboxStarted,
        EgressDecided,
        EgressAnswered,
        ArtifactCollected,
        ArtifactRefused,
        ArtifactScanned,
        CallFinished,
        CallCancelled,
        CallFailed,
        CallLost,
        ReceiptSigned,
        ApprovalRequested,
        ApprovalAnswered,
        ApprovalWithdrawn,
        ApprovalRefused,
        GrantMade,
        GrantRevoked,
        GapRecorded,
        SegmentSealed,
        SegmentBegun,
        SegmentRemoved,
        StopMade,
        StopLifted,
        WatchAlarm,
        PromotionApplied,
        PromotionRolledBack,
        ProposalScanned,
    )
}


#: Calls that are remembered. A server runs 16 at once, so this is thousands of killed servers. Beyond it the oldest is
#: evicted, and nothing is reported about an unknown call.
MAX_UNDER_WAY = 65_536


def draft(event: Event) -> chain.Draft:
    """Turn an event into a draft for the chain.

    Raises:
        ValueError: a field holds what is not JSON, the call id is not a name, or the record would be too long.
    """
    call_id = event.call_id if isinstance(event, CallEvent) else None
    data, parts = _data(event), None
    if call_id == NOT_YET:
        call_id, parts = None, {name: chain.canonical(value) for name, value in data.items()}
    if call_id is not None and not chain.is_name(call_id):
        raise ValueError("the call id is not a name")
    encoded = chain.canonical(data) if parts is None else chain.join_parts(parts)
    _require_room(encoded)
    return chain.Draft(kind=event.kind, call_id=call_id, data=json.loads(encoded), encoded=encoded, parts=parts)


def draft_receipt(event: ReceiptSigned, envelope: bytes) -> chain.Draft:
    """Draft a receipt's event from its encoded envelope: that is nearly all of it, and plain JSON."""
    data = _data(event)
    del data["envelope"]
    parts = {name: chain.canonical(value) for name, value in data.items()}
    data = {**json.loads(chain.join_parts(parts)), "envelope": event.envelope}
    whole = chain.join_parts({**parts, "envelope": envelope})
    _require_room(whole)
    return chain.Draft(kind=event.kind, call_id=event.call_id, data=data, encoded=whole)


def _require_room(encoded: bytes) -> None:
    # 1,024 bytes hold every other field of a record at its longest.
    if len(encoded) > chain.MAX_LINE_BYTES - 1024:
        raise ValueError(f"it is {len(encoded)} bytes long and a record holds {chain.MAX_LINE_BYTES - 1024}")


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.name != "call_id")


def _data(item: Event | Output | Input | PromotedFile) -> dict[str, Any]:
    pairs = ((name, getattr(item, name)) for name in _names(type(item)))  # type: ignore[arg-type]  # a class is hashable
    data = {name: value for name, value in pairs if value is not None}
    for name in ("outputs", "inputs", "files"):
        if isinstance(listed := data.get(name), tuple):
            data[name] = [_data(part) for part in listed]
    return data


@dataclass(slots=True, kw_only=True)
class Begun:
    """A call without an end, so far."""

    before: Head
    """The end of the chain before its first record."""
    server: str
    """Id of the server process that decided about it."""
    decided: str
    """Time of its first record."""
    whose: dict[str, str]
    """Its tool, principal and client, as that record has them."""
    last: str


class OpenCalls:
    """The calls that have begun and not ended. Give it every record, or all of one server, in the chain's order.

    The log's writer learns which calls still need an end, the verifier which records fit no call.
    """

    def __init__(self) -> None:
        self._begun: dict[str, Begun] = {}
        self._ended: str | None = None
        self._forgot = False

    @property
    def forgot(self) -> bool:
        """Return whether there may be unknown calls under way."""
        return self._forgot

    def resume(self, calls: Iterable[str], *, forgot: bool) -> None:
        """Begin in the middle of the chain with these calls, and unknown ones if ``forgot``."""
        self._begun = {call: Begun(before=Head(), server="", decided="", last="", whose={}) for call in calls}
        self._ended, self._forgot = None, forgot

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
