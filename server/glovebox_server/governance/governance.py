"""The broker's one door to what governs a call beside its tool's profile. A part that is off is None.

In the order in which a call meets them: its caller's rights, stops, approvals, budgets; and watch rules at its end.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import anyio

from glovebox_profiles.egress import EgressTarget
from glovebox_profiles.model import Profile
from glovebox_sandboxes.contract.errors import Refusal, Refused
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_server.audit.events import CallFinished
from glovebox_server.broker.inputs import Inputs
from glovebox_server.calls import CallResult, Decision, Listener, Principal, ToolCall
from glovebox_server.egress.credentials.lent import Lender
from glovebox_server.egress.events import EgressAttempt
from glovebox_server.egress.traffic import Traffic
from glovebox_server.errors import AuditUnavailable, StoreUnusable
from glovebox_server.governance.approvals.lifting import Escalation, budget_escalation, considered, unnamed, widened
from glovebox_server.governance.budgets.spending import LOOKING, Amounts, Left
from glovebox_server.governance.repeats import Repeats
from glovebox_server.governance.rights import Rights
from glovebox_server.governance.stops.stops import Stopped, Stops
from glovebox_server.governance.watch.look import NOTHING, Look
from glovebox_server.governance.watch.watch import Watch
from glovebox_server.tools.base import Tool

if TYPE_CHECKING:  # the parts import this one for ``Proposal``
    from glovebox_server.governance.approvals.question import Question
    from glovebox_server.governance.approvals.states import State

_T = TypeVar("_T")
_NOBODY = Refusal(
    rule="approval.nobody",
    reason="Somebody has to say yes to changes, and nobody can be asked here; nothing was changed.",
    hint="Tell the operator: `glovebox artifact promote` puts artifacts into a folder.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One call that may run if nobody objects, and all that is known of it before it starts."""

    call: ToolCall
    rights: Rights
    profile: Profile
    decision: Decision
    inputs: Inputs
    escalation: Escalation | None = None
    """What somebody would have to lift, where the call is denied otherwise; rights and profile are those with it."""
    changes: str = ""
    """What it would change on the host, as a person is to be shown it: nobody but they can let it run."""


class Reservation(Protocol):
    """What one call may spend of its caller's budgets. What is not spent is given back at the block's end."""

    @property
    def connections(self) -> int | None:
        """How many it may make; None where no budget says."""

    def counts(self, traffic: Traffic) -> None:
        """Take where the bytes of its connections are counted."""

    async def connect(self, host: str) -> Refusal | None:
        """Count one connection; why there may be none just now."""

    def release(self) -> None:
        """Note that the call does not run: it spends nothing."""

    def looked(self) -> None:
        """Note that the call did not run: time is all that it spent."""

    def started(self) -> None:
        """Note that its program starts, and may tell its caller something from now on."""

    def spent(self, finished: CallFinished, result: CallResult) -> CallResult:
        """Take what the call used and told; returns its result, with what is left where that is little."""


class Budgets(Protocol):
    """How much each caller may spend."""

    def reserved(
        self, proposal: Proposal, worst: Amounts | None = None
    ) -> AbstractAsyncContextManager[Reservation | Refusal]:
        """Reserve what the call may spend, for the block; the refusal where something is spent already.

        Args:
            proposal: the call.
            worst: the most that is spent within the block; None where the call runs in it.
        """

    async def left(self, principal: Principal, run: str | None, rights: Rights) -> Sequence[Left]:
        """What is left of everything that bounds a caller.

        Raises:
            StoreUnusable: it cannot be read.
        """


