"""Records calls: the decision, and one end with a signed receipt; makes the broker's events."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from glovebox_audit.chain import Draft, canonical, digest, draft
from glovebox_audit.event import NOT_YET
from glovebox_audit.events import CallDecided, CallFinished, SandboxStarted, SandboxTable
from glovebox_audit.receipts.parts import Input, Output
from glovebox_profiles.model import Profile
from glovebox_sandboxes.contract.attestation import Field, made_with
from glovebox_sandboxes.contract.base import Driver
from glovebox_sandboxes.contract.measure import Measured
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_sandboxes.session.connection import AttestedSandbox
from glovebox_server.calls import Decision, ToolCall
from glovebox_server.core.call import Call, Ran
from glovebox_server.core.rights import Rights
from glovebox_server.guards.redaction.detector import Forms
from glovebox_server.guards.redaction.guard import mask_value
from glovebox_server.receipts.recorder import CallRecorder, ReceiptIssuer, elapsed_ms

if TYPE_CHECKING:
    from glovebox_server.proof.sealed import Sealer

MAX_KEPT = 128 * 1024
"""Characters of one output that a profile has kept in the log: a record holds 1 MiB, escaped."""


def decided(call: ToolCall, decision: Decision, *, keep_arguments: bool, inputs: tuple[Input, ...] = ()) -> CallDecided:
    """Make the event for one decision; ``CallRecorder`` adds whose it is, and ``keep_arguments`` is the profile's."""
    arguments = dict(call.arguments)
    encoded = canonical(arguments)
    return CallDecided(
        call_id=call.id,
        transport=call.principal.transport,
        effect=decision.effect,
        rule=decision.rule,
        reason=decision.recorded or decision.reason,
        profile_digest=decision.profile_digest,
        arguments_digest="sha256:" + hashlib.sha256(encoded).hexdigest(),
        arguments_bytes=len(encoded),
        arguments=arguments if keep_arguments else None,
        inputs=inputs or None,
        user=call.principal.user,
        role=decision.role,
        policy_digest=decision.policy_digest,
        approval=decision.approval,
        approved_by=decision.approved_by or None,
        traceparent=call.trace.parent if call.trace else None,
        tracestate=call.trace.state if call.trace else None,
        grants=tuple(f"{grant.what}:{grant.target} ({grant.approval})" for grant in decision.grants) or None,
    )


