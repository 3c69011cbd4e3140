"""Where the time of one call goes, told by the server itself: its parts wrapped with a clock, in its own process.

What a part spends in another part counts for that one alone, so the parts of a call add up to the call. ``POINTS`` has
functions of ours by their place; a test holds that each is there. Nothing of the client is in here.
"""

import functools
import importlib
import inspect
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

PARSE = "glovebox_server.transport.stdio:_parse"
CALL = "glovebox_server.mcp.server:McpServer._call_tool"
IN_SANDBOX = "in the sandbox, by its own clock"
TRANSPORT = "MCP: from the line read to the tool"
REST = "between the parts: tasks, dispatch"
POLICY, RECEIPT = "policy: decide", "audit: last record and signed receipt, on disk"
AUDIT = "audit: {}, on disk"
#: Where → what it does in a call; a context manager is two parts: entering and leaving. Code that moves gets another
#: place here and keeps its part: by those, another revision (which has its own list) is compared with this one.
POINTS: dict[str, str] = {
    "glovebox_server.core.call:validate_arguments": "arguments: validate",
    "glovebox_server.guards.admission.admission:Admission.enter": "admission",
    "glovebox_server.mcp.delivery:deliver_messages": "messages beside the call",
    "glovebox_server.core.broker:Broker._take_turn": "broker: the rest",
    "glovebox_server.core.call:decide": POLICY,
    "glovebox_server.receipts.recorder:CallRecorder.record": AUDIT,
    "glovebox_server.receipts.recorder:CallRecorder.finish": RECEIPT,
    "glovebox_sandboxes.drivers.registry:Drivers.choose": "driver and plan: choose",
    "glovebox_server.artifacts.collect:Collector.discard": "artifacts: a place for them",
    "glovebox_sandboxes.pool.pool:Pool.take": "sandbox: take from the pool",
    "glovebox_server.core.broker:run": "job: body, ending",
    "glovebox_sandboxes.session.connection:GuestConnection.run": "job: over the wire and back",
    "glovebox_server.artifacts.collect:Collector.deliver": "artifacts: deliver",
    "glovebox_server.guards.journal.journal:call_finished": "outcome: digests",
    "glovebox_server.core.broker:build_result": "answer: fields",
    "glovebox_server.mcp.delivery:tool_result": "answer: as MCP",
}


@dataclass(slots=True)
class _Call:
    """One call's parts in milliseconds."""

    parts: dict[str, float] = field(default_factory=dict)

    def add(self, part: str, milliseconds: float) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + milliseconds


@dataclass(slots=True)
class _Span:
    """A part under way."""

    call: _Call
    within: "_Span | None"
    inner: float = 0.0  # milliseconds spent in parts within it
    began: float = field(default_factory=time.perf_counter)

    def end(self, part: str) -> float:
        spent = (time.perf_counter() - self.began) * 1000
        if self.within is not None:
            self.within.inner += spent
        self.call.add(part, spent - self.inner)
        return spent


_now: ContextVar[_Span | None] = ContextVar("_now", default=None)


@contextmanager
def _timed(part: str) -> Iterator[None]:
    """A part of the call we are in; nothing where we are in none, as when the pool prepares."""
    within = _now.get()
    if within is None:
        yield
        return
    span = _Span(within.call, within)
    token = _now.set(span)
    try:
        yield
    finally:
        _now.reset(token)
        span.end(part)


class _Manager:
    """A context manager with both its ends timed."""

    def __init__(self, manager: AbstractAsyncContextManager[Any], part: str) -> None:
        self._manager = manager
        self._part = part

    async def __aenter__(self) -> Any:
        with _timed(self._part):
            return await self._manager.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        with _timed(f"{self._part}, leave"):
            return await self._manager.__aexit__(kind, problem, traceback)


def wrapped(function: Callable[..., Any], part: str) -> Callable[..., Any]:
    """The same function with a clock: a plain one, a coroutine function, or one that makes a context manager."""

    def named(arguments: tuple[Any, ...]) -> str:
        return (
            part.format(next((each.kind for each in arguments if hasattr(each, "kind")), "")) if "{}" in part else part
        )

    if inspect.isasyncgenfunction(inspect.unwrap(function)):
        return functools.wraps(function)(lambda *a, **k: _Manager(function(*a, **k), part))
    if inspect.iscoroutinefunction(function):

        async def waiting(*arguments: Any, **keywords: Any) -> Any:
            with _timed(named(arguments)):
                found = await function(*arguments, **keywords)
            within = _now.get()
            spent = getattr(found, "wall_ms", None)
            if within is not None and isinstance(spent, float):
                # The guest says how long the program ran; the rest of this part is the way there and back.
                within.call.add(IN_SANDBOX, spent)
                within.call.add(part, -spent)
            return found

        return functools.wraps(function)(waiting)

    def plain(*arguments: Any, **keywords: Any) -> Any:
        with _timed(named(arguments)):
            return function(*arguments, **keywords)

    return functools.wraps(function)(plain)


def found(place: str) -> tuple[Any, str, Callable[..., Any]]:
    """Whose attribute a place is, its last name, and the function."""
    module, _, name = place.partition(":")
    *way, last = name.split(".")
    try:
        owner: Any = functools.reduce(getattr, way, importlib.import_module(module))
        return owner, last, getattr(owner, last)
    except (ImportError, AttributeError) as problem:
        raise LookupError(f"{place} has moved ({problem}): correct it in {__file__}, and keep its part") from problem


@contextmanager
def recorded(file: Path) -> Iterator[None]:
    """Time every call for the length of the block; then write a list of objects: part → milliseconds."""
    calls: list[dict[str, float]] = []
    read = 0.0

    def parsed(original: Callable[..., Any]) -> Callable[..., Any]:
        def parse(line: bytes) -> Any:
            nonlocal read
            # One client that waits for each answer: the last line that was read is the one that is called for.
            read = time.perf_counter()
            return original(line)

        return parse

    def rooted(original: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            span = _Span(_Call(), None)
            span.call.add(TRANSPORT, (span.began - read) * 1000)
            token = _now.set(span)
            try:
                return await original(*arguments)
            finally:
                _now.reset(token)
                span.end(REST)
                calls.append(span.call.parts)

        return call

    with ExitStack() as stack:
        for place, wrap in ((PARSE, parsed), (CALL, rooted)):
            owner, last, original = found(place)
            stack.enter_context(mock.patch.object(owner, last, wrap(original)))
        for place, part in POINTS.items():
            owner, last, original = found(place)
            stack.enter_context(mock.patch.object(owner, last, wrapped(original, part)))
        try:
            yield
        finally:
            file.write_text(json.dumps(calls))
