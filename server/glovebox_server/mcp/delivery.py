"""Everything that a client receives of its call: messages while it runs, and the complete result in both forms.

Messages are progress, live output, heartbeats and audit events. They pass bounded places that are overwritten or
counted when full, and separate tasks send them: a client that does not read never slows a call. Results are complete in
``content`` and in ``structuredContent``, and never larger than clients accept.
"""

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import mcp_types as types
from mcp.server.connection import Connection, allowed_log_levels
from mcp.server.context import ServerRequestContext
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from glovebox_audit import chain, events, log, read, subscription
from glovebox_server.calls import CallResult, Content, Image, Link, Listener, Principal, Text
from glovebox_server.guards.approvals.question import ApprovalAnswer, Question

#: Logger name in ``notifications/message``.
AUDIT_LOGGER = "glovebox.audit"
#: Silence before a heartbeat, in seconds. Clients give up at 60; proxies at 30.
HEARTBEAT_SECONDS = 5.0
#: Shortest time between two progress messages, in seconds: live to the eye, four small messages a second.
PAUSE_SECONDS = 0.25
#: Longest text in one progress message, in characters: the newest output since the last one.
MAX_PRINTED = 4096
#: How long a finished call waits for its last messages to be read, in seconds. The result and the audit log are
#: complete without them.
FLUSH_SECONDS = 0.5

#: Record fields in log messages above the level ``debug``: a trivial call's take less than 1 KB together.
BRIEF = (
    "tool", "run", "workflow", "effect", "rule", "reason", "driver", "level", "host", "port", "name", "uri", "risks",
    "ended", "exit_code", "by", "error", "first", "count",
)  # fmt: skip

Context = ServerRequestContext[Any, Any]
Identify = Callable[[Context], Principal]
"""Identifies the caller of a request. Raises rather than guesses: there is no anonymous principal."""


def connection_of(ctx: Context) -> Connection:
    """Return the connection of a request, which holds state and ends; in the handshake eras it outlives the request."""
    return ctx.session._connection  # noqa: SLF001 - the SDK has no other way to learn of its end


#: Key in a connection's state: the level of its ``logging/setLevel``.
LEVEL = "glovebox.level"
Levels = frozenset[types.LoggingLevel]
Endings = Mapping[str, anyio.Event]
"""The events that end a call, by who sets them."""
Ask = Callable[[Question], Awaitable[ApprovalAnswer | None]]
#: Largest result, in bytes of JSON. SDK clients reject a server-sent event above 1 MiB, and a model cannot use more.
#: Larger content is an artifact with a resource link.
MAX_MESSAGE_BYTES = 256 * 1024
#: Key of a call's facts in a result's ``_meta``.
CALL_META_KEY = "dev.glovebox/call"
#: Key of an artifact's digest in a resource link's ``_meta``.
SHA256_META_KEY = "dev.glovebox/sha256"
#: Key of the reasons not to open a file unseen, in the ``_meta`` of its link and of its content.
RISKS_META_KEY = "dev.glovebox/risks"
#: Key of the kinds and numbers of secrets replaced in a file's content, in its ``_meta``.
REDACTED_META_KEY = "dev.glovebox/redacted"
#: Revisions without resource links: their clients refuse a whole result for an unknown block.
WITHOUT_LINKS = frozenset({"2024-11-05", "2025-03-26"})
#: Text is never cut below this many characters; then only an absurd number of items is left to drop.
_LEAST_TEXT = 256


class Reporter(Listener):
    """A listener (``calls.Listener``) that reports one call to its client; never waits, never grows."""

    def __init__(self, ctx: Context, endings: Endings, ask: Ask) -> None:
        self._ctx = ctx
        self._endings = endings
        self._ask = ask
        self.goes_on = False
        """True if the call ends here without its last record: the client repeats it with an answer."""
        self._sentence: str | None = None
        self._newest = "Waiting for a turn"
        self._printed = ""
        self._skipped = 0
        self._wake = anyio.Event()
        self._began = anyio.current_time()

    def ended_by(self) -> str:
        """Return who ends the call: the one whose event is set, else the client."""
        return next((who for who, event in self._endings.items() if event.is_set()), "client")

    def progress(self, message: str) -> None:
        """Keep the newest sentence; drop an older one that was not sent yet."""
        self._sentence = self._newest = message[:MAX_PRINTED]
        self._wake.set()

    def printed(self, text: str) -> None:
        """Keep the newest ``MAX_PRINTED`` characters of output, and count what came before."""
        whole = self._printed + text
        self._printed = whole[-MAX_PRINTED:]
        self._skipped += len(whole) - len(self._printed)
        self._wake.set()

    def waits(self) -> bool:
        """Return whether the client asked for progress."""
        return (self._ctx.meta or {}).get("progress_token") is not None

    async def ask(self, question: Question) -> ApprovalAnswer | None:
        """Ask the person at the client; return None if that is impossible."""
        return await self._ask(question)

    async def run(self) -> None:
        """Send news or a heartbeat until cancelled."""
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
        # MCP demands that progress grows, and time is the one number that always does.
        await self._ctx.session.report_progress(round(elapsed, 3), None, text)


