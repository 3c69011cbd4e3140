"""Decide on calls that require approval: find the approval, or ask and wait. Read ``consult`` first.

An approval is used up in the transaction that finds it, before the call runs: of concurrent calls, one gets it.
"""

import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Self, TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import rfc8785
from anyio.lowlevel import EventLoopToken

from glovebox_audit.chain import new_id
from glovebox_audit.events import Event
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_profiles.model import effective
from glovebox_sandboxes.contract.errors import Refusal, RefusedError
from glovebox_server.calls import Decision, Grant, Listener
from glovebox_server.core.accept import deny
from glovebox_server.errors import StoreError
from glovebox_server.guards.approvals import store
from glovebox_server.guards.approvals.question import ApprovalAnswer, Question, QuestionSubject, canonical
from glovebox_server.guards.approvals.rules import (
    Asking,
    Escalation,
    Proposal,
    asked_about,
    reaching,
    subject,
    with_lift,
)
from glovebox_server.guards.approvals.store import Questions, Standing, State
from glovebox_server.guards.budgets.spending import Clocks, read_clocks
from glovebox_server.stores.database import Database
from glovebox_server.tools.base import Tool

WAIT_SECONDS: Final = 45.0
"""Of an MCP client for an answer: as for a turn, so that it still reads the result."""
POLL_SECONDS: Final = 0.2
"""Between two reads of the store, which other processes write to; shared by all waiting calls."""
MAX_REFUSED: Final = 64
"""Refused answers on record within ``REFUSED_MS``: a client that forges them must not fill the disk."""
REFUSED_MS: Final = 3_600_000
_UNSHOWABLE: Final = Refusal(
    rule="approval.arguments",
    reason="Somebody has to approve this call, and its arguments hold what nobody can be shown: half characters.",
    hint="Write such characters as escapes in the program.",
)
_MANY: Final = Refusal(
    rule="approval.many",
    reason=f"Somebody has to approve this call, and {store.MAX_PENDING} questions of yours are not answered yet.",
    hint="Wait until they are, then call again.",
)
_WORDS: Final[Mapping[str, tuple[str, str]]] = {
    "approval.denied": ("{who} said no", "Do not ask again for the same; ask the user what they want instead."),
    "approval.expired": ("nobody answered in time", "Call again to have it asked anew."),
    "approval.withdrawn": ("the question was taken back", "Ask the user before calling again."),
    "promotion.conflict": ("what it would change is no longer what was shown", "Call again to have it asked anew."),
    "approval.used": ("the yes was for one call, and another call has used it", "Call again to have it asked anew."),
}

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(kw_only=True)
class _ClientQuestion:
    """A question at the caller's client. It may outlive the call, but not its question."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    over: anyio.Event = field(default_factory=anyio.Event)
    problem: Exception | None = None
    shown: bool = False
    left_open: bool = False
    """The call has ended: a repeated call finds the answer, or waits for it here."""


@dataclass(eq=False)
class Approvals:
    """The approvals of one server. Several servers on one state directory share their questions."""

    database: Callable[[], Database]
    """Opens the store, once a call needs it."""
    audit: AuditLog
    tools: Mapping[str, Tool]
    environment: Callable[[str], str]
    """Returns the digest of what a tool's programs import from, and may read files."""
    start: Callable[..., object]
    """A task group's ``start_soon``, as a form may outlive its call."""
    clock: Callable[[], Clocks] = read_clocks
    _database: Database | None = None
    _opening: anyio.Lock = field(default_factory=anyio.Lock)
    _token: EventLoopToken | None = None
    _left_open: dict[str, _ClientQuestion] = field(default_factory=dict)
    _refused: deque[float] = field(default_factory=deque)
    _looking: anyio.Lock = field(default_factory=anyio.Lock)
    _looked: float = -math.inf
    _undecided: frozenset[str] = frozenset()

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        state_dir: Path,
        audit: AuditLog,
        tools: Mapping[str, Tool],
        environment: Callable[[str], str],
        clock: Callable[[], Clocks] = read_clocks,
    ) -> AsyncIterator[Self]:
        """Open the approvals of a state directory; the first call that needs the store opens it."""
        with ExitStack() as files:
            async with anyio.create_task_group() as tasks:
                yield cls(
                    lambda: files.enter_context(store.opened(state_dir)),
                    audit, tools, environment, tasks.start_soon, clock,
                )  # fmt: skip
                tasks.cancel_scope.cancel()

    async def consult(self, proposal: Proposal, settled: State | None) -> Decision | Question:
        """Decide on a call that its profile allows, or asks about; or return the question to ask first.

        ``settled`` is the state of its question when the wait for it ended. Raises StoreError.
        """
        if not (proposal.escalation or self._reaches(proposal) or asked_about(proposal)):
            return proposal.decision
        try:
            canonical(proposal.call.arguments)
        except ValueError:
            return deny(proposal.decision, _UNSHOWABLE)
        return await self._write(lambda known: self._consulted(known, proposal, settled))

    async def request(self, proposal: Proposal, escalations: Sequence[Escalation]) -> tuple[Question, ...]:
        """Ask about what a call was refused while it ran; open questions are joined.

        Raises StoreError: the questions cannot be kept.
        """

        def put(known: Questions) -> tuple[Question, ...]:
            wanted = (replace(proposal, escalation=each) for each in escalations)
            asked = [(each, with_lift(None, each.escalation, each.call.tool)) for each in wanted]
            found = (self._not_yet(known, each, asks, None) for each, asks in asked if asks is not None)
            return tuple(each for each in found if isinstance(each, Question))

        return await self._write(put)

    async def settle(self, question: Question, listener: Listener) -> State:
        """Ask the person at the client, if their answer counts, and wait for any answer.

        A caller that cannot wait gets ``pending`` at once, and is to try again.

        Raises StoreError: the answers cannot be read.
        """
        listener.progress(f"Waiting for somebody to approve it: {question.id}")
        # A person who still reads the form of an earlier, equal question gets no second one.
        form = self._left_open.get(question.id)
        if form is None:
            form = _ClientQuestion()
            self.start(self._ask, form, question, listener)
        try:
            with anyio.move_on_after(max(WAIT_SECONDS, listener.waits())):
                await form.over.wait()
        except anyio.get_cancelled_exc_class():
            if not form.left_open:
                form.scope.cancel()
            await self._abandon(question)
            raise
        if form.shown and question.id not in self._left_open:
            self._left_open[question.id] = form
            form.left_open = True
        elif not form.left_open:
            form.scope.cancel()
        if form.problem is not None and not form.left_open:
            raise form.problem
        found = await self.standing(question.id)
        return found.state if found else "expired"

    async def _elicit(self, form: "_ClientQuestion", question: Question, listener: Listener) -> None:
        form.shown = True
        try:
            given = await listener.ask(question)
            if given is not None:
                await self.answer(question.id, given)
            elif form.left_open or not listener.waits():
                form.scope.cancel()
        except RefusedError:  # another answer came first
            pass
        except Exception as raised:  # noqa: BLE001 - a value, because the task group would wrap it
            form.problem = raised
            form.scope.cancel()
        finally:
            form.shown = False

    async def _ask(self, form: "_ClientQuestion", question: Question, listener: Listener) -> None:
        """Ask until decided; report errors to the caller, or log them once it has left."""
        try:
            with form.scope:
                async with anyio.create_task_group() as tasks:
                    if question.asked.by != "operator" and not question.asked.another_principal:
                        tasks.start_soon(self._elicit, form, question, listener)
                    elif not listener.waits():
                        form.scope.cancel()
                    try:
                        await self._until_decided(question.id)
                    except StoreError as problem:  # a value, for the same reason
                        form.problem = form.problem or problem
                    tasks.cancel_scope.cancel()
        except Exception as raised:  # noqa: BLE001 - an internal error ends no server
            form.problem = raised
        finally:
            form.over.set()
            if form.left_open:
                del self._left_open[question.id]
                if form.problem is not None:
                    _log.error("What was said to %s was not taken: %s", question.id, form.problem)

    async def answer(self, identifier: str, given: ApprovalAnswer) -> Standing:
        """Take an answer; return the state of the question then.

        Raises:
            RefusedError: it does not count; that is recorded, and the question is unchanged.
            StoreError: it cannot be kept.
        """
        try:
            return await self._write(lambda known: known.answer(identifier, given))
        except RefusedError as objection:
            known = None if objection.rule == "approval.unknown" else identifier
            now = self.clock().since_boot
            while self._refused and self._refused[0] <= now - REFUSED_MS:
                self._refused.popleft()
            if len(self._refused) < MAX_REFUSED:
                self._refused.append(now)
                await self.audit.append(store.refused(known, given, objection))
            raise

    async def withdraw(self, identifier: str, by: str) -> Standing:
        """Withdraw a question or a valid approval; return its state before.

        Raises:
            RefusedError: the id is unknown, or the question is over.
            StoreError: it cannot be kept.
        """
        return await self._write(lambda known: known.withdraw(identifier, by))

    async def standing(self, identifier: str) -> Standing | None:
        """Return a question and its state; None for an unknown id."""
        return await self._write(lambda known: known.standing(identifier))

    def _consulted(self, known: Questions, proposal: Proposal, settled: State | None) -> Decision | Question:
        """Run ``consult`` in one transaction."""
        asks = asked_about(proposal)
        whole = with_lift(asks, proposal.escalation, proposal.call.tool)
        found = None if whole is None else self._used(known, proposal, whole)
        # Lifts what the approval covers; a program may also use hosts granted to it.
        held = self._held(known, proposal if found is None else replace(proposal, escalation=None))
        if found is None and any(proposal.escalation and _lifts(each, proposal.escalation) for each in held):
            whole, found = asks, None if asks is None else self._used(known, proposal, asks)
        if whole is not None and found is None:
            # Show what it could reach with what was granted already.
            shown = replace(proposal, profile=reaching(proposal.profile, _grants(held), proposal.escalation))
            return self._not_yet(known, shown, whole, settled)
        return _allowed(proposal, whole, found, [each for each in held if known.use(each, proposal.call.id)])

    def _used(self, known: Questions, proposal: Proposal, asks: Asking) -> Standing | None:
        """Return the approval of exactly this call, which uses it up."""
        found = known.same(self._subject(proposal, asks).digest)
        return found if found is not None and known.use(found, proposal.call.id) else None

    def _reaches(self, proposal: Proposal) -> bool:
        """Return whether a program could use the grant of a host."""
        programs = self.tools[proposal.call.tool].request is None and proposal.profile.network.mode != "none"
        return programs and any(each.what == "host" for each in proposal.rights.lifts)

    def _held(self, known: Questions, proposal: Proposal) -> list[Standing]:
        """Return grants that the call could use; for a program every host, as its hosts are unknown before."""
        escalation, reaches = proposal.escalation, self._reaches(proposal)
        return [
            each
            for each in (known.grants(self._subject(proposal, None)) if escalation or reaches else ())
            if (escalation and _lifts(each, escalation)) or (reaches and each.question.subject.lifted == "host")
        ]

    def _subject(self, proposal: Proposal, asks: Asking | None) -> QuestionSubject:
        about = subject(proposal, asks.rules if asks else (), self.environment(proposal.call.tool))
        if asks is not None and asks.asked.reach == "caller":
            about = replace(about, any_run=True)
        if asks is not None and asks.lifts and proposal.escalation is not None:
            about = replace(about, lifted=proposal.escalation.what, target=proposal.escalation.target)
        return about

    def _not_yet(
        self, known: Questions, proposal: Proposal, asks: Asking, settled: State | None
    ) -> Decision | Question:
        """Decide without an approval: a denial holds, a question is asked once and waited for once."""
        about = self._subject(proposal, asks)
        found = known.same(about.digest)
        if found is not None and found.state == "denied":
            return _refused(proposal, "approval.denied", found, asks)
        if settled is not None:
            if proposal.changes and found is None and settled == "allowed":
                return _refused(proposal, "promotion.conflict", found, asks)
            state = "pending" if found else settled  # an approval that is gone was used
            return _refused(proposal, "approval.used" if state == "allowed" else f"approval.{state}", found, asks)
        if found is not None:
            known.join(found.question.id)
            return found.question
        if known.pending(about.principal) >= store.MAX_PENDING:
            return deny(proposal.decision, _MANY)
        call, made = proposal.call, datetime.fromtimestamp(known.at.wall / 1000, UTC)
        question = Question(
            id=new_id("a"),
            digest=about.digest,
            subject=about,
            asked=asks.asked,
            why=asks.why,
            client=call.principal.client,
            workflow=call.principal.workflow,
            profile=rfc8785.dumps(effective(proposal.profile)).decode(),
            made=made,
            expires=made + timedelta(minutes=asks.asked.minutes),
            asked_by=call.id,
            folder=proposal.folder or (str(proposal.rights.workspace) if about.workspace else ""),
            last_approved=known.last_approved(about.principal, about.tool),
        )
        known.ask(question)
        return question

    async def _abandon(self, question: Question) -> None:
        """Withdraw the question of a cancelled call. The caller sees the cancellation, also if this fails."""
        with suppress(StoreError, AuditError), anyio.CancelScope(shield=True):
            await self._write(lambda known: known.abandon(question))

    async def _until_decided(self, identifier: str) -> None:
        """Return once nothing has to be waited for. Raises StoreError."""
        database, began = await self._store(), anyio.current_time()
        while True:
            async with self._looking:
                now = anyio.current_time()
                if now - self._looked >= POLL_SECONDS or self._looked < began:
                    self._undecided = await database.query(lambda db: Questions(db, self.clock()).undecided())
                    self._looked = now
            if identifier not in self._undecided:
                return
            await anyio.sleep(POLL_SECONDS)

    async def _store(self) -> Database:
        async with self._opening:
            if self._database is None:
                self._database = await anyio.to_thread.run_sync(self.database)
        return self._database

    async def _write(self, work: Callable[[Questions], _T]) -> _T:
        database = await self._store()
        self._token = anyio.lowlevel.current_token()
        # Shielded: a record that is in the log must not be undone in the store.
        with anyio.CancelScope(shield=True):
            return await database.transact(lambda db: work(Questions(db, self.clock(), self._record)))
        raise AssertionError  # a shielded scope is not cancelled: for the type checker

    def _record(self, event: Event) -> None:
        anyio.from_thread.run(self.audit.append, event, token=self._token)


