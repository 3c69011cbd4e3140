"""Everything that a client is sent of its call: messages while it runs, and its result, complete in both forms.

Messages are progress, live output, signs of life and audit events. They go through bounded places that are overwritten
or counted when full, and are sent by tasks of their own, so a client that does not read never slows a call. Results are
complete in ``content`` and in ``structuredContent``, and never larger than clients accept.
"""

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import mcp_types as types
from mcp.server.connection import allowed_log_levels
from mcp.server.context import ServerRequestContext
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from glovebox_audit.chain import Record
from glovebox_audit.events import CallDecided
from glovebox_audit.log import AuditLog
from glovebox_audit.read import is_last
from glovebox_audit.subscription import Missed, Subscription
from glovebox_server.calls import CallResult, Content, Image, Link, Principal, Text
from glovebox_server.guards.approvals.question import ApprovalAnswer, Question
from glovebox_server.guards.stops.stop import BY_RULES

#: Logger name in ``notifications/message``.
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


Ask = Callable[[Question], Awaitable[ApprovalAnswer | None]]
"""Asks the person at a client: ``asking.Asker.ask``."""

#: Largest result, in bytes of JSON. SDK clients reject a server-sent event above 1 MiB, and a model cannot use more;
#: what is larger is an artifact with a resource link.
MAX_MESSAGE_BYTES = 256 * 1024

#: Where the facts of a call stand in a result's ``_meta``.
CALL_META_KEY = "dev.glovebox/call"

#: Where an artifact's digest stands in a resource link's ``_meta``.
SHA256_META_KEY = "dev.glovebox/sha256"

#: Where the reasons not to open a file unseen stand, in the ``_meta`` of its link and of its content.
RISKS_META_KEY = "dev.glovebox/risks"

#: Where the kinds of secrets that were replaced in a file's content stand, with their numbers, in its ``_meta``.
REDACTED_META_KEY = "dev.glovebox/redacted"

#: Revisions without resource links: their clients refuse a whole result for a block that they do not know.
WITHOUT_LINKS = frozenset({"2024-11-05", "2025-03-26"})

#: Text is never cut below this many characters; by then only something absurd in number is left to drop.
_LEAST_TEXT = 256


class Reporter:
    """Hears one call and tells its client. Implements ``calls.Listener``; never waits, never grows."""

    def __init__(self, ctx: Context, endings: Mapping[str, anyio.Event], ask: Ask) -> None:
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
        """Return who is ending the call: the one whose event is set, else the client."""
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
        """Return whether the client asked for progress."""
        return (self._ctx.meta or {}).get("progress_token") is not None

    async def ask(self, question: Question) -> ApprovalAnswer | None:
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
async def deliver_messages(
    ctx: Context,
    audit: AuditLog,
    call_id: str,
    level: types.LoggingLevel,
    endings: Mapping[str, anyio.Event],
    *,
    ask: Ask,
) -> AsyncIterator[Reporter]:
    """Run the messages of one call beside it."""
    reporter = Reporter(ctx, endings, ask)
    async with anyio.create_task_group() as tasks:
        if reporter.waits():
            tasks.start_soon(reporter.run)
        if hears_audit(ctx, level):
            async with audit.subscribe(call_id=call_id) as records:
                copies = _Copies(ctx, records, level)
                tasks.start_soon(copies.send_until_end)
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

    async def send_until_end(self) -> None:
        """Deliver a call's records up to its last one."""
        # Closed while we wait: the call is over and its last record never came, as on a full disk. The result says why.
        with self._scope, suppress(anyio.ClosedResourceError):
            async for item in self._records:
                self._unread = item
                await send_record(self._ctx, item, self._level)
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
            await send_record(self._ctx, missed, self._level)


def hears_audit(ctx: Context, level: types.LoggingLevel) -> bool:
    """Return whether any audit event of a call would be sent to this client."""
    return "alert" in _levels(ctx, level)


async def send_record(ctx: Context, item: Record | Missed, level: types.LoggingLevel) -> None:
    """Send one record as a log message on the stream of the request, if the client's level lets it through."""
    params = show_record(item)
    # Among missed records may have been a denial.
    grave = isinstance(item, Missed) or params["data"].get("effect") == "deny"
    severity: types.LoggingLevel = "warning" if grave else "info"
    heard = _levels(ctx, level)
    if severity in heard:
        data = params if "debug" in heard else _brief(params)
        body = types.LoggingMessageNotificationParams(level=severity, logger=AUDIT_LOGGER, data=data)
        message = types.LoggingMessageNotification(params=body)
        await ctx.session.send_notification(message, related_request_id=ctx.request_id)


