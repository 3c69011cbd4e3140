"""A small internet for egress tests: real sockets on public-looking addresses, in network namespaces of the test's own.

The policy refuses every address of this machine, so instead of loosening it a test gets two fresh namespaces joined by
a veth pair: the broker's side runs in one (the pytest process's main thread enters it for the length of a test), the
servers listen in the other, on ordinary public addresses and on forbidden ones alike. Nothing leaves the machine, and
the namespaces are gone with their last file descriptor.
"""

import ctypes
import os
import socket
import ssl
import subprocess  # noqa: TID251 - runs ip(8) for the test bed; nothing here comes from a sandbox
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import NoReturn

import anyio
import anyio.abc
import pytest
import trustme
from anyio.streams.tls import TLSStream
from tests.must_run import unusable

from glovebox_profiles.egress import EgressRule
from glovebox_profiles.egress.addresses import Address
from glovebox_server.egress.events import Body, EgressAttempt, Head, RequestEvent
from glovebox_server.egress.exchange import request
from glovebox_server.egress.gate import EgressGate
from glovebox_server.egress.limits import EgressLimits

CLIENT = "93.184.0.1"
SITE = "93.184.1.1"
OTHER = "93.184.1.2"
SITE6 = "2a00:1450:4001::1"
PRIVATE = "10.0.0.1"
METADATA = "169.254.169.254"
_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)

Handler = Callable[[anyio.abc.ByteStream], Awaitable[None]]


class Cable:
    """The two namespaces; the calling thread is in the client's."""

    def __init__(self, client: int, server: int) -> None:
        """Take the open namespace files."""
        self._client, self._server = client, server

    def listen(self, address: str, port: int, *, own: bool = False) -> socket.socket:
        """Listen in the server's namespace, or in the client's ``own``."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        _enter(self._client if own else self._server)
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(16)
            return listener
        finally:
            _enter(self._client)


@contextmanager
def cable() -> Iterator[Cable]:
    """Put the calling thread into a fresh client namespace that sees only the fresh server namespace.

    Raises:
        OSError: Not permitted here.
    """
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    opened = [home]
    try:
        server = _fresh(opened)
        client = _fresh(opened)
        path = f"/proc/{os.getpid()}/fd/{server}"
        _ip(f"link add va type veth peer name vb netns {path}")
        _enter(server)
        _ip("link set vb up")
        _enter(client)
        _ip(f"address add {CLIENT}/16 dev va")
        _ip("link set va up")
        _ip("link set lo up")
        for forbidden in ("10.0.0.0/8", f"{METADATA}/32", "100.64.0.0/10"):
            _ip(f"route add {forbidden} dev va")
        _ip("-6 address add 2a00:1450:4001::ffff/64 dev va nodad")
        _enter(server)
        for address in (f"{SITE}/16", f"{OTHER}/16", f"{PRIVATE}/8", f"{METADATA}/32", "100.64.0.1/10"):
            _ip(f"address add {address} dev vb")
        _ip(f"-6 address add {SITE6}/64 dev vb nodad")
        _ip("link set lo up")
        _enter(client)
        yield Cable(client, server)
    finally:
        _enter(home)
        for descriptor in opened:
            os.close(descriptor)


@pytest.fixture
def wires() -> Iterator[Cable]:
    """Two joined namespaces, or a skip with the reason; where ``GLOVEBOX_MUST_RUN`` names ``netns``, a failure."""
    with ExitStack() as stack:
        try:
            joined = stack.enter_context(cable())
        except OSError as error:
            unavailable(error)
        yield joined


def unavailable(error: object) -> NoReturn:
    """Skip a test that needs a namespace; where ``GLOVEBOX_MUST_RUN`` names ``netns``, fail it."""
    reason = f"network namespaces cannot be made here ({error}); run as root, with iproute2"
    unusable("netns", reason)


@dataclass
class Internet:
    """Servers, names and what was asked of them."""

    wires: Cable
    tasks: anyio.abc.TaskGroup
    authority: trustme.CA
    zone: dict[str, list[Sequence[str]]] = field(default_factory=dict)
    """Answers per name, one list per look-up in turn; the last one stays."""
    lookups: list[str] = field(default_factory=list)
    attempts: list[EgressAttempt] = field(default_factory=list)
    connections: list[str] = field(default_factory=list)
    """``address:port`` of every connection that any server accepted."""

    async def serve(self, address: str, port: int, handler: Handler, *, name: str = "", own: bool = False) -> None:
        """Answer connections with ``handler``, over TLS with a certificate for ``name`` if there is one."""
        listener = await anyio.abc.SocketListener.from_socket(self.wires.listen(address, port, own=own))
        context = self._server_tls(name) if name else None

        async def accepted(plain: anyio.abc.SocketStream) -> None:
            self.connections.append(f"{address}:{port}")
            async with plain:
                stream: anyio.abc.ByteStream = plain
                try:
                    if context is not None:
                        stream = await TLSStream.wrap(plain, server_side=True, ssl_context=context)
                    await handler(stream)
                    if context is not None:
                        await stream.aclose()
                except (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, ssl.SSLError):
                    return  # the client left, as it should when it refuses to read on

        async def run() -> None:
            async with listener:
                await listener.serve(accepted)

        self.tasks.start_soon(run)

    def _server_tls(self, name: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert(name).configure_cert(context)
        return context

    @property
    def trust(self) -> ssl.SSLContext:
        """A client's context that trusts this internet's certificate authority."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context

    async def resolve(self, name: str) -> tuple[Address, ...]:
        """Answer a look-up and remember it."""
        self.lookups.append(name)
        answers = self.zone.get(name)
        if answers is None:
            raise OSError("no such name")
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return tuple(ip_address(text) for text in answer)

    def gate(self, *rules: EgressRule, limits: EgressLimits | None = None) -> EgressGate:
        """Return one call's gate on this internet."""

        async def record(attempt: EgressAttempt) -> None:
            self.attempts.append(attempt)

        return EgressGate(rules=rules, on_decision=record, resolver=self.resolve, tls=self.trust, limits=limits)


