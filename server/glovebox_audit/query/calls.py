"""Summarize one call from its records; select the texts that a search covers. Pure: no I/O."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from glovebox_audit import chain, events
from glovebox_audit.query.outcomes import CANCELLED, ERRORS, RUNNING

#: Kinds whose texts are not searched: measurements and signatures.
UNSEARCHED = frozenset({events.SandboxStarted.kind, events.ReceiptSigned.kind})

#: Fields of the others that hold only our own words.
_OURS = frozenset({"usage", "effect", "transport", "ended"})

_CALL = b'{"call_id":"'
# The end of a record's line, of bounded length; see ``chain``.
_END = re.compile(
    rb'"kind":"([A-Za-z0-9._:@-]{1,128})","prev":"[0-9a-f]{64}","seq":[0-9]{1,16},"server":"[A-Za-z0-9._:@-]{1,128}"'
    rb',"time":"[0-9T:.Z-]{27}"}\n\Z'
)
_END_BYTES = 560
_ABOUT = re.compile(rb'"kind":"(?:approval|promotion|stop|watch|sandbox)\.')
OVER = "over "


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSummary:
    """One call in a line."""

    call_id: str
    time: str
    tool: str
    principal: str
    client: str | None
    run: str | None
    workflow: str | None
    transport: str
    outcome: str
    """One of ``outcomes.OUTCOMES``."""
    rule: str
    exit_code: int | None = None
    elapsed_ms: float | None = None
    error: str | None = None
    """Class of Glovebox's own failure."""

    is_error: bool = False
    """True if the call was allowed and its caller's result is an error, for any reason."""

    @property
    def through(self) -> str:
        """Return the client's own name; without one the transport, as ``over cli``."""
        return self.client or f"{OVER}{self.transport}"


def label(line: bytes) -> tuple[str, str] | None:
    """Return kind and call of a line with the form of a call's record; None for any other."""
    end = _END.search(line, max(0, len(line) - _END_BYTES)) if line.startswith(_CALL) else None
    if end is None:
        return None
    start = len(_CALL)
    return end[1].decode(), line[start : line.index(b'"', start)].decode("utf-8", "replace")


def named_by(line: bytes) -> set[str]:
    """Return what a record of no call is about: approval, stop, call, sandbox table, or promoted artifacts."""
    if not _ABOUT.search(line, max(0, len(line) - _END_BYTES)) or (found := fields(line)) is None:
        return set()
    data = found["data"]
    files = data.get("files")
    parts = [data, *(each for each in (files if isinstance(files, list) else ()) if isinstance(each, dict))]
    names = (part.get(name) for part in parts for name in ("approval", "stop", "call", "digest", "asked_by", "origin"))
    return {name for name in names if isinstance(name, str) and name}


def fields(line: bytes) -> Mapping[str, Any] | None:
    """Return the unproved fields of a line; None if it is no record."""
    try:
        found = json.loads(line)
        return found if isinstance(found["data"], dict) and isinstance(found["time"], str) else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def outcome(kind: str, data: Mapping[str, Any]) -> str | None:
    """Return the call's state after this record; None if it does not say."""
    if kind == events.CallDecided.kind:
        return {"allow": RUNNING, "deny": "denied"}.get(str(data.get("effect")), "ask")
    if kind == events.CallFinished.kind:
        ended = str(data.get("ended"))
        if ended != "exited":
            return ended
        failed = data.get("failed", data.get("exit_code") != 0)
        return "failed" if failed else "succeeded"
    return {events.CallCancelled.kind: CANCELLED, events.CallFailed.kind: "error", events.CallLost.kind: "lost"}.get(
        kind
    )


def of_records(decided: chain.Record, end: chain.Record) -> CallSummary:
    """Summarize a call from the record that began it and its latest, maybe the same."""
    said, last = decided.data, end.data
    came = outcome(end.kind, last) or ""
    texts: dict[str, Any] = {name: str(said.get(name, "")) for name in ("tool", "principal", "transport", "rule")}
    for name in ("client", "run", "workflow"):
        texts[name] = None if said.get(name) is None else str(said[name])
    return CallSummary(
        call_id=decided.call_id or "",
        time=decided.time,
        outcome=came,
        exit_code=last.get("exit_code"),
        elapsed_ms=last.get("elapsed_ms"),
        error=last.get("error"),
        is_error=came in ERRORS or (came == CANCELLED and last.get("by") == "stop"),
        **texts,
    )


def connections(records: Iterable[chain.Record]) -> Iterator[tuple[str, str]]:
    """Yield ``reached``, ``refused`` or ``asked`` per connection of a call, with a line about it.

    Reached is what answered. Of a tunnel earlier logs do not say so.
    """
    answers: dict[object, list[Mapping[str, Any]]] = {}
    for record in reversed(kept := list(records)):
        if record.kind == events.EgressAnswered.kind:
            answers.setdefault(record.data.get("asked_digest"), []).append(record.data)
    for data in (record.data for record in kept if record.kind == events.EgressDecided.kind):
        allowed = data.get("effect") == "allow"
        said = answers.get(data.get("asked_digest"))
        answer = said.pop() if allowed and said else None
        asked = f"{data.get('method') or 'connect'} {data.get('scheme')}://{data.get('host')}:{data.get('port')}"
        more = [str(data["address"])] if data.get("address") else []
        if answer is not None:
            more += [str(answer["status"])] if answer.get("status") is not None else []
            more += [f"{answer.get('bytes')} bytes", *([] if answer.get("complete") else ["cut off"])]
        elif allowed:
            more.append("no answer on record")
        more += [f"with the credential {data['credential']}"] if data.get("credential") else []
        about = f"{asked} by the rule {data.get('rule')}"
        yield ("reached" if answer else "asked" if allowed else "refused"), ", ".join([about, *more])


def completed(started: Mapping[str, Any], records: Iterable[chain.Record]) -> Mapping[str, Any]:
    """Return the data of a ``sandbox.started`` with its table's, if that is among the records."""
    tables = (each.data for each in records if each.kind == events.SandboxTable.kind)
    table = next((each for each in tables if each.get("digest") == started.get("table")), None)
    with suppress(LookupError, TypeError, ValueError):  # of a forged log
        if table is not None:
            fields = {each["field"]: each for each in (*table["fields"], *started.get("fields", ()))}
            measured = {**table["measured"], **started.get("measured", {})}
            return {**started, "host": table["host"], "measured": measured, "fields": [*fields.values()]}
    return started


def texts(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield every text in a record's data that a search covers, folded."""
    for key, value in data.items():
        if key not in _OURS:
            yield from _texts(value)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value.casefold()
    elif isinstance(value, dict):
        yield from (text for each in value.values() for text in _texts(each))
    elif isinstance(value, list):
        yield from (text for each in value for text in _texts(each))


def holds(records: Iterable[chain.Record], wanted: str) -> bool:
    """Return whether one of a call's records holds a folded text."""
    return any(wanted in text for each in records if each.kind not in UNSEARCHED for text in texts(each.data))
