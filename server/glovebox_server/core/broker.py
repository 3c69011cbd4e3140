"""Brokers calls: the only path of a call. Read ``Broker.submit`` and what follows it from top to bottom.

Guards surround each part of a call: the call, its turn, its run. Every step with an effect is in the audit log, on
disk, before the effect.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Protocol, Unpack

import anyio
import anyio.lowlevel

from glovebox_audit.chain import new_call_id
from glovebox_audit.events import CallFinished
from glovebox_profiles.compile import to_spec
from glovebox_sandboxes.contract.base import SandboxSpec
from glovebox_sandboxes.contract.errors import Refusal, RefusedError
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_sandboxes.pool.pool import SandboxProvider
from glovebox_sandboxes.session.connection import AttestedSandbox, Input, StreamSink
from glovebox_sandboxes.session.run import Hooks, run
from glovebox_server.artifacts.collect import Collector
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.calls import NOTHING, Arguments, CallResult, Listener, Principal, ToolCall
from glovebox_server.core import call as accepting
from glovebox_server.core.call import ApprovalRequiredError, Call, CallDeniedError, GuardLink, Guards, Origin, Ran
from glovebox_server.core.result import build_refusal, build_result
from glovebox_server.receipts.recorder import CallRecorder
from glovebox_server.tools.base import Tool, cut_output


class CallRecords(Protocol):
    """The recorder of calls."""

    async def decide(self, call: Call) -> CallRecorder:
        """Record the decision about a call; return the recorder of its other records."""

    async def describe_end(self, call: Call, ran: Ran) -> CallFinished:
        """Return the last record of a call that ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """The runner of calls. All its parts are passed in; it keeps no state of a call."""

    tools: Mapping[str, Tool]
    guards: Guards
    sandboxes: SandboxProvider
    artifacts: ArtifactStore
    journal: CallRecords

    async def submit(
        self, principal: Principal, tool: str, arguments: Arguments, listener: Listener, **origin: Unpack[Origin]
    ) -> CallResult:
        """Run one call from raw arguments to its result; cancelling it kills the sandbox.

        A refusal of policy is a result. ``failures`` maps each exception to an answer.

        Raises:
            UnknownToolError: the tool does not exist.
            InvalidArgumentsError: they do not fit the tool's model.
            RefusedError: too many calls are under way. After these three nothing was started or recorded.
            UnsupportedSpecError: no driver can enforce the profile here; nothing was started.
            SandboxError: the sandbox could not be started, was not what was planned, or died.
            ArtifactStoreError: the disk failed under an artifact.
            AuditError: a record could not be made durable; what it announces did not happen.
        """
        rights = self.guards.rights_of(principal)
        known = accepting.find_tool(self.tools, tool, rights)
        request = ToolCall(
            id=origin.get("call_id") or new_call_id(), principal=principal, session=origin.get("session"),
            run=origin.get("run"), trace=origin.get("trace"), tool=tool, received=datetime.now(UTC),
            arguments=accepting.validate_arguments(known, arguments),
        )  # fmt: skip
        call = Call(
            request=request, tool=known, listener=listener, rights=rights, objections=self.guards.objections,
            ended_by=lambda: (listener.ended_by(), None),
        )  # fmt: skip
        try:
            return await self._take_turns(call)
        except CallDeniedError as denial:
            return await self._deny(call, denial.refusal)
        except Exception:
            if call.is_decided and call.now.is_recorded and call.now.decision.effect == "allow":
                self._note_end(call, failed=True)
            raise
        finally:  # references back to the call: else only the garbage collector would free it, and its output
            if hasattr(call, "now"):
                del call.now

    async def _take_turns(self, call: Call) -> CallResult:
        """Give a call its turn, and another after each answer of a person."""
        async with AsyncExitStack() as around:
            await enter(self.guards.around_call, call, around)
            while True:
                try:
                    async with AsyncExitStack() as held:
                        await enter(self.guards.before_turn, call, held)
                        return await self._take_turn(call)
                except ApprovalRequiredError as required:
                    call.is_decided = False  # the decision of that turn is void
                    wait = required.wait
                call.answer = await wait()  # without the resources of a turn

    def _begin(self, call: Call) -> None:
        call.request = replace(call.request, received=datetime.now(UTC))
        rights = self.guards.rights_of(call.request.principal)
        decide = partial(accepting.decide_call, call.request, call.tool, objections=call.objections)
        now = call.now = accepting.Attempt(request=call.request, rights=rights, decision=decide(rights))
        for decider in self.guards.deciders:
            decider(call, decide)
        call.is_decided = True
        profile = now.rights.profiles.by_tool.get(call.request.tool)
        if profile is not None:
            now.profile = profile
            now.reveal += [file.path for file in profile.files.reveal]

    async def _take_turn(self, call: Call) -> CallResult:
        """Decide a call in its turn, open its inputs, and enter the guards that need both."""
        self._begin(call)
        async with AsyncExitStack() as inputs:
            if call.request.arguments.get("inputs") and call.now.decision.effect != "deny":
                try:
                    call.now.inputs = await accepting.open_inputs(self.artifacts, call.request, inputs)
                except RefusedError as refused:
                    call.now.decision = accepting.deny(call.now.decision, refused.refusal)
            if call.now.decision.effect == "deny":
                return await self._deny(call, None)
            try:
                async with AsyncExitStack() as held:
                    await enter(self.guards.around_turn, call, held)
                    result = await self._run_on_record(call)
                    for hook in reversed(call.now.on_result):
                        result = await hook(result)
                    return result
            except CallDeniedError as denial:
                return await self._deny(call, denial.refusal)  # in its turn: records cost disk time

    async def _deny(self, call: Call, refusal: Refusal | None) -> CallResult:
        """Refuse a call, and record that unless its decision is on record."""
        if not call.is_decided:
            self._begin(call)
        now = call.now
        if refusal is not None:
            now.decision = accepting.deny(now.decision, refusal)
        if not now.is_recorded:
            with anyio.CancelScope(shield=True):  # a stop meanwhile must not decide it twice
                await self._record_decision(call)
        return build_refusal(call.request, now.decision, now.records.head)

    async def _record_decision(self, call: Call) -> None:
        call.now.records, call.now.is_recorded = await self.journal.decide(call), True
        if call.now.decision.effect != "allow":
            await enter(self.guards.on_decided, call, call.stack)

    async def _run_on_record(self, call: Call) -> CallResult:
        """Record the decision, run the call, and record its one end."""
        now = call.now
        if now.decision.effect != "allow":
            raise CallDeniedError
        await self._record_decision(call)
        try:
            async with now.records.until_ended(call.ended_by):
                await enter(self.guards.on_decided, call, call.stack)
                if now.perform is not None:
                    await now.records.flush()
                    await anyio.lowlevel.checkpoint_if_cancelled()  # the last point before changes
                with anyio.CancelScope(shield=now.perform is not None):  # changes in effect are recorded
                    ran = await (now.perform or self._run_guarded)(call)
                    finished = now.finished = await self.journal.describe_end(call, ran)
                    receipt = await now.records.finish(finished)
        except RefusedError as refusal:
            if now.perform is None:
                raise
            raise CallDeniedError(refusal.refusal) from refusal
        # After the block: the end is recorded, and must not be again.
        self._note_end(call, failed=bool(finished.failed))
        if now.withheld is not None:
            return build_refusal(call.request, accepting.deny(now.decision, now.withheld), now.records.head)
        return build_result(call, ran, finished.elapsed_ms, receipt)

    def _note_end(self, call: Call, *, failed: bool) -> None:
        for note in self.guards.on_ended:
            note(call, failed)

    async def _run_guarded(self, call: Call) -> Ran:
        now, tool = call.now, call.request.tool
        profile, spec = now.rights.specs.get(tool, (None, None))
        if spec is None or profile is not now.profile:  # it may be narrowed, or lifted, for this call
            spec = to_spec(now.profile, workspace=now.rights.workspace)
            now.rights.specs[tool] = now.profile, spec
        now.spec = spec
        async with AsyncExitStack() as held:
            await enter(self.guards.around_run, call, held)
            ran = await self._run_in_sandbox(call)
            for hook in reversed(call.now.on_ran):
                await hook(ran)
            return ran

    async def _run_in_sandbox(self, call: Call) -> Ran:
        """Run the program in a sandbox: its outcome is observed, then transformed; deliver its files."""
        now, request = call.now, call.request
        if now.spec is None:
            raise AssertionError(request.id)
        profile, code = now.profile, request.arguments.get("code")
        prepared = profile.python.start == "warm"
        inputs = now.inputs.contents() if now.inputs else []
        async with AsyncExitStack() as files:
            collect = _Collecting(call, now.spec, self.artifacts, files)
            call.listener.progress("Getting a sandbox")
            async with self.sandboxes.acquire(
                profile.isolation, now.spec, now.records.flush, prepared=prepared, code=code,
                key=request.principal.id, bound=call.rights.turns,
            ) as sandbox:  # fmt: skip
                await now.records.record(sandbox.record)
                sandbox.require_as_planned()
                call.listener.progress("Running")
                now.is_started = True
                outcome = await _run_program(call, sandbox, inputs, collect)
            outcome = await _pass_on(call, outcome)
            delivered = NOTHING
            gives = outcome.blobs or outcome.shown or outcome.skipped or cut_output(outcome)[1]
            if now.withheld is None and (collect.collector or gives):
                delivered = await collect.open().deliver(outcome, keep_pictures=now.profile.files.output)
            return Ran(outcome=outcome, delivered=delivered, answer=call.tool.answer(outcome), plan=sandbox.plan)