@asynccontextmanager
async def internet(wires: Cable) -> AsyncIterator[Internet]:
    """Run servers for the length of the block."""
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        yield Internet(wires=wires, tasks=tasks, authority=_AUTHORITY)


_AUTHORITY = trustme.CA()


@dataclass
class Fetched:
    """The events of one request."""

    events: list[RequestEvent]

    @property
    def head(self) -> Head:
        """The final response's head."""
        assert isinstance(self.events[0], Head), self.events
        return self.events[0]

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(event.data for event in self.events if isinstance(event, Body))

    @property
    def last(self) -> RequestEvent:
        """How it ended."""
        return self.events[-1]


async def fetch(
    gate: EgressGate, url: str, method: str = "GET", headers: Sequence[tuple[str, str]] = (), body: bytes = b""
) -> Fetched:
    """Make one request and keep its events."""
    events: list[RequestEvent] = []

    async def keep(event: RequestEvent) -> None:
        events.append(event)

    await request(gate, method, url, headers, body, send=keep)
    return Fetched(events)


async def read_head(stream: anyio.abc.ByteReceiveStream) -> bytes:
    """Read one request's head (and whatever came with it)."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive()
    return data


def answering(response: bytes, requests: list[bytes] | None = None) -> Handler:
    """Return a server that reads a request, keeps it, and answers with fixed bytes."""

    async def handler(stream: anyio.abc.ByteStream) -> None:
        head = await read_head(stream)
        if requests is not None:
            requests.append(head)
        await stream.send(response)

    return handler


def site(pages: Mapping[str, bytes], requests: list[bytes] | None = None) -> Handler:
    """A server with these responses by path; one that is shorter than it says is followed by silence."""

    async def handler(stream: anyio.abc.ByteStream) -> None:
        head = await read_head(stream)
        if requests is not None:
            requests.append(head)
        path = head.split(b" ")[1].decode()
        if pages[path]:
            await stream.send(pages[path])
        if path in ("/slow", "/mute"):
            await anyio.sleep_forever()

    return handler


def ok(body: bytes, *headers: str) -> bytes:
    """Return a 200 response with its length."""
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def redirect(location: str, status: int = 302) -> bytes:
    """Return a redirect."""
    return f"HTTP/1.1 {status} Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


def _fresh(opened: list[int]) -> int:
    if _LIBC.unshare(_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    opened.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
    return opened[-1]


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ip(command: str) -> None:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"ip {command}: {done.stderr.strip()}")
