"""Tell one call in rows, in the order in which a person asks: asked, decided, measured, reached, came out, ended.

For ``glovebox audit show`` and the console. The rest is in the records.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from glovebox_audit import events
from glovebox_audit.chain import Record
from glovebox_audit.printable import cell
from glovebox_audit.query import ask, calls
from glovebox_audit.query.ask import Told
from glovebox_audit.query.outcomes import RUNNING
from glovebox_sandboxes.plural import counted

Row = tuple[str, str, str]
"""A label, empty where it is that of the row before; a text; a style: green, red, yellow, cyan, bold or none."""
_ByKind = defaultdict[str, list[Mapping[str, Any]]]
KEEPING = (
    '`audit.keep = ["arguments"]` in a profile keeps them, GLOVEBOX_AUDIT_ARGUMENTS_KEY seals them to a key of yours'
)
"""The settings that keep arguments."""
_VALUE = "the result as JSON"
"""Of a program the last expression's value or null, and the error; of the other tools all results."""


def around(directory: Path, records: Sequence[Record], told: Told) -> list[Record]:
    """Return records of no call: its approvals, its stop, its sandbox's table, and later uses of its files."""
    named = [each.data.get(name) for each in records for name in ("approval", "stop", "table")]
    named += [each.data.get("uri") for each in records if each.kind == events.ArtifactCollected.kind]
    texts = {str(records[0].call_id), *(text for text in named if isinstance(text, str) and text)}
    return ask.about(directory, texts, told)


def rows(records: Sequence[Record], around: Sequence[Record]) -> Iterator[Row]:
    """Yield the rows of a call, by its records and those ``around`` it."""
    by_kind: _ByKind = defaultdict(list)
    for record in records:
        by_kind[record.kind].append(record.data)
    last = next((each for each in reversed(records) if calls.outcome(each.kind, each.data) is not None), records[-1])
    yield from _asked(records[0], [each.data for each in around if each.kind == events.ApprovalAnswered.kind])
    for data in by_kind[events.SandboxStarted.kind]:
        yield from _measured(calls.completed(data, around))
    styles = {"reached": "green", "refused": "red", "asked": "yellow"}
    yield from ((word, words, styles[word]) for word, words in calls.connections(records))
    yield from _came_out(by_kind, last.data)
    for data in by_kind[events.ArtifactScanned.kind]:
        yield from _looked_into(data)
    uris = {data.get("uri") for data in by_kind[events.ArtifactCollected.kind]}
    for record in around:
        yield from _changed(record, str(records[0].call_id), uris)
    yield from _ended(last)
    yield from _stopped(around, str(records[0].call_id), last.data)
    for data in by_kind[events.ReceiptSigned.kind]:
        yield ("receipt", f"`glovebox receipt show {records[0].call_id}`; signed with key {data.get('key')}", "")
    numbers = f"{len(records)}, numbered from {records[0].seq} to {records[-1].seq} in the log"
    yield ("records", f"{numbers}; --json prints them", "")


def _changed(record: Record, call_id: str, uris: Collection[object]) -> Iterator[Row]:
    """Yield changes in an operator's folder, by the call or with a file of it."""
    data = record.data
    if record.kind not in {events.PromotionApplied.kind, events.PromotionRolledBack.kind}:
        return
    what = "by" if record.kind == events.PromotionApplied.kind else "put back, of"
    where = f"in {data.get('folder')}, {what} promotion {data.get('promotion')}"
    for file in _list(data, "files"):
        if data.get("asked_by") == call_id or file.get("origin") in uris:
            yield ("changed", f"{file.get('name')} {where}", "")


