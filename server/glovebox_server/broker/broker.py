"""The broker: the only path a call can take. Read ``Broker.call`` from top to bottom; nothing happens elsewhere.

Every step that has an effect is in the audit log, on disk, before the effect.
"""

import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio

from glovebox_profiles.compile import to_spec
from glovebox_profiles.load.loader import ProfileSet
from glovebox_profiles.model import Profile
from glovebox_sandboxes.contract.attestation import made_with
from glovebox_sandboxes.contract.base import Driver, Plan
from glovebox_sandboxes.contract.errors import SandboxUnavailable, UnsupportedSpec
from glovebox_sandboxes.contract.measure import told
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_sandboxes.drivers.registry import Drivers
from glovebox_sandboxes.pool.pool import Pool
from glovebox_sandboxes.session import run as running
from glovebox_sandboxes.session.run import AttestedSandbox
from glovebox_server.artifacts.record import ArtifactsUnavailable
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.audit.chain import Draft
from glovebox_server.audit.events import (
    CallCancelled,
    CallDecided,
    CallFailed,
    CallFinished,
    Input,
    Output,
    SandboxStarted,
    draft,
)
from glovebox_server.audit.log import AuditLog
from glovebox_server.broker.answers import answered, refused
from glovebox_server.broker.calls import CallResult, Decision, Listener, ToolCall
from glovebox_server.broker.collector import Collector
from glovebox_server.broker.imports import needs_preload
from glovebox_server.broker.inputs import open_inputs
from glovebox_server.broker.network import gate_for, serve_with
from glovebox_server.broker.policy import decide
from glovebox_server.egress.gate import EgressGate
from glovebox_server.errors import AuditUnavailable, Refused
from glovebox_server.receipts.recorder import CallRecorder, ReceiptIssuer, TerminalEvent
from glovebox_server.redaction import without_paths
from glovebox_server.tools.base import Isolation, Tool

MAX_KEPT = 128 * 1024
"""Characters of one output that a profile has kept in the log: a record holds 1 MiB, escaped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """Brokers calls. All its parts are given to it; it keeps nothing of a call after it."""

    tools: Mapping[str, Tool]
    profiles: ProfileSet
    drivers: Drivers
    pool: Pool
    audit: AuditLog
    receipts: ReceiptIssuer
    artifacts: ArtifactStore
    workspace: Path | None
    ahead: bool = True
    """Whether sandboxes are prepared ahead of calls. Not worth it for one call alone."""

    async def call(self, call: ToolCall, listener: Listener) -> CallResult:
        """Run one call from decision to result; cancelling it kills the sandbox.

        A refusal of policy is a result. Arguments have been validated before.

        Raises:
            UnsupportedSpec: no driver can enforce the profile here; nothing was started.
            SandboxUnavailable: the sandbox could not be started, was not what was planned, or died.
            ArtifactsUnavailable: the disk failed under an artifact.
            AuditUnavailable: a record could not be made durable; what it announces did not happen.
        """
        tool = self.tools[call.tool]
        profile = self.profiles.get(call.tool)
        decision = decide(tool, call.arguments, profile, self.profiles.digest_for(tool.name) if profile else "")
        log = self.receipts.recorder(call, profile)
        inputs: list[tuple[Input, bytes]] = []
        broken: ArtifactsUnavailable | None = None
        try:
            if decision.effect == "allow":
                inputs = await open_inputs(self.artifacts, call)
        except Refused as refusal:
            decision = replace(decision, effect="deny", rule=refusal.rule, reason=refusal.reason, hint=refusal.hint)
        except ArtifactsUnavailable as problem:
            broken = problem
        keep = profile is not None and "arguments" in profile.audit.keep
        given = tuple(each for each, _ in inputs)
        decided = CallDecided.of(call, decision, keep_arguments=keep, inputs=given)
        if profile is None or decision.effect != "allow":
            await log.append(decided)
            return refused(call, decision, self.audit.head)
        # On the disk before anything is looked at, waited for or started for the call. To take a sandbox that stands
        # ready is none of that: its record comes next, and both are on the disk before the program is in it.
        log.hold(decided)
        try:
            if broken is not None:
                await log.release()
                raise broken  # noqa: TRY301 - its last word is written below
            with self.pool.call():
                return await self._run(call, tool, profile, decision, log, inputs=inputs, listener=listener)
        except anyio.get_cancelled_exc_class():
            cancelled = CallCancelled(call_id=call.id, by=listener.ended_by(), elapsed_ms=_elapsed(call))
            await _last_word(log, cancelled)
            raise
        except Exception as problem:
            # Also for what nobody foresaw: a call without its last record would look as if it still ran.
            foreseen = isinstance(
                problem, SandboxUnavailable | UnsupportedSpec | ArtifactsUnavailable | AuditUnavailable
            )
            reason = without_paths(str(problem))[:500] if foreseen else "Nobody foresaw this; see the server's log."
            event = CallFailed(call_id=call.id, error=type(problem).__name__, reason=reason, elapsed_ms=_elapsed(call))
            await _last_word(log, event)
            raise

    async def _run(
        self,
        call: ToolCall,
        tool: Tool,
        profile: Profile,
        decision: Decision,
        log: CallRecorder,
        *,
        inputs: list[tuple[Input, bytes]],
        listener: Listener,
    ) -> CallResult:
        spec = to_spec(profile, workspace=self.workspace)
        code = call.arguments.get("code")
        if spec.preload and isinstance(code, str) and not needs_preload(code, spec.preload):
            spec = spec.without_preload()
        chosen = self.drivers.chosen(profile.isolation, spec)
        if chosen is None:
            await log.release()
            chosen = await self.drivers.choose(profile.isolation, spec)
        driver, plan = chosen
        cold = plan
        if spec.preload:
            # A sandbox made for a call that waits does not import what the program may not need.
            _, cold = await self.drivers.choose((driver.name,), spec.without_preload())
        listener.progress(f"Starting a {driver.name} sandbox")
        async with (
            self.artifacts.collect(call, spec.limits) as collection,
            Collector(collection, log, call) as collector,
        ):
            gate = gate_for(profile, log, call)
            async with self._sandbox(profile, driver, plan, cold, log) as proved:
                await _announce(log, call, proved)
                listener.progress("Running")
                hooks = running.Hooks(
                    file=collector.accept,
                    serve=serve_with(gate) if gate else None,
                    printed=lambda data: listener.printed(data.decode("utf-8", "replace")),
                )
                files = [(each.name, content) for each, content in inputs]
                outcome = await running.run(proved, tool.job(call.arguments), inputs=files, hooks=hooks)
            delivered = await collector.deliver(outcome, keep_pictures=profile.files.output)
        isolation = Isolation(driver=plan.driver, level=plan.level, verified=True)
        finished = _finished(call, outcome, profile, gate)
        receipt = await log.close(finished)
        return answered(
            tool, call, outcome, delivered, decision=decision, isolation=isolation, head=self.audit.head,
            elapsed_ms=finished.elapsed_ms, receipt=receipt,
        )  # fmt: skip

    @asynccontextmanager
    async def _sandbox(
        self, profile: Profile, driver: Driver, plan: Plan, cold: Plan, log: CallRecorder
    ) -> AsyncIterator[AttestedSandbox]:
        """One that stood ready where the profile wants it; else the decision is on disk before one is started."""
        if self.ahead and profile.python.start == "warm":
            async with self.pool.take(driver, plan, cold, waits=log.release) as proved:
                yield proved
        else:
            await log.release()
            async with self.pool.start(driver, cold) as proved:
                yield proved


def started(driver: Driver, proved: AttestedSandbox) -> Draft:
    """The record of a sandbox, all but whose call it is for: the pool's note, so that it is there before the call."""
    plan, attestation = proved.plan, proved.attestation
    event = SandboxStarted(
        call_id="-",
        sandbox_id=proved.sandbox.id,
        driver=plan.driver,
        level=plan.level,
        plan_digest=plan.digest,
        fields=attestation.rows,
        measured=proved.measured.model_dump(mode="json"),
        host=made_with(driver, plan),
        verified=not attestation.differences,
    )
    return replace(draft(event), call_id=None)


