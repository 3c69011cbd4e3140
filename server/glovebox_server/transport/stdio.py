"""The stdio wire: one JSON-RPC message a line, both ways, without threads. Knows no tool and no call.

The SDK's own stdio transport reads lines of any length in a thread that cannot be stopped while the client is silent,
so a server with it neither bounds its memory nor ends on SIGTERM; and it drops malformed lines without an answer.
Source: MCP specification, "Transports", stdio.
"""

import contextlib
import fcntl
import os
import select
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import anyio
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server.transport import messages
from glovebox_server.transport.messages import Malformed

#: Longest line in bytes, the same as an HTTP body's. Code and arguments of a call are far below it.
MAX_LINE_BYTES = 1 << 20

#: One read; a pipe holds this much.
_READ_BYTES = 1 << 16

#: One write: a pipe that polls as writable takes PIPE_BUF bytes without blocking (pipe(7)).
_WRITE_BYTES = 4096

#: Longest message that may be written without a turn for others.
_AT_ONCE_BYTES = 1 << 16

#: How long the last answers may take on their way out, in seconds; a client that does not read is not waited for.
DRAIN_SECONDS = 1.0

Incoming = MemoryObjectReceiveStream[SessionMessage | Exception]
Outgoing = MemoryObjectSendStream[SessionMessage]


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioFds:
    """File descriptors of the two directions."""

    read: int
    write: int


class Unanswered:
    """The client's requests that have had no answer so far, by id."""

    def __init__(self) -> None:
        """Begin with none."""
        self._ids: set[types.RequestId] = set()
        self._answered = anyio.Event()

    def read(self, message: types.JSONRPCMessage) -> None:
        """Take what came from the client; of a request that it cancelled it hears no more."""
        if isinstance(message, types.JSONRPCRequest):
            self._ids.add(message.id)
        elif isinstance(message, types.JSONRPCNotification) and message.method == "notifications/cancelled":
            self._settle((message.params or {}).get("requestId"))

    def written(self, message: types.JSONRPCMessage) -> None:
        """Take what the client has been sent."""
        if isinstance(message, types.JSONRPCResponse | types.JSONRPCError):
            self._settle(message.id)

    async def settled(self) -> None:
        """Wait until there are none."""
        while self._ids:
            self._answered = anyio.Event()
            await self._answered.wait()

    def _settle(self, identity: object) -> None:
        if isinstance(identity, str | int):
            self._ids.discard(identity)
            self._answered.set()


@contextmanager
def claimed_fds() -> Iterator[StdioFds]:
    """Take the process's stdin and stdout for the protocol alone.

    Until the end, descriptor 0 is the null device and 1 is stderr, so that a stray ``print`` or a child process can
    neither eat nor forge a message. The copies are close-on-exec: no child inherits them.

    Raises:
        DiagnosedError: standard output was closed, so nobody would get an answer.
    """
    if (
        fcntl.fcntl(1, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    ):  # see ``cli.entry``: what stands in for a closed one
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


@asynccontextmanager
async def streams(
    wire: StdioFds, unanswered: Unanswered, refused: Callable[[str], None] = lambda _: None
) -> AsyncIterator[tuple[Incoming, Outgoing]]:
    """Run the two directions and give their ends to the SDK's server.

    The incoming stream ends when the client closes its end, in either direction.

    Args:
        wire: the descriptors.
        unanswered: told of every message, in both directions.
        refused: told the rule that a line broke which is no message.
    """
    inbox, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, outbox = anyio.create_memory_object_stream[SessionMessage](0)
    reading, written = anyio.CancelScope(), anyio.Event()

    async def read() -> None:
        with reading:
            await _read(wire.read, inbox, outgoing.clone(), unanswered, refused)

    async def write() -> None:
        await _write(wire.write, outbox, inbox, unanswered)
        written.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(write)
        yield incoming, outgoing
        reading.cancel()
        incoming.close()
        outgoing.close()
        with anyio.move_on_after(DRAIN_SECONDS):
            await written.wait()
        tasks.cancel_scope.cancel()


async def _read(
    fd: int,
    inbox: MemoryObjectSendStream[SessionMessage | Exception],
    reply: Outgoing,
    unanswered: Unanswered,
    refused: Callable[[str], None],
) -> None:
    with inbox, reply, contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        async for line in _lines(fd):
            try:
                message = _parse(line)
            except Malformed as error:
                refused("message.size" if line is None else "message")
                await reply.send(SessionMessage(error.answer))
            else:
                unanswered.read(message.message)
                await inbox.send(message)


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
    with contextlib.suppress(PermissionError):
        await anyio.wait_readable(fd)
    try:
        return os.read(fd, _READ_BYTES)
    except OSError:
        return b""


async def _write(
    fd: int,
    outbox: MemoryObjectReceiveStream[SessionMessage],
    inbox: MemoryObjectSendStream[SessionMessage | Exception],
    unanswered: Unanswered,
) -> None:
    room = select.poll()
    room.register(fd, select.POLLOUT)
    with outbox:
        async for item in outbox:
            data = memoryview(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            whole = len(data)
            while data:
                # A short message is written where there is room, as nearly always: to hear that from the event loop
                # costs more. A long one must not keep everybody else waiting.
                if whole > _AT_ONCE_BYTES or not room.poll(0):
                    with contextlib.suppress(PermissionError):
                        await anyio.wait_writable(fd)
                try:
                    data = data[os.write(fd, data[:_WRITE_BYTES]) :]
                except OSError:
                    # Nobody reads any more: the same end as a closed stdin.
                    inbox.close()
                    return
            unanswered.written(item.message)


def _parse(line: bytes | None) -> SessionMessage:
    if line is None:
        raise Malformed(types.PARSE_ERROR, f"Parse error: a message is longer than {MAX_LINE_BYTES} bytes")
    value = messages.value_of(line)
    if messages.known_id(value) is not None:  # nobody reads an answer to a notification
        messages.require_served(value, messages.revision_of(value))
    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_python(value, by_name=False))
    except ValidationError:
        text = "Invalid request: not one JSON-RPC message"
        raise Malformed(types.INVALID_REQUEST, text, messages.known_id(value)) from None
