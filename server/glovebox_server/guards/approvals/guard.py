"""Approvals around a call: what policy may lift, the wait for a person while the call holds nothing, and its use."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial

import anyio

from glovebox_audit.place import AuditError
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_server.calls import CallResult, Decision, ToolCall
from glovebox_server.core.call import ApprovalRequiredError, Call, CallDeniedError, Decide
from glovebox_server.core.result import add_notes
from glovebox_server.errors import StoreError
from glovebox_server.guards.approvals.approvals import Approvals
from glovebox_server.guards.approvals.question import Question
from glovebox_server.guards.approvals.rules import (
    Escalation,
    budget_escalation,
    considered,
    propose,
    reaching,
    unnamed,
    widened,
)
from glovebox_server.guards.approvals.store import State


@dataclass(slots=True)
class _PendingLift:
    """The lift that a call needs in this turn."""

    escalation: Escalation | None = None


def lift(call: Call, decide: Decide) -> None:
    """Turn a denial that policy may lift into a question."""
    now = call.now
    now.decision, now.rights, now.part(_PendingLift).escalation = considered(
        call.request, call.tool, now.rights, decide
    )


async def lift_budget(call: Call) -> None:
    """Ask about a spent budget if policy says so: once, with the rights that lack it."""
    pending = call.now.part(_PendingLift)

    def lift(refusal: Refusal) -> bool:
        if pending.escalation is not None:
            return False
        now = call.now
        pending.escalation = budget_escalation(now.rights, refusal.rule)
        if pending.escalation is None:
            return False
        now.rights = widened(now.rights, call.request.tool, [pending.escalation])
        return True

    call.lift = lift


async def settle(approvals: Approvals, question: Question, call: Call) -> State:
    """Ask a question, wait for its answer, and return its state."""
    try:
        return await approvals.settle(question, call.listener)
    except StoreError:
        return "pending"  # decided anew, which refuses it by the store's rule


async def spend(approvals: Approvals, count: Callable[[ToolCall], Awaitable[None]] | None, call: Call) -> None:
    """Use an approval up, once everything else has been granted; or ask for one."""
    now, escalation = call.now, call.now.part(_PendingLift).escalation
    try:
        verdict = await approvals.consult(propose(call, escalation), call.answer)
    except StoreError as problem:
        raise CallDeniedError(problem.refusal) from problem
    if not isinstance(verdict, Decision):
        if count is not None:
            with anyio.CancelScope(shield=True):  # a stop meanwhile must not leave a question without a waiting call
                await count(call.request)
        raise ApprovalRequiredError(partial(settle, approvals, verdict, call))
    now.decision = verdict
    if verdict.effect == "deny":
        raise CallDeniedError
    now.profile = reaching(now.profile, verdict.grants, escalation)

    async def add_questions(result: CallResult) -> CallResult:
        return add_notes(result, await request_hosts(approvals, call)) if call.now.refused_targets else result

    now.on_result.append(add_questions)


async def request_hosts(approvals: Approvals, call: Call) -> tuple[str, ...]:
    """Ask an operator about hosts refused while the call ran; return the lines for its caller."""
    now = call.now
    escalations = unnamed(now.refused_targets, now.profile, now.rights)
    if not escalations:
        return ()
    try:
        questions = await approvals.request(replace(propose(call), escalation=None), escalations)
    except (StoreError, AuditError):
        return ()  # the program has run, and what it was refused stays refused
    return tuple(
        f"Question {question.id} asks whether it may reach {question.subject.target}: call again once that is allowed."
        for question in questions
    )
