"""Questions and their answers, in a SQLite file that all server processes share.

Each function is one step of a transaction: it takes the connection, and never waits.
Time is the boot clock (CLOCK_BOOTTIME), which cannot be set: a jump of the wall clock ends and prolongs nothing.
A reboot ends every question and every approval.
"""

import sqlite3
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from pydantic import TypeAdapter, ValidationError

from glovebox_profiles.policy.model import CALLER_MINUTES
from glovebox_server.errors import RefusedError, StoreError
from glovebox_server.guards.approvals.question import ApprovalAnswer, Question, QuestionSubject, Reach, RequiredApproval
from glovebox_server.guards.approvals.states import State, Step, after
from glovebox_server.stores import database
from glovebox_server.stores.database import Database

NAME: Final = "approvals.sqlite"

MAX_PENDING: Final = 8
"""Pending questions of one principal: more would not be read."""
KEPT_SECONDS: Final = 7 * 86400.0
"""Ended questions stay listed for this long; the audit log keeps them."""
MAX_OVER: Final = 64
"""Ended questions of one principal that stay listed: each holds a whole program, and the file is bounded."""
MAX_KNOWN: Final = 4096
"""Approved programs and hosts remembered of one caller: the oldest are evicted, and asked about again."""

SCHEMA: Final = (
    """
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
        channel TEXT NOT NULL, reach TEXT NOT NULL, time REAL NOT NULL, PRIMARY KEY (question, principal)
    ) WITHOUT ROWID;
    CREATE TABLE known (
        kind TEXT NOT NULL, owner TEXT NOT NULL, value TEXT NOT NULL, time REAL NOT NULL,
        PRIMARY KEY (kind, owner, value)
    ) WITHOUT ROWID
    """,
    "ALTER TABLE answers ADD COLUMN reason TEXT NOT NULL DEFAULT ''",
)

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_QUESTION: Final = TypeAdapter(Question)
_SELECT: Final = "SELECT id, digest, state, boot, ends, reach, changed, asked_by, callers, used_by, body FROM questions"


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
    changed: float
    """Unix time of its last step."""
    asked_by: str
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
    return [
        each
        for each in found
        if _bound(each.question.subject, each.reach) == _bound(about, each.reach) and each.question.subject.lifted
    ]


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