def _brief(params: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten a record: who gets log messages did not ask for measurements, and may show a model each of them."""
    data = {name: params["data"][name] for name in BRIEF if isinstance(params["data"].get(name), str | int | list)}
    if params["kind"] != CallDecided.kind:
        for name in ("tool", "run", "workflow"):
            data.pop(name, None)  # the first has said it
    if data.get("effect") == "allow":
        data.pop("reason", None)
    about = {name: params[name] for name in ("seq", "kind", "call_id") if name in params}
    return {**about, "data": data}


async def cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    """Cancel ``scope`` once ``event`` is set."""
    await event.wait()
    scope.cancel()


def show_record(item: Record | Missed) -> dict[str, Any]:
    """Return a record, or a notice of missed ones, as clients see it; docs/operate/audit.md explains each event."""
    if isinstance(item, Missed):
        return {"seq": item.last, "kind": "missed", "data": {"count": item.count, "first": item.first}}
    data = {name: value for name, value in item.data.items() if name != "workspace"}
    # Earlier logs have in such a record which watch rule it was.
    if data.get("rule") == "stop" and _NAMES_A_RULE in str(data.get("reason")):
        data["reason"] = BY_RULES
    fields = {"seq": item.seq, "kind": item.kind, "time": item.time, "call_id": item.call_id, "data": data}
    return {name: value for name, value in fields.items() if value is not None} | {"hash": item.hash}


_ORDER: tuple[types.LoggingLevel, ...] = (
    "debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"
)  # fmt: skip


def _levels(ctx: Context, level: types.LoggingLevel) -> frozenset[types.LoggingLevel]:
    """Levels the client may be sent: its request's opt-in in the modern era, ``logging/setLevel`` before."""
    allowed = allowed_log_levels(ctx.protocol_version, ctx.meta)
    if ctx.protocol_version in MODERN_PROTOCOL_VERSIONS:
        return allowed
    return allowed.intersection(_ORDER[_ORDER.index(level) :])


def tool_result(result: CallResult, revision: str | None = None) -> types.CallToolResult:
    """Turn a broker's result into MCP's, within ``MAX_MESSAGE_BYTES``, of blocks that ``revision`` has.

    What does not fit goes in this order: images beyond half of it (each has its original elsewhere), then the middle
    of the longest texts, with the number of characters that were left out in their place. What cannot fit is told by
    its length: nothing is encoded that is left out, for everybody waits meanwhile.
    """
    items: Sequence[Content] = result.content
    if revision in WITHOUT_LINKS:
        items = [_said(item) if isinstance(item, Link) else item for item in items]
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
    return _hopeless(meta)


def error_result(text: str, structured: Mapping[str, Any] | None = None) -> types.CallToolResult:
    """Return an error the model can read (``isError``), not one of the protocol."""
    content: list[types.ContentBlock] = [types.TextContent(text=text)]
    return types.CallToolResult(content=content, structured_content=structured and dict(structured), is_error=True)


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


def _said(link: Link) -> Text:
    return Text(text=f"[{link.name}: {link.media_type}, {link.bytes} bytes, {link.uri}]")


def risks_meta(risks: Sequence[str]) -> dict[str, Any]:
    """Return the ``_meta`` of a file with risks; empty without."""
    return {RISKS_META_KEY: list(risks)} if risks else {}


def _encoded(item: Content) -> int:
    """Characters that an image takes in JSON; 0 for what is none."""
    return (len(item.data) + 2) // 3 * 4 if isinstance(item, Image) else 0


def _lengths(value: Any) -> Iterator[int]:
    """Characters of every text, wherever it stands: each takes at least as many bytes."""
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
    """Leave out images, largest first, until the rest of them takes at most half of a message."""
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
    """Keep head and tail of every text longer than ``longest`` characters, wherever it stands."""
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


def _hopeless(meta: dict[str, Any] | None) -> types.CallToolResult:
    text = f"The result has too many parts for a message of {MAX_MESSAGE_BYTES} bytes. Ask for less at a time."
    return types.CallToolResult(content=[types.TextContent(text=text)], is_error=True, _meta=meta)
