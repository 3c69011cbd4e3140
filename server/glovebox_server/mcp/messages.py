"""Measures messages and sessions, and completes the span that the SDK opens for each message. Not imported if off."""

import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from contextvars import ContextVar
from time import monotonic, time_ns
from typing import TYPE_CHECKING, Literal

import anyio
import mcp_types as types
import structlog
from mcp.server.context import CallNext, HandlerResult
from mcp.shared.exceptions import MCPError
from opentelemetry.trace import Span, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from pydantic import ValidationError

from glovebox_audit.chain import Record, new_call_id
from glovebox_audit.place import AuditError
from glovebox_server.errors import StoreError
from glovebox_server.mcp.delivery import Context, connection_of
from glovebox_server.mcp.server import McpServer, session_of
from glovebox_server.settings import exports
from glovebox_server.telemetry import names, spans
from glovebox_server.telemetry.totals import TotalStore

if TYPE_CHECKING:
    from glovebox_server.telemetry.otlp import MetricSender, SpanSender
    from glovebox_server.telemetry.prometheus import Scrape

#: Seconds between two looks at the log. A scrape looks by itself.
LOOK_SECONDS = 15.0
_PROTOCOL = "http/protobuf"
_CALLS: ContextVar[list[str]] = ContextVar("calls of this message")
_headers = TraceContextTextMapPropagator()
_log = structlog.get_logger(__name__)


@asynccontextmanager
async def observed(surface: McpServer, scrape: "Scrape | None") -> AsyncIterator[None]:
    """Observe a server's messages during the block; send what the ``OTEL_*`` variables ask for, and be scraped.

    Raises StoreError if totals cannot be kept.
    """
    app, traces, metrics = surface.app, _sent("TRACES"), _sent("METRICS")
    with ExitStack() as stack:
        spans_to, totals_to = None, None
        if traces or metrics:
            try:
                from glovebox_server.telemetry import otlp  # noqa: PLC0415 - imports the SDK, an extra
            except ImportError as missing:
                _log.warning("telemetry is not sent: install glovebox-mcp[telemetry]", missing=missing.name)
            else:
                whose = otlp.resource(app.version, app.settings.state_dir)
                spans_to = stack.enter_context(otlp.tracing(whose)) if traces else None
                totals_to = otlp.MetricSender(whose) if metrics else None
        totals = stack.enter_context(TotalStore.opened(app.settings.state_dir))
        if scrape is not None:
            scrape.totals = totals
        messages = Messages(totals, spans_to)
        surface.server.middleware.insert(1, messages)  # inside the SDK's, which opens the span
        if spans_to is not None:
            surface.new_call_id = messages.new_call_id
            stack.enter_context(app.audit.observed(messages.hear))
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_follow, totals, totals_to)
                yield
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await _look(totals, totals_to, last=True)


