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
from functools import cache
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import ByteReceiveStream, ByteStream
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glovebox_profiles.egress.rules import decide, decide_inspected
from glovebox_profiles.egress.targets import parse_connect, quoted
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.session.connection import Duplex
from glovebox_server.egress.authority import Authority
from glovebox_server.egress.clienthello import ClientHello
from glovebox_server.egress.events import (
    READ_BYTES,
    ConnectNext,
    EgressAnswer,
    EgressAttempt,
    EgressLimits,
    PeerError,
    refusal,
)
from glovebox_server.egress.gate import EgressGate
from glovebox_server.egress.request import request


class RequestMeta(BaseModel):
    """Meta of a ``request`` stream, as the guest sent it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    method: str = Field(max_length=16)
    url: str = Field(max_length=8192)
    headers: list[list[str]] = Field(default_factory=list, max_length=64)


class ConnectMeta(BaseModel):
    """Meta of a ``connect`` stream, as the guest sent it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    authority: str = Field(max_length=512)


async def serve_stream(gate: EgressGate, stream: Duplex) -> None:
    """Serve one egress stream. Raises what ``on_decision`` raises, so that nothing is dialled without its record."""
    try:
        if stream.kind == "request":
            await _request(gate, stream, RequestMeta.model_validate(stream.meta))
        elif stream.kind == "connect":
            await connect(gate, ConnectMeta.model_validate(stream.meta).authority, stream)
        elif stream.kind == "trust":
            await _trust(gate, stream)
        elif stream.kind == "certificate" and gate.authority is not None:
            await _certificate(gate, gate.authority, stream, ConnectMeta.model_validate(stream.meta))
        else:
            await stream.reset(refusal("egress.kind", "There is no such way out.", ""))
    except RefusedError as refused:
        await stream.reset(refusal(refused.rule, refused.reason, refused.hint))
    except ValidationError:
        hint = "A method of at most 16 characters, a URL of 8192, 64 headers."
        await stream.reset(refusal("egress.malformed", "What was asked cannot be read.", hint))


async def _request(gate: EgressGate, stream: Duplex, meta: RequestMeta) -> None:
    headers = [(pair[0], pair[1]) for pair in meta.headers if len(pair) == 2]  # noqa: PLR2004 - name and value
    body = bytearray()
    try:
        while True:
            body += await stream.receive()
            if len(body) > gate.limits.request_body_bytes:
                reason = f"The request's body is larger than {gate.limits.request_body_bytes} bytes."
                raise RefusedError("egress.body", reason, "Send less.")
    except anyio.EndOfStream:
        pass
    await request(gate, meta.method, meta.url, headers, bytes(body), stream=stream)


async def _trust(gate: EgressGate, stream: Duplex) -> None:
    trusted = await anyio.to_thread.run_sync(authorities)
    if gate.authority is not None:
        own = await anyio.to_thread.run_sync(gate.authority.certificate)
        await stream.accept({"inspect": True})
        trusted += own
    await stream.send(trusted)
    await stream.send_eof()


async def _certificate(gate: EgressGate, authority: Authority, stream: Duplex, meta: ConnectMeta) -> None:
    host = await find_inspected_host(gate, meta.authority)
    leaf = "" if host is None else await anyio.to_thread.run_sync(authority.leaf, host)
    await stream.accept({"leaf": leaf})
    await stream.send_eof()


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
    pump, opened = _Pump(guest, gate.limits), False
    reason: str | None = None

    async def open_tunnel(attempt: EgressAttempt) -> None:
        nonlocal opened
        await guest.accept({"opened": True})
        opened = True
        pump.hello = await _hello(guest, attempt.target.host if attempt.target else "", gate.limits)

    async def carry(attempt: EgressAttempt, remote: ByteStream) -> None:
        nonlocal reason
        reason = "It was cut off."
        try:
            reason = await pump.run(remote)
        finally:
            received = pump.carried["received"]
            gate.on_answer(EgressAnswer(attempt=attempt, status=None, type=None, bytes=received, complete=not reason))

    attempt = EgressAttempt(kind="connect", asked=authority, read=_read, on_allowed=open_tunnel, use=carry)
    try:
        await gate.connect(attempt)
    except RefusedError as refused:
        if not opened:
            await guest.reset(refusal(refused.rule, refused.reason, refused.hint))
            return
        reason = f"{refused.rule}: {refused.reason} {refused.hint}"
    except PeerError as failed:
        reason = str(failed)
    await guest.reset({"reason": reason} if reason else {})


