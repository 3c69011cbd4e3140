"""Prepares the changes that a call proposes for approval, and makes them afterwards; only the scan is in a sandbox."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import anyio

from glovebox_audit.events import ArtifactScanned
from glovebox_sandboxes.contract.errors import Refusal, RefusedError
from glovebox_server.calls import NOTHING
from glovebox_server.core.call import Call, CallDeniedError, Inputs, Ran
from glovebox_server.guards.budgets.spending import LOOKING
from glovebox_server.promotion.proposing import FileScanner, Known

if TYPE_CHECKING:
    from glovebox_server.guards.budgets.budgets import Budgets
    from glovebox_server.promotion.proposing import Proposals


async def scan_files(scanner: FileScanner, call: Call) -> None:
    """Scan the files of a call before its last record is written."""

    async def look(ran: Ran) -> None:
        files = (*ran.delivered.artifacts, *ran.delivered.figures)
        if not files:
            return
        call.listener.progress("Looking into files")
        began = anyio.current_time()
        ran.scans = await scanner.scans(call, files)
        for scan in ran.scans:
            call.now.records.hold(ArtifactScanned(call_id=call.request.id, **scan.recorded()))
        ran.usage["scan_ms"] = round((anyio.current_time() - began) * 1000, 3)

    call.now.on_ran.append(look)


_NOBODY = Refusal(
    rule="approval.nobody",
    reason="Somebody has to say yes to changes, and nobody can be asked here; nothing was changed.",
    hint="Tell the operator: `glovebox artifact promote` puts artifacts into a folder.",
)


async def refuse_unasked(_call: Call) -> None:
    """Refuse changes when no one can be asked about them."""
    raise CallDeniedError(_NOBODY)


async def propose(
    changes: "Callable[[], Proposals] | None", scanner: FileScanner, known: Known, budgets: "Budgets | None", call: Call
) -> None:
    """Compute the changes and scan the files, before anyone is asked; make them once somebody said yes."""
    now = call.now
    inputs = now.inputs or Inputs()
    if inputs.unreadable is not None:
        raise inputs.unreadable
    if changes is None:
        reason = f"{call.request.tool} can change nothing here."
        raise CallDeniedError(Refusal(rule="promotion.folder", reason=reason, hint="Ask the operator."))
    try:
        proposals = changes()
        proposed = await proposals.proposed(call.request, sum(item.bytes for item in inputs.listed))
        call.listener.progress("Looking into files")
        # Charged to the caller. No approval lifts that: what it would cover is not known yet.
        async with budgets.reserved(now, LOOKING) if budgets else nullcontext():
            scans = await scanner.scans(call, inputs.listed, known)
        proposed = await proposals.scanned(proposed, scans, call.request)
    except RefusedError as refusal:
        raise CallDeniedError(refusal.refusal) from refusal
    now.changes, now.folder = proposed.shown, proposed.folder

    async def put(call: Call) -> Ran:
        if call.now.decision.approval is None:  # whatever profile and policy say
            raise AssertionError(call.request.id)
        call.listener.progress("Changing files")
        call.now.is_started = True
        outcome = await proposals.put(proposed, call.request)
        answer = call.tool.answer(outcome)
        promotion = answer.fields.get("promotion") or None
        return Ran(outcome=outcome, delivered=NOTHING, answer=answer, recorded={"promotion": promotion})

    now.perform = put
