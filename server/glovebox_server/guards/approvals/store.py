"""Questions and their answers, in a SQLite file that all server processes and commands share.

Each function is one step of a transaction: it takes the connection, and never waits. What a step records is written in
it, before it counts: so the log and the store agree about which of two answers came first.
Time is the boot clock (CLOCK_BOOTTIME), which cannot be set: a jump of the wall clock ends and prolongs nothing.
A reboot ends every question and every approval.
"""

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

from pydantic import TypeAdapter, ValidationError

from glovebox_audit.events import (
    ApprovalAnswered,
    ApprovalRefused,
    ApprovalRequested,
    ApprovalWithdrawn,
    Event,
    GrantMade,
    GrantRevoked,
)
from glovebox_profiles.policy.model import CALLER_MINUTES, Reach
from glovebox_server.errors import RefusedError, StoreError
from glovebox_server.guards.approvals.question import (
    ApprovalAnswer,
    Question,
    QuestionSubject,
    RequiredApproval,
    digest_of,
)
from glovebox_server.stores import database
from glovebox_server.stores.database import Database

NAME: Final = "approvals.sqlite"

MAX_PENDING: Final = 8
"""Pending questions of one principal: more would not be read."""
KEPT_SECONDS: Final = 7 * 86400.0
"""Ended questions stay listed for this long; the audit log keeps them."""
MAX_OVER: Final = 64
"""Ended questions of one principal that stay listed: each holds a whole program, and the file is bounded."""

SCHEMA: Final = """
    CREATE TABLE questions (
        id TEXT PRIMARY KEY, digest TEXT NOT NULL, state TEXT NOT NULL, principal TEXT NOT NULL, run TEXT NOT NULL,
        tool TEXT NOT NULL, lifted TEXT NOT NULL, target TEXT NOT NULL, reach TEXT NOT NULL, boot TEXT NOT NULL,
        ends REAL NOT NULL, made REAL NOT NULL, changed REAL NOT NULL, asked_by TEXT NOT NULL, callers INTEGER NOT NULL,
        used_by TEXT NOT NULL, body TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX questions_digest ON questions (digest);
    CREATE INDEX questions_whose ON questions (principal, state);
    CREATE TABLE answers (
        question TEXT NOT NULL REFERENCES questions ON DELETE CASCADE, principal TEXT NOT NULL, allow INTEGER NOT NULL,
        channel TEXT NOT NULL, reach TEXT NOT NULL, time REAL NOT NULL,
        reason TEXT NOT NULL, PRIMARY KEY (question, principal)
    ) WITHOUT ROWID
    """

State = Literal["pending", "allowed", "denied", "expired", "used", "withdrawn"]
"""In order: undecided; a valid approval; a denial, until it expires; out of time; a used approval; taken back."""
Step = Literal["allow", "deny", "expire", "use", "use_in_run", "withdraw"]
"""Steps. ``deny``: an operator also after an approval. ``use``, ``use_in_run``: a call ran on it, once or as one of its
run. ``withdraw``: by its caller before an answer, or by an operator after it. ``allow``: the quorum approved.
"""

TRANSITIONS: Final[Mapping[tuple[State, Step], State]] = {
    ("pending", "allow"): "allowed",
    ("pending", "deny"): "denied",
    ("pending", "expire"): "expired",
    ("pending", "withdraw"): "withdrawn",
    ("allowed", "deny"): "denied",
    ("allowed", "use"): "used",
    ("allowed", "use_in_run"): "allowed",
    ("allowed", "expire"): "expired",
    ("allowed", "withdraw"): "withdrawn",
    ("denied", "expire"): "expired",
}
"""Every transition. A used approval is never valid again, and a denial becomes no approval."""

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_QUESTION: Final = TypeAdapter(Question)
_SELECT: Final = "SELECT id, digest, state, boot, ends, reach, callers, used_by, body FROM questions"

