"""Puts calls on record: the decision, and one end with a signed receipt."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread

from glovebox_audit.chain import Head
from glovebox_server.calls import elapsed_ms
from glovebox_server.core.call import Call, Ran
from glovebox_server.core.rights import Rights
from glovebox_server.guards.journal.records import call_decided, call_finished
from glovebox_server.guards.redaction.detector import Forms
from glovebox_server.receipts.recorder import CallRecorder, Receipt, ReceiptIssuer

if TYPE_CHECKING:
    from glovebox_server.proof.sealed import Sealer


@dataclass(frozen=True, slots=True, kw_only=True)
class CallJournal:
    """Records the calls of one server."""

    receipts: ReceiptIssuer
    forms_of: Callable[[Rights], Forms]
    """Returns the keys that are masked in the arguments of a caller with these rights."""
    sealer: "Sealer | None" = None
    """Seals arguments in the log; None where the operator wants none."""

    @property
    def head(self) -> Head:
        """Return the end of the log's chain."""
        return self.receipts.log.head

    async def decide(self, call: Call) -> CallRecorder:
        """Record the decision about a call; return what writes its other records.

        Raises:
            AuditUnavailable: The decision is not in the log.
        """
        now, request = call.now, call.request
        profile = now.profile if request.tool in now.rights.profiles else None
        recorder = self.receipts.recorder(request, profile)
        forms = self.forms_of(now.rights)
        event = await call_decided(request, now.decision, profile, now.inputs, forms, sealer=self.sealer)
        workspace = now.rights.workspace
        if workspace is not None and profile is not None and profile.files.workspace != "none":
            event = replace(event, workspace=workspace.name or None)
        await recorder.record(event)
        return recorder

    async def finish(self, call: Call, ran: Ran) -> Receipt:
        """Record how a call ended that ran.

        Raises:
            AuditUnavailable: The record is not in the log.
        """
        now, outcome = call.now, ran.outcome
        failed = ran.answer.failed or now.withheld is not None
        finish = partial(call_finished, call.request, outcome, now.profile, now.redacted, failed=failed)
        # Digests of pictures take tens of milliseconds, in which nobody else would be served.
        finished = await anyio.to_thread.run_sync(finish) if outcome.blobs or outcome.shown else finish()
        usage = {**finished.usage, **ran.usage}
        now.finished = replace(finished, elapsed_ms=elapsed_ms(call.request), usage=usage, **ran.recorded)
        return await now.records.finish(now.finished)
