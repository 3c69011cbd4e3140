"""The broker's side of a sandbox's egress streams: what the guest asks for over the wire, the gate decides.

The guest opens every stream; its kind says what for.

``request``  meta has ``method``, ``url`` and ``headers``, the data is the body. The ACCEPT has ``status``, ``headers``,
             ``url``, ``hops`` (redirects that led there) and ``dropped`` (request headers left out); then the body.
             A body that breaks off ends in a RESET with ``truncated``.
``connect``  meta has ``authority``. An ACCEPT says ``opened``, then bytes go both ways. A tunnel that ends before its
             time ends in a RESET with ``reason``.
``trust``    the answer is this machine's certificate authorities as PEM: in a tunnel a program verifies its peer.
             Where TLS ends inside the sandbox, an ACCEPT says ``inspect`` before, and the sandbox's own is among them.
``certificate``  meta has ``authority``. The ACCEPT has ``leaf``: key and certificate with which TLS to it is to be
             ended, as PEM; empty where it is to be a tunnel.

A refusal is a RESET with ``rule``, ``reason`` and ``hint``, and ``hops`` where redirects led to it.
"""

import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import ByteReceiveStream, ByteStream
from pydantic import BaseModel, Field, ValidationError

from glovebox_profiles.egress.rules import decide
from glovebox_profiles.egress.targets import parse_connect, parse_host, quoted
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.session.connection import Duplex
from glovebox_server.egress.events import READ_BYTES, EgressAnswer, EgressAttempt, EgressLimits, PeerError, refusal
from glovebox_server.egress.gate import EgressGate
from glovebox_server.egress.request import request

#: Post-quantum key shares make hellos of about 2 KiB, long session tickets 4 more.
MAX_HELLO = 16 * 1024

_HANDSHAKE_RECORD = 22
_TLS_MAJOR = 3
_RECORD_HEADER = 5
_CLIENT_HELLO = 1
_MESSAGE_HEADER = 4
_SERVER_NAME = 0
_HOST_NAME = 0
#: encrypted_client_hello, and the encrypted_server_name draft it replaced.
_ENCRYPTED = frozenset({0xFE0D, 0xFFCE})


class RequestMeta(BaseModel, extra="forbid", strict=True):
    """Meta of a ``request`` stream, as the guest sent it."""

    method: str = Field(max_length=16)
    url: str = Field(max_length=8192)
    headers: list[list[str]] = Field(default_factory=list, max_length=64)


class ConnectMeta(BaseModel, extra="forbid", strict=True):
    """Meta of a ``connect`` stream, as the guest sent it."""

    authority: str = Field(max_length=512)


async def serve_stream(gate: EgressGate, stream: Duplex) -> None:
    """Serve one egress stream. Raises what ``on_decision`` raises, so that nothing is dialled without its record."""
    try:
        if stream.kind == "request":
            await _request(gate, stream, RequestMeta.model_validate(stream.meta))
        elif stream.kind == "connect":
            await connect(gate, ConnectMeta.model_validate(stream.meta).authority, stream)
        elif stream.kind == "trust":
            trusted = await anyio.to_thread.run_sync(authorities)
            if gate.authority is not None:
                trusted += gate.authority.pem
                await stream.accept({"inspect": True})
            await stream.send(trusted)
            await stream.send_eof()
        elif stream.kind == "certificate" and gate.authority is not None:
            asked = ConnectMeta.model_validate(stream.meta).authority
            await stream.accept({"leaf": await find_leaf(gate, asked, gate.authority.leaf)})
            await stream.send_eof()
        else:
            await stream.reset(refusal(RefusedError("egress.kind", "This way out does not exist.", "")))
    except RefusedError as refused:
        await stream.reset(refusal(refused))
    except ValidationError:
        hint = "A method of at most 16 characters, a URL of 8192, 64 headers."
        await stream.reset(refusal(RefusedError("egress.malformed", "What was asked cannot be read.", hint)))


async def _request(gate: EgressGate, stream: Duplex, meta: RequestMeta) -> None:
    headers = [(pair[0], pair[1]) for pair in meta.headers if len(pair) == 2]  # noqa: PLR2004 - name and value
    body = bytearray()
    async for piece in stream:
        body += piece
        if len(body) > gate.limits.request_body_bytes:
            reason = f"The request's body is larger than {gate.limits.request_body_bytes} bytes."
            raise RefusedError("egress.body", reason, "Send less.")
    await request(gate, meta.method, meta.url, headers, bytes(body), stream=stream)