def _stopped(around: Iterable[Record], call_id: str, last: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the stop that ended it; results do not say so if it was a rule."""
    for record in around:
        data = record.data
        if record.kind == events.WatchAlarm.kind and data.get("call") == call_id:
            what = f"{data.get('rule')} in {data.get('where')}: {data.get('what')}"
            yield ("alarm", f"{what} ({data.get('action')})", "red")
        elif record.kind == events.StopMade.kind and data.get("stop") == last.get("stop"):
            yield ("stopped", f"by {data.get('by')}: {data.get('because')}", "red")
    if last.get("rule") == "stop":
        hint = "`glovebox stops list` says by what, and `glovebox audit tail --all` what was lifted since"
        yield ("stopped", hint, "")


def _asked(first: Record, answers: Iterable[Mapping[str, Any]]) -> Iterator[Row]:
    data = first.data
    yield ("call", str(first.call_id), "bold")
    if first.kind != events.CallDecided.kind:
        yield ("asked", "its beginning is no longer in the log", "yellow")
        return
    client = f" ({data['client']})" if data.get("client") else ""
    yield ("asked", f"{data.get('tool')}, by {data.get('principal')}{client} over {data.get('transport')}", "bold")
    yield ("", f"{first.time[:19].replace('T', ' ')} UTC", "")
    yield from _arguments(data)
    yield from ((name, str(data[name]), "") for name in ("run", "workflow", "workspace") if data.get(name))
    if data.get("role"):
        yield ("role", f"{data['role']}, by policy {data.get('policy_digest')}", "")
    for each in _list(data, "inputs"):
        yield ("given", f"{each.get('name')}, {_size(each)}, {each.get('uri')}", "")
    style = "green" if data.get("effect") == "allow" else "red"
    yield ("decided", f"{data.get('effect')}, by the rule {data.get('rule')}: {data.get('reason')}", style)
    yes = data.get("approved_by") or [each.get("answered_by") for each in answers if each.get("effect") == "allow"]
    if yes:
        yield ("", f"approved by {', '.join(map(str, yes))}", "")
    if data.get("approval"):
        yield ("", f"question {data['approval']}: `glovebox approvals show {data['approval']}`", "")
    for each in data.get("grants", ()):
        yield ("", f"lifted for it: {each}", "yellow")


def _arguments(data: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the arguments, or the settings that keep them the next time."""
    if isinstance(data.get("arguments"), dict):
        for name, value in data["arguments"].items():
            first_line, *others = cell(value).split("\n")
            yield ("", f"{name}: {first_line}", "")
            yield from (("", f"{' ' * len(name)}  {line}", "") for line in others)
        return
    yield ("", f"arguments of {_size(data, 'arguments_bytes')}, {data.get('arguments_digest')}", "")
    yield ("", "kept sealed to your key" if data.get("sealed_arguments") else f"not kept: {KEEPING}", "")


def _measured(data: Mapping[str, Any]) -> Iterator[Row]:
    verified = data.get("verified") is True
    fields = _list(data, "fields")
    held = sum(each.get("verdict") == "ok" for each in fields)
    how = "as planned" if verified else "NOT as planned, so nothing ran"
    words = f"{data.get('driver')}, {data.get('level')}: {how}"
    yield ("measured", f"{words}; {held} of {counted(len(fields), 'field')} hold", "green" if verified else "red")
    for each in fields:
        if each.get("verdict") != "ok":
            sides = ", ".join(f"{side} {cell(each[side])}" for side in ("planned", "inside", "outside") if side in each)
            yield ("", f"{each.get('field')}: {each.get('verdict')} ({sides})", "yellow")


def _came_out(by_kind: _ByKind, last: Mapping[str, Any]) -> Iterator[Row]:
    for each in _list(last, "outputs"):
        if each.get("bytes"):
            name = _VALUE if each.get("name") == "value" else each.get("name")
            yield ("gave", f"{name}, {_size(each)}, {each.get('digest')}", "")
    for each in by_kind[events.ArtifactCollected.kind]:
        kept = "" if each.get("uri") in (last.get("published") or ()) else ", never readable"
        yield ("gave", f"{each.get('name')}, {_size(each)}, {each.get('media_type')}, {each.get('uri')}{kept}", "")
        yield from (("", f"  risk: {risk}", "yellow") for risk in each.get("risks") or ())
    for each in by_kind[events.ArtifactRefused.kind]:
        more = f" ({each['count']} files)" if each.get("count") else ""
        yield ("refused", f"{each.get('name')}: {each.get('reason')}{more}", "yellow")


def _looked_into(data: Mapping[str, Any]) -> Iterator[Row]:
    why, found = data.get("not_scanned"), data.get("findings") or ()
    what = f"NOT scanned: {why}" if why else "" if found or data.get("more") else "nothing was found"
    yield ("found", f"{data.get('name')}: {what}".rstrip(), "yellow" if why or found else "")
    yield from (("", f"  {each}", "yellow") for each in found)
    if more := data.get("more"):
        yield ("", f"  and {more} more, which are not listed", "yellow")


def _ended(last: Record) -> Iterator[Row]:
    data = last.data
    usage = data.get("usage")
    spent = {"elapsed_ms": data.get("elapsed_ms"), **(usage if isinstance(usage, dict) else {})}
    told = ", ".join(_spent(name, value) for name, value in spent.items() if value is not None)
    if told:
        yield ("spent", told, "")
    outcome = calls.outcome(last.kind, data) or "?"
    more = {"exit_code": "exit code {}", "error": "{}", "by": "by {}", "stop": "{}", "cause": "cause {}"}
    how = [words.format(data[name]) for name, words in more.items() if name in data]
    if data.get("failed") and data.get("exit_code") == 0:
        how.append("its result is an error")
    if last.kind != events.CallDecided.kind and data.get("reason"):
        how.append(str(data["reason"]))
    style = {"succeeded": "green", RUNNING: "cyan"}.get(outcome, "red")
    yield ("ended", ", ".join([outcome, *how]), style)


def _spent(name: str, value: object) -> str:
    for counter, scale, unit in (("_ms", 1000, "s"), ("_bytes", 2**20, "MiB")):
        if isinstance(value, int | float) and name.endswith(counter):
            return f"{name.removesuffix(counter)} {value / scale:.3g} {unit}"
    return f"{name} {cell(value)}"


def _list(data: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = data.get(name)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _size(data: Mapping[str, Any], name: str = "bytes") -> str:
    found = data.get(name)
    return counted(found if isinstance(found, int) else 0, "byte")
