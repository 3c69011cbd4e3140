"""The stdio wire, one JSON-RPC message a line, and the handling of messages and connections for every transport.

The SDK's own stdio transport reads lines of any length in a thread that cannot be stopped while the client is silent. A
server with it neither bounds its memory nor ends on SIGTERM, and it drops malformed lines without an answer. Sources:
MCP specification, "Transports", stdio; JSON-RPC 2.0, https://www.jsonrpc.org/specification, sections 4 and 5.
"""

import fcntl
import os
import select
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.abc
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from glovebox_sandboxes import strict_json
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.app import App
from glovebox_server.calls import Principal
from glovebox_server.exits import ENDING, signal_name
from glovebox_server.mcp.delivery import Context
from glovebox_server.mcp.server import McpServer
from glovebox_server.settings import exports
from glovebox_server.transport import logs

if TYPE_CHECKING:
    from glovebox_server.telemetry.prometheus import Scrape

#: Longest line in bytes, the same as an HTTP body's. Code and arguments of a call are far below it.
MAX_LINE_BYTES = 1 << 20
#: Bytes of one read; a pipe holds this much.
_READ_BYTES = 1 << 16
#: Bytes of one write: a pipe that polls as writable takes PIPE_BUF bytes without blocking (pipe(7)).
_WRITE_BYTES = 4096
#: Longest message that may be written without a turn for others.
_AT_ONCE_BYTES = 1 << 16
#: Seconds that the last answers may take on their way out; a client that does not read is not waited for.
DRAIN_SECONDS = 1.0
Inbox = MemoryObjectSendStream[SessionMessage | Exception]
Incoming = MemoryObjectReceiveStream[SessionMessage | Exception]
Outgoing = MemoryObjectSendStream[SessionMessage]


class StdioFds(NamedTuple):
    """File descriptors of the two directions."""

    read: int
    write: int


@contextmanager
def claim_fds() -> Iterator[StdioFds]:
    """Take the process's stdin and stdout for the protocol alone.

    Until the end, descriptor 0 is the null device and 1 is stderr, so that a stray ``print`` or a child process can
    neither eat nor forge a message. The copies are close-on-exec: no child inherits them. Raises DiagnosedError:
    standard output was closed, so no answer could be sent.
    """
    # See ``cli.entry``: what stands in for a closed one can only be read.
    if fcntl.fcntl(1, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        fix = "Let an MCP client start it (`glovebox client-config`), or serve with --transport http."
        raise DiagnosedError("Serving over stdio", "standard output is closed", fix)
    wire = StdioFds(read=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3), write=fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    try:
        yield wire
    finally:
        os.dup2(wire.read, 0)
        os.dup2(wire.write, 1)
        os.close(wire.read)
        os.close(wire.write)


#: Seconds that answers to cancelled calls may take on their way out before open streams are cut.
GRACE_SECONDS = 2


def client_of(ctx: Context) -> str | None:
    """Return the client's own name, for the record only."""
    params = ctx.session.client_params
    return None if params is None else f"{params.client_info.name} {params.client_info.version}"[:128]


async def serve_stdio(app: App, wire: StdioFds | None = None, *, workflow: str | None = None) -> str:
    """Serve one client over stdin and stdout, in either protocol era.

    Calls under way when the client or a signal ends the connection are cancelled, and their sandboxes are gone, before
    this returns.

    Returns:
        The reason of the end, for the audit log: ``stdin closed`` or the signal's name.
    """
    if wire is None:
        with claim_fds() as own:
            return await serve_stdio(app, own, workflow=workflow)
    logs.to_stderr_by_default()
    uid = f"local:{os.getuid()}"

    def identify(ctx: Context) -> Principal:
        return Principal(id=uid, transport="stdio", client=client_of(ctx), workflow=workflow)

    surface, ours = McpServer(app, identify), StdioWire(wire, partial(app.refusals.note, principal=uid))
    async with observe(surface):
        with anyio.CancelScope() as scope:

            async def end() -> None:
                with anyio.move_on_after(GRACE_SECONDS):
                    await ours.settled()
                scope.cancel()

            async with end_on_signal(surface, end) as names, ours.streams() as ends:
                await serve_stream(surface, *ends)
    return names[0] if names else "stdin closed"


class StdioWire:
    """The messages of one client over two descriptors, and its unanswered requests."""

    def __init__(self, fds: StdioFds, refused: Callable[[str], None] = lambda _: None) -> None:
        self._fds, self._refused = fds, refused
        self._pending: set[types.RequestId] = set()
        self._answered, self._written = anyio.Event(), anyio.Event()
        self._reading = anyio.CancelScope()

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[Incoming, Outgoing]]:
        """Run the two directions and pass their ends to the SDK's server.

        The incoming stream ends when the client closes its end, in either direction.
        """
        inbox, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, outbox = anyio.create_memory_object_stream[SessionMessage](0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read, inbox, outgoing.clone())
            tasks.start_soon(self._write, outbox, inbox)
            yield incoming, outgoing
            self._reading.cancel()
            incoming.close()
            outgoing.close()
            with anyio.move_on_after(DRAIN_SECONDS):
                await self._written.wait()
            tasks.cancel_scope.cancel()

    async def settled(self) -> None:
        """Wait until no request is pending; one that its client cancelled gets no answer."""
        while self._pending:
            self._answered = anyio.Event()
            await self._answered.wait()

    def _settle(self, identity: object) -> None:
        if isinstance(identity, str | int):
            self._pending.discard(identity)
            self._answered.set()

    async def _read(self, inbox: Inbox, reply: Outgoing) -> None:
        with self._reading, inbox, reply, suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for line in _lines(self._fds.read):
                try:
                    item = _parse(line)
                except MessageError as error:
                    self._refused("message.size" if line is None else "message")
                    await reply.send(SessionMessage(error.answer))
                    continue
                message = item.message
                if isinstance(message, types.JSONRPCRequest):
                    self._pending.add(message.id)
                elif isinstance(message, types.JSONRPCNotification) and message.method == "notifications/cancelled":
                    self._settle((message.params or {}).get("requestId"))
                await inbox.send(item)

    async def _write(self, outbox: MemoryObjectReceiveStream[SessionMessage], inbox: Inbox) -> None:
        fd, room = self._fds.write, select.poll()
        room.register(fd, select.POLLOUT)
        with outbox, suppress(OSError):  # the reader is gone: the same end as a closed stdin
            async for item in outbox:
                data = memoryview(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                whole = len(data)
                while data:
                    # A short message is written if there is room, as nearly always: asking the event loop costs more. A
                    # long one must not delay all others.
                    if whole > _AT_ONCE_BYTES or not room.poll(0):
                        with suppress(PermissionError):
                            await anyio.wait_writable(fd)
                    data = data[os.write(fd, data[:_WRITE_BYTES]) :]
                if isinstance(item.message, types.JSONRPCResponse | types.JSONRPCError):
                    self._settle(item.message.id)
        inbox.close()
        self._written.set()


async def _lines(fd: int) -> AsyncIterator[bytes | None]:
    """Yield lines without their end; None stands for one that was too long and is skipped."""
    pending = bytearray()
    skipping = False
    while chunk := await _receive(fd):
        *whole, rest = chunk.split(b"\n")
        for part in whole:
            pending += part
            if skipping or len(pending) > MAX_LINE_BYTES:
                yield None
            elif pending.strip():
                yield bytes(pending)
            pending.clear()
            skipping = False
        pending += rest
        if len(pending) > MAX_LINE_BYTES:
            pending.clear()
            skipping = True


async def _receive(fd: int) -> bytes:
    # Regular files and the null device cannot be polled (epoll_ctl(2): EPERM) and never block.
    with suppress(PermissionError):
        await anyio.wait_readable(fd)
    with suppress(OSError):
        return os.read(fd, _READ_BYTES)
    return b""


def _parse(line: bytes | None) -> SessionMessage:
    if line is None:
        raise MessageError(types.PARSE_ERROR, f"Parse error: a message is longer than {MAX_LINE_BYTES} bytes")
    value = parse_message(line)
    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_python(value, by_name=False))
    except ValidationError:
        text = "Invalid request: not a JSON-RPC message"
        raise MessageError(types.INVALID_REQUEST, text, known_id(value)) from None


