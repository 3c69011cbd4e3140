"""What a client hears while its call runs: progress, live output, signs of life and audit events.

Everything goes through bounded places that are overwritten or counted when full, and is sent by tasks of its own, so a
client that does not read never slows a call. Only ``glovebox_server.mcp.server`` imports this.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import anyio
import mcp_types as types
from mcp.server.connection import allowed_log_levels
from mcp.server.context import ServerRequestContext
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ConfigDict, Field

from glovebox_server.audit.chain import Record
from glovebox_server.audit.events import CallDecided
from glovebox_server.audit.log import AuditLog
from glovebox_server.audit.read import is_last
from glovebox_server.audit.subscription import Missed, Subscription
from glovebox_server.calls import Principal
from glovebox_server.guards.approvals.question import Answer, Question
from glovebox_server.guards.stops.stop import BY_RULES

#: Our extension: a client that declares it gets ``AUDIT_NOTIFICATION``. https://modelcontextprotocol.io, SEP-2133.
AUDIT_EXTENSION = "dev.glovebox/audit"
AUDIT_NOTIFICATION: Literal["notifications/dev.glovebox/audit"] = "notifications/dev.glovebox/audit"

#: Logger name in ``notifications/message`` for clients that know no extension.
AUDIT_LOGGER = "glovebox.audit"

#: Silence after which a client is told that its call is alive, in seconds. Clients give up at 60; proxies at 30.
HEARTBEAT_SECONDS = 5.0

#: Shortest time between two progress messages, in seconds: live to the eye, four small messages a second on the wire.
PAUSE_SECONDS = 0.25

#: Longest text in one progress message, in characters: the newest of what was printed since the last one.
MAX_PRINTED = 4096

#: How long a finished call waits for its last messages to be read, in seconds. They are a courtesy: the result and
#: the audit log tell everything.
FLUSH_SECONDS = 0.5

#: Fields of records that log messages have above the level ``debug``: a trivial call's take less than 1 KB together.
BRIEF = (
    "tool", "run", "workflow", "effect", "rule", "reason", "driver", "level", "host", "port", "name", "uri", "risks",
    "ended", "exit_code", "by", "error", "first", "count",
)  # fmt: skip

_NAMES_A_RULE = "A watch rule ("

Context = ServerRequestContext[Any, Any]

Identify = Callable[[Context], Principal]
"""Who makes a request. Raises rather than guesses: there is no anonymous principal."""


Ask = Callable[[Question], Awaitable[Answer | None]]
"""Asks the person at a client: ``asking.Asker.ask``."""


class AuditParams(types.NotificationParams):
    """One audit record as clients see it, or a notice of records that were not delivered."""

    # Fields of ours are spelled in one way, as in the log and in results; the SDK would write ``callId``.
    model_config = ConfigDict(alias_generator=None)

    seq: int
    """Place in the chain; a hole means that records of others, or lost messages, lie between."""
    kind: str
    """Which event (docs/operate/audit.md); or ``missed``, or ``listening`` at the start of a listen request."""
    time: str | None = None
    call_id: str | None = None
    data: dict[str, Any] = Field(default_factory=dict)
    hash: str | None = None


class AuditNotification(types.Notification[AuditParams, Literal["notifications/dev.glovebox/audit"]]):
    """One audit event for a client that asked for them."""

    method: Literal["notifications/dev.glovebox/audit"] = AUDIT_NOTIFICATION
    params: AuditParams


class Reporter:
    """Hears one call and tells its client. Implements ``calls.Listener``; never waits, never grows."""

    def __init__(self, ctx: Context, endings: Mapping[str, anyio.Event], ask: Ask) -> None:
        """Take the context of the ``tools/call`` request, the events that end it by who sets them, and who asks."""
        self._ctx = ctx
        self._endings = endings
        self._ask = ask
        self.goes_on = False
        """Whether the call ends here without its last record: its client makes it again with an answer."""
        self._sentence: str | None = None
        self._newest = "Waiting for a turn"
        self._printed = ""
        self._skipped = 0
        self._wake = anyio.Event()
        self._began = anyio.current_time()

    def ended_by(self) -> str:
        """Who is ending the call: the one whose event is set, else the client itself."""
        return next((who for who, event in self._endings.items() if event.is_set()), "client")

    def progress(self, message: str) -> None:
        """Remember the newest sentence; an older one that was not sent yet is dropped."""
        self._sentence = self._newest = message[:MAX_PRINTED]
        self._wake.set()

    def printed(self, text: str) -> None:
        """Remember the newest output, at most ``MAX_PRINTED`` characters of it, and how much came before."""
        whole = self._printed + text
        self._printed = whole[-MAX_PRINTED:]
        self._skipped += len(whole) - len(self._printed)
        self._wake.set()

    def waits(self) -> bool:
        """Whether the client asked to hear progress."""
        return (self._ctx.meta or {}).get("progress_token") is not None

    async def ask(self, question: Question) -> Answer | None:
        """Ask the person at the client; None where it cannot be asked."""
        return await self._ask(question)

    async def run(self) -> None:
        """Send until cancelled: what is new, or a sign of life."""
        while True:
            with anyio.move_on_after(HEARTBEAT_SECONDS):
                await self._wake.wait()
            await self._send()
            await anyio.sleep(PAUSE_SECONDS)

    async def _send(self) -> None:
        elapsed = anyio.current_time() - self._began
        if self._sentence is not None:
            text, self._sentence = self._sentence, None
        elif self._printed:
            text = f"[… {self._skipped} characters …]\n{self._printed}" if self._skipped else self._printed
            self._printed, self._skipped = "", 0
        else:
            text = f"{self._newest} ({elapsed:.0f} s)"
        if self._sentence is None and not self._printed:
            self._wake = anyio.Event()
        # Time is the one number that always grows, as the protocol demands of progress.
        await self._ctx.session.report_progress(round(elapsed, 3), None, text)


@asynccontextmanager
async def listening(
    ctx: Context,
    audit: AuditLog,
    call_id: str,
    level: types.LoggingLevel,
    endings: Mapping[str, anyio.Event],
    *,
    ask: Ask,
) -> AsyncIterator[Reporter]:
    """Run the messages of one call beside it.

    Args:
        ctx: context of the request.
        audit: the audit log.
        call_id: the call whose records are delivered.
        level: what the client set with ``logging/setLevel``; counts in the handshake eras only.
        endings: events that end the call, by who sets them.
        ask: asks the person at the client.
    """
    reporter = Reporter(ctx, endings, ask)
    async with anyio.create_task_group() as tasks:
        if reporter.waits():
            tasks.start_soon(reporter.run)
        if hears_audit(ctx, level):
            async with audit.subscribe(call_id=call_id) as records:
                copies = _Copies(ctx, records, level)
                tasks.start_soon(copies.tell_until_end)
                yield reporter
                # Of a call that was not begun there is no record, and a refusal that is slow piles up.
                if records.offered and not reporter.goes_on:
                    await copies.finish()
        else:
            yield reporter
        tasks.cancel_scope.cancel()


class _Copies:
    """Copies of one call's records on their way to its client."""

    def __init__(self, ctx: Context, records: Subscription, level: types.LoggingLevel) -> None:
        self._ctx, self._records, self._level = ctx, records, level
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self._unread: Record | Missed | None = None

    async def tell_until_end(self) -> None:
        """Deliver a call's records up to its last one."""
        # Closed while we wait: the call is over and its last record never came, as on a full disk. The result says why.
        with self._scope, suppress(anyio.ClosedResourceError):
            async for item in self._records:
                self._unread = item
                await tell(self._ctx, item, self._level)
                self._unread = None
                if isinstance(item, Record) and is_last(item):
                    break
        self._ended.set()

    async def finish(self) -> None:
        """Give a client that does not read ``FLUSH_SECONDS``, then drop its copies, and announce that.

        The notice waits for the client as the result does, which comes behind it on the same stream.
        """
        with anyio.move_on_after(FLUSH_SECONDS):
            await self._ended.wait()
        if self._ended.is_set():
            return
        self._scope.cancel()
        await self._ended.wait()
        missed = self._records.give_up(self._unread)
        if missed is not None:
            await tell(self._ctx, missed, self._level)