async def _announce(log: CallRecorder, call: ToolCall, proved: AttestedSandbox) -> None:
    """Put on disk which sandbox the call gets, and refuse one whose isolation is not what was planned."""
    await log.append(replace(proved.note, call_id=call.id))
    differences = proved.attestation.differences
    if differences:
        raise SandboxUnavailable(
            "Proving a sandbox's isolation",
            f"it is not what was planned ({told(differences)})",
            "Run `glovebox doctor`.",
        )


async def _last_word(log: CallRecorder, event: TerminalEvent) -> None:
    """Record how a call ended although it is being cancelled, or although the log is what failed."""
    with anyio.CancelScope(shield=True):
        try:
            await log.close(event)
        except AuditUnavailable as problem:
            # The caller hears of it already, or is gone.
            log.lose(f"Its last record could not be written: {without_paths(problem.reason)[:200]}.")


def _finished(call: ToolCall, outcome: Outcome, profile: Profile, gate: EgressGate | None) -> CallFinished:
    usage: dict[str, Any] = asdict(outcome.usage)
    if gate is not None:
        usage |= {f"egress_{name}": spent for name, spent in asdict(gate.traffic).items()}
        if gate.unrecorded:
            usage["egress_attempts_without_record"] = gate.unrecorded
    if outcome.changes is not None:
        usage |= {f"workspace_{kind}": count for kind, count in outcome.changes.counts.items()}
    outputs = [
        _output("stdout", outcome.stdout.text.encode(), outcome.stdout.total_bytes),
        _output("stderr", outcome.stderr.text.encode(), outcome.stderr.total_bytes),
    ]
    if outcome.value is not None:
        value = json.dumps(outcome.value).encode()
        outputs.append(_output("value", value, len(value)))
    outputs += [_output(f"image:{n}", blob.data, len(blob.data)) for n, blob in enumerate(outcome.blobs)]
    texts = {"stdout": outcome.stdout.text, "stderr": outcome.stderr.text, "value": json.dumps(outcome.value)}
    kept: dict[str, str] = {name: text[:MAX_KEPT] for name, text in texts.items() if name in profile.audit.keep}
    return CallFinished(
        call_id=call.id,
        ended=outcome.ended,
        exit_code=outcome.code,
        elapsed_ms=_elapsed(call),
        usage=usage,
        outputs=tuple(outputs),
        kept=kept or None,
    )


def _output(name: str, kept: bytes, total: int) -> Output:
    return Output(name=name, digest="sha256:" + hashlib.sha256(kept).hexdigest(), bytes=total)


def _elapsed(call: ToolCall) -> float:
    return round((datetime.now(UTC) - call.received).total_seconds() * 1000, 3)