class _Collecting:
    """The collection of a call's files, from the first one on. Holds no call: streams keep it until freed."""

    def __init__(self, call: Call, spec: SandboxSpec, artifacts: ArtifactStore, stack: AsyncExitStack) -> None:
        now, request = call.now, call.request
        self.collector: Collector | None = None
        self._make = partial(
            Collector, store=artifacts, call=request, limits=spec.limits, recorder=now.records,
            room=now.rights.artifact_bytes, look=now.inspect_file, mask=now.mask_name,
        )  # fmt: skip
        self._stack = stack

    def open(self) -> Collector:
        """Return the collector, made once; what it has not published by the end is removed."""
        if self.collector is None:
            self.collector = self._make()
            self._stack.push_async_callback(self.collector.discard)
        return self.collector

    async def accept(self, name: str, size: int, *, cut: bool = False) -> StreamSink | None:
        """Accept one file that the guest announces."""
        return await self.open().accept(name, size, cut=cut)


async def _run_program(call: Call, sandbox: AttestedSandbox, inputs: Sequence[Input], collect: _Collecting) -> Outcome:
    now, request = call.now, call.request
    # Over HTTP, a caller must not learn the path of the workspace, nor test guesses.
    root = now.rights.workspace if request.principal.transport == "stdio" else None
    job = replace(call.tool.job(request.arguments, now.reveal, root=root), environment=now.environment)
    cut_file = partial(collect.accept, cut=True)
    hooks = Hooks(file=collect.accept, cut_file=cut_file, serve=now.serve, printed=_show_live(call))
    async with AsyncExitStack() as around:
        for scope in now.around_program:
            await around.enter_async_context(scope)
        return await run(sandbox, job, inputs=inputs, hooks=hooks)


async def _pass_on(call: Call, outcome: Outcome) -> Outcome:
    now = call.now
    for observer in now.observers:
        await observer.ended(outcome)
    normal = outcome.ended == "exited" and all(observer.is_complete for observer in now.observers)
    for transform in now.transforms:
        outcome = await transform(outcome, normal)
    return outcome


def _show_live(call: Call) -> Callable[[bytes], None]:
    """Return a function that takes raw live output: observers first, then masks, then the listener."""
    show: accepting.Show = call.listener.printed
    for wrap in call.now.wrap_live:
        show = wrap(show)
    if len(call.now.observers) == 1:
        return call.now.observers[0].printed(show)
    if call.now.observers:
        raise AssertionError("live output has one observer")
    return lambda data: show(data.decode("utf-8", "replace"))


async def enter(links: Sequence[GuardLink], call: Call, stack: AsyncExitStack) -> None:
    """Enter the guards that this call needs, in order; what they hold goes onto ``stack``.

    A guard returns before the next begins: a coroutine around the call would be resumed with its every step.
    """
    call.stack = stack
    for link in links:
        if link.when is None or link.when(call):
            await link.guard(call)
