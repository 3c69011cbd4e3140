"""Render a bundle's records as a page for people. One file, no script; all text is escaped."""

import html
import json
from collections.abc import Iterable, Mapping
from typing import Any

from glovebox_audit import chain, events
from glovebox_audit.bundle.evidence import Evidence
from glovebox_audit.chain import Record
from glovebox_audit.printable import printable
from glovebox_audit.query.calls import connections
from glovebox_audit.receipts import dsse
from glovebox_sandboxes.plural import counted

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse}td,th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0}"
    "pre{white-space:pre-wrap;background:#f4f4f4;padding:.6rem}code{overflow-wrap:anywhere}"
)
_PROVES_NOTHING = (
    "<p>This page proves nothing by itself: <code>glovebox bundle verify FILE --key KEY</code> does, with a key that"
    " you have from elsewhere.</p>"
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(evidence: Evidence) -> str:
    """Return the whole page."""
    first, last = evidence.seals[0], evidence.seals[-1]
    calls = of_calls(evidence.records)
    title = f"{evidence.of} {evidence.id}"
    where = f"segment {first.segment}" if first is last else f"segments {first.segment} to {last.segment}"
    many = f"{counted(len(calls), 'call')}, {counted(len(evidence.records), 'record')}"
    found = f"{many}: all that {where} of the audit log have of it, the last of them sealed {last.time}."
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{_text(title)}</h1>",
            _PROVES_NOTHING,
            f"<p>{_text(found)}</p>",
            *(_call(call, records, evidence.receipts.get(call)) for call, records in calls.items()),
            _others(evidence.records),
            *_texts("Profile", evidence.profiles),
            *_texts("Policy", evidence.policies),
            *_texts("Measured of sandboxes", evidence.tables),
            "</body></html>\n",
        )
    )


def of_calls(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the records of each call."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.call_id is not None:
            found.setdefault(record.call_id, []).append(record)
    return found


def outcome(records: Iterable[Record]) -> str:
    """Return a call's outcome, or its last step, in a few words."""
    kinds = {record.kind: record.data for record in records}
    decided = kinds.get(events.CallDecided.kind, {})
    if decided.get("effect") != "allow":
        return f"{decided.get('effect', 'not decided')}: {decided.get('rule', '')}"
    finished = kinds.get("call.finished")
    if finished is not None:
        code = finished.get("exit_code")
        failed = ", its result is an error" if finished.get("failed") else ""
        return f"{finished.get('ended')}{'' if code is None else f' {code}'}{failed}"
    return next((kind.removeprefix("call.") for kind in kinds if kind in _ENDS), "no end on record yet")


_ENDS = frozenset({"call.cancelled", "call.failed", "call.lost"})


def _call(call: str, records: list[Record], receipt: bytes | None) -> str:
    decided: Mapping[str, Any] = next((each.data for each in records if each.kind == events.CallDecided.kind), {})
    rows = [
        ("time", records[0].time),
        ("tool", decided.get("tool")),
        ("caller", decided.get("principal")),
        ("decision", f"{decided.get('effect')} by {decided.get('rule')}: {decided.get('reason')}"),
        ("outcome", outcome(records)),
        ("arguments", decided.get("arguments_digest")),
        ("profile", decided.get("profile_digest")),
        ("policy", decided.get("policy_digest")),
        ("approval", decided.get("approval")),
        ("approved by", ", ".join(map(str, decided.get("approved_by") or ()))),
        ("workspace", decided.get("workspace")),
    ]
    for each in records:
        data = each.data
        if each.kind == events.SandboxStarted.kind:
            verified = "as planned" if data.get("verified") else "NOT as planned"
            rows.append(("sandbox", f"{data.get('driver')} ({data.get('level')}), measured: {verified}"))
        elif each.kind == events.ArtifactCollected.kind:
            rows.append(("artifact", f"{data.get('name')}  {data.get('bytes')} bytes  sha256:{data.get('sha256')}"))
        elif each.kind == events.CallFinished.kind and data.get("promotion"):
            rows.append(("changed files", f"put there by promotion {data['promotion']}"))
        elif each.kind == events.ArtifactScanned.kind:
            rows.append(("scan", f"{data.get('name')}: {_found(data)}"))
    rows += [("connection", f"{word}: {words}") for word, words in connections(records)]
    rows += [("withheld", each) for each in withheld(receipt)]
    cells = "".join(f"<tr><th>{name}</th><td>{_text(value)}</td></tr>" for name, value in rows if value)
    return f"<h2>{_text(call)}</h2><table>{cells}</table>"


def _found(scan: Mapping[str, Any]) -> str:
    if why := scan.get("not_scanned"):
        return f"not looked into: {why}"
    findings = scan.get("findings")
    if not isinstance(findings, list):
        return "nothing found"
    return "; ".join(map(str, findings)) + (f"; and {scan['more']} more" if scan.get("more") else "")


def withheld(receipt: bytes | None) -> list[str]:
    """Return what the receipt says was withheld from its call."""
    if receipt is None:
        return []
    told = json.loads(dsse.parse(receipt).payload)["predicate"].get("withheld")
    return [str(each) for each in told] if isinstance(told, list) else []


def _others(records: Iterable[Record]) -> str:
    cells = ""
    for each in records:
        if each.call_id is None:
            effect = each.data.get("effect") if each.kind == events.ApprovalAnswered.kind else ""
            data = f"<code>{_text(chain.canonical(each.data).decode())}</code>"
            texts = (*map(_text, (each.time, each.kind, effect)), data)
            cells += f"<tr>{''.join(f'<td>{text}</td>' for text in texts)}</tr>"
    return f"<h2>Approvals, grants and stops</h2><table>{cells}</table>" if cells else ""


def _texts(what: str, texts: Mapping[str, Mapping[str, Any] | None]) -> Iterable[str]:
    for digest, text in texts.items():
        words = "<p>Changed since, as whoever made this bundle says: its text is not here.</p>"
        if text is not None:
            words = f"<pre>{_text(json.dumps(text, indent=1, sort_keys=True))}</pre>"
        yield f"<h2>{what} <code>{_text(digest)}</code></h2>{words}"


def _text(value: object) -> str:
    return html.escape(printable(str(value or ""), "\n"))
