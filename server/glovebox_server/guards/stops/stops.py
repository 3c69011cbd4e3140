"""Applies the stops of a state directory in one server process: refuses calls, and ends running ones.

Every process polls: one ``stat`` before a call, ten a second during calls. So no notification is needed, and a process
that was suspended (SIGSTOP) obeys when it continues.
"""

import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, Self, get_args

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskGroup
from pydantic import AwareDatetime, Field

from glovebox_audit import chain, events, log, place
from glovebox_audit.event import Event
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_server.calls import ToolCall
from glovebox_server.core.call import Call, CallDeniedError
from glovebox_server.secret_files import FOLDER, Files, SecretFileError, StoredItem, StoredItems

Scope = Literal["call", "run", "principal", "workflow", "tool", "all"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

KIND = "stop"
MAX_STOPS = 1024
"""In effect at one time: all are read again when one is made, and one that names a principal does the work of many."""
SPARE_STOPS = 64
"""Reserved for the operator: watch rules make no more when the others are used up."""
MAX_BECAUSE = 500
"""Characters of a reason: every caller that is stopped reads it."""
_MAX_NAME = 640
"""Characters of a name: principals of OAuth issuers are the longest."""
HINT = "Ask the operator: nothing you can change lifts it."
"""Callers read it beside the reason."""
BY_RULES = "Stopped by the operator's rules."
"""All that callers read of a watch rule's stop: the rule's name would help a program to evade it."""
DAMAGED = Refusal(
    rule="store",
    reason="What is stopped cannot be read, so everything is.",
    hint="The operator finds the fix with `glovebox stops list`.",
)
"""Callers read it if a stop is damaged: it may name them."""
_ID = re.compile(r"s_[0-9a-z]{26}", re.ASCII)


class Stop(StoredItem):
    """One stop, in effect until it is resumed."""

    id: str = Field(pattern=r"^s_[0-9a-z]{26}$")
    """``s_`` and 26 lower-case characters, made as call ids are."""
    scope: Scope
    name: str = Field(max_length=_MAX_NAME)
    """Exactly what is stopped; empty for everything."""
    because: str = Field(min_length=1, max_length=MAX_BECAUSE)
    by: str = Field(min_length=1, max_length=_MAX_NAME)
    """A principal, or ``watch:`` and the rule."""
    made: AwareDatetime

    @property
    def refusal(self) -> Refusal:
        """Return the refusal of the calls it stops."""
        if self.by.startswith("watch:"):
            return Refusal(rule="stop", reason=BY_RULES, hint=HINT)
        words = "Everything is stopped" if self.scope == "all" else f"This {self.scope} is stopped"
        return Refusal(rule="stop", reason=f"{words}: {self.because.rstrip('.')}.", hint=HINT)

    def encoded(self) -> bytes:
        """Encode it for its file."""
        return self.model_dump_json().encode()


def _keys(call: ToolCall) -> tuple[tuple[Scope, str | None], ...]:
    """Return scope and name of all stops that would stop this call."""
    who = call.principal
    return (
        ("all", ""), ("call", call.id), ("run", call.run), ("tool", call.tool), ("principal", who.id),
        ("workflow", who.workflow),
    )  # fmt: skip


def new_stop(scope: Scope, name: str, *, because: str, by: str, made: datetime) -> Stop:
    """Make a stop with an id of its own. Raises ValidationError: the reason or the name is empty or too long."""
    return Stop(id=f"s_{chain.new_call_id()[2:]}", scope=scope, name=name, because=because, by=by, made=made)


def stops_of(state_dir: Path) -> Files[Stop]:
    """Return the stops of a state directory."""

    def fix(path: Path) -> str:
        return f"Run `glovebox resume {path.name}`, which lifts it." if _ID.fullmatch(path.name) else f"Remove {path}."

    return Files(state_dir / FOLDER / "stops", Stop, fix=fix, kind=KIND, most=MAX_STOPS)


LOOK_SECONDS = 0.1
"""Polling interval during calls: a tenth of what a running call may outlive its stop."""
RECORD_SECONDS = 2.0
"""Wait for a stop's record: a hanging disk or a locked log must not keep calls running."""

_log = logging.getLogger(__name__)


def made(stop: Stop) -> events.StopMade:
    """Return the record of a stop."""
    return events.StopMade(stop=stop.id, scope=stop.scope, name=stop.name, because=stop.because, by=stop.by)


@dataclass(slots=True, kw_only=True, eq=False)
class Stopped:
    """A running call, and its stop if there is one."""

    call: ToolCall
    scope: anyio.CancelScope
    refusal: Refusal | None = None
    stop: str | None = None
    """Id of the stop; None for a damaged file."""


@dataclass(eq=False)
class Stops:
    """The stops in one server process; make it with ``opened``."""

    _files: Files[Stop]
    _audit: log.AuditLog
    """For stops by watch rules."""
    _tasks: TaskGroup
    _overdue: set[anyio.Event] = field(default_factory=set)
    _making: anyio.Lock = field(default_factory=anyio.Lock)
    _here: list[Stop] = field(default_factory=list)
    _first: dict[tuple[Scope, str | None], Stop] = field(default_factory=dict)
    """The first of each scope and name."""
    _running: set[Stopped] = field(default_factory=set)
    _busy: anyio.Event = field(default_factory=anyio.Event)
    _told: tuple[str, ...] = ()
    _found: StoredItems[Stop] = field(default_factory=StoredItems)

    @classmethod
    @asynccontextmanager
    async def opened(cls, state_dir: Path, audit: log.AuditLog) -> AsyncIterator[Self]:
        """Apply the stops of a state directory during the block.

        Raises SecretFileError: their directory cannot be made, or others could write to it.
        """
        files = stops_of(state_dir)
        await anyio.to_thread.run_sync(files.prepare)
        async with anyio.create_task_group() as tasks:
            stops = cls(files, audit, tasks)
            tasks.start_soon(stops._watch)
            try:
                yield stops
            finally:
                tasks.cancel_scope.cancel()

    def refusal(self, call: ToolCall) -> Refusal | None:
        """Return why this call may not start; None if no stop in effect names it."""
        self._look()
        return self._objection(call)[0]

    async def end(self, call: Call) -> None:
        """End a call that a stop names: while it is delayed, waits, is scanned or runs (GB-LIFE-8)."""
        stopped, otherwise = call.stack.enter_context(self.ending(call.request)), call.ended_by
        call.ended_by = lambda: ("stop", stopped.stop) if stopped.refusal else otherwise()

    async def obey(self, call: Call) -> None:
        """Apply a stop that was made while the decision was recorded."""
        self.refusal(call.request)
        await anyio.lowlevel.checkpoint_if_cancelled()

    @contextmanager
    def ending(self, call: ToolCall) -> Iterator[Stopped]:
        """Cancel the block once a stop names the call, at once if one does already. Raises CallDeniedError then."""
        with anyio.CancelScope() as scope:
            running = Stopped(call=call, scope=scope)
            self._running.add(running)
            self._busy.set()
            try:
                self._look()
                self._end(running)
                yield running
                return
            finally:
                self._running.discard(running)
        # Nothing else cancels that scope: a call that ran is recorded as cancelled, and its sandbox is gone.
        raise CallDeniedError(running.refusal)

    @property
    def crowded(self) -> bool:
        """Return whether half of the places are taken."""
        return len(self._found.items) + len(self._here) >= MAX_STOPS // 2

    async def record(self, event: Event) -> None:
        """Append an event that takes effect in any case; wait at most ``RECORD_SECONDS``.

        A log that delayed one event that long delays no other until it has written that one.
        """
        done = anyio.Event()
        self._tasks.start_soon(self._append, event, done)
        with anyio.move_on_after(0 if self._overdue else RECORD_SECONDS, shield=True):
            await done.wait()
        if not done.is_set():
            self._overdue.add(done)
            _log.warning("the log does not answer: %s is not waited for", event.kind)

    async def make(self, scope: Scope, name: str, *, because: str, by: str) -> None:
        """Stop something for a watch rule, unless it is; recorded first if possible. Calls of this process end at once.

        ``because`` is shown to callers; ``by`` is ``watch:`` and the rule. A stop whose file cannot be made is in
        effect only in this process, while that lives; the last of ``MAX_STOPS`` such stops everything there.
        """
        with anyio.CancelScope(shield=True):
            async with self._making:
                self._look()
                if (scope, name) not in self._first:
                    await self._make(new_stop(scope, name, because=because, by=by, made=datetime.now(UTC)))

    async def _make(self, stop: Stop) -> None:
        await self.record(made(stop))
        add = partial(self._files.add, stop.id, stop.encoded(), instead=b"", spare=SPARE_STOPS)
        try:
            await anyio.to_thread.run_sync(add)
        except SecretFileError as problem:
            _log.error("a stop is in effect in this process alone: %s", problem)
            if len(self._here) == MAX_STOPS - 1:  # the last place is for all that would have none
                _log.error("everything is stopped, by this process: it has %d stops of its own", MAX_STOPS)
                stop = stop.model_copy(update={"scope": "all", "name": ""})
            if len(self._here) < MAX_STOPS:
                self._here.append(stop)
            self._end_all()
        self._look()

    async def _append(self, event: Event, done: anyio.Event) -> None:
        try:
            await self._audit.append(event)
        except place.AuditError as problem:
            _log.warning("%s is not recorded: %s", event.kind, problem)
        finally:
            done.set()
            self._overdue.discard(done)

    def _look(self) -> None:
        found = self._files.look()
        if found is self._found:
            return
        told, self._told = self._told, tuple(str(each) for each in found.damaged)
        for words in set(self._told) - set(told):
            _log.error("everything is stopped: %s", words)
        self._found = found
        self._end_all()

    def _end_all(self) -> None:
        every = reversed((*self._found.items, *self._here))
        self._first = {(each.scope, each.name if each.scope != "all" else ""): each for each in every}
        for running in self._running:
            self._end(running)

    def _end(self, running: Stopped) -> None:
        if running.refusal is None:
            running.refusal, running.stop = self._objection(running.call)
            if running.refusal is not None:
                running.scope.cancel()

    def _objection(self, call: ToolCall) -> tuple[Refusal | None, str | None]:
        if found := [self._first[each] for each in _keys(call) if each in self._first]:
            stop = min(found, key=lambda each: each.id)
            return stop.refusal, stop.id
        return (DAMAGED, None) if self._found.damaged else (None, None)

    async def _watch(self) -> None:
        while True:
            if not self._running:
                self._busy = anyio.Event()
                await self._busy.wait()
            await anyio.sleep(LOOK_SECONDS)
            self._look()