@cache
def authorities() -> bytes:
    """Return every certificate in the system's trust store as PEM; empty if there is none.

    ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` choose another store, here as for the gate, which uses the same one.
    """
    context = ssl.create_default_context()
    directory = ssl.get_default_verify_paths().capath
    if directory is not None:
        # OpenSSL reads such a directory only when it searches one name; its files are named <hash>.<number>.
        for path in sorted(Path(directory).glob("*.[0-9]")):
            try:
                context.load_verify_locations(path)
            except (ssl.SSLError, OSError):
                continue  # not a certificate, or unreadable: not trusted here either
    return "".join(ssl.DER_cert_to_PEM_cert(der) for der in context.get_ca_certs(binary_form=True)).encode("ascii")


async def connect(gate: EgressGate, authority: str, guest: Duplex) -> None:
    """Tunnel TLS between ``guest`` and ``authority`` (``host:port``): an opaque tunnel to one allowed host and port.

    Its content cannot be read. So the name in the TLS ClientHello must be the allowed one before anything is dialled,
    and bytes and time are counted.
    ``guest`` is accepted once the rules allow it; a refusal after that is the reason of its reset. Raises only what
    ``gate``'s ``on_decision`` or ``guest`` raise.
    """
    opened, reason = False, ""
    attempt = EgressAttempt(kind="connect", asked=authority)
    try:
        async with gate.recorded(attempt):
            target = attempt.target = parse_connect(authority)
            gate.apply_rules(attempt, target)
            await guest.accept({"opened": True})
            opened = True
            hello = await _hello(guest, target.host, gate.limits)  # the name in it is part of what is asked
            async with gate.connect(attempt, target) as remote:
                reason = "It was cut off."
                try:
                    reason = await _carry(guest, remote, hello, gate.limits)
                finally:
                    gate.on_answer(EgressAnswer(attempt=attempt, bytes=remote.received, complete=not reason))
    except RefusedError as refused:
        if not opened:
            await guest.reset(refusal(refused))
            return
        reason = f"{refused.rule}: {refused.reason} {refused.hint}"
    except PeerError as failed:
        reason = str(failed)
    await guest.reset({"reason": reason} if reason else {})


async def find_leaf(gate: EgressGate, authority: str, certify: Callable[[str], str]) -> str:
    """Return key and certificate of the host whose TLS ends inside the sandbox; empty if a rule tunnels it.

    Raises RefusedError, recorded, if no request to it could be allowed, or no certificate is left for it.
    """
    attempt = EgressAttempt(kind="connect", asked=authority)
    async with gate.recorded(attempt):
        target = attempt.target = parse_connect(authority)
        gate.apply_rules(attempt, target, inspected=True)
        return "" if decide(target, gate.rules).effect == "allow" else certify(target.host)


async def _hello(guest: ByteReceiveStream, host: str, limits: EgressLimits) -> bytes:
    """Read until the ClientHello is complete and names ``host``; return all bytes read."""
    hello, name = ClientHello(), None
    with anyio.move_on_after(limits.hello_seconds):
        while name is None:
            try:
                name = hello.feed(await guest.receive(max(1, hello.room)))
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                raise RefusedError("egress.sni", "The tunnel was closed before its ClientHello.", "") from None
    if name is None:
        reason = f"No TLS ClientHello came within {limits.hello_seconds:g} seconds."
        raise RefusedError("egress.sni", reason, "Speak TLS first.")
    if name != host:
        reason = f"The tunnel to {host} was used to ask for {quoted(name)}."
        raise RefusedError("egress.sni", reason, "Open a tunnel to the host that TLS is spoken with.")
    return bytes(hello.raw)


async def _carry(guest: ByteStream, remote: ByteStream, hello: bytes, limits: EgressLimits) -> str:
    """Carry bytes both ways until both sides have finished, or a bound is reached; return why it ended early.

    ``hello`` has those of the guest's bytes that were read before the tunnel was dialled.
    """
    reason, end = "", anyio.current_time() + limits.tunnel_seconds
    scope = anyio.CancelScope()

    def give_up(why: str) -> None:
        nonlocal reason
        reason = reason or why
        scope.cancel()

    async def carry(source: ByteStream, sink: ByteStream, data: bytes, direction: str, most: int) -> None:
        carried = 0
        try:
            with suppress(anyio.EndOfStream):
                while True:
                    data = data or await source.receive(READ_BYTES)
                    carried += len(data)
                    if carried > most:
                        give_up(f"The tunnel was closed: more than {most} bytes were {direction}.")
                        return
                    await sink.send(data)
                    # Silence is measured from the last byte in either direction.
                    scope.deadline = min(end, anyio.current_time() + limits.tunnel_idle_seconds)
                    data = b""
            await sink.send_eof()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            give_up("The connection broke.")

    with scope:
        scope.deadline = anyio.current_time() + min(limits.tunnel_seconds, limits.tunnel_idle_seconds)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(carry, guest, remote, hello, "sent", limits.tunnel_sent_bytes)
            tasks.start_soon(carry, remote, guest, b"", "received", limits.tunnel_received_bytes)
    if scope.cancelled_caught and not reason:
        if anyio.current_time() >= end:
            return f"The tunnel was closed: it was open for {limits.tunnel_seconds:g} seconds."
        return f"The tunnel was closed: it was silent for {limits.tunnel_idle_seconds:g} seconds."
    return reason