_MAX_TABLES = 256
"""Plans whose table is remembered: one for each profile and set of masks. A forgotten one is written again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shared:
    fields: Mapping[str, Field]
    measured: Measured
    table: Draft


class SandboxDescriber:
    """Drafts the records of sandboxes; what those of a plan share is in a table, encoded and written once."""

    def __init__(self) -> None:
        self._shared: dict[str, _Shared] = {}

    def __call__(self, driver: Driver, sandbox: AttestedSandbox) -> Draft:
        """Draft the record of a sandbox: when it gets ready, which may be before its call."""
        plan, attestation, measured = sandbox.plan, sandbox.attestation, sandbox.measured
        told: dict[str, Any] = {
            "call_id": NOT_YET,
            "sandbox_id": sandbox.sandbox.id,
            "driver": plan.driver,
            "level": plan.level,
        }
        told |= {"plan_digest": plan.digest, "verified": not attestation.differences}
        if attestation.differences:
            return draft(SandboxStarted(**told, **_whole(driver, sandbox, measured.model_dump())))
        fields = {each.field: each for each in attestation.fields}
        shared = self._shared.get(plan.digest)
        if shared is None or shared.fields.keys() != fields.keys():
            if len(self._shared) >= _MAX_TABLES:
                self._shared.clear()
            whole = _whole(driver, sandbox, measured.model_dump(exclude=_EACH))
            table = draft(SandboxTable(digest=digest(whole), **whole))
            shared = self._shared[plan.digest] = _Shared(fields=fields, measured=measured, table=table)
        names = {each for each in Measured.model_fields if getattr(measured, each) != getattr(shared.measured, each)}
        found = measured.model_dump(include={*names, *_EACH})
        rows = tuple(each.row() for name, each in fields.items() if each != shared.fields[name]) or None
        started = SandboxStarted(**told, table=shared.table.data["digest"], measured=found, fields=rows)
        return replace(draft(started), table=shared.table)


_EACH = {"namespaces"}
"""Measured of each sandbox: no other has them."""


def _whole(driver: Driver, sandbox: AttestedSandbox, measured: Mapping[str, Any]) -> dict[str, Any]:
    return {"measured": measured, "fields": sandbox.attestation.rows, "host": made_with(driver, sandbox.plan)}


def call_finished(
    call: ToolCall, outcome: Outcome, profile: Profile, redacted: Mapping[str, int], *, failed: bool
) -> CallFinished:
    """Return the record of a call's end, its usage, and digests of its output."""
    usage: dict[str, Any] = asdict(outcome.usage)
    if outcome.changes is not None:
        usage |= {f"workspace_{kind}": count for kind, count in outcome.changes.counts.items()}
    texts = {"stdout": outcome.stdout.text, "stderr": outcome.stderr.text, "value": json.dumps(outcome.value)}
    absent = {"value"} if outcome.value is None else set()
    absent |= {name for name, each in (("stdout", outcome.stdout), ("stderr", outcome.stderr)) if not each.total_bytes}
    pieces = [(name, text.encode()) for name, text in texts.items() if name not in absent]
    pieces += [(f"image:{n}", blob.data) for n, blob in enumerate(outcome.blobs)]
    copies = [(f"image:{n}", blob.shown) for n, blob in enumerate(outcome.blobs) if blob.shown is not None]
    copies += [(copy.name, copy) for copy in outcome.shown]
    pieces += [(f"shown:{name}", copy.data) for name, copy in copies if copy.data]
    totals = {"stdout": outcome.stdout.total_bytes, "stderr": outcome.stderr.total_bytes}
    outputs = tuple(
        Output(name=name, digest="sha256:" + hashlib.sha256(data).hexdigest(), bytes=totals.get(name, len(data)))
        for name, data in pieces
    )
    kept: dict[str, str] = {name: text[:MAX_KEPT] for name, text in texts.items() if name in profile.audit.keep}
    return CallFinished(
        call_id=call.id,
        ended=outcome.ended,
        exit_code=outcome.code,
        failed=failed,
        elapsed_ms=elapsed_ms(call),
        usage=usage,
        outputs=outputs,
        kept=kept or None,
        redacted=redacted or None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallJournal:
    """Records the calls of one server."""

    receipts: ReceiptIssuer
    forms_of: Callable[[Rights], Forms]
    """Returns the keys that are masked in the arguments of a caller with these rights."""
    sealer: "Sealer | None" = None
    """Seals arguments in the log; None where the operator wants none."""

    async def decide(self, call: Call) -> CallRecorder:
        """Record the decision about a call; return what writes its other records.

        Raises:
            AuditError: The decision is not in the log.
        """
        now, request = call.now, call.request
        profile = now.profile if request.tool in now.rights.profiles.by_tool else None
        recorder = CallRecorder(self.receipts, request, profile)
        # The arguments only where the profile keeps them, or sealed.
        keep = profile is not None and "arguments" in profile.audit.keep
        event = decided(request, now.decision, keep_arguments=keep, inputs=now.inputs.listed if now.inputs else ())
        if profile is not None and event.arguments is not None and profile.result.redact != "none":
            arguments, secrets = await mask_value(event.arguments, self.forms_of(now.rights))
            event = replace(event, arguments=arguments, redacted=secrets) if secrets else event
        if self.sealer is not None and (event.arguments is None or event.redacted):
            event = replace(event, sealed_arguments=self.sealer.seal(request))
        workspace = now.rights.workspace
        if workspace is not None and profile is not None and profile.files.workspace != "none":
            event = replace(event, workspace=workspace.name or None)
        await recorder.record(event)
        return recorder

    async def describe_end(self, call: Call, ran: Ran) -> CallFinished:
        """Return the last record of a call that ran."""
        now, outcome = call.now, ran.outcome
        failed = ran.answer.failed or now.withheld is not None
        finish = partial(call_finished, call.request, outcome, now.profile, now.redacted, failed=failed)
        # Digests of pictures take tens of milliseconds, which would block all other calls.
        finished = await anyio.to_thread.run_sync(finish) if outcome.blobs or outcome.shown else finish()
        usage = {**finished.usage, **ran.usage}
        return replace(finished, elapsed_ms=elapsed_ms(call.request), usage=usage, **ran.recorded)