def declares_audit(ctx: Context) -> bool:
    """Say whether the client declared our extension (or, before extensions existed, the experimental capability)."""
    declared = ctx.session.client_capabilities
    if declared is None:
        return False
    return AUDIT_EXTENSION in (declared.extensions or {}) or AUDIT_EXTENSION in (declared.experimental or {})


def hears_audit(ctx: Context, level: types.LoggingLevel) -> bool:
    """Say whether any audit event of a call would be sent to this client."""
    return declares_audit(ctx) or "alert" in _levels(ctx, level)


async def tell(ctx: Context, item: Record | Missed, level: types.LoggingLevel) -> None:
    """Send one record on the stream of the request, in the form this client understands."""
    if declares_audit(ctx):
        await tell_extension(ctx, shown(item))
        return
    params = shown(item)
    grave = isinstance(item, Missed) or params.data.get("effect") == "deny"  # what was missed may have been a denial
    severity: types.LoggingLevel = "warning" if grave else "info"
    heard = _levels(ctx, level)
    if severity in heard:
        data = params.model_dump(by_alias=True, mode="json", exclude_none=True) if "debug" in heard else _brief(params)
        body = types.LoggingMessageNotificationParams(level=severity, logger=AUDIT_LOGGER, data=data)
        message = types.LoggingMessageNotification(params=body)
        await ctx.session.send_notification(message, related_request_id=ctx.request_id)


