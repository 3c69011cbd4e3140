"""Drafts of events, for the chain."""

import json
from dataclasses import fields
from functools import cache
from typing import Any

from glovebox_audit import chain
from glovebox_audit.events.base import NOT_YET, CallEvent, Event
from glovebox_audit.events.calls import Input, Output, ReceiptSigned
from glovebox_audit.events.promotions import PromotedFile


def draft(event: Event) -> chain.Draft:
    """Turn an event into a draft for the chain.

    Raises:
        ValueError: a field holds what is not JSON, the call id is not a name, or the record would be too long.
    """
    call_id = event.call_id if isinstance(event, CallEvent) else None
    data, parts = _data(event), None
    if call_id == NOT_YET:
        call_id, parts = None, {name: chain.canonical(value) for name, value in data.items()}
    if call_id is not None and not chain.NAME.fullmatch(call_id):
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