def _sent(signal: Literal["TRACES", "METRICS"]) -> bool:
    """Return whether a signal is asked for, in the one protocol that the extra knows."""
    said = os.environ.get
    protocol = said(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL") or said("OTEL_EXPORTER_OTLP_PROTOCOL") or _PROTOCOL
    if exports(signal) and protocol != _PROTOCOL:
        _log.warning("telemetry is not sent in this protocol", signal=signal, asked=protocol, known=_PROTOCOL)
    return exports(signal) and protocol == _PROTOCOL


async def _follow(totals: TotalStore, sender: "MetricSender | None") -> None:
    failing = False
    while True:
        failed = await _look(totals, sender)
        if failed and not failing:  # once: calls need no totals
            _log.warning("totals cannot be kept", reason=str(failed))
        failing = failed is not None
        await anyio.sleep(LOOK_SECONDS if sender is None else min(LOOK_SECONDS, sender.seconds))


async def _look(totals: TotalStore, sender: "MetricSender | None", *, last: bool = False) -> Exception | None:
    try:
        await totals.count()
        if sender is not None and await totals.is_due(0 if last else sender.seconds):
            sender.send(*await totals.read())
            if last:
                sender.close()
    except (StoreError, AuditError) as problem:
        return problem
    return None


class Messages:
    """A middleware of the SDK."""

    def __init__(self, totals: TotalStore, sender: "SpanSender | None") -> None:
        self._totals, self._sender = totals, sender
        self._heard: dict[str, list[spans.Heard]] = {}

    def new_call_id(self) -> str:
        """Return the id of a call, whose records are kept until its message is answered."""
        call_id = new_call_id()
        self._heard[call_id] = []
        _CALLS.get().append(call_id)
        return call_id

    def hear(self, record: Record) -> None:
        """Keep a record that is on the disk, of a call under way."""
        heard = self._heard.get(record.call_id or "")
        if heard is not None:
            heard.append((time_ns(), record))

    async def __call__(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        """Handle a message."""
        began, calls, error = time_ns(), list[str](), ""
        before = _CALLS.set(calls)
        try:
            result = await call_next(ctx)
            error = names.TOOL_ERROR if isinstance(result, dict) and result.get("isError") is True else ""
            return result  # noqa: TRY300 - what it says is looked at
        except BaseException as problem:
            error = _error_of(problem)
            raise
        finally:
            _CALLS.reset(before)
            heard = {call: self._heard.pop(call) for call in calls}
            try:
                self._measure(ctx, began, error)
                span = get_current_span()
                if self._sender is not None and span.is_recording():
                    _describe(span, ctx)
                    for call, records in heard.items():
                        span.set_attributes({names.CALL: call, **spans.attributes(records)})
                        for part in spans.parts(began, records):
                            self._sender.write(span, part)
            except Exception:  # noqa: BLE001 - the message was handled, and its answer goes out
                _log.exception("a message was not measured", method=names.closed(names.METHOD, ctx.method))

    def _measure(self, ctx: Context, began: int, error: str) -> None:
        tool, over = (ctx.params or {}).get("name") if ctx.method == names.TOOL_CALL else None, _transport_of(ctx)
        seconds = (time_ns() - began) / 1e9
        self._totals.tally.observe(names.OPERATION, seconds, ctx.method, tool, error, over, ctx.protocol_version)
        if ctx.method == "initialize" and not error:
            connection, since = connection_of(ctx), monotonic()

            def end() -> None:
                lasted, version = monotonic() - since, connection.protocol_version
                self._totals.tally.observe(names.SESSIONS, lasted, over, version)

            connection.exit_stack.callback(end)


def _describe(span: Span, ctx: Context) -> None:
    """Add what the SDK does not know, and take out names that are none of ours."""
    span.set_attribute(names.TRANSPORT, _transport_of(ctx))
    if (session := session_of(ctx)) is not None:
        span.set_attribute(names.SESSION, session)
    method, tool = names.closed(names.METHOD, ctx.method), ""
    if method == names.TOOL_CALL:
        tool = names.closed(names.TOOL, (ctx.params or {}).get("name"))
    if tool in {"", names.OTHER}:  # also without the name of a prompt
        span.update_name(method)
        span.set_attributes({names.METHOD: method, **({names.TOOL: tool} if tool else {})})
    if ctx.request is not None:
        found = {name: ",".join(ctx.request.headers.getlist(name)) for name in ("traceparent", "tracestate")}
        link = get_current_span(_headers.extract(found)).get_span_context()
        if link.is_valid:
            span.add_link(link)


def _transport_of(ctx: Context) -> str:
    return "pipe" if ctx.request is None else "tcp"


def _error_of(problem: BaseException) -> str:
    if isinstance(problem, MCPError):
        return str(problem.error.code)
    if isinstance(problem, ValidationError):
        return str(types.INVALID_PARAMS)
    return type(problem).__qualname__ if isinstance(problem, Exception) else names.CANCELLED