class Approvals(Protocol):
    """What people said to calls that ask for it."""

    async def consult(self, proposal: Proposal, settled: "State | None") -> "Decision | Question":
        """What becomes of a call that its profile allows or asks about.

        Args:
            proposal: the call.
            settled: where its question stood when the wait for an answer ended; None where none was put.

        Returns:
            That it may run, or that it may not; or what is to be asked first.
        """

    async def request(self, proposal: Proposal, escalations: Sequence[Escalation]) -> "Sequence[Question]":
        """Put questions about what a call was refused while it ran."""

    async def settle(self, question: "Question", listener: Listener) -> "State":
        """Put the question, and wait for the answer as long as its caller can wait; where it stands then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Governance:
    """Everything that governs calls beside profiles."""

    rights_of: Callable[[Principal], Rights]
    """What a caller may do; quick, and the same for the same caller."""
    stops: Stops | None = None
    budgets: Budgets | None = None
    approvals: Approvals | None = None
    watch: Watch | None = None
    repeats: Repeats = field(default_factory=Repeats)

    def objection(self, call: ToolCall, rights: Rights) -> Refusal | None:
        """Why the call may not even be looked at: it is stopped, its role does not have the tool, it keeps failing."""
        stopped = self.stops.refusal(call) if self.stops else None
        return stopped or rights.refusal(call.tool) or self.repeats.refusal(call)

    def considered(
        self, call: ToolCall, tool: Tool, decide: Callable[[Rights], Decision]
    ) -> tuple[Decision, Rights, Escalation | None]:
        """What policy says of a call; where somebody may lift its denial, what it says then, and what to lift."""
        rights = self.rights_of(call.principal)
        return considered(call, tool, rights, decide) if self.approvals else (decide(rights), rights, None)

    @asynccontextmanager
    async def admitted(
        self, proposal: Proposal, settled: "State | None"
    ) -> AsyncIterator["tuple[Decision | Question, Reservation | None]"]:
        """What becomes of a call that its profile allows or asks about, and what it may spend within the block."""
        # Reserved first: a call that nothing is left for must not use up what somebody said.
        async with self._reserved(proposal) as reserved:
            if not isinstance(reserved, Refusal):
                verdict = await self._consulted(proposal, settled)
                runs = isinstance(verdict, Decision) and verdict.effect == "allow"
                if reserved is not None and not runs:
                    reserved.release()
                yield verdict, reserved if runs else None
                return
        refusal = denied(proposal.decision, reserved)
        more = budget_escalation(proposal.rights, refusal) if self.approvals and not proposal.escalation else None
        if more is None:
            yield refusal, None
            return
        rights = widened(proposal.rights, proposal.call.tool, [more])
        async with self.admitted(replace(proposal, escalation=more, rights=rights), settled) as found:
            yield found

    @asynccontextmanager
    async def looking(self, proposal: Proposal) -> AsyncIterator[None]:
        """Charge the caller for what is looked into within the block, before anybody can be asked about the call.

        Raises:
            Refused: too little is left for that. Nobody can lift it: what they would say yes to is not known yet.
        """
        async with self._reserved(proposal, LOOKING) as reserved:
            if isinstance(reserved, Refusal):
                raise Refused(reserved.rule, reserved.reason, reserved.hint)
            try:
                yield
            finally:
                if reserved is not None:
                    reserved.looked()

    def _reserved(
        self, proposal: Proposal, worst: Amounts | None = None
    ) -> "AbstractAsyncContextManager[Reservation | Refusal | None]":
        return nullcontext() if self.budgets is None else self.budgets.reserved(proposal, worst)

    async def _consulted(self, proposal: Proposal, settled: "State | None") -> "Decision | Question":
        rights = proposal.rights
        asks = proposal.decision.effect == "ask" or rights.approvals or proposal.escalation or rights.lifts
        if self.approvals is None and proposal.changes:
            return denied(proposal.decision, _NOBODY)
        if self.approvals is None or not (asks or proposal.changes):
            return proposal.decision
        try:
            verdict = await self.approvals.consult(proposal, settled)
        except StoreUnusable as problem:
            return denied(proposal.decision, problem.refusal)
        if self.watch is not None and not isinstance(verdict, Decision):
            await self.watch.questioned(proposal.call)
        return verdict

    async def settle(self, question: "Question", listener: Listener) -> "State":
        """Put a question that ``admitted`` gave back, and wait for its answer."""
        if self.approvals is None:
            raise AssertionError(question)
        try:
            return await self.approvals.settle(question, listener)
        except StoreUnusable:
            return "pending"  # decided anew, which refuses it by the store's rule

    async def requested(self, proposal: Proposal, targets: Iterable[EgressTarget]) -> tuple[str, ...]:
        """Have an operator asked about hosts that a call was refused while it ran; what its caller is told."""
        escalations = unnamed(targets, proposal.profile, proposal.rights) if self.approvals else ()
        if self.approvals is None or not escalations:
            return ()
        try:
            questions = await self.approvals.request(proposal, escalations)
        except (StoreUnusable, AuditUnavailable):
            return ()  # the program has run, and what it was refused stays refused
        return tuple(
            f"Question {each.id} asks whether it may reach {each.subject.target}: call again once that is allowed."
            for each in questions
        )

    async def decided(self, call: ToolCall, decision: Decision, workspace: Path | None) -> None:
        """Have the watch rules look at a decision that is recorded, of a call that reads this workspace."""
        if self.watch is not None:
            await self.watch.decided(call, decision, workspace)

    def asks(self, call: ToolCall, decision: Decision) -> Decision:
        """The same decision, turned into a question where a watch rule has its run asked about."""
        asked = self.watch.asks(call) if self.watch is not None and decision.effect != "deny" else None
        if asked is None:
            return decision
        return replace(decision, effect="ask", rule=asked.rule, reason=asked.reason, hint=asked.hint)

    def look(self, lender: Lender | None = None) -> Look:
        """What looks through what a call gives back, which was lent this."""
        return NOTHING if self.watch is None else self.watch.look(lender.placeholders if lender else {})

    async def planted(self, workspace: Path | None) -> tuple[str, ...]:
        """Paths of the canaries in a workspace, which are to be read though they are named as secrets are."""
        return () if self.watch is None or workspace is None else await self.watch.planted(workspace)

    async def connecting(self, call: ToolCall, attempt: EgressAttempt) -> None:
        """Have the watch rules look at an attempt to connect that is recorded."""
        if self.watch is not None:
            await self.watch.connecting(call, attempt)

    async def ended(self, call: ToolCall, outcome: Outcome, look: Look) -> None:
        """Have the watch rules look at what came of a call. Where they stop it, this does not return."""
        if self.watch is not None:
            await self.watch.ended(call, outcome, look)

    def slowed(self, call: ToolCall) -> float:
        """Seconds that the call waits, holding nothing, where a watch rule slows its run."""
        return 0.0 if self.watch is None else self.watch.pause(call)

    def ending(self, call: ToolCall, scope: anyio.CancelScope) -> AbstractContextManager[Stopped]:
        """Cancel ``scope`` once a stop names the call, for as long as the block runs."""
        return nullcontext(Stopped(call=call, scope=scope)) if self.stops is None else self.stops.ending(call, scope)

    async def unless_stopped(self, call: ToolCall, waited_for: Awaitable[_T]) -> _T | None:
        """Wait for something; None once a stop names the call that waits."""
        with anyio.CancelScope() as scope, self.ending(call, scope):
            return await waited_for
        return None


def denied(decision: Decision, refusal: Refusal | None) -> Decision:
    """The same decision, turned down for this reason."""
    if refusal is None:
        raise AssertionError(decision)
    return replace(decision, effect="deny", rule=refusal.rule, reason=refusal.reason, hint=refusal.hint, recorded="")
