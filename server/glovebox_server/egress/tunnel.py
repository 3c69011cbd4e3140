"""The ``connect`` exchange: an opaque TLS tunnel to one allowed host and port.

Its content cannot be read. So the name in the TLS ClientHello must be the allowed one before anything is dialled, and
bytes and time are counted.
"""

import anyio
from anyio.abc import ByteReceiveStream, ByteStream

from glovebox_profiles.egress.rules import decide, decide_inspected
from glovebox_profiles.egress.targets import parse_connect, quoted
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.session.connection import Duplex
from glovebox_server.egress.clienthello import ClientHello
from glovebox_server.egress.events import ConnectNext, EgressAnswer, EgressAttempt, PeerError, refusal
from glovebox_server.egress.gate import EgressGate
from glovebox_server.egress.limits import READ_BYTES, EgressLimits


async def connect(gate: EgressGate, authority: str, guest: Duplex) -> None:
    """Tunnel TLS between ``guest`` and ``authority`` (``host:port``), as ``serve`` says.

    ``guest`` is accepted once the rules allow it; a refusal after that is the reason of its reset. Raises only what
    ``gate``'s ``on_decision`` or ``guest`` raise.
    """
    pump: _Pump | None = None
    hello = b""
    reason: str | None = None

    async def open_tunnel(attempt: EgressAttempt) -> None:
        nonlocal pump, hello
        await guest.accept({"opened": True})
        pump = _Pump(guest, gate.limits)
        hello = await _hello(guest, attempt.target.host if attempt.target else "", gate.limits)

    async def carry(attempt: EgressAttempt, remote: ByteStream) -> None:
        nonlocal reason
        if pump is None:
            raise RuntimeError("A tunnel was dialled that was never opened.")
        reason = "It was cut off."
        try:
            reason = await pump.run(hello, remote)
        finally:
            if gate.on_answer is not None:
                gate.on_answer(
                    EgressAnswer(
                        attempt=attempt, status=None, type=None, bytes=pump.carried["received"], complete=not reason
                    )
                )

    attempt = EgressAttempt(kind="connect", asked=authority, read=_read, on_allowed=open_tunnel, use=carry)
    try:
        await gate.connect(attempt)
    except RefusedError as refused:
        if pump is None:
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
        self._reason: str | None = None
        self._scope = anyio.CancelScope()
        self._end = anyio.current_time() + limits.tunnel_seconds

    async def run(self, hello: bytes, remote: ByteStream) -> str | None:
        """Return why it ended early; None if both sides finished."""
        with self._scope:
            self._alive()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._carry, "sent", self._guest, remote, hello)
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
