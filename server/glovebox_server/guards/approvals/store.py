"""Questions and their answers, in a SQLite file that all server processes and commands share.

``Questions`` is the work of one transaction. What a step records is written in it, before it counts: so the log and
the store agree about which of two answers came first. Time is the boot clock (CLOCK_BOOTTIME): a jump of the wall
clock ends and prolongs nothing. A reboot ends every question and every approval.
"""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

from glovebox_audit import events
from glovebox_audit.event import Event
from glovebox_profiles.policy.model import CALLER_MINUTES, Reach
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.errors import StoreError
from glovebox_server.guards.approvals.question import (
    ApprovalAnswer,
    Question,
    QuestionSubject,
    RequiredApproval,
    digest_of,
)
from glovebox_server.guards.budgets.spending import Clocks, read_clocks
from glovebox_server.stores import database
from glovebox_server.stores.database import Database

NAME: Final = "approvals.sqlite"
MAX_PENDING: Final = 8
"""Pending questions of one principal: more would not be read."""
KEPT_MS: Final = 7 * 86_400_000
"""Ended questions stay listed for this long; the audit log keeps them."""
MAX_OVER: Final = 64
"""Ended questions of one principal that stay listed: each holds a whole program, and the file is bounded."""
_MINUTE_MS: Final = 60_000
SCHEMA: Final = """
    CREATE TABLE questions (
        id TEXT PRIMARY KEY, digest TEXT NOT NULL, state TEXT NOT NULL, principal TEXT NOT NULL, tool TEXT NOT NULL,
        lifted TEXT NOT NULL, reach TEXT NOT NULL, boot TEXT NOT NULL, ends REAL NOT NULL, made INTEGER NOT NULL,
        changed INTEGER NOT NULL, callers INTEGER NOT NULL, used_by TEXT NOT NULL, body TEXT NOT NULL,
        answers TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX questions_digest ON questions (digest);
    CREATE INDEX questions_state ON questions (state, changed);
    CREATE INDEX questions_whose ON questions (principal, state)
    """

State = Literal["pending", "allowed", "denied", "expired", "used", "withdrawn"]
"""In order: undecided; a valid approval; a denial, until it expires; out of time; a used approval; taken back."""
Step = Literal["allow", "deny", "use", "use_in_run", "withdraw"]
"""Steps. ``deny``: an operator also after an approval. ``use``, ``use_in_run``: a call ran on it, once or as one of its
run. ``withdraw``: by its caller before an answer, or by an operator after it. ``allow``: the quorum approved.
"""

TRANSITIONS: Final[Mapping[tuple[State, Step], State]] = {
    ("pending", "allow"): "allowed",
    ("pending", "deny"): "denied",
    ("pending", "withdraw"): "withdrawn",
    ("allowed", "deny"): "denied",
    ("allowed", "use"): "used",
    ("allowed", "use_in_run"): "allowed",
    ("allowed", "withdraw"): "withdrawn",
}
"""Every transition but the end of time, which expires all that is open. A used approval is never valid again, and a
denial becomes no approval.
"""
_T = TypeVar("_T")
_UPDATE: Final = "UPDATE questions SET"
_SELECT: Final = "SELECT state, boot, ends, reach, callers, used_by, body, answers FROM questions"
_OPEN: Final = "state IN ('pending', 'allowed', 'denied')"
_QUESTION: Final = TypeAdapter(Question)
_ANSWERS: Final = TypeAdapter(tuple[ApprovalAnswer, ...])

Record = Callable[[Event], object]
"""Writes one event to the audit log; it is on the disk when this returns, or it raises ``AuditError``."""


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
    used_by: str
    answers: tuple[ApprovalAnswer, ...]


def opened(state_dir: Path) -> AbstractContextManager[Database]:
    """Open the store of a state directory, creating it if missing. Raises StoreError."""
    return database.opened(path(state_dir), SCHEMA)


def path(state_dir: Path) -> Path:
    """Return the path of the store."""
    return state_dir / database.DIRECTORY / NAME


