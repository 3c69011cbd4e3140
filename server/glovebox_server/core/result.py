"""Builds the result of a call: complete as text and as structured data. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from glovebox_audit.chain import Head
from glovebox_audit.printable import invisible
from glovebox_sandboxes.contract.outcome import PATCH, Outcome, OverlayChanges
from glovebox_server.calls import CallResult, Content, Decision, Delivered, Link, Text, ToolCall
from glovebox_server.core.call import Call, Ran
from glovebox_server.receipts.recorder import Receipt, whose
from glovebox_server.tools.base import Excerpt, Isolation, cut_output

if TYPE_CHECKING:
    from glovebox_server.promotion.proposing import Scan

MAX_MARKS: Final = 16 * 1024
"""Characters of all files' marks in a result, which has them three times. The audit log and artifacts have all."""
_ERROR: Final = 4096
"""Characters of the end of standard error, where the final error is."""


def build_refusal(call: ToolCall, decision: Decision, head: Head) -> CallResult:
    """Return the result of a call that policy did not allow."""
    refusal = {"rule": decision.rule, "reason": decision.reason, "hint": decision.hint}
    return CallResult(
        structured={"call_id": call.id, "refused": refusal, "error": None, "profile_digest": decision.profile_digest},
        content=(Text(text=f"Refused ({decision.rule}): {decision.reason} {decision.hint}".strip()),),
        failed=True,
        meta=_meta(call, decision, None, head),
    )


def build_result(call: Call, ran: Ran, elapsed_ms: float, receipt: Receipt) -> CallResult:
    """Return the result of a call that ran; without a plan, outside of a sandbox."""
    tool, now, outcome, answer, plan = call.tool, call.now, ran.outcome, ran.answer, ran.plan
    decision, masks = now.decision, now.spec.masks if now.spec else ()
    unseen = sum(invisible(item.text) for item in answer.content if isinstance(item, Text) and not item.text.isascii())
    cut: Mapping[str, Excerpt] = {}
    if tool.delivers:
        whole, (outcome, cut) = outcome, cut_output(outcome)
        answer = tool.answer(outcome) if cut else answer
        truncated = _truncated(whole, cut, ran.delivered.whole)
    delivered, told = _bounded(ran.delivered), {"uri": receipt.uri, "digest": receipt.digest}
    isolation = None if plan is None else Isolation(driver=plan.driver, level=plan.level, verified=True).model_dump()
    structured: dict[str, Any] = {
        "call_id": call.request.id,
        "error": None,
        **answer.fields,
        "isolation": isolation,
        "profile_digest": decision.profile_digest,
        "elapsed_ms": elapsed_ms,
    }
    content: list[Content] = list(answer.content)
    if tool.delivers:
        content += [Text(text=f"[truncated: {truncated}]")] * bool(truncated)
        structured |= {"hidden": len(masks), "truncated": truncated}
        notes = [*delivered.notes, *(f"{file.name}: not collected, {file.reason}" for file in delivered.skipped)]
        if outcome.ended != "exited" and len(delivered.artifacts) > len(delivered.whole):
            notes.append("The program was stopped: the file it was writing may be incomplete.")
        if answer.failed and _names(outcome.stderr.text[-_ERROR:], masks):
            notes.append(f"closed to programs in /workspace, as their names are those of secrets: {len(masks)}")
        content += _describe_files(structured, outcome, delivered, notes, ran.scans or ())
    if unseen:
        structured["invisible"] = unseen
        content.append(Text(text=f"[invisible characters in this output: {unseen}; people do not see what they say]"))
    if now.redacted:
        structured["redacted"] = dict(now.redacted)
        content.append(Text(text=f"[secrets replaced in this output: {_counted(now.redacted)}]"))
    content += [*delivered.shown, *delivered.figures, *delivered.artifacts]
    if not content and tool.silent:
        content.append(Text(text=tool.silent))
    return CallResult(
        structured=structured,
        content=tuple(content),
        failed=answer.failed,
        meta=_meta(call.request, decision, isolation, receipt.head) | {"receipt": told},
        beside=sum(len(cut[name].whole) - cut[name].shown for name in delivered.whole),
    )


