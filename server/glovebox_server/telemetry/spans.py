"""The parts of a call, and what its span says, from the call's own records. Pure: no I/O, no clock.

Each record says when it was written, and was heard of when it was on the disk. Between those lie the parts:

admission   from the message to the call's turn
decision    to the record of it; of a call that is refused, to the disk
sandbox     to the disk with the sandbox's record, before which nothing runs
run         the program
collect     to the call's last record: files, scans, masks
receipt     to the disk with that and the receipt
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from glovebox_audit.chain import Record
from glovebox_audit.events import EVENTS
from glovebox_server.telemetry import names

Heard = tuple[int, Record]
"""A record, and when it was on the disk: nanoseconds since the epoch."""
Attributes = dict[str, Any]


class SpanPart(NamedTuple):
    """A part of a call's span; those with connections have one event for each record of them."""

    name: str
    begin: int
    end: int
    events: tuple[tuple[int, Attributes], ...] = ()


def attributes(heard: Sequence[Heard]) -> Attributes:
    """Return what the records of a call say of it."""
    found: Attributes = {}
    for _, record in heard:
        found |= _picked(record.data, names.OF_RECORDS.get(record.kind, {}))
    return found


def parts(began: int, heard: Sequence[Heard]) -> list[SpanPart]:
    """Return the parts of a call whose message began then, each from the end of the one before."""
    first = {record.kind: (at, record) for at, record in reversed(heard)}
    decided, started = first.get("call.decided"), first.get("sandbox.started")
    end = next(((at, each) for at, each in heard if EVENTS[each.kind].ends_call), None)
    if decided is None:
        return []
    if end is None:
        return _joined(began, {names.ADMISSION: _written(decided[1]), names.DECISION: decided[0]})
    over, data = _written(end[1]), end[1].data
    steps = {names.ADMISSION: over - _ns(data.get("elapsed_ms", 0)), names.DECISION: _written(decided[1])}
    ran = data.get("usage", {}).get("wall_ms")
    if started is not None:
        steps |= {names.SANDBOX: started[0], names.RUN: over if ran is None else min(over, started[0] + _ns(ran))}
    else:  # on the host, or no sandbox could be started
        steps[names.SANDBOX if ran is None else names.RUN] = over
    steps |= {} if ran is None else {names.COLLECT: over}
    return _joined(began, {**steps, names.RECEIPT: end[0]}) + _connections(heard)


def _joined(began: int, steps: Mapping[str, int]) -> list[SpanPart]:
    found: list[SpanPart] = []
    for name, until in steps.items():
        end = max(began, until)  # the wall clock may step back
        found.append(SpanPart(name, began, end))
        began = end
    return found


def _connections(heard: Sequence[Heard]) -> list[SpanPart]:
    records = [record for _, record in heard if record.kind.startswith("egress.")]
    events = tuple((_written(each), _picked(each.data, names.OF_CONNECTIONS)) for each in records)
    return [SpanPart(names.CONNECTIONS_MADE, events[0][0], max(at for at, _ in events), events)] if events else []


def _picked(data: Mapping[str, Any], wanted: Mapping[str, str]) -> Attributes:
    found = {name: data[field] for field, name in wanted.items() if data.get(field) is not None}
    return {name: json.dumps(each) if isinstance(each, Mapping) else each for name, each in found.items()}


def _written(record: Record) -> int:
    return int(datetime.fromisoformat(record.time).timestamp() * 1_000_000) * 1000


def _ns(milliseconds: float) -> int:
    return int(milliseconds * 1_000_000)