@asynccontextmanager
async def deliver_messages(
    ctx: Context, audit: log.AuditLog, call_id: str, endings: Endings, ask: Ask
) -> AsyncIterator[Reporter]:
    """Run the messages of one call beside it."""
    reporter, levels = Reporter(ctx, endings, ask), levels_of(ctx)
    hears = "alert" in levels  # any audit event
    if not reporter.waits() and not hears:
        yield reporter
        return
    async with anyio.create_task_group() as tasks:
        if reporter.waits():
            tasks.start_soon(reporter.run)
        if hears:
            async with audit.subscribe(call_id=call_id) as records:
                copies = _Copies(ctx, records, levels)
                tasks.start_soon(copies.send_until_end)
                yield reporter
                # A call that did not begin has no record, and slow refusals pile up.
                if records.offered and not reporter.goes_on:
                    await copies.finish()
        else:
            yield reporter
        tasks.cancel_scope.cancel()


class _Copies:
    """Copies of one call's records on their way to its client."""

    def __init__(self, ctx: Context, records: subscription.Subscription, levels: Levels) -> None:
        self._ctx, self._records, self._levels = ctx, records, levels
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self._unread: chain.Record | subscription.Missed | None = None

    async def send_until_end(self) -> None:
        """Deliver a call's records up to its last one."""
        # Closed while we wait: the call ended without its last record, as on a full disk. The result says why.
        with self._scope, suppress(anyio.ClosedResourceError):
            async for item in self._records:
                self._unread = item
                await self._send(item)
                self._unread = None
                if isinstance(item, chain.Record) and read.is_last(item):
                    break
        self._ended.set()

    async def finish(self) -> None:
        """Give a client that does not read ``FLUSH_SECONDS``, then drop its copies and announce that.

        The notice waits for the client as the result does, which follows on the same stream.
        """
        with anyio.move_on_after(FLUSH_SECONDS):
            await self._ended.wait()
        if self._ended.is_set():
            return
        self._scope.cancel()
        await self._ended.wait()
        missed = self._records.give_up(self._unread)
        if missed is not None:
            await self._send(missed)

    async def _send(self, item: chain.Record | subscription.Missed) -> None:
        """Send one record as a log message on the request's stream, if the client's level allows it."""
        params = show_record(item)
        # A missed record may have been a denial.
        grave = isinstance(item, subscription.Missed) or params["data"].get("effect") == "deny"
        severity: types.LoggingLevel = "warning" if grave else "info"
        if severity in self._levels:
            data = params if "debug" in self._levels else _brief(params)
            body = types.LoggingMessageNotificationParams(level=severity, logger=AUDIT_LOGGER, data=data)
            message = types.LoggingMessageNotification(params=body)
            await self._ctx.session.send_notification(message, related_request_id=self._ctx.request_id)


