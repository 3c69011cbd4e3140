"""Steps of a question, each recorded before it counts: the same for servers and commands.

Each runs inside one transaction, and writes its audit record there. So the log and the store agree about which of two
answers came first. A process that waits for the store meanwhile waits for one write to the disk.
"""

import sqlite3
from collections.abc import Callable

from glovebox_audit.events import (
    ApprovalAnswered,
    ApprovalRefused,
    ApprovalRequested,
    ApprovalWithdrawn,
    Event,
    GrantMade,
    GrantRevoked,
)
from glovebox_server.errors import RefusedError
from glovebox_server.guards.approvals import store
from glovebox_server.guards.approvals.question import ApprovalAnswer, Question, digest_of
from glovebox_server.guards.approvals.store import ClockReading, Standing

Record = Callable[[Event], object]
"""Writes one event to the audit log; it is on the disk when this returns, or it raises ``AuditError``."""


def ask(db: sqlite3.Connection, question: Question, at: ClockReading, record: Record) -> None:
    """Put a new question."""
    about, asked = question.subject, question.asked
    record(
        ApprovalRequested(
            approval=question.id,
            digest=question.digest,
            principal=about.principal,
            run=about.run,
            tool=about.tool,
            asked_by=question.asked_by,
            client=question.client,
            workflow=question.workflow,
            rules=about.rules,
            arguments_digest=digest_of(about.arguments),
            profile_digest=about.profile_digest,
            policy_digest=about.policy_digest or None,
            by=asked.by,
            quorum=asked.quorum,
            another_principal=asked.another_principal,
            reach=asked.reach,
            seconds=asked.minutes * 60,
            lifted=about.lifted,
            target=about.target or None,
        )
    )
    store.add(db, question, at)


def answer(
    db: sqlite3.Connection, identifier: str, given: ApprovalAnswer, at: ClockReading, record: Record
) -> Standing:
    """Take an answer; return the question's state then.

    Raises:
        RefusedError: it does not count, and why; the question is unchanged.
    """
    store.expire(db, at)
    found = store.standing(db, identifier, at)
    objection = store.objection(found, given)
    if found is None or objection is not None:
        raise objection or store.unknown_question()
    question = found.question
    then = store.answer(db, identifier, given, at)
    about = _about(question)
    record(
        ApprovalAnswered(
            **about,
            effect="allow" if given.allow else "deny",
            answered_by=given.by,
            channel=given.channel,
            reach=store.once(question.asked) if given.reach == "call" else given.reach,
            reason=given.reason or None,
            yes=sum(each.allow for each in then.answers),
            state=then.state,
        )
    )
    lifted, target = question.subject.lifted, question.subject.target
    if found.state == "allowed" and lifted is not None:
        record(GrantRevoked(**about, lifted=lifted, target=target, by=given.by))
    if then.state == "allowed" and lifted is not None:
        seconds = question.asked.minutes * 60
        record(GrantMade(**about, lifted=lifted, target=target, reach=then.reach, seconds=seconds))
    return then


def refused(identifier: str | None, given: ApprovalAnswer, objection: RefusedError) -> ApprovalRefused:
    """Return the record of an answer that did not count."""
    return ApprovalRefused(approval=identifier, rule=objection.rule, answered_by=given.by, channel=given.channel)


def withdraw(db: sqlite3.Connection, identifier: str, by: str, at: ClockReading, record: Record) -> Standing:
    """Withdraw a question or a valid approval.

    Raises:
        RefusedError: the id is unknown, or the question is over.
    """
    store.expire(db, at)
    found = store.withdraw(db, identifier, at)
    lifted = found.question.subject.lifted
    if found.state == "allowed" and lifted is not None:
        record(GrantRevoked(**_about(found.question), lifted=lifted, target=found.question.subject.target, by=by))
    else:
        record(ApprovalWithdrawn(**_about(found.question), by=by))
    return found


def abandon(db: sqlite3.Connection, question: Question, at: ClockReading, record: Record) -> None:
    """Withdraw an unanswered question whose only caller is gone."""
    if store.abandon(db, question.id, question.asked_by, at) is not None:
        record(ApprovalWithdrawn(**_about(question), by=question.subject.principal))


def _about(question: Question) -> dict[str, str]:
    about = question.subject
    return {
        "approval": question.id,
        "digest": question.digest,
        "principal": about.principal,
        "run": about.run,
        "tool": about.tool,
    }