def add(db: sqlite3.Connection, question: Question, at: ClockReading) -> None:
    """Store a new pending question; its caller has fewer than ``MAX_PENDING``."""
    about = question.subject
    db.execute(
        "INSERT INTO questions VALUES (?, ?, 'pending', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1, '', ?)",
        (
            question.id, question.digest, about.principal, about.run, about.tool, about.lifted or "", about.target,
            question.asked.reach, at.boot, at.at + question.asked.minutes * 60, at.wall, at.wall, question.asked_by,
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


def withdraw(db: sqlite3.Connection, identifier: str, at: ClockReading) -> Standing:
    """Withdraw a question or an approval.

    Raises:
        RefusedError: the id is unknown, or the question is over.
    """
    found = _there(db, identifier, at)
    if not _step(db, identifier, found.state, "withdraw", at):
        raise RefusedError(
            "approval.over", f"Question {identifier} is {found.state} already.", "Nothing is left to take."
        )
    return found


def abandon(db: sqlite3.Connection, identifier: str, call_id: str, at: ClockReading) -> Standing | None:
    """Withdraw the question of a call that is gone; None if other calls ask it, or it was answered."""
    found = standing(db, identifier, at)
    if found is None or (found.state, found.asked_by, found.callers) != ("pending", call_id, 1) or found.answers:
        return None
    _step(db, identifier, "pending", "withdraw", at)
    return found


def unknown_question() -> RefusedError:
    """Return the refusal of an unknown id."""
    return RefusedError(
        "approval.unknown", "There is no such question.", "`glovebox approvals list` names those there are."
    )


def objection(found: Standing | None, answer: ApprovalAnswer) -> RefusedError | None:
    """Return why this answer does not count, or None; the question is unchanged."""
    if found is None:
        return unknown_question()
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


def answer(db: sqlite3.Connection, identifier: str, given: ApprovalAnswer, at: ClockReading) -> Standing:
    """Take one answer, which ``objection`` let pass; return the question's state then.

    One denial decides, an operator's also after a complete approval.
    An approval counts towards the quorum, and restarts the time of the question.
    """
    found = _there(db, identifier, at)
    db.execute(
        "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)",
        (identifier, given.by, given.allow, given.channel, given.reach, at.wall, given.reason),
    )
    said = (*(each for each in found.answers if each.by != given.by), given)
    asked = found.question.asked
    ends = at.at + (CALLER_MINUTES if asked.reach == "caller" else asked.minutes) * 60
    if not given.allow:
        _step(db, identifier, found.state, "deny", at)
    elif sum(each.allow for each in said) >= asked.quorum:
        reach = "run" if all(each.reach == "run" for each in said if each.allow) else once(asked)
        _step(db, identifier, "pending", "allow", at)
        db.execute("UPDATE questions SET reach = ?, ends = ? WHERE id = ?", (reach, ends, identifier))
    return _there(db, identifier, at)


def once(asked: RequiredApproval) -> Reach:
    """Return the reach of an approval for one call."""
    return "caller" if asked.reach == "caller" else "call"


def last_approved(db: sqlite3.Connection, principal: str, tool: str) -> str | None:
    """Return the arguments of the caller's last approved question about a tool."""
    row = db.execute(
        "SELECT body FROM questions WHERE principal = ? AND tool = ? AND (state = 'allowed' OR used_by != '') "
        "ORDER BY changed DESC LIMIT 1",
        (principal, tool),
    ).fetchone()
    return _decoded(row[0]).subject.arguments if row else None


def unknown(db: sqlite3.Connection, kind: str, owner: str, values: Iterable[str]) -> tuple[str, ...]:
    """Return those values that no approved call of this owner had."""
    query = "SELECT 1 FROM known WHERE kind = ? AND owner = ? AND value = ?"
    return tuple(each for each in values if not db.execute(query, (kind, owner, each)).fetchone())


def known(db: sqlite3.Connection, kind: str, owner: str) -> tuple[str, ...]:
    """Return all values that approved calls of this owner had."""
    found = db.execute("SELECT value FROM known WHERE kind = ? AND owner = ? ORDER BY value", (kind, owner))
    return tuple(row[0] for row in found)


def learn(db: sqlite3.Connection, kind: str, owner: str, values: Iterable[str], at: ClockReading) -> None:
    """Remember values of an approved call."""
    for value in values:
        db.execute("INSERT OR REPLACE INTO known VALUES (?, ?, ?, ?)", (kind, owner, value, at.wall))
    db.execute(
        "DELETE FROM known WHERE kind = ? AND owner = ? AND value IN "
        "(SELECT value FROM known WHERE kind = ? AND owner = ? ORDER BY time DESC, value LIMIT -1 OFFSET ?)",
        (kind, owner, kind, owner, MAX_KNOWN),
    )


def _there(db: sqlite3.Connection, identifier: str, at: ClockReading) -> Standing:
    found = standing(db, identifier, at)
    if found is None:
        raise unknown_question()
    return found


def _step(db: sqlite3.Connection, identifier: str, state: State, step: Step, at: ClockReading) -> bool:
    """Take one step of the table; return whether it applied to the question's state."""
    to = after(state, step)
    if to is None:
        return False
    values = (to, at.wall, identifier, state)
    return db.execute("UPDATE questions SET state = ?, changed = ? WHERE id = ? AND state = ?", values).rowcount > 0


def _found(db: sqlite3.Connection, where: str, values: tuple[object, ...], at: ClockReading) -> list[Standing]:
    return [_read(db, row, at) for row in db.execute(f"{_SELECT} {where}", values).fetchall()]


def _read(db: sqlite3.Connection, row: Sequence[object], at: ClockReading) -> Standing:
    identifier, digest, state, boot, ends, reach, changed, asked_by, callers, used_by, body = row
    question = _decoded(cast("str", body))
    said = db.execute(
        "SELECT principal, allow, channel, reach, reason FROM answers WHERE question = ? ORDER BY time", (identifier,)
    ).fetchall()
    return Standing(
        question=question,
        state=cast("State", state),
        reach=cast("Reach", reach),
        left=cast("float", ends) - at.at if boot == at.boot else -1.0,
        changed=cast("float", changed),
        asked_by=cast("str", asked_by),
        callers=cast("int", callers),
        used_by=cast("str", used_by),
        answers=tuple(
            ApprovalAnswer(
                allow=bool(allow), by=by, channel=channel, reach=reach, digest=cast("str", digest), reason=reason
            )
            for by, allow, channel, reach, reason in said
        ),
    )


def _decoded(body: str) -> Question:
    try:
        return _QUESTION.validate_json(body)
    except ValidationError as problem:
        fix = "Use the version of Glovebox that wrote it, or stop the servers and move the file away."
        raise StoreError(f"Reading a question in {NAME}", "it is none of this version's", fix) from problem