class Questions:
    """All questions, in one transaction, at one moment. With ``record`` it writes, and first ends expired ones."""

    def __init__(self, db: sqlite3.Connection, at: Clocks, record: Record | None = None) -> None:
        self._db, self.at, self._record = db, at, record or (lambda _: None)
        if record is not None:
            # Of every open state, and unread: a question of another version must not outlive its time.
            db.execute(
                f"{_UPDATE} state = 'expired', changed = ? WHERE {_OPEN} AND (ends <= ? OR boot != ?)",
                (at.wall, at.since_boot, at.boot),
            )
            db.execute(
                "DELETE FROM questions WHERE state IN ('expired', 'used', 'withdrawn') AND changed < ?",
                (at.wall - KEPT_MS,),
            )

    def standing(self, identifier: str) -> Standing | None:
        """Return one question; None for an unknown id."""
        return next(iter(self._found("id = ?", identifier)), None)

    def standings(self, states: Sequence[State] = ()) -> list[Standing]:
        """Return all questions in these states, or in any, newest first."""
        return [each for each in self._found("TRUE") if not states or each.state in states]

    def same(self, digest: str) -> Standing | None:
        """Return the newest open question of this digest."""
        return next(iter(self._found(f"digest = ? AND {_OPEN}", digest)), None)

    def grants(self, about: QuestionSubject) -> list[Standing]:
        """Return every grant for a call like this, for its run or for it alone."""
        found = self._found("principal = ? AND state = 'allowed' AND lifted != ''", about.principal)
        return [each for each in found if _bound(each.question.subject, each.reach) == _bound(about, each.reach)]

    def pending(self, principal: str) -> int:
        """Count the unanswered questions of a principal."""
        asked = "SELECT count(*) FROM questions WHERE principal = ? AND state = 'pending'"
        return cast("int", self._db.execute(asked, (principal,)).fetchone()[0])

    def undecided(self) -> frozenset[str]:
        """Return the ids of all pending questions that have not expired."""
        asked = "SELECT id FROM questions WHERE state = 'pending' AND ends > ? AND boot = ?"
        return frozenset(row[0] for row in self._db.execute(asked, (self.at.since_boot, self.at.boot)))

    def last_approved(self, principal: str, tool: str) -> str | None:
        """Return the arguments of the caller's last approved question about a tool."""
        row = self._db.execute(
            "SELECT body FROM questions WHERE principal = ? AND tool = ? AND (state = 'allowed' OR used_by != '') "
            "ORDER BY changed DESC LIMIT 1",
            (principal, tool),
        ).fetchone()
        return _decoded(_QUESTION, row[0]).subject.arguments if row else None

    def ask(self, question: Question) -> None:
        """Put a new question; its caller has fewer than ``MAX_PENDING``."""
        about, asked, at = question.subject, question.asked, self.at
        self._record(
            events.ApprovalRequested(
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
        ends = at.since_boot + asked.minutes * _MINUTE_MS
        self._db.execute(
            "INSERT INTO questions VALUES (?, ?, 'pending', ?, ?, ?, ?, ?, ?, ?, ?, 1, '', ?, '[]')",
            (
                question.id, question.digest, about.principal, about.tool, about.lifted or "", asked.reach, at.boot,
                ends, at.wall, at.wall, _QUESTION.dump_json(question).decode(),
            ),
        )  # fmt: skip
        self._db.execute(
            "DELETE FROM questions WHERE id IN (SELECT id FROM questions WHERE principal = ? AND state IN"
            " ('expired', 'used', 'withdrawn') ORDER BY changed DESC LIMIT -1 OFFSET ?)",
            (about.principal, MAX_OVER),
        )

    def join(self, identifier: str) -> None:
        """Count one more call that asks the same."""
        self._db.execute("UPDATE questions SET callers = callers + 1 WHERE id = ?", (identifier,))

    def use(self, found: Standing, call_id: str) -> bool:
        """Use an approval for a call; False if there is none, or it was used."""
        return self._step(found, "use_in_run" if found.reach == "run" else "use", used_by=call_id)

    def answer(self, identifier: str, given: ApprovalAnswer) -> Standing:
        """Take an answer; return the question's state then.

        One denial decides, an operator's also after a complete approval.
        An approval counts towards the quorum, and restarts the time of the question.

        Raises RefusedError: it does not count, and why; the question is unchanged.
        """
        found = self._there(identifier)
        _require_valid(found, given)
        question, asked = found.question, found.question.asked
        given = replace(given, after=max(0.0, self.at.wall / 1000 - question.made.timestamp()))
        answers = (*(each for each in found.answers if each.by != given.by), given)
        yes = [each for each in answers if each.allow]
        self._set(identifier, answers=_ANSWERS.dump_json(answers).decode())
        if not given.allow:
            self._step(found, "deny")
        elif len(yes) >= asked.quorum:
            reach = "run" if all(each.reach == "run" for each in yes) else _once(asked)
            minutes = CALLER_MINUTES if asked.reach == "caller" else asked.minutes
            self._step(found, "allow", reach=reach, ends=self.at.since_boot + minutes * _MINUTE_MS)
        then, about = self._there(identifier), _about(question)
        self._record(
            events.ApprovalAnswered(
                **about,
                effect="allow" if given.allow else "deny",
                answered_by=given.by,
                channel=given.channel,
                reach=_once(asked) if given.reach == "call" else given.reach,
                reason=given.reason or None,
                yes=len(yes),
                state=then.state,
            )
        )
        lifted, target = question.subject.lifted, question.subject.target
        if found.state == "allowed" and lifted is not None:
            self._record(events.GrantRevoked(**about, lifted=lifted, target=target, by=given.by))
        if then.state == "allowed" and lifted is not None:
            seconds = asked.minutes * 60
            self._record(events.GrantMade(**about, lifted=lifted, target=target, reach=then.reach, seconds=seconds))
        return then

    def withdraw(self, identifier: str, by: str) -> Standing:
        """Withdraw a question or a valid approval; return its state before.

        Raises RefusedError: the id is unknown, or the question is over.
        """
        found = self._there(identifier)
        if not self._step(found, "withdraw"):
            raise RefusedError(
                "approval.over", f"Question {identifier} is {found.state} already.", "Nothing is left to take."
            )
        about, lifted = _about(found.question), found.question.subject.lifted
        if found.state == "allowed" and lifted is not None:
            self._record(events.GrantRevoked(**about, lifted=lifted, target=found.question.subject.target, by=by))
        else:
            self._record(events.ApprovalWithdrawn(**about, by=by))
        return found

    def abandon(self, question: Question) -> None:
        """Withdraw the question of a call that is gone, unless other calls ask it, or somebody answered."""
        found = self.standing(question.id)
        alone = found is not None and found.state == "pending" and found.callers == 1 and not found.answers
        if found is not None and alone and found.question.asked_by == question.asked_by:
            self.withdraw(question.id, question.subject.principal)

    def _there(self, identifier: str) -> Standing:
        if (found := self.standing(identifier)) is None:
            raise unknown_question()
        return found

    def _step(self, found: Standing, step: Step, **columns: object) -> bool:
        """Take one step of the table, and set columns; return whether it applied to the question's state."""
        to = TRANSITIONS.get((found.state, step))
        if to is not None:
            self._set(found.question.id, state=to, changed=self.at.wall, **columns)
        return to is not None

    def _set(self, identifier: str, **columns: object) -> None:
        names = ", ".join(f"{name} = ?" for name in columns)
        self._db.execute(f"{_UPDATE} {names} WHERE id = ?", (*columns.values(), identifier))

    def _found(self, where: str, *values: object) -> list[Standing]:
        """Return the questions that these conditions select, newest first."""
        rows = self._db.execute(f"{_SELECT} WHERE {where} ORDER BY made DESC, id DESC", values).fetchall()
        return [
            Standing(
                question=_decoded(_QUESTION, body),
                state=state,
                reach=reach,
                left=(ends - self.at.since_boot) / 1000 if boot == self.at.boot else -1.0,
                callers=callers,
                used_by=used_by,
                answers=_decoded(_ANSWERS, answers),
            )
            for state, boot, ends, reach, callers, used_by, body, answers in rows
        ]


def _bound(about: QuestionSubject, reach: Reach) -> QuestionSubject:
    """Return what binds a grant: for a run, everything except the call itself."""
    bound = replace(about, rules=(), lifted=None, target="", changes="", any_run=False)
    return replace(bound, arguments="", inputs=()) if reach == "run" else bound


def give(database: Database, record: Record, identifier: str, given: ApprovalAnswer) -> Standing:
    """Take an answer of an operator's; return the question's state then.

    Raises RefusedError: it does not count, and why, which is on record.
    """
    try:
        return database.transact_now(lambda db: Questions(db, read_clocks(), record).answer(identifier, given))
    except RefusedError as objection:
        record(refused(identifier, given, objection))
        raise


def refused(identifier: str | None, given: ApprovalAnswer, objection: RefusedError) -> events.ApprovalRefused:
    """Return the record of an answer that did not count."""
    return events.ApprovalRefused(approval=identifier, rule=objection.rule, answered_by=given.by, channel=given.channel)


def unknown_question() -> RefusedError:
    """Return the refusal of an unknown id."""
    return RefusedError(
        "approval.unknown", "No question has this id.", "`glovebox approvals list` names those there are."
    )


def _require_valid(found: Standing, answer: ApprovalAnswer) -> None:
    """Refuse an answer that does not count. Raises RefusedError: why; the question is unchanged."""
    question, asked = found.question, found.question.asked
    no = not answer.allow and answer.channel == "operator"  # the operator can always deny
    if found.state != "pending" and not (no and found.state == "allowed"):
        reason = f"Question {question.id} is {found.state} already, and no answer changes that."
        hint = "A call that asks again gets a question of its own."
        if no and found.used_by:
            hint = f"To end the call that ran on it: `glovebox stop --call {found.used_by}`."
        raise RefusedError("approval.over", reason, hint)
    if answer.digest != question.digest:
        reason = "The answer is to another question: what would run differs from what was shown."
        raise RefusedError("approval.mismatch", reason, "Look at the question again, and answer what it shows now.")
    if not no and asked.by not in ("either", answer.channel):
        whom = "the person at the client" if asked.by == "client" else "an operator"
        raise RefusedError("approval.channel", f"Only {whom} may answer this question.", "Have them answer it.")
    if not answer.allow:
        return
    if asked.another_principal and answer.by == question.subject.principal:
        reason = f"This question wants another principal than the caller, and {answer.by} is the caller."
        raise RefusedError("approval.own", reason, "Have somebody else answer, as another user of this host.")
    if answer.reach == "run" and asked.reach != "run":
        reason = "An approval of this question is for one call, not for the run."
        raise RefusedError("approval.reach", reason, "Answer without --run.")
    if any(each.allow and each.by == answer.by for each in found.answers):
        reason = f"{answer.by} has said yes already, and {asked.quorum} different principals have to."
        raise RefusedError("approval.twice", reason, "Have somebody else answer.")


def _once(asked: RequiredApproval) -> Reach:
    """Return the reach of an approval for one call."""
    return "caller" if asked.reach == "caller" else "call"


def _about(question: Question) -> dict[str, Any]:
    """Return what every record of a question names."""
    about = question.subject
    names = {"principal": about.principal, "run": about.run, "tool": about.tool}
    return {"approval": question.id, "digest": question.digest, **names}


def _decoded(model: TypeAdapter[_T], body: str) -> _T:
    try:
        return model.validate_json(body)
    except ValidationError as problem:
        fix = "Use the version of Glovebox that wrote it, or stop the servers and move the file away."
        raise StoreError(f"Reading a question in {NAME}", "it is none of this version's", fix) from problem
