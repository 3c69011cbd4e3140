"""Brokers calls: the only path a call can take. Read ``Broker.submit`` and what follows it from top to bottom.

Every step that has an effect is in the audit log, on disk, before the effect.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from glovebox_profiles.compile import to_spec
from glovebox_profiles.model import Profile
from glovebox_sandboxes.pool.provider import SandboxProvider, Wanted
from glovebox_sandboxes.session.run import AttestedSandbox, Hooks, run
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.audit.events import CallFinished
from glovebox_server.broker.admission import Admission
from glovebox_server.broker.answers import answered, refused, told, withholding
from glovebox_server.broker.arguments import tool_named, validated
from glovebox_server.broker.collector import NOTHING, Collector
from glovebox_server.broker.hiding import Hiding
from glovebox_server.broker.inputs import Inputs, open_inputs
from glovebox_server.broker.network import gate_for, serve_with
from glovebox_server.broker.policy import decide
from glovebox_server.broker.records import artifact_scanned, call_decided, call_finished
from glovebox_server.calls import (
    CallResult,
    Decision,
    Link,
    Listener,
    Principal,
    ToolCall,
    Trace,
    elapsed_ms,
    new_call_id,
)
from glovebox_server.egress.credentials.held import Held
from glovebox_server.egress.gate import EgressGate
from glovebox_server.errors import Refused
from glovebox_server.governance.approvals import lifting
from glovebox_server.governance.governance import Governance, Proposal, Reservation, denied
from glovebox_server.governance.rights import Rights
from glovebox_server.governance.stops.stops import Stopped
from glovebox_server.promotion.scanning import Known, Scan, Scanning
from glovebox_server.receipts.recorder import CallRecorder, ReceiptIssuer
from glovebox_server.secret_scan.redact import redacted, shown_live, text_redacted
from glovebox_server.tools.base import Tool

if TYPE_CHECKING:
    from glovebox_server.governance.approvals.question import Question
    from glovebox_server.governance.approvals.states import State
    from glovebox_server.promotion.proposing import Proposals, Proposed
    from glovebox_server.proof.sealed import Sealer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Allowed:
    """A call that may run, and what it runs with."""

    call: ToolCall
    tool: Tool
    profile: Profile
    decision: Decision
    inputs: Inputs
    recorder: CallRecorder


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """Runs calls for whoever asks. All its parts are given to it; it keeps nothing of a call after it."""

    tools: Mapping[str, Tool]
    governance: Governance
    admission: Admission
    sandboxes: SandboxProvider
    receipts: ReceiptIssuer
    artifacts: ArtifactStore
    credentials: Held = field(default_factory=Held)
    hiding: Hiding = field(default_factory=Hiding)
    gates: Callable[..., EgressGate] | None = None
    """Makes the gates of calls; None as they are. A proof's have a server of its own behind them."""
    sealer: "Sealer | None" = None
    """Seals arguments in the log; None where the operator wants none."""
    known: Known = field(default_factory=Known)
    """What was found in artifacts that calls propose."""
    proposals: "Callable[[], Proposals] | None" = None
    """Gives what works out and makes the changes that calls propose; None where none can be made."""

    async def submit(
        self,
        principal: Principal,
        tool: str,
        arguments: Mapping[str, Any],
        listener: Listener,
        *,
        call_id: str = "",
        session: str | None = None,
        run: str | None = None,
        trace: Trace | None = None,
    ) -> CallResult:
        """Run one call from raw arguments to its result; cancelling it kills the sandbox.

        A refusal of policy is a result. ``failures`` says what becomes of each exception.

        Args:
            principal: who calls.
            tool: which tool, as the caller names it.
            arguments: as the caller gave them.
            listener: hears what happens meanwhile.
            call_id: the call's id, where somebody listens for its records already; else a new one.
            session: the transport's name for the session it came in.
            run: the piece of work it belongs to.
            trace: where it stands in its caller's own tracing.

        Raises:
            UnknownTool: there is none of that name.
            InvalidArguments: they do not fit the tool's model.
            Refused: too many calls are under way. Of these three nothing was started, and nothing is recorded.
            UnsupportedSpec: no driver can enforce the profile here; nothing was started.
            SandboxUnavailable: the sandbox could not be started, was not what was planned, or died.
            ArtifactsUnavailable: the disk failed under an artifact.
            AuditUnavailable: a record could not be made durable; what it announces did not happen.
        """
        rights = self.governance.rights_of(principal)
        found = tool_named(self.tools, tool, rights.offered(self.tools))
        valid = validated(found, arguments)
        call = ToolCall(
            id=call_id or new_call_id(),
            principal=principal,
            session=session,
            run=run,
            trace=trace,
            tool=tool,
            arguments=valid,
            received=datetime.now(UTC),
        )
        settled: State | None = None
        pause = self.governance.repeats.pause(call)
        if pause:
            listener.progress(f"Waiting {pause:g} s: this same call has just failed several times")
        pause = max(pause, self.governance.slowed(call))
        while True:
            async with AsyncExitStack() as turn:
                place = self.admission.enter(principal.id, tool, valid, rights.turns, pause)
                entered = turn.enter_async_context(place)
                # Stopped while it waited: it is decided without a turn, which is that it is refused.
                await self.governance.unless_stopped(call, entered)
                call = replace(call, received=datetime.now(UTC))
                came = await self._call(call, found, listener, settled)
            if isinstance(came, CallResult):
                return came
            pause = 0.0
            # Who waits for a person holds neither a turn nor a sandbox; the call is decided anew with the answer.
            settled = await self.governance.unless_stopped(call, self.governance.settle(came, listener))

    async def _call(
        self, call: ToolCall, tool: Tool, listener: Listener, settled: "State | None"
    ) -> "CallResult | Question":
        """Decide, and record what was decided; or return what somebody is to be asked first."""
        decide = partial(self._decided, call, tool)
        decided, rights, escalation = self.governance.considered(call, tool, decide)
        profile = rights.profiles.get(call.tool)
        async with AsyncExitStack() as held:
            decision, inputs = await held.enter_async_context(open_inputs(self.artifacts, call, decided))
            decision, changes = await self._proposed(call, tool, decision, inputs, rights=rights, listener=listener)
            reservation = None
            if profile is not None and decision.effect != "deny":
                proposal = Proposal(
                    call=call, rights=rights, profile=profile, decision=decision, inputs=inputs, escalation=escalation,
                    changes="" if changes is None else changes.shown,
                )  # fmt: skip
                verdict, reservation = await held.enter_async_context(self.governance.admitted(proposal, settled))
                if not isinstance(verdict, Decision):
                    return verdict
                decision = verdict
                profile = lifting.reaching(profile, decision, escalation)
            recorder = self.receipts.recorder(call, profile)
            forms, sealer = self.credentials.forms, self.sealer
            await recorder.record(await call_decided(call, decision, profile, inputs, forms, sealer=sealer))
            await self.governance.decided(call, decision, rights.workspace)
            if profile is None or decision.effect != "allow":
                return refused(call, decision, recorder.head)
            allowed = _Allowed(
                call=call, tool=tool, profile=profile, decision=decision, inputs=inputs, recorder=recorder
            )
            with anyio.CancelScope() as scope, self.governance.ending(call, scope) as stopped:
                try:
                    if changes is not None:
                        return await self._put(allowed, changes, listener, stopped, reservation)
                    return await self._run(allowed, rights, listener, stopped, reservation)
                except Exception:
                    self.governance.repeats.note(call, failed=True)
                    raise
            # Nothing else cancels that scope: the call is recorded as cancelled, and its sandbox is gone.
            return refused(call, denied(decision, stopped.refusal), recorder.head)

    def _decided(self, call: ToolCall, tool: Tool, rights: Rights) -> Decision:
        profile, served = rights.profiles.get(call.tool), rights.workspace is not None
        digest = rights.profiles.digest_for(call.tool) if profile else ""
        objection = self.governance.objection(call, rights)
        decision = decide(tool, call.arguments, profile, digest, workspace=served, objection=objection)
        decision = self.governance.asks(call, decision)
        return (
            replace(decision, role=rights.role, policy_digest=rights.policy_digest)
            if rights.policy_digest
            else decision
        )

    async def _proposed(
        self,
        call: ToolCall,
        tool: Tool,
        decision: Decision,
        inputs: Inputs,
        *,
        rights: Rights,
        listener: Listener,
    ) -> "tuple[Decision, Proposed | None]":
        """What a call would change on the host, or why nobody can be asked about that; None for one that runs."""
        profile = rights.profiles.get(call.tool)
        if not tool.proposes or decision.effect == "deny" or profile is None:
            return decision, None
        if inputs.unreadable is not None:
            raise inputs.unreadable
        try:
            proposals = self._proposals(call)
            proposed = await proposals.proposed(call, sum(each.bytes for each in inputs.listed))
            listener.progress("Looking into files")
            with anyio.CancelScope() as scope, self.governance.ending(call, scope) as stopped:
                proposal = Proposal(call=call, rights=rights, profile=profile, decision=decision, inputs=inputs)
                async with self.governance.looking(proposal):
                    scans = await self._scanning(call, profile).scans(inputs.listed, self.known)
                return decision, await proposals.scanned(proposed, scans, call)
        except Refused as refusal:
            return denied(decision, refusal.refusal), None
        return denied(decision, stopped.refusal), None

    async def _put(
        self,
        allowed: "_Allowed",
        changes: "Proposed",
        listener: Listener,
        stopped: Stopped,
        reservation: Reservation | None,
    ) -> CallResult:
        """Make the changes that somebody said yes to, record and answer. Nothing runs in a sandbox."""
        call, recorder, decision = allowed.call, allowed.recorder, allowed.decision
        if decision.approval is None:  # whatever profile and policy say
            raise AssertionError(call.id)
        try:
            async with recorder.until_ended(partial(_ended_by, stopped, listener), lambda: stopped.stop):
                await recorder.flush()
                listener.progress("Changing files")
                if reservation is not None:
                    reservation.started()
                with anyio.CancelScope(shield=True):  # what is in force is told as that
                    outcome = await self._proposals(call).put(changes, call)
                    finished = call_finished(call, outcome, allowed.profile, None, {})
                    receipt = await recorder.finish(finished)
        except Refused as refusal:
            return refused(call, denied(decision, refusal.refusal), recorder.head)
        result = answered(
            allowed.tool, call, outcome, NOTHING, decision=decision, plan=None, head=recorder.head,
            elapsed_ms=finished.elapsed_ms, receipt=receipt,
        )  # fmt: skip
        self.governance.repeats.note(call, failed=False)
        return reservation.spent(finished, result) if reservation else result

    def _scanning(self, call: ToolCall, profile: Profile, recorder: CallRecorder | None = None) -> Scanning:
        """How files are looked into for a call; without a recorder, before there is anything to record of it."""

        async def before_start() -> None:
            if recorder is not None:
                await recorder.flush()

        async def started(sandbox: AttestedSandbox) -> None:
            if recorder is not None:
                await recorder.record(sandbox.record)

        return Scanning(
            call=call, profile=profile, sandboxes=self.sandboxes, artifacts=self.artifacts,
            forms=self.credentials.forms, before_start=before_start, started=started,
        )  # fmt: skip

    def _proposals(self, call: ToolCall) -> "Proposals":
        if self.proposals is None:
            raise Refused("promotion.folder", f"{call.tool} can change nothing here.", "Ask the operator.")
        return self.proposals()

    async def _run(
        self,
        allowed: "_Allowed",
        rights: Rights,
        listener: Listener,
        stopped: Stopped,
        reservation: Reservation | None,
    ) -> CallResult:
        """Run, record and answer."""
        call, profile, recorder = allowed.call, allowed.profile, allowed.recorder
        async with (
            recorder.until_ended(partial(_ended_by, stopped, listener), lambda: stopped.stop),
            AsyncExitStack() as held,
        ):
            redact, secrets = profile.result.redact, Counter[str]()

            def masked(name: str) -> str:
                return name if redact == "none" else text_redacted(name, self.credentials.forms, secrets)

            reveal = (*(each.path for each in profile.files.reveal), *await self.governance.planted(rights.workspace))
            connecting = partial(self.governance.connecting, call)
            files = allowed.inputs.contents()
            gate = gate_for(
                profile, recorder, call, connecting, reservation, credentials=self.credentials, made=self.gates
            )
            lender = gate.lender if gate is not None else None
            if lender is not None and any(each.env for each in lender.credentials):
                await recorder.flush()  # a helper may be started for what the program finds in its place
            environment = await lender.environment() if lender is not None else {}
            look = self.governance.look(lender)
            hidden = await held.enter_async_context(
                self.hiding.guarding(to_spec(profile, workspace=rights.workspace), allowed.tool, reveal)
            )
            wanted = Wanted(
                isolation=profile.isolation,
                spec=hidden.spec,
                prepared=profile.python.start == "warm",
                code=call.arguments.get("code"),
                key=call.principal.id,
            )
            async with (
                self.artifacts.collect(call, wanted.spec.limits, rights.artifact_bytes, look.file) as collection,
                Collector(collection, recorder, call, masked) as collector,
            ):
                listener.progress("Getting a sandbox")
                async with self.sandboxes.acquire(wanted, before_start=recorder.flush) as sandbox:
                    await recorder.record(sandbox.record)
                    sandbox.require_as_planned()
                    listener.progress("Running")
                    if reservation is not None:
                        reservation.started()
                    hooks = Hooks(
                        file=collector.accept,
                        cut_file=partial(collector.accept, cut=True),
                        serve=serve_with(gate) if gate else None,
                        printed=look.printed(
                            shown_live(hidden.printed(listener.printed), redact, lambda: self.credentials.forms)
                        ),
                    )
                    job = replace(allowed.tool.job(call.arguments, reveal), environment=environment)
                    outcome = await hidden.run(partial(run, sandbox, job, inputs=files, hooks=hooks))
                await self.governance.ended(call, outcome, look)
                if redact != "none":
                    outcome, more = await redacted(outcome, self.credentials.forms)
                    secrets.update(more)
                withheld = redact == "refuse" and bool(secrets)
                delivered = (
                    NOTHING if withheld else await collector.deliver(outcome, keep_pictures=profile.files.output)
                )
            # Digests of pictures take tens of milliseconds, in which nobody else would be served.
            finished = (
                await anyio.to_thread.run_sync(call_finished, call, outcome, profile, gate, secrets)
                if outcome.blobs or outcome.shown
                else call_finished(call, outcome, profile, gate, secrets)
            )
            scans = None
            if profile.files.scan and (delivered.artifacts or delivered.figures):
                listener.progress("Looking into files")
                scans, finished = await self._scanned(allowed, (*delivered.artifacts, *delivered.figures), finished)
            receipt = await recorder.finish(finished)
        # After the block: the call has its end, and must not get a second one.
        result = answered(
            allowed.tool, call, outcome, delivered, decision=allowed.decision, plan=sandbox.plan, head=recorder.head,
            elapsed_ms=finished.elapsed_ms, receipt=receipt, secrets=secrets,
            hidden=len(hidden.spec.masks), scans=scans,
        )  # fmt: skip
        if withheld:
            result = refused(call, denied(allowed.decision, withholding(secrets)), recorder.head)
        if gate is not None and gate.unnamed:
            proposal = Proposal(
                call=call, rights=rights, profile=profile, decision=allowed.decision, inputs=allowed.inputs
            )
            result = told(result, await self.governance.requested(proposal, gate.unnamed))
        self.governance.repeats.note(call, failed=result.failed)
        return reservation.spent(finished, result) if reservation else result

    async def _scanned(
        self, allowed: "_Allowed", files: Sequence[Link], finished: CallFinished
    ) -> tuple[Sequence[Scan], CallFinished]:
        """Have the files that a call gives back looked into; returns its end with what that took."""
        call, recorder = allowed.call, allowed.recorder
        began = anyio.current_time()
        scans = await self._scanning(call, allowed.profile, recorder).scans(files)
        for each in scans:
            recorder.hold(artifact_scanned(call, each))
        spent = {**finished.usage, "scan_ms": round((anyio.current_time() - began) * 1000, 3)}
        return scans, replace(finished, elapsed_ms=elapsed_ms(call), usage=spent)


def _ended_by(stopped: Stopped, listener: Listener) -> str:
    return "stop" if stopped.refusal else listener.ended_by()
