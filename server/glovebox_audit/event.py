"""The base of the events of the audit log, and the table of those there are. Plain data, no I/O."""

from dataclasses import dataclass
from typing import ClassVar, Literal, dataclass_transform

#: Every event by its kind, once ``events`` is imported, which has it as ``EVENTS``.
KINDS: "dict[str, type[Event]]" = {}

#: The fields of ``CallEvent`` that say whose a call is.
WHOSE = ("tool", "principal", "client", "run", "workflow")

#: In place of a call's id: the event is drafted before its call comes, see ``chain.Draft.of_call``.
NOT_YET = "(not yet)"

Effect = Literal["allow", "deny", "ask"]
Answer = Literal["allow", "deny"]
Channel = Literal["client", "operator"]
Reach = Literal["call", "run", "caller"]


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Anything that can be recorded. A subclass is a frozen dataclass; its ``kind`` never changes its meaning."""

    kind: ClassVar[str]
    ends_call: ClassVar[bool] = False

    def __init_subclass__(cls, *, kind: str | None = None, ends_call: bool = False) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        if kind is not None:
            cls.kind, cls.ends_call = kind, ends_call
            KINDS[kind] = cls


class CallEvent(Event):
    """Anything that belongs to one call. ``CallRecorder`` fills in whose it is, in each of its records."""

    call_id: str
    tool: str | None = None
    principal: str | None = None
    client: str | None = None
    run: str | None = None
    workflow: str | None = None
