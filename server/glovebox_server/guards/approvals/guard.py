"""Approvals around a call: one link waits for a person while the call holds nothing, one uses the approval up."""

from dataclasses import dataclass, replace

import anyio

from glovebox_server.calls import CallResult, Decision
from glovebox_server.core.call import ApprovalRequiredError, Call, CallDeniedError
from glovebox_server.core.chain import Next
from glovebox_server.core.result import told
from glovebox_server.core.rights import Rights
from glovebox_server.errors import AuditUnavailable, StoreUnusable
from glovebox_server.guards.approvals.approvals import Approvals
from glovebox_server.guards.approvals.lifting import (
    Escalation,
    budget_escalation,
    considered,
    reaching,
    unnamed,
    widened,
)
from glovebox_server.guards.approvals.question import Question
from glovebox_server.guards.approvals.states import State
from glovebox_server.guards.proposal import propose


@dataclass(slots=True)
class _PendingApproval:
    """What both links know of a call."""

    escalation: Escalation | None = None
    """What would have to be lifted for it in this turn."""
    settled: State | None = None
    """Where its question stood when the wait for an answer ended."""


async def wait(approvals: Approvals, call: Call, call_next: Next[CallResult]) -> CallResult:
    """Wait for a person's answer, holding neither a turn nor a budget; the call is decided anew with the answer."""
    asking, decide = call.part(_PendingApproval), call.decide

    def lift(rights: Rights) -> tuple[Decision, Rights]:
        decision, rights, asking.escalation = considered(
            call.request, call.tool, rights, lambda wider: decide(wider)[0]
        )
        return decision, rights

    call.decide = lift
    while True:
        try:
            return await call_next(call)
        except ApprovalRequiredError as required:
            asking.settled = await settle(approvals, required.question, call)


async def lift_budget(call: Call, call_next: Next[CallResult]) -> CallResult:
    """Have a spent budget asked about where policy says so: once, with the rights that lack it."""
    now, asking = call.now, call.part(_PendingApproval)
    try:
        return await call_next(call)
    except CallDeniedError as denial:
        if denial.refusal is None or asking.escalation is not None:
            raise
        asking.escalation = budget_escalation(now.rights, denial.refusal.rule)
        if asking.escalation is None:
            raise
    now.rights = widened(now.rights, call.request.tool, [asking.escalation])
    return await call_next(call)


async def settle(approvals: Approvals, question: Question, call: Call) -> State:
    """Put a question, wait for its answer, and return where it stands."""
    try:
        return await approvals.settle(question, call.listener)
    except StoreUnusable:
        return "pending"  # decided anew, which refuses it by the store's rule


async def spend(approvals: Approvals, call: Call, call_next: Next[CallResult]) -> CallResult:
    """Use an approval up, once everything else has been granted; or ask for one."""
    now, asking = call.now, call.part(_PendingApproval)
    try:
        verdict = await approvals.consult(propose(call, asking.escalation), asking.settled)
    except StoreUnusable as problem:
        raise CallDeniedError(problem.refusal) from problem
    if not isinstance(verdict, Decision):
        with anyio.CancelScope(shield=True):  # a stop meanwhile must not leave a question that nobody waits for
            for hook in call.on_question:
                await hook(call)
        raise ApprovalRequiredError(verdict)
    now.decision = verdict
    if verdict.effect == "deny":
        raise CallDeniedError
    now.profile = reaching(now.profile, verdict, asking.escalation)
    result = await call_next(call)
    return told(result, await request_hosts(approvals, call)) if now.refused_targets else result


async def request_hosts(approvals: Approvals, call: Call) -> tuple[str, ...]:
    """Ask an operator about hosts that the call was refused while it ran; return what its caller is told."""
    now = call.now
    escalations = unnamed(now.refused_targets, now.profile, now.rights)
    if not escalations:
        return ()
    try:
        questions = await approvals.request(replace(propose(call), escalation=None), escalations)
    except (StoreUnusable, AuditUnavailable):
        return ()  # the program has run, and what it was refused stays refused
    return tuple(
        f"Question {question.id} asks whether it may reach {question.subject.target}: call again once that is allowed."
        for question in questions
    )
