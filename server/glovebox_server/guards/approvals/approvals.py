"""Decide on calls that require approval: find the approval, or ask and wait. Read ``consult`` first.

An approval is used up in the transaction that finds it, before the call runs: of concurrent calls, one gets it.
"""

import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Final, Self, TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import rfc8785

from glovebox_audit.chain import new_id
from glovebox_audit.event import Event
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_profiles.model import Profile, effective
from glovebox_sandboxes.contract.errors import Refusal, RefusedError
from glovebox_server.calls import CallResult, Decision, Grant, Listener, ToolCall
from glovebox_server.core.call import ApprovalRequiredError, Attempt, Call, CallDeniedError, deny
from glovebox_server.core.result import add_notes
from glovebox_server.errors import StoreError
from glovebox_server.guards.approvals import rules, store
from glovebox_server.guards.approvals.question import ApprovalAnswer, Question, canonical
from glovebox_server.guards.approvals.rules import Asking, Escalation
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
    reason="A person must approve this call, but its arguments contain unpaired surrogates, which cannot be displayed.",
    hint="Write such characters as escapes in the program.",
)
_MANY: Final = Refusal(
    rule="approval.many",
    reason=f"A person must approve this call, but {store.MAX_PENDING} of your questions are not answered yet.",
    hint="Wait until they are, then call again.",
)
_WORDS: Final[Mapping[str, tuple[str, str]]] = {
    "approval.denied": ("{who} said no", "Do not ask again for the same; ask the user what they want instead."),
    "approval.expired": ("nobody answered in time", "Call again to have it asked anew."),
    "approval.withdrawn": ("the question was taken back", "Ask the user before calling again."),
    "promotion.conflict": ("what it would change is no longer what was shown", "Call again to have it asked anew."),
    "approval.used": ("the approval was for one call, and another has used it", "Call again to have it asked anew."),
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

    async def spend(self, count: Callable[[ToolCall], Awaitable[None]] | None, call: Call) -> None:
        """Use an approval up, once everything else has been granted; or ask for one."""
        now = call.now
        try:
            verdict = await self.consult(now, call.answer)
        except StoreError as problem:
            raise CallDeniedError(problem.refusal) from problem
        if not isinstance(verdict, Decision):
            if count is not None:
                with anyio.CancelScope(shield=True):  # a stop meanwhile leaves no question without a waiting call
                    await count(call.request)
            raise ApprovalRequiredError(partial(self.settle, verdict, call.listener))
        now.decision = verdict
        if verdict.effect == "deny":
            raise CallDeniedError
        now.profile = rules.reaching(now.profile, verdict.grants, now.escalation)

        async def add_questions(result: CallResult) -> CallResult:
            return add_notes(result, await self.ask_about_hosts(call.now)) if call.now.refused_targets else result

        now.on_result.append(add_questions)

    async def ask_about_hosts(self, now: Attempt) -> tuple[str, ...]:
        """Ask an operator about hosts refused while a call ran, or join open questions; return lines for its caller."""
        escalations = rules.unnamed(now.refused_targets, now.profile, now.rights)

        def put(known: Questions) -> list[Decision | Question]:
            asked = (rules.with_lift(each, now.request.tool) for each in escalations)
            return [self._not_yet(known, now, asks, now.profile, None) for asks in asked]

        try:
            questions = await self._write(put) if escalations else []
        except (StoreError, AuditError):
            return ()  # the program has run, and what it was refused stays refused
        return tuple(
            f"Question {each.id} asks whether it may reach {each.subject.target}: call again once that is allowed."
            for each in questions
            if isinstance(each, Question)
        )

    async def consult(self, now: Attempt, settled: State | None) -> Decision | Question:
        """Decide on a call that its profile allows, or asks about; or return the question to ask first.

        ``settled`` is the state of its question when the wait for it ended. Raises StoreError.
        """
        if not (now.escalation or self._reaches(now) or rules.asked_about(now)):
            return now.decision
        try:
            canonical(now.request.arguments)
        except ValueError:
            return deny(now.decision, _UNSHOWABLE)
        return await self._write(lambda known: self._consulted(known, now, settled))

    async def settle(self, question: Question, listener: Listener) -> State:
        """Ask the person at the client, if their answer counts, and wait for any answer.

        A caller that cannot wait gets ``pending`` at once, and is to try again; so does one whose answers cannot be
        read: it is decided anew, which refuses it by the store's rule.
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
            with suppress(StoreError, AuditError), anyio.CancelScope(shield=True):  # its caller sees the cancellation
                await self._write(lambda known: known.abandon(question))
            raise
        if form.shown and question.id not in self._left_open:
            self._left_open[question.id] = form
            form.left_open = True
        elif not form.left_open:
            form.scope.cancel()
        if form.problem is not None and not form.left_open and not isinstance(form.problem, StoreError):
            raise form.problem
        try:
            found = await self.standing(question.id)
        except StoreError:
            return "pending"
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

    def _consulted(self, known: Questions, now: Attempt, settled: State | None) -> Decision | Question:
        """Run ``consult`` in one transaction."""
        escalation, asks = now.escalation, rules.asked_about(now)
        whole = rules.with_lift(escalation, now.request.tool, asks) if escalation else asks
        found = self._used(known, now, whole)
        # Lifts what the approval covers; a program may also use hosts granted to it.
        held = self._held(known, now, None if found else escalation)
        if found is None and any(escalation and _lifts(each, escalation) for each in held):
            whole, found = asks, self._used(known, now, asks)
        if whole is not None and found is None:
            # Show what it could reach with what was granted already.
            profile = rules.reaching(now.profile, _grants(held), escalation)
            return self._not_yet(known, now, whole, profile, settled)
        return _allowed(now, whole, found, [each for each in held if known.use(each, now.request.id)])

    def _used(self, known: Questions, now: Attempt, asks: Asking | None) -> Standing | None:
        """Return the approval of exactly this call, which uses it up."""
        found = None if asks is None else known.same(rules.subject(now, asks, self.environment).digest)
        return found if found is not None and known.use(found, now.request.id) else None

    def _reaches(self, now: Attempt) -> bool:
        """Return whether a program could use the grant of a host."""
        programs = self.tools[now.request.tool].request is None and now.profile.network.mode != "none"
        return programs and any(each.what == "host" for each in now.rights.lifts)

    def _held(self, known: Questions, now: Attempt, escalation: Escalation | None) -> list[Standing]:
        """Return grants that the call could use; for a program every host, as its hosts are unknown before."""
        reaches = self._reaches(now)
        return [
            each
            for each in (known.grants(rules.subject(now, None, self.environment)) if escalation or reaches else ())
            if (escalation and _lifts(each, escalation)) or (reaches and each.question.subject.lifted == "host")
        ]

    def _not_yet(
        self, known: Questions, now: Attempt, asks: Asking, profile: Profile, settled: State | None
    ) -> Decision | Question:
        """Decide without an approval: a denial holds, a question is asked once and waited for once."""
        about = rules.subject(now, asks, self.environment)
        found = known.same(about.digest)
        if found is not None and found.state == "denied":
            return _refused(now, "approval.denied", found, asks)
        if settled is not None:
            if found is not None:
                return _unanswered(now, found.question.id, asks)
            # An approval that is gone was used; a question that was open a moment ago is over.
            gone = {"allowed": "promotion.conflict" if now.changes else "approval.used", "pending": "approval.expired"}
            return _refused(now, gone.get(settled, f"approval.{settled}"), None, asks)
        if found is not None:
            known.join(found.question.id)
            return found.question
        if known.pending(about.principal) >= store.MAX_PENDING:
            return deny(now.decision, _MANY)
        call, made = now.request, datetime.fromtimestamp(known.at.wall / 1000, UTC)
        question = Question(
            id=new_id("a"),
            digest=about.digest,
            subject=about,
            asked=asks.asked,
            why=asks.why,
            client=call.principal.client,
            workflow=call.principal.workflow,
            profile=rfc8785.dumps(effective(profile)).decode(),
            made=made,
            expires=made + timedelta(minutes=asks.asked.minutes),
            asked_by=call.id,
            folder=now.folder or (str(now.rights.workspace) if about.workspace else ""),
            last_approved=known.last_approved(about.principal, about.tool),
        )
        known.ask(question)
        return question

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
        database, token = await self._store(), anyio.lowlevel.current_token()

        def record(event: Event) -> None:
            anyio.from_thread.run(self.audit.append, event, token=token)

        # Shielded: a record that is in the log must not be undone in the store.
        with anyio.CancelScope(shield=True):
            return await database.transact(lambda db: work(Questions(db, self.clock(), record)))
        raise AssertionError  # a shielded scope is not cancelled: for the type checker


def _lifts(each: Standing, escalation: Escalation) -> bool:
    return (each.question.subject.lifted, each.question.subject.target) == (escalation.what, escalation.target)


def _grants(found: Sequence[Standing]) -> tuple[Grant, ...]:
    about = [(each.question.id, each.question.subject) for each in found]
    return tuple(Grant(approval=name, what=one.lifted, target=one.target) for name, one in about if one.lifted)


def _allowed(now: Attempt, asks: Asking | None, found: Standing | None, lifted_by: list[Standing]) -> Decision:
    """Return the decision that allows a call, with who approved it and what was lifted for it."""
    every = [*([found] if found else []), *lifted_by]
    yes = dict.fromkeys(answer.by for standing in every for answer in standing.answers if answer.allow)
    grants = _grants(every)
    decision = replace(now.decision, effect="allow", grants=grants, approved_by=tuple(yes))
    if asks is None or found is None:
        lifted = f"lift.{now.escalation.what}" if grants and now.escalation else ""
        return replace(decision, rule=lifted, reason="Somebody lifted what refuses it.") if lifted else decision
    return replace(decision, rule=asks.rules[0], reason="Somebody approved it.", hint="", approval=found.question.id)


def _unanswered(now: Attempt, identifier: str, asks: Asking) -> Decision:
    """Return that the call does not run yet, and how it may."""
    whose = "the person at your client" if asks.asked.by == "client" else f"`glovebox approvals allow {identifier}`"
    run = now.request.run
    unchanged = f"with --run {run}" if run and now.request.principal.transport == "cli" else "unchanged"
    return replace(
        now.decision, effect="ask", rule="approval.pending", approval=identifier,
        reason=f"{asks.why} Nobody has answered question {identifier} yet.",
        hint=f"Tell the user. Retry the same call, {unchanged}, once it is allowed by {whose}.",
    )  # fmt: skip


def _refused(now: Attempt, rule: str, found: Standing | None, asks: Asking) -> Decision:
    """Return why the call does not run, and what to do."""
    how, hint = _WORDS[rule]
    no = [each for each in found.answers if not each.allow] if found else []
    why = f": {no[0].reason.rstrip('.')}" if no and no[0].reason else ""
    reason = f"{asks.why} It was not allowed: {how.format(who=no[0].by if no else 'somebody')}{why}."
    refused = deny(now.decision, Refusal(rule=rule, reason=reason, hint=hint))
    return replace(refused, approval=found.question.id if found else None)
