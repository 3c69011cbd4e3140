"""Brokers calls: the only path a call can take. Read ``Broker.submit`` and what follows it from top to bottom.

Two chains of guards stand around a call: the first decides whether it may run, the second is there while it runs.
Between them its decision is put on record, and its end. Every step that has an effect is in the audit log, on disk,
before the effect.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

import anyio
import anyio.lowlevel

from glovebox_audit.chain import Head
from glovebox_profiles.compile import to_spec
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_sandboxes.pool.pool import SandboxProvider, SandboxRequest
from glovebox_sandboxes.session.run import Hooks, run
from glovebox_server.artifacts.collector import Collector
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.calls import NOTHING, CallResult, Decision, Listener, Principal, ToolCall, Trace, new_call_id
from glovebox_server.core.accept import decide, tool_named, validated
from glovebox_server.core.call import ApprovalRequiredError, Attempt, Call, CallDeniedError, Ran, Show
from glovebox_server.core.chain import GuardLink, enter
from glovebox_server.core.inputs import open_inputs
from glovebox_server.core.result import answered, refused
from glovebox_server.core.rights import Rights, RightsOf
from glovebox_server.errors import RefusedError
from glovebox_server.receipts.recorder import CallRecorder, Receipt
from glovebox_server.tools.base import Tool


class Guards(Protocol):
    """What stands around the calls of a server."""

    @property
    def rights_of(self) -> RightsOf:
        """Return what says what a caller may do."""

    @property
    def around_call(self) -> Sequence[GuardLink[CallResult]]:
        """Return the chain that decides whether a call may run."""

    @property
    def around_turn(self) -> Sequence[GuardLink[CallResult]]:
        """Return the part of that chain which a call enters once it is decided in its turn."""

    @property
    def around_run(self) -> Sequence[GuardLink[Ran]]:
        """Return the chain around the run of an allowed call."""


class CallRecords(Protocol):
    """Puts calls on record."""

    @property
    def head(self) -> Head:
        """Return the end of the log's chain."""

    async def decide(self, call: Call) -> CallRecorder:
        """Record the decision about a call; return what writes its other records."""

    async def finish(self, call: Call, ran: Ran) -> Receipt:
        """Record how a call ended that ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """Runs calls for whoever asks. All its parts are given to it; it keeps nothing of a call after it."""

    tools: Mapping[str, Tool]
    guards: Guards
    sandboxes: SandboxProvider
    artifacts: ArtifactStore
    journal: CallRecords

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
            RefusedError: too many calls are under way. Of these three nothing was started, and nothing is recorded.
            UnsupportedSpecError: no driver can enforce the profile here; nothing was started.
            SandboxError: the sandbox could not be started, was not what was planned, or died.
            ArtifactsUnavailable: the disk failed under an artifact.
            AuditUnavailable: a record could not be made durable; what it announces did not happen.
        """
        rights = self.guards.rights_of(principal)
        known = tool_named(self.tools, tool, rights.shown(self.tools))
        request = ToolCall(
            id=call_id or new_call_id(),
            principal=principal,
            session=session,
            run=run,
            trace=trace,
            tool=tool,
            arguments=validated(known, arguments),
            received=datetime.now(UTC),
        )
        call = Call(
            request=request,
            tool=known,
            listener=listener,
            rights=rights,
            decide=lambda rights: (self._decide(call, rights), rights),
            ended_by=lambda: (listener.ended_by(), None),
        )
        try:
            return await enter(self.guards.around_call, self._take_turn, call)
        except CallDeniedError as denial:
            return await self._deny(call, denial.refusal)
        finally:
            call.forget()

    def _decide(self, call: Call, rights: Rights) -> Decision:
        """Decide a call under these rights. Pure but for what guards object to."""
        request = call.request
        profile = rights.profiles.get(request.tool)
        digest = rights.profiles.digest_for(request.tool) if profile else ""
        refusals = (objection(request, rights) for objection in call.objections)
        objection = next((refusal for refusal in refusals if refusal), None)
        served = rights.workspace is not None
        decision = decide(call.tool, request.arguments, profile, digest, workspace=served, objection=objection)
        if rights.policy_digest:
            return replace(decision, role=rights.role, policy_digest=rights.policy_digest)
        return decision

    def _begin(self, call: Call) -> None:
        """Begin a turn: the call is decided by what is in force now."""
        call.request = replace(call.request, received=datetime.now(UTC))
        decision, rights = call.decide(self.guards.rights_of(call.request.principal))
        call.is_decided, call.now = True, Attempt(rights=rights, decision=decision)
        profile = rights.profiles.get(call.request.tool)
        if profile is not None:
            call.now.profile = profile
            call.now.reveal += [file.path for file in profile.files.reveal]

    async def _take_turn(self, call: Call) -> CallResult:
        """Decide a call whose turn has come, open its inputs, and enter the guards that need to know both."""
        self._begin(call)
        async with open_inputs(self.artifacts, call.request, call.now.decision) as (decision, inputs):
            call.now.decision, call.now.inputs = decision, inputs
            if decision.effect == "deny":
                return await self._deny(call, None)
            try:
                return await enter(self.guards.around_turn, self._run_on_record, call)
            except CallDeniedError as denial:
                return await self._deny(call, denial.refusal)  # in its turn: records take the disk's time
            except ApprovalRequiredError:
                call.is_decided = False  # what was decided in this turn holds no longer
                raise

    async def _deny(self, call: Call, refusal: Refusal | None) -> CallResult:
        """Refuse a call, and record that unless it has been decided on record."""
        if not call.is_decided:
            self._begin(call)
        now = call.now
        if refusal is not None:
            now.decision = denied(now.decision, refusal)
        if not now.is_recorded:
            with anyio.CancelScope(shield=True):  # a stop meanwhile must not have it decided twice
                await self._record_decision(call)
                for hook in call.on_decided:
                    await hook(call)
        return refused(call.request, now.decision, self.journal.head)

    async def _record_decision(self, call: Call) -> None:
        call.now.records, call.now.is_recorded = await self.journal.decide(call), True

    async def _run_on_record(self, call: Call) -> CallResult:
        """Record the decision, run the call, and record its one end."""
        now = call.now
        if now.decision.effect != "allow":
            raise CallDeniedError
        await self._record_decision(call)
        try:
            async with now.records.until_ended(call.ended_by):
                for hook in call.on_decided:
                    await hook(call)
                if now.perform is not None:
                    await now.records.flush()
                    await anyio.lowlevel.checkpoint_if_cancelled()  # the last moment at which nothing has changed
                with anyio.CancelScope(shield=now.perform is not None):  # what is in force is recorded as that
                    ran = await (now.perform or self._run_guarded)(call)
                    receipt = await self.journal.finish(call, ran)
        except RefusedError as refusal:
            if now.perform is None:
                raise
            raise CallDeniedError(refusal.refusal) from refusal
        # After the block: the call has its end, and must not get a second one.
        if now.finished is None:
            raise AssertionError(call.request.id)
        if now.withheld is not None:
            return refused(call.request, denied(now.decision, now.withheld), self.journal.head)
        return answered(
            call.tool, call.request, ran.outcome, ran.delivered, decision=now.decision, plan=ran.plan,
            head=self.journal.head, elapsed_ms=now.finished.elapsed_ms, receipt=receipt, secrets=now.redacted,
            masks=now.spec.masks if now.spec else (), scans=ran.scans, answer=ran.answer,
        )  # fmt: skip

    async def _run_guarded(self, call: Call) -> Ran:
        """Enter the guards that are there while a program runs."""
        call.now.spec = to_spec(call.now.profile, workspace=call.now.rights.workspace)
        return await enter(self.guards.around_run, self._run, call)

    async def _run(self, call: Call) -> Ran:
        """Run the program in a sandbox of its own: observers see what came of it, then it is transformed."""
        now, request = call.now, call.request
        profile, records = now.profile, now.records
        if now.spec is None:
            raise AssertionError(request.id)
        inputs = now.inputs.contents()
        wanted = SandboxRequest(
            isolation=profile.isolation,
            spec=now.spec,
            prepared=profile.python.start == "warm",
            code=request.arguments.get("code"),
            key=request.principal.id,
        )
        async with (
            self.artifacts.collect(
                request, wanted.spec.limits, now.rights.artifact_bytes, now.inspect_file
            ) as collection,
            Collector(collection, records, request, now.mask_name) as collector,
        ):
            call.listener.progress("Getting a sandbox")
            async with self.sandboxes.acquire(wanted, before_start=records.flush) as sandbox:
                await records.record(sandbox.record)
                sandbox.require_as_planned()
                call.listener.progress("Running")
                for hook in now.on_started:
                    hook()
                hooks = Hooks(
                    file=collector.accept,
                    cut_file=partial(collector.accept, cut=True),
                    serve=now.serve,
                    printed=_show_live(call),
                )
                # Over HTTP, a caller need not know where the workspace is, nor find out by asking.
                root = now.rights.workspace if request.principal.transport == "stdio" else None
                job = replace(call.tool.job(request.arguments, now.reveal, root=root), environment=now.environment)
                program = partial(run, sandbox, job, inputs=inputs, hooks=hooks)
                for wrap in now.wrap_program:
                    program = wrap(program)  # type: ignore[assignment]  # a partial is what it calls
                outcome = await program()
            outcome = await _pass_on(call, outcome)
            delivered = NOTHING
            if now.withheld is None:
                delivered = await collector.deliver(outcome, keep_pictures=profile.files.output)
        return Ran(outcome=outcome, delivered=delivered, answer=call.tool.answer(outcome), plan=sandbox.plan)


async def _pass_on(call: Call, outcome: Outcome) -> Outcome:
    """Have raw output observed, then transformed."""
    now = call.now
    for observer in now.observers:
        await observer.ended(outcome)
    normal = outcome.ended == "exited" and all(observer.is_complete for observer in now.observers)
    for transform in now.transforms:
        outcome = await transform(outcome, normal)
    return outcome


def _show_live(call: Call) -> Callable[[bytes], None]:
    """Return what takes a program's raw live output: observers first, then what masks it, then the listener."""
    show: Show = call.listener.printed
    for wrap in call.now.wrap_live:
        show = wrap(show)
    if len(call.now.observers) == 1:
        return call.now.observers[0].printed(show)
    if call.now.observers:
        raise AssertionError("live output has one observer")
    return lambda data: show(data.decode("utf-8", "replace"))


def denied(decision: Decision, refusal: Refusal) -> Decision:
    """Return the same decision, turned down for this reason."""
    return replace(decision, effect="deny", rule=refusal.rule, reason=refusal.reason, hint=refusal.hint, recorded="")