Record = Callable[[Event], object]
"""Writes one event to the audit log; it is on the disk when this returns, or it raises ``AuditError``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """One moment, on the boot clock and on the wall clock."""

    boot: str
    at: float
    """Seconds since boot, including sleep."""
    wall: float
    """Unix time, only for people."""


def opened(state_dir: Path) -> AbstractContextManager[Database]:
    """Open the store of a state directory, creating it if missing.

    Raises:
        StoreError: it cannot be used, and what to do.
    """
    return database.opened(path(state_dir), SCHEMA)


def path(state_dir: Path) -> Path:
    """Return the path of the store."""
    return state_dir / database.DIRECTORY / NAME


def now() -> ClockReading:
    """Read both clocks."""
    return ClockReading(boot=_BOOT_ID.read_text().strip(), at=time.clock_gettime(time.CLOCK_BOOTTIME), wall=time.time())


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A question and its state."""

    question: Question
    state: State
    reach: Reach
    """Reach of the approval; without one, its possible reach."""
    left: float
    """Seconds until it expires; negative afterwards."""
    callers: int
    """Calls that asked the same, including the first."""
    used_by: str
    """The last call that ran on the approval; empty before."""
    answers: tuple[ApprovalAnswer, ...]
    """In no order."""


def expire(db: sqlite3.Connection, at: ClockReading) -> None:
    """End expired questions, and delete old ones."""
    over = db.execute(
        "SELECT id, state FROM questions WHERE state IN ('pending', 'allowed', 'denied') AND (ends <= ? OR boot != ?)",
        (at.at, at.boot),
    )
    for identifier, state in over.fetchall():
        _step(db, identifier, state, "expire", at)
    db.execute(
        "DELETE FROM questions WHERE state IN ('expired', 'used', 'withdrawn') AND changed < ?",
        (at.wall - KEPT_SECONDS,),
    )


def standing(db: sqlite3.Connection, identifier: str, at: ClockReading) -> Standing | None:
    """Return one question; None for an unknown id."""
    return next(iter(_found(db, "WHERE id = ?", (identifier,), at)), None)


def standings(db: sqlite3.Connection, at: ClockReading, states: Sequence[State] = ()) -> list[Standing]:
    """Return all questions in these states, or in any, newest first."""
    found = _found(db, "ORDER BY made DESC, id DESC", (), at)
    return [each for each in found if not states or each.state in states]


def same(db: sqlite3.Connection, digest: str, at: ClockReading) -> Standing | None:
    """Return the newest open question of this digest; call ``expire`` first."""
    found = _found(db, "WHERE digest = ? ORDER BY made DESC, id DESC", (digest,), at)
    return next((each for each in found if each.state in ("pending", "allowed", "denied")), None)


def grants(db: sqlite3.Connection, about: QuestionSubject, at: ClockReading) -> list[Standing]:
    """Return every grant for a call like this, for its run or for it alone; call ``expire`` first."""
    found = _found(db, "WHERE principal = ? AND state = 'allowed' AND lifted != ''", (about.principal,), at)
    return [each for each in found if _bound(each.question.subject, each.reach) == _bound(about, each.reach)]


def _bound(about: QuestionSubject, reach: Reach) -> tuple[object, ...]:
    """Return what binds a grant: for a run, everything except the call itself."""
    where = (about.principal, about.run, about.tool, about.profile_digest, about.policy_digest)
    around = (about.workspace, about.environment)
    return (*where, *around) if reach == "run" else (*where, *around, about.arguments, about.inputs)


def pending(db: sqlite3.Connection, principal: str) -> int:
    """Count the unanswered questions of a principal."""
    row = db.execute(
        "SELECT count(*) FROM questions WHERE principal = ? AND state = 'pending'", (principal,)
    ).fetchone()
    return cast("int", row[0])


def undecided(db: sqlite3.Connection, at: ClockReading) -> frozenset[str]:
    """Return the ids of all pending questions that have not expired."""
    found = db.execute("SELECT id FROM questions WHERE state = 'pending' AND ends > ? AND boot = ?", (at.at, at.boot))
    return frozenset(row[0] for row in found)


def last_approved(db: sqlite3.Connection, principal: str, tool: str) -> str | None:
    """Return the arguments of the caller's last approved question about a tool."""
    row = db.execute(
        "SELECT body FROM questions WHERE principal = ? AND tool = ? AND (state = 'allowed' OR used_by != '') "
        "ORDER BY changed DESC LIMIT 1",
        (principal, tool),
    ).fetchone()
    return _decoded(row[0]).subject.arguments if row else None