def _describe_files(
    structured: dict[str, Any], outcome: Outcome, delivered: Delivered, notes: list[str], scans: "Sequence[Scan]"
) -> list[Content]:
    """Add the files that left the sandbox to ``structured``; return them as text."""
    structured |= {
        "artifacts": [asdict(link) for link in delivered.artifacts],
        "images": [asdict(link) for link in delivered.figures],
        "changes": _changes(outcome.changes, delivered),
        "notes": [*structured.get("notes", ()), *notes],
    }
    content: list[Content] = [Text(text=f"[{note}]") for note in notes]
    content += _marks((*delivered.figures, *delivered.artifacts))
    if scans:
        structured["findings"] = [_findings(scan, MAX_MARKS // len(scans)) for scan in scans]
        content.append(_scanned(structured["findings"]))
    return content


def _truncated(outcome: Outcome, cut: Mapping[str, Excerpt], kept: Mapping[str, str]) -> str | None:
    """Return how much of each output the result has, and where the rest is; None if it is complete."""
    said = []
    for name, stream in (("stdout", outcome.stdout), ("stderr", outcome.stderr), ("value", None)):
        dropped, total = (stream.dropped_bytes, stream.total_bytes) if stream else (0, 0)
        if name in cut:
            shown, total = cut[name].shown, total if dropped else len(cut[name].whole)
        elif dropped:
            shown = total - dropped
        else:
            continue
        rest = f"all of it is {kept[name]}" if name in kept else "the others are not kept: print less"
        if name in kept and dropped:
            rest = f"all but {dropped} is {kept[name]}: print less, or write it to /output"
        said.append(f"{name}: its first and last {shown} of {total} bytes are here; {rest}.")
    return " ".join(said) or None


def _names(error: str, masks: Sequence[str]) -> bool:
    """Return whether an error names one of these workspace paths: in quotes, whole or as its end."""
    near = (mask.rstrip("/") for mask in masks if mask.rstrip("/") in error)
    return any(f"{first}{path}{last}" in error for path in near for first in "'\"/" for last in "'\"/")


def _counted(secrets: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} × {number}" if number > 1 else kind for kind, number in secrets.items())


def add_notes(result: CallResult, notes: tuple[str, ...]) -> CallResult:
    """Return the result with more notes."""
    structured = {**result.structured}
    if "notes" in structured:
        structured["notes"] = [*structured["notes"], *notes]
    told = tuple(Text(text=f"[{each}]") for each in notes)
    return replace(result, structured=structured, content=(*result.content, *told))


def _bounded(delivered: Delivered) -> Delivered:
    """Return the files with marks that fit into one message: each file has a share, the rest is counted."""
    marked = [link for link in (*delivered.figures, *delivered.artifacts) if link.risks]
    if sum(len(risk) for link in marked for risk in link.risks) <= MAX_MARKS:
        return delivered
    share = MAX_MARKS // len(marked)
    return replace(
        delivered,
        figures=tuple(_within(link, share) for link in delivered.figures),
        artifacts=tuple(_within(link, share) for link in delivered.artifacts),
    )


def _within(link: Link, room: int) -> Link:
    kept = _fitting(link.risks, room)
    left = len(link.risks) - len(kept)
    if not left:
        return link
    begun = [] if kept else [link.risks[0][:room] + "…"]
    more = f"{left} more marks, which reading the file gives in full"
    return replace(link, risks=(*kept, *begun, more))


def _fitting(texts: Sequence[str], room: int) -> list[str]:
    """Return the first of the texts, as many as have ``room`` characters together."""
    return [text for text, end in zip(texts, accumulate(map(len, texts)), strict=True) if end <= room]


def _marks(links: tuple[Link, ...]) -> list[Text]:
    """Return one block for all files that a host might run or obey: clients do not show a link's metadata."""
    marked = [f"{link.name}: {'; '.join(link.risks)}" for link in links if link.risks]
    return [Text(text="\n".join(["[look before you open, run, copy or apply these]", *marked]))] if marked else []


def _findings(scan: "Scan", room: int) -> dict[str, Any]:
    """Return the findings of a file within ``room`` characters; the rest is counted, and on record."""
    kept = _fitting(scan.findings, room)
    more = scan.more + len(scan.findings) - len(kept)
    told = {"name": scan.name, "uri": scan.uri, "findings": kept, "more": more}
    return {**told, "not_scanned": scan.not_scanned or None}


def _scanned(found: Sequence[Mapping[str, Any]]) -> Text:
    lines = ["[each file was scanned for what acts when it is opened; that nothing was found proves nothing]"]
    for each in found:
        told = [*each["findings"], *([f"{each['more']} more"] if each["more"] else [])]
        what = f"NOT scanned: {each['not_scanned']}" if each["not_scanned"] else "; ".join(told)
        lines.append(f"{each['name']}: {what or 'nothing was found'}")
    return Text(text="\n".join(lines))


def _changes(changes: OverlayChanges | None, delivered: Delivered) -> dict[str, Any] | None:
    if changes is None:
        return None
    # The guest sends the patch before the program's files, so a file of that name is the patch or was refused.
    uri = next((link.uri for link in delivered.artifacts if link.name == PATCH and changes.patch), None)
    return {"created": changes.created, "changed": changes.changed, "deleted": changes.deleted, "patch_uri": uri}


def _meta(call: ToolCall, decision: Decision, isolation: Mapping[str, Any] | None, head: Head) -> dict[str, Any]:
    meta = {
        "call_id": call.id,
        "profile_digest": decision.profile_digest,
        "audit": {"seq": head.seq, "hash": head.hash},
        **whose(call.principal, call.run),
    }
    return meta if isolation is None else {**meta, "isolation": isolation}
