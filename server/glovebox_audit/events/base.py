"""The base of every event of the audit log. Plain data, no I/O.

Optional fields that are None are left out of the record. Digests are ``sha256:`` and hex unless a field says otherwise.
No event may carry a secret, a host path or an environment variable: records reach clients.
"""

from dataclasses import dataclass
from typing import ClassVar, dataclass_transform

#: Every event by its kind; each registers itself. docs/operate/audit-events.csv is generated from it.
EVENTS: "dict[str, type[Event]]" = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Anything that can be recorded. A subclass is a frozen dataclass; its ``kind`` never changes its meaning."""

    kind: ClassVar[str]
    """Stable name, written into the record."""
    ends_call: ClassVar[bool] = False
    """Whether this is the last record of its call."""

    def __init_subclass__(cls, *, kind: str | None = None, ends_call: bool = False) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        if kind is not None:
            cls.kind, cls.ends_call = kind, ends_call
            EVENTS[kind] = cls


WHOSE = ("tool", "principal", "client", "run", "workflow")
"""The fields of ``CallEvent`` that say whose a call is."""

NOT_YET = "(not yet)"
"""In place of a call's id: the event is drafted before its call comes, see ``chain.Draft.of_call``."""


class CallEvent(Event):
    """Anything that belongs to one call. Whose it is, is in each of its records: ``CallRecorder`` fills it in."""

    call_id: str
    """The call; stands at the top of the record, not in its data."""
    tool: str | None = None
    """Name of the tool."""
    principal: str | None = None
    """Id of the caller."""
    client: str | None = None
    """What the client calls itself; self-reported."""
    run: str | None = None
    """Id of the piece of work it belongs to: a connection, a session, or what the server's handle names."""
    workflow: str | None = None
    """Name that the operator bound to the caller's token or to the server."""