def _brief(params: AuditParams) -> dict[str, Any]:
    """A record in a few words. Whoever is sent log messages did not ask for measurements, and may show a model each."""
    data = {name: params.data[name] for name in BRIEF if isinstance(params.data.get(name), str | int | list)}
    if params.kind != CallDecided.kind:
        for name in ("tool", "run", "workflow"):
            data.pop(name, None)  # the first has said it
    if data.get("effect") == "allow":
        data.pop("reason", None)
    return {"seq": params.seq, "kind": params.kind, "call_id": params.call_id, "data": data}


async def tell_extension(ctx: Context, params: AuditParams) -> None:
    """Send our own notification; only to a client that declared the extension or asked to listen."""
    message: Any = AuditNotification(params=params)
    await ctx.session.send_notification(message, related_request_id=ctx.request_id)


async def cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    """Cancel ``scope`` once ``event`` is set."""
    await event.wait()
    scope.cancel()


def shown(item: Record | Missed) -> AuditParams:
    """Return a record, or a notice of missed ones, as clients see it."""
    if isinstance(item, Missed):
        return AuditParams(seq=item.last, kind="missed", data={"count": item.count, "first": item.first})
    data = {name: value for name, value in item.data.items() if name != "workspace"}
    # Earlier logs have in such a record which watch rule it was.
    if data.get("rule") == "stop" and _NAMES_A_RULE in str(data.get("reason")):
        data["reason"] = BY_RULES
    return AuditParams(seq=item.seq, kind=item.kind, time=item.time, call_id=item.call_id, data=data, hash=item.hash)


_ORDER: tuple[types.LoggingLevel, ...] = (
    "debug",
    "info",
    "notice",
    "warning",
    "error",
    "critical",
    "alert",
    "emergency",
)


def _levels(ctx: Context, level: types.LoggingLevel) -> frozenset[types.LoggingLevel]:
    """Levels the client may be sent: its request's opt-in in the modern era, ``logging/setLevel`` before."""
    allowed = allowed_log_levels(ctx.protocol_version, ctx.meta)
    if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
        return allowed
    return allowed.intersection(_ORDER[_ORDER.index(level) :])