def ask(db: sqlite3.Connection, question: Question, at: ClockReading, record: Record) -> None:
    """Put a new question; its caller has fewer than ``MAX_PENDING``."""
    about, asked = question.subject, question.asked
    record(
        ApprovalRequested(
            **_about(question),
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
    db.execute(
        "INSERT INTO questions VALUES (?, ?, 'pending', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1, '', ?)",
        (
            question.id, question.digest, about.principal, about.run, about.tool, about.lifted or "", about.target,
            asked.reach, at.boot, at.at + asked.minutes * 60, at.wall, at.wall, question.asked_by,
            _QUESTION.dump_json(question).decode(),
        ),
    )  # fmt: skip
    db.execute(
        "DELETE FROM questions WHERE id IN (SELECT id FROM questions WHERE principal = ? AND state IN"
        " ('expired', 'used', 'withdrawn') ORDER BY changed DESC LIMIT -1 OFFSET ?)",
        (about.principal, MAX_OVER),
    )


def join(db: sqlite3.Connection, identifier: str) -> None:
    """Count one more call that asks the same."""
    db.execute("UPDATE questions SET callers = callers + 1 WHERE id = ?", (identifier,))


def use(db: sqlite3.Connection, found: Standing, call_id: str, at: ClockReading) -> bool:
    """Use an approval for a call; False if there is none, or it was used."""
    step: Step = "use_in_run" if found.reach == "run" else "use"
    if not _step(db, found.question.id, found.state, step, at):
        return False
    db.execute("UPDATE questions SET used_by = ? WHERE id = ?", (call_id, found.question.id))
    return True


def answer(
    db: sqlite3.Connection, identifier: str, given: ApprovalAnswer, at: ClockReading, record: Record
) -> Standing:
    """Take an answer; return the question's state then.

    One denial decides, an operator's also after a complete approval.
    An approval counts towards the quorum, and restarts the time of the question.

    Raises:
        RefusedError: it does not count, and why; the question is unchanged.
    """
    expire(db, at)
    found = _there(db, identifier, at)
    if (refused := objection(found, given)) is not None:
        raise refused
    question, asked = found.question, found.question.asked
    db.execute(
        "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)",
        (identifier, given.by, given.allow, given.channel, given.reach, at.wall, given.reason),
    )
    yes = [each for each in (*(each for each in found.answers if each.by != given.by), given) if each.allow]
    if not given.allow:
        _step(db, identifier, found.state, "deny", at)
    elif len(yes) >= asked.quorum:
        reach = "run" if all(each.reach == "run" for each in yes) else once(asked)
        ends = at.at + (CALLER_MINUTES if asked.reach == "caller" else asked.minutes) * 60
        _step(db, identifier, "pending", "allow", at)
        db.execute("UPDATE questions SET reach = ?, ends = ? WHERE id = ?", (reach, ends, identifier))
    then = _there(db, identifier, at)
    about = _about(question)
    record(
        ApprovalAnswered(
            **about,
            effect="allow" if given.allow else "deny",
            answered_by=given.by,
            channel=given.channel,
            reach=once(asked) if given.reach == "call" else given.reach,
            reason=given.reason or None,
            yes=len(yes),
            state=then.state,
        )
    )
    lifted, target = question.subject.lifted, question.subject.target
    if found.state == "allowed" and lifted is not None:
        record(GrantRevoked(**about, lifted=lifted, target=target, by=given.by))
    if then.state == "allowed" and lifted is not None:
        record(GrantMade(**about, lifted=lifted, target=target, reach=then.reach, seconds=asked.minutes * 60))
    return then


def withdraw(db: sqlite3.Connection, identifier: str, by: str, at: ClockReading, record: Record) -> Standing:
    """Withdraw a question or a valid approval; return its state before.

    Raises:
        RefusedError: the id is unknown, or the question is over.
    """
    expire(db, at)
    found = _there(db, identifier, at)
    if not _step(db, identifier, found.state, "withdraw", at):
        raise RefusedError(
            "approval.over", f"Question {identifier} is {found.state} already.", "Nothing is left to take."
        )
    about, lifted = _about(found.question), found.question.subject.lifted
    if found.state == "allowed" and lifted is not None:
        record(GrantRevoked(**about, lifted=lifted, target=found.question.subject.target, by=by))
    else:
        record(ApprovalWithdrawn(**about, by=by))
    return found


def abandon(db: sqlite3.Connection, question: Question, at: ClockReading, record: Record) -> bool:
    """Withdraw the question of a call that is gone; False if other calls ask it, or somebody answered."""
    found = standing(db, question.id, at)
    alone = found is not None and found.state == "pending" and found.callers == 1 and not found.answers
    if found is None or not alone or found.question.asked_by != question.asked_by:
        return False
    _step(db, question.id, "pending", "withdraw", at)
    record(ApprovalWithdrawn(**_about(question), by=question.subject.principal))
    return True


def refused(identifier: str | None, given: ApprovalAnswer, objection: RefusedError) -> ApprovalRefused:
    """Return the record of an answer that did not count."""
    return ApprovalRefused(approval=identifier, rule=objection.rule, answered_by=given.by, channel=given.channel)


def unknown_question() -> RefusedError:
    """Return the refusal of an unknown id."""
    return RefusedError(
        "approval.unknown", "There is no such question.", "`glovebox approvals list` names those there are."
    )


def objection(found: Standing, answer: ApprovalAnswer) -> RefusedError | None:
    """Return why this answer does not count, or None; the question is unchanged."""
    question, asked = found.question, found.question.asked
    no = not answer.allow and answer.channel == "operator"  # the operator can always deny
    counted = no or asked.by in ("either", answer.channel)
    late = found.state != "pending" and not (no and found.state == "allowed")
    ran = f"To end the call that ran on it: `glovebox stop --call {found.used_by}`." if no and found.used_by else ""
    own = asked.another_principal and answer.by == question.subject.principal
    yes = tuple(each.by for each in found.answers if each.allow)
    table = (
        (
            late,
            "over",
            f"Question {question.id} is {found.state} already, and no answer changes that.",
            ran or "A call that asks again gets a question of its own.",
        ),
        (
            answer.digest != question.digest,
            "mismatch",
            "The answer is to another question: what would run differs from what was shown.",
            "Look at the question again, and answer what it shows now.",
        ),
        (
            not counted,
            "channel",
            f"Only {'the person at the client' if asked.by == 'client' else 'an operator'} may answer this question.",
            "Have them answer it.",
        ),
        (
            own and answer.allow,
            "own",
            f"This question wants another principal than the caller, and {answer.by} is the caller.",
            "Have somebody else answer, as another user of this host.",
        ),
        (
            answer.allow and answer.reach == "run" and asked.reach != "run",
            "reach",
            "A yes to this question is for one call, not for the run.",
            "Answer without --run.",
        ),
        (
            answer.allow and answer.by in yes,
            "twice",
            f"{answer.by} has said yes already, and {asked.quorum} different principals have to.",
            "Have somebody else answer.",
        ),
    )
    return next((RefusedError(f"approval.{rule}", reason, hint) for holds, rule, reason, hint in table if holds), None)


def once(asked: RequiredApproval) -> Reach:
    """Return the reach of an approval for one call."""
    return "caller" if asked.reach == "caller" else "call"


def _about(question: Question) -> dict[str, Any]:
    """Return what every record of a question names."""
    about = question.subject
    return {
        "approval": question.id,
        "digest": question.digest,
        "principal": about.principal,
        "run": about.run,
        "tool": about.tool,
    }


def _there(db: sqlite3.Connection, identifier: str, at: ClockReading) -> Standing:
    found = standing(db, identifier, at)
    if found is None:
        raise unknown_question()
    return found


def _step(db: sqlite3.Connection, identifier: str, state: State, step: Step, at: ClockReading) -> bool:
    """Take one step of the table; return whether it applied to the question's state."""
    to = TRANSITIONS.get((state, step))
    if to is None:
        return False
    values = (to, at.wall, identifier, state)
    return db.execute("UPDATE questions SET state = ?, changed = ? WHERE id = ? AND state = ?", values).rowcount > 0


def _found(db: sqlite3.Connection, where: str, values: tuple[object, ...], at: ClockReading) -> list[Standing]:
    return [_read(db, row, at) for row in db.execute(f"{_SELECT} {where}", values).fetchall()]


def _read(db: sqlite3.Connection, row: Sequence[Any], at: ClockReading) -> Standing:
    identifier, digest, state, boot, ends, reach, callers, used_by, body = row
    said = db.execute(
        "SELECT principal, allow, channel, reach, reason FROM answers WHERE question = ? ORDER BY time", (identifier,)
    ).fetchall()
    return Standing(
        question=_decoded(body),
        state=state,
        reach=reach,
        left=ends - at.at if boot == at.boot else -1.0,
        callers=callers,
        used_by=used_by,
        answers=tuple(
            ApprovalAnswer(allow=bool(allow), by=by, channel=channel, reach=reach, digest=digest, reason=reason)
            for by, allow, channel, reach, reason in said
        ),
    )


def _decoded(body: str) -> Question:
    try:
        return _QUESTION.validate_json(body)
    except ValidationError as problem:
        fix = "Use the version of Glovebox that wrote it, or stop the servers and move the file away."
        raise StoreError(f"Reading a question in {NAME}", "it is none of this version's", fix) from problem