def _lifts(each: Standing, escalation: Escalation) -> bool:
    return (each.question.subject.lifted, each.question.subject.target) == (escalation.what, escalation.target)


def _grants(found: Sequence[Standing]) -> tuple[Grant, ...]:
    about = [(each.question.id, each.question.subject) for each in found]
    return tuple(Grant(approval=name, what=one.lifted, target=one.target) for name, one in about if one.lifted)


def _allowed(proposal: Proposal, asks: Asking | None, found: Standing | None, lifted_by: list[Standing]) -> Decision:
    """Return the decision that allows a call, with who approved it and what was lifted for it."""
    every = [*([found] if found else []), *lifted_by]
    yes = dict.fromkeys(answer.by for standing in every for answer in standing.answers if answer.allow)
    grants = _grants(every)
    decision = replace(proposal.decision, effect="allow", grants=grants, approved_by=tuple(yes))
    if asks is None or found is None:
        lifted = f"lift.{proposal.escalation.what}" if grants and proposal.escalation else ""
        return replace(decision, rule=lifted, reason="Somebody lifted what refuses it.") if lifted else decision
    return replace(decision, rule=asks.rules[0], reason="Somebody approved it.", hint="", approval=found.question.id)


def _refused(proposal: Proposal, rule: str, found: Standing | None, asks: Asking) -> Decision:
    """Return why the call does not run, and what to do; an open question is named."""
    if rule == "approval.pending":
        identifier = found.question.id if found else ""
        by = asks.asked.by
        whose = "the person at your client" if by == "client" else f"`glovebox approvals allow {identifier}`"
        run = proposal.call.run
        unchanged = f"with --run {run}" if run and proposal.call.principal.transport == "cli" else "unchanged"
        return replace(
            proposal.decision,
            effect="ask",
            rule=rule,
            reason=f"{asks.why} Nobody has answered question {identifier} yet.",
            hint=f"Tell the user. Retry the same call, {unchanged}, once it is allowed by {whose}.",
            approval=identifier or None,
        )
    how, hint = _WORDS[rule]
    no = [each for each in found.answers if not each.allow] if found else []
    why = f": {no[0].reason.rstrip('.')}" if no and no[0].reason else ""
    reason = f"{asks.why} It was not allowed: {how.format(who=no[0].by if no else 'somebody')}{why}."
    refused = deny(proposal.decision, Refusal(rule=rule, reason=reason, hint=hint))
    return replace(refused, approval=found.question.id if found else None)