class MessageError(Exception):
    """A text is not a JSON-RPC message."""

    def __init__(self, code: int, message: str, identity: str | int | None = None) -> None:
        super().__init__(message)
        self.answer = types.JSONRPCError(jsonrpc="2.0", id=identity, error=types.ErrorData(code=code, message=message))


def parse_message(text: bytes) -> Any:
    """Parse a message.

    Raises MessageError: not strict JSON, out of bounds, or a request with an invalid id, which the SDK would take for a
    notification and never answer.
    """
    try:
        value = strict_json.check(text)
    except ValueError as error:
        raise MessageError(types.PARSE_ERROR, f"Parse error: {error}") from None
    if isinstance(value, dict) and "method" in value and "id" in value and known_id(value) is None:
        raise MessageError(types.INVALID_REQUEST, "Invalid request: an id is a string or an integer")
    return value


def tool_of(value: Any) -> str | None:
    """Return the tool that a message calls, empty if it is no name; None for other messages."""
    if not isinstance(value, dict) or value.get("method") != "tools/call":
        return None
    params = value.get("params")
    name = params.get("name") if isinstance(params, dict) else None
    return name if isinstance(name, str) else ""


def known_id(value: Any) -> str | int | None:
    """Return the id of a message; None without a valid one."""
    identity = value.get("id") if isinstance(value, dict) else None
    return identity if isinstance(identity, str | int) and not isinstance(identity, bool) else None


async def serve_stream(surface: McpServer, incoming: Any, outgoing: Any) -> None:
    """Serve one client over a stream in each direction, until it leaves."""
    await surface.server.run(incoming, outgoing, surface.server.create_initialization_options())


def observe(surface: McpServer, scrape: "Scrape | None" = None) -> AbstractAsyncContextManager[object]:
    """Return a context in which messages are measured and traced, if anybody asks for that; else one without effect."""
    if scrape is None and not exports("TRACES") and not exports("METRICS"):
        return nullcontext()
    from glovebox_server.mcp import messages  # noqa: PLC0415 - what is off is not imported

    return messages.observed(surface, scrape)


@asynccontextmanager
async def end_on_signal(surface: McpServer, end: Callable[[], Awaitable[None]]) -> AsyncIterator[list[str]]:
    """Run the body; on an ending signal append its name to the list, end all calls, and call ``end``.

    Afterwards signals have their earlier meaning again: the process still has to clean up and to record.
    """
    names: list[str] = []
    before = {number: signal.getsignal(number) for number in (*ENDING, signal.SIGALRM)}
    # A signal that `nohup` set to be ignored stays ignored; the alarm of a clock that was set for us ends us in order.
    asked = {signal.SIGTERM, signal.SIGINT} | {number for number in ENDING if before[number] != signal.SIG_IGN}
    asked |= {signal.SIGALRM} if before[signal.SIGALRM] == signal.SIG_DFL else set()

    async def watch(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(*asked) as signals:  # type: ignore[arg-type]  # real-time ones are numbers
            task_status.started()
            async for number in signals:
                names.append(signal_name(number))
                surface.stop()
                await end()

    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(watch)
            yield names
            tasks.cancel_scope.cancel()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
