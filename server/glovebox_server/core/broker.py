"""Brokers calls: the only path a call can take. Read ``Broker.submit`` and what follows it from top to bottom.

Guards stand around each part of a call: the call, its turn, its run. Every step that has an effect is in the audit
log, on disk, before the effect.
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol, Unpack

import anyio
import anyio.lowlevel

from glovebox_audit.chain import Head
from glovebox_profiles.compile import to_spec
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.pool.pool import SandboxProvider
from glovebox_server.artifacts.store import ArtifactStore
from glovebox_server.calls import CallResult, Listener, Principal
from glovebox_server.core.accept import Origin, accept, decide_call, deny
from glovebox_server.core.call import ApprovalRequiredError, Attempt, Call, CallDeniedError, Guards, Ran, enter
from glovebox_server.core.inputs import open_inputs
from glovebox_server.core.result import build_refusal, build_result
from glovebox_server.core.run import run_in_sandbox
from glovebox_server.errors import RefusedError
from glovebox_server.receipts.recorder import CallRecorder, Receipt
from glovebox_server.tools.base import Tool


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
        **origin: Unpack[Origin],
    ) -> CallResult:
        """Run one call from raw arguments to its result; cancelling it kills the sandbox.

        A refusal of policy is a result. ``failures`` says what becomes of each exception.

        Raises:
            UnknownToolError: There is none of that name.
            InvalidArgumentsError: They do not fit the tool's model.
            RefusedError: Too many calls are under way. Of these three nothing was started, and nothing is recorded.
            UnsupportedSpecError: No driver can enforce the profile here; nothing was started.
            SandboxError: The sandbox could not be started, was not what was planned, or died.
            ArtifactStoreError: The disk failed under an artifact.
            AuditError: A record could not be made durable; what it announces did not happen.
        """
        rights = self.guards.rights_of(principal)
        call = accept(self.tools, rights, tool, arguments, principal=principal, listener=listener, origin=origin)
        call.objections = self.guards.objections
        try:
            return await self._take_turns(call)
        except CallDeniedError as denial:
            return await self._deny(call, denial.refusal)
        except Exception:
            if call.is_decided and call.now.is_recorded and call.now.decision.effect == "allow":
                self._note_end(call, failed=True)
            raise
        finally:
            call.forget()

    async def _take_turns(self, call: Call) -> CallResult:
        """Give a call its turn, and another one after each answer of a person."""
        async with AsyncExitStack() as around:
            await enter(self.guards.around_call, call, around)
            while True:
                try:
                    async with AsyncExitStack() as held:
                        await enter(self.guards.before_turn, call, held)
                        return await self._take_turn(call)
                except ApprovalRequiredError as required:
                    call.is_decided = False  # what was decided in that turn holds no longer
                    wait = required.wait
                call.answer = await wait()  # holding nothing that a turn gives
        raise AssertionError(call.request.id)  # what a guard holds ends no call without saying why

    def _begin(self, call: Call) -> None:
        """Begin a turn: the call is decided by what is in force now."""
        call.request = replace(call.request, received=datetime.now(UTC))
        rights = self.guards.rights_of(call.request.principal)
        decide = partial(decide_call, call)
        now = call.now = Attempt(rights=rights, decision=decide(rights))
        for decider in self.guards.deciders:
            decider(call, decide)
        call.is_decided = True
        profile = now.rights.profiles.get(call.request.tool)
        if profile is not None:
            now.profile = profile
            now.reveal += [file.path for file in profile.files.reveal]

    async def _take_turn(self, call: Call) -> CallResult:
        """Decide a call whose turn has come, open its inputs, and enter the guards that need to know both."""
        self._begin(call)
        async with AsyncExitStack() as inputs:
            if call.request.arguments.get("inputs") and call.now.decision.effect != "deny":
                opened = open_inputs(self.artifacts, call.request, call.now.decision)
                call.now.decision, call.now.inputs = await inputs.enter_async_context(opened)
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
                return await self._deny(call, denial.refusal)  # in its turn: records take the disk's time
        raise AssertionError(call.request.id)  # neither guards nor inputs swallow an exception

    async def _deny(self, call: Call, refusal: Refusal | None) -> CallResult:
        """Refuse a call, and record that unless it has been decided on record."""
        if not call.is_decided:
            self._begin(call)
        now = call.now
        if refusal is not None:
            now.decision = deny(now.decision, refusal)
        if not now.is_recorded:
            with anyio.CancelScope(shield=True):  # a stop meanwhile must not have it decided twice
                await self._record_decision(call)
        return build_refusal(call.request, now.decision, self.journal.head)

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
        self._note_end(call, failed=bool(now.finished.failed))
        if now.withheld is not None:
            return build_refusal(call.request, deny(now.decision, now.withheld), self.journal.head)
        return build_result(
            call.tool, call.request, ran.outcome, ran.delivered, decision=now.decision, plan=ran.plan,
            head=self.journal.head, elapsed_ms=now.finished.elapsed_ms, receipt=receipt, secrets=now.redacted,
            masks=now.spec.masks if now.spec else (), scans=ran.scans, answer=ran.answer,
        )  # fmt: skip

    def _note_end(self, call: Call, *, failed: bool) -> None:
        for note in self.guards.on_ended:
            note(call, failed)

    async def _run_guarded(self, call: Call) -> Ran:
        """Run a program within the guards that are there while it runs."""
        call.now.spec = to_spec(call.now.profile, workspace=call.now.rights.workspace)
        async with AsyncExitStack() as held:
            await enter(self.guards.around_run, call, held)
            ran = await run_in_sandbox(call, self.sandboxes, self.artifacts)
            for hook in reversed(call.now.on_ran):
                await hook(ran)
            return ran
        raise AssertionError(call.request.id)