async def find_inspected_host(gate: EgressGate, authority: str) -> str | None:
    """Return the host whose TLS ends inside the sandbox; None if a rule tunnels it.

    Raises RefusedError, recorded, if no request to it could be allowed, or no certificate is left for it.
    """
    host: str | None = None

    async def find(attempt: EgressAttempt, _connect_next: ConnectNext) -> None:
        nonlocal host
        if attempt.target is None or decide(attempt.target, gate.rules).effect == "allow":
            return
        if gate.authority is None or not gate.authority.has_room(attempt.target.host):
            why = "This call has certificates for as many hosts as it can have."
            raise RefusedError("egress.attempts", why, "Ask fewer hosts, or make another call.")
        host = attempt.target.host

    await gate.check(EgressAttempt(kind="connect", asked=authority, read=_read, decide=decide_inspected), find)
    return host


def _read(attempt: EgressAttempt) -> None:
    attempt.target = parse_connect(attempt.asked)


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
        raise RefusedError(
            "egress.sni", f"No TLS ClientHello came within {limits.hello_seconds:g} seconds.", "Speak TLS first."
        )
    if name != host:
        raise RefusedError(
            "egress.sni",
            f"The tunnel to {host} was used to ask for {quoted(name)}.",
            "Open a tunnel to the host that TLS is spoken with.",
        )
    return bytes(hello.raw)


class _Pump:
    """Carries bytes both ways until both sides have finished, or a bound is reached."""

    def __init__(self, guest: ByteStream, limits: EgressLimits) -> None:
        self.carried = {"sent": 0, "received": 0}
        self._most = {"sent": limits.tunnel_sent_bytes, "received": limits.tunnel_received_bytes}
        self._guest, self._limits = guest, limits
        self.hello = b""
        """Of the guest's bytes, those that were read before the tunnel was dialled."""
        self._reason: str | None = None
        self._scope = anyio.CancelScope()
        self._end = 0.0

    async def run(self, remote: ByteStream) -> str | None:
        """Return why it ended early; None if both sides finished."""
        self._end = anyio.current_time() + self._limits.tunnel_seconds
        with self._scope:
            self._alive()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._carry, "sent", self._guest, remote, self.hello)
                tasks.start_soon(self._carry, "received", remote, self._guest, b"")
        if self._scope.cancelled_caught and self._reason is None:
            if anyio.current_time() >= self._end:
                return f"The tunnel was closed: it was open for {self._limits.tunnel_seconds:g} seconds."
            return f"The tunnel was closed: it was silent for {self._limits.tunnel_idle_seconds:g} seconds."
        return self._reason

    async def _carry(self, direction: str, source: ByteStream, sink: ByteStream, data: bytes) -> None:
        most = self._most[direction]
        try:
            while data or (data := await _receive(source)):
                self.carried[direction] += len(data)
                if self.carried[direction] > most:
                    self._give_up(f"The tunnel was closed: more than {most} bytes were {direction}.")
                    return
                await sink.send(data)
                self._alive()
                data = b""
            await sink.send_eof()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self._give_up("The connection broke.")

    def _give_up(self, reason: str) -> None:
        self._reason = self._reason or reason
        self._scope.cancel()

    def _alive(self) -> None:
        """Move the deadline: silence is measured from the last byte in either direction."""
        self._scope.deadline = min(self._end, anyio.current_time() + self._limits.tunnel_idle_seconds)


async def _receive(stream: ByteReceiveStream) -> bytes:
    try:
        return await stream.receive(READ_BYTES)
    except anyio.EndOfStream:
        return b""