class ClientHello:
    """A parser of a TLS ClientHello that is fed the client's bytes until it returns the name. Sans-I/O.

    Rule 1  Every byte is hostile; nothing is buffered beyond ``MAX_HELLO``, and each byte is read once.
    Rule 2  The first byte must be that of a TLS handshake record: plain HTTP or SSH is refused at once.
    Rule 3  Exactly one host name in exactly one ``server_name`` extension; none, two or an encrypted one is refused.
    Sources: RFC 8446 sections 4.1.2 and 5.1, RFC 6066 section 3, RFC 9849 (encrypted ClientHello).
    """

    def __init__(self) -> None:
        self.raw = bytearray()
        """Everything fed so far, to be passed on once the name has been checked."""
        self._at = 0
        self._message = bytearray()

    @property
    def room(self) -> int:
        """Return how many more bytes it takes; read no more at a time, for others may follow the hello."""
        return MAX_HELLO - len(self.raw)

    def feed(self, data: bytes) -> str | None:
        """Take more bytes; return the canonical server name, or None while the hello is incomplete.

        Raises RefusedError (``egress.sni``) if it is no ClientHello, or has no single readable server name.
        """
        if len(data) > self.room:
            raise _no_hello(f"the first {MAX_HELLO} bytes hold no complete TLS ClientHello")
        self.raw += data
        while self._take_record():
            pass
        if self._message and self._message[0] != _CLIENT_HELLO:
            raise _no_hello("the first TLS message is not a ClientHello")
        if len(self._message) < _MESSAGE_HEADER:
            return None
        length = int.from_bytes(self._message[1:_MESSAGE_HEADER], "big")
        if length > MAX_HELLO:
            raise _no_hello(f"the ClientHello announces more than {MAX_HELLO} bytes")
        if len(self._message) < _MESSAGE_HEADER + length:
            return None
        if len(self._message) > _MESSAGE_HEADER + length:
            raise _no_hello("another message follows the ClientHello in its record")
        return _server_name(_Fields(bytes(self._message[_MESSAGE_HEADER:])))

    def _take_record(self) -> bool:
        header = self.raw[self._at : self._at + _RECORD_HEADER]
        if (header and header[0] != _HANDSHAKE_RECORD) or (len(header) > 1 and header[1] != _TLS_MAJOR):
            raise _no_hello("the bytes are not TLS")
        if len(header) < _RECORD_HEADER:
            return False
        length = int.from_bytes(header[3:], "big")
        if not 0 < length <= MAX_HELLO:
            raise _no_hello("a TLS record has an impossible length")
        end = self._at + _RECORD_HEADER + length
        if len(self.raw) < end:
            return False
        self._message += self.raw[self._at + _RECORD_HEADER : end]
        self._at = end
        return True


class _Fields:
    """A cursor over length-prefixed fields that refuses to read past the end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self.data)

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self.data):
            raise _no_hello("the ClientHello is truncated")
        part, self._at = self.data[self._at : end], end
        return part

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> "_Fields":
        return _Fields(self.take(self.number(size)))


def _server_name(hello: _Fields) -> str:
    hello.take(2 + 32)  # version, random
    hello.vector(1)  # session id
    hello.vector(2)  # cipher suites
    hello.vector(1)  # compression methods
    if not hello:
        raise _no_hello("the ClientHello has no server name")
    extensions = hello.vector(2)
    if hello:
        raise _no_hello("bytes follow the extensions of the ClientHello")
    seen: dict[int, _Fields] = {}
    while extensions:
        kind = extensions.number(2)
        if kind in seen:
            raise _no_hello("an extension of the ClientHello stands there twice")
        if kind in _ENCRYPTED:
            raise _no_hello("the server name is encrypted")
        seen[kind] = extensions.vector(2)
    if _SERVER_NAME not in seen:
        raise _no_hello("the ClientHello has no server name")
    names = seen[_SERVER_NAME].vector(2)
    if not names or names.number(1) != _HOST_NAME:
        raise _no_hello("the ClientHello has no server name")
    name = names.vector(2)
    if names or seen[_SERVER_NAME]:
        raise _no_hello("the ClientHello has more than one server name")
    return parse_host(name.data.decode("latin-1"))


def _no_hello(what: str) -> RefusedError:
    return RefusedError(
        "egress.sni", f"The tunnel was closed: {what}.", "Speak TLS with the host's own name and without ECH."
    )