def _brief(params: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten a record: a reader of log messages did not ask for measurements, and a model may see each one."""
    data = {name: params["data"][name] for name in BRIEF if isinstance(params["data"].get(name), str | int | list)}
    if params["kind"] != events.CallDecided.kind:
        for name in ("tool", "run", "workflow"):
            data.pop(name, None)  # the first has said it
    if data.get("effect") == "allow":
        data.pop("reason", None)
    about = {name: params[name] for name in ("seq", "kind", "call_id") if name in params}
    return {**about, "data": data}


async def call_when(event: anyio.Event, act: Callable[[], None]) -> None:
    """Call a function once ``event`` is set."""
    await event.wait()
    act()


def show_record(item: chain.Record | subscription.Missed) -> dict[str, Any]:
    """Return a record, or a notice of missed ones, for clients; docs/operate/audit.md explains each event."""
    if isinstance(item, subscription.Missed):
        return {"seq": item.last, "kind": "missed", "data": {"count": item.count, "first": item.first}}
    data = {name: value for name, value in item.data.items() if name != "workspace"}
    fields = {"seq": item.seq, "kind": item.kind, "time": item.time, "call_id": item.call_id, "data": data}
    return {name: value for name, value in fields.items() if value is not None} | {"hash": item.hash}


_ORDER: tuple[types.LoggingLevel, ...] = (
    "debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"
)  # fmt: skip


def levels_of(ctx: Context) -> Levels:
    """Return the levels for the client: the request's opt-in in the modern era, ``logging/setLevel`` before."""
    allowed = allowed_log_levels(ctx.protocol_version, ctx.meta)
    if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
        return allowed
    return allowed.intersection(_ORDER[_ORDER.index(connection_of(ctx).state.get(LEVEL, "info")) :])


def tool_result(result: CallResult, revision: str | None = None) -> types.CallToolResult:
    """Convert a broker's result to MCP's, within ``MAX_MESSAGE_BYTES``, of blocks that ``revision`` has.

    Dropped first are images beyond half of it (each has its original elsewhere), then the middle of the longest texts,
    replaced by the number of omitted characters. Sizes are judged before encoding, because encoding blocks the event
    loop.
    """
    items: Sequence[Content] = result.content
    if revision in WITHOUT_LINKS:
        links = "[{0.name}: {0.media_type}, {0.bytes} bytes, {0.uri}]"
        items = [Text(text=links.format(item)) if isinstance(item, Link) else item for item in items]
    structured: Any = dict(result.structured)
    meta = {CALL_META_KEY: dict(result.meta)} if result.meta else None
    if sum(map(_encoded, items)) > MAX_MESSAGE_BYTES:
        items = _without_images(items)
    longest = MAX_MESSAGE_BYTES
    while longest > _LEAST_TEXT // 2:
        if sum(min(length, longest) for length in _lengths([structured, items])) <= MAX_MESSAGE_BYTES:
            blocks = [_block(item, longest) for item in items]
            rendered = types.CallToolResult(
                content=blocks, structured_content=_cut(structured, longest), is_error=result.failed, _meta=meta
            )
            if _size(rendered) <= MAX_MESSAGE_BYTES:
                return rendered
        if longest == MAX_MESSAGE_BYTES:
            items = _without_images(items)
        longest //= 2
    text = f"The result has too many parts for a message of {MAX_MESSAGE_BYTES} bytes. Ask for less at a time."
    return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True, _meta=meta)


def _block(item: Content, longest: int) -> types.ContentBlock:
    match item:
        case Text():
            return types.TextContent(text=_cut(item.text, longest))
        case Image():
            return types.ImageContent(data=base64.b64encode(item.data).decode(), mime_type=item.media_type)
        case Link():
            meta = {SHA256_META_KEY: item.sha256, **risks_meta(item.risks)}
            return types.ResourceLink(
                uri=item.uri, name=item.name, mime_type=item.media_type, size=item.bytes, _meta=meta
            )


def risks_meta(risks: Sequence[str]) -> dict[str, Any]:
    """Return the ``_meta`` of a file with risks; empty without."""
    return {RISKS_META_KEY: list(risks)} if risks else {}


def _encoded(item: Content) -> int:
    return (len(item.data) + 2) // 3 * 4 if isinstance(item, Image) else 0


def _lengths(value: Any) -> Iterator[int]:
    """Yield the length of every nested text: each takes at least as many bytes."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                yield len(text)
            case Text(text=text):
                yield len(text)
            case Mapping() as table:
                waiting += table.values()
            case list() | tuple() as row:
                waiting += row


def _size(result: types.CallToolResult) -> int:
    return len(json.dumps(result.model_dump(by_alias=True, mode="json", exclude_none=True)))


def _without_images(items: Sequence[Content]) -> list[Content]:
    """Drop images, largest first, until the rest take at most half of a message."""
    kept = list(items)
    sizes = sorted(((_encoded(item), n) for n, item in enumerate(kept) if isinstance(item, Image)), reverse=True)
    total = sum(size for size, _ in sizes)
    for size, place in sizes:
        if total <= MAX_MESSAGE_BYTES // 2:
            break
        total -= size
        kept[place] = Text(text=f"[image of {size * 3 // 4} bytes left out: too large for one message]")
    return kept


def _cut(value: Any, longest: int) -> Any:
    """Keep head and tail of every nested text longer than ``longest`` characters."""
    if isinstance(value, str):
        if len(value) <= longest:
            return value
        half = longest // 2
        return f"{value[:half]}\n[… {len(value) - 2 * half} characters left out …]\n{value[-half:]}"
    if isinstance(value, Mapping):
        return {key: _cut(item, longest) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_cut(item, longest) for item in value]
    return value
