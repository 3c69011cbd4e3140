"""The gate of one call's network, and the links that each connection passes.

A link is a coroutine ``async (attempt, connect_next)``, like a guard of a call: it may refuse the attempt, set a field
of it, or wrap the rest. ``guards/network/guard.py`` has their order, with guards' links in between.
"""

import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Protocol

from anyio import aclose_forcefully
from anyio.abc import ByteStream, SocketStream

from glovebox_profiles.egress.rules import EgressRule, decide_inspected, denial
from glovebox_profiles.egress.targets import EgressTarget
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.egress.authority import Authority
from glovebox_server.egress.dial import Dial, Resolver, dial, require_public, resolve, system_resolver, within
from glovebox_server.egress.events import ConnectNext, EgressAnswer, EgressAttempt, EgressLimits, PeerError

MAX_UNNAMED = 4
"""Hosts of one call that a person may be asked about; a program may try many more."""

ConnectionLink = Callable[[EgressAttempt, ConnectNext], Awaitable[None]]


class StreamMask(Protocol):
    """Replaces keys in what a server sends: in a stream, or in a complete text."""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; return those that they release."""

    def finish(self) -> bytes:
        """Return the rest, at a normal end."""

    def whole(self, text: str) -> str:
        """Return a complete text, masked."""


async def enter(links: Sequence[ConnectionLink], attempt: EgressAttempt) -> None:
    """Pass an attempt through links, of which the last enters no other."""
    await links[0](attempt, partial(enter, links[1:]))


@dataclass(slots=True)
class Traffic:
    """Sums over one call's connections; they grow while it runs."""

    connections: int = 0
    sent_bytes: int = 0
    """Out of the sandbox, below TLS: headers and handshakes included."""
    received_bytes: int = 0


@cache
def _system_tls() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


@dataclass(kw_only=True, eq=False)
class EgressGate:
    """The network of one call; nothing is allowed until ``links`` is set.

    Its rules never change while it lives; a new profile is a new gate.
    """

    rules: Sequence[EgressRule]
    """The profile's, narrowed; empty denies everything."""
    on_decision: Callable[[EgressAttempt], Awaitable[None]]
    """Awaited before each connection is made or refused; if it raises, nothing is dialled."""
    on_answer: Callable[[EgressAnswer], None] = lambda _: None
    new_mask: Callable[[], StreamMask] | None = None
    """Makes the mask of one answer; None if no key is in scope."""
    principal: str = ""
    """Look-ups are bounded for each."""
    resolver: Resolver | None = None
    """None for the operating system's."""
    tls: ssl.SSLContext = field(default_factory=_system_tls)
    """Verifies servers; with the system's trust store by default."""
    connect_to: Dial = dial
    """Connects to checked addresses; a proof dials a server of its own."""
    limits: EgressLimits = field(default_factory=EgressLimits)
    authority: Authority | None = None
    """Certifies names for TLS that ends inside the sandbox; None if none does."""
    links: Sequence[ConnectionLink] = ()
    traffic: Traffic = field(default_factory=Traffic)
    unrecorded: int = 0
    """Refused attempts beyond the bound of records; for the call's last record."""
    unnamed: set[EgressTarget] = field(default_factory=set)
    """Requests to hosts that no rule names, up to ``MAX_UNNAMED``: an operator may be asked about them."""
    _attempts: int = 0
    _connections: int = 0
    _open: int = 0

    async def connect(self, attempt: EgressAttempt) -> None:
        """Pass an attempt through all links, the last of which dials and uses the connection.

        Raises RefusedError if it is refused, which is recorded; PeerError if it could not be resolved or connected.
        """
        await enter(self.links, attempt)

    async def check(self, attempt: EgressAttempt, then: ConnectionLink) -> None:
        """Check an attempt against the rules alone, then enter ``then``. Raises RefusedError, recorded, if refused."""
        await enter((self.record_refusals, self.read_target, self.apply_rules, then), attempt)

    async def record_refusals(self, attempt: EgressAttempt, connect_next: ConnectNext) -> None:
        """Record a link's refusal, unless the attempt is on record."""
        try:
            await connect_next(attempt)
        except RefusedError as error:
            if not attempt.is_recorded:
                attempt.decision = denial(error)
                await self._record(attempt)
            raise

    async def read_target(self, attempt: EgressAttempt, connect_next: ConnectNext) -> None:
        """Parse the request by its strict grammar."""
        if attempt.read is not None:
            attempt.read(attempt)
        await connect_next(attempt)

    async def apply_rules(self, attempt: EgressAttempt, connect_next: ConnectNext) -> None:
        """Refuse what no rule allows; collect hosts that no rule names."""
        target = _target(attempt)
        attempt.decision = decision = attempt.decide(target, self.rules)
        if decision.effect == "deny":
            if decision.rule == "egress.host" and len(self.unnamed) < MAX_UNNAMED:
                # Requests come out of TLS that ends inside the sandbox, so a person is asked about a request.
                inspected = attempt.decide is decide_inspected
                self.unnamed.add(replace(target, method="GET", path="/") if inspected else target)
            raise RefusedError(decision.rule, decision.reason, decision.hint)
        await connect_next(attempt)

    async def open_tunnel(self, attempt: EgressAttempt, connect_next: ConnectNext) -> None:
        """Report where a tunnel leads."""
        if attempt.on_allowed is not None:
            await attempt.on_allowed(attempt)
        await connect_next(attempt)

    async def limit(self, attempt: EgressAttempt, connect_next: ConnectNext) -> None:
        """Refuse connections beyond the call's bounds, in total or at one time."""
        limits = self.limits
        if self._connections >= limits.connections:
            raise _exhausted("connections", f"made its {limits.connections} connections")
        if self._open >= limits.concurrent:
            raise _exhausted("concurrent", f"has {limits.concurrent} connections open")
        self._connections += 1
        self._open += 1
        try:
            await connect_next(attempt)
        finally:
            self._open -= 1

    async def resolve(self, attempt: EgressAttempt, connect_next: ConnectNext) -> None:
        """Resolve the host, once; a failure is recorded, for the look-up was a message."""
        target = _target(attempt)
        try:
            resolver = self.resolver or partial(system_resolver, principal=self.principal)
            seconds = within(self.limits.resolve_seconds, attempt.deadline)
            attempt.addresses = await resolve(target.host, resolver, seconds)
        except PeerError:
            await self._record(attempt)
            raise
        await connect_next(attempt)

    async def check_addresses(self, attempt: EgressAttempt, connect_next: ConnectNext) -> None:
        """Refuse an answer with an address that is not public, or is this machine's own."""
        require_public(_target(attempt).host, attempt.addresses)
        await connect_next(attempt)

    async def record(self, attempt: EgressAttempt, connect_next: ConnectNext) -> None:
        """Record an allowed attempt."""
        await self._record(attempt)
        await connect_next(attempt)

    async def dial(self, attempt: EgressAttempt, _connect_next: ConnectNext) -> None:
        """Connect to a checked address, for as long as the connection is used."""
        target = _target(attempt)
        if not attempt.is_recorded or attempt.decision.effect != "allow" or attempt.use is None:
            raise RuntimeError("A connection was to be dialled that no link has allowed and recorded.")
        stream = await self.connect_to(target.host, attempt.addresses, target.port, self.limits, attempt.deadline)
        self.traffic.connections += 1
        try:
            await attempt.use(attempt, CountedStream(stream, self.traffic))
        finally:
            await aclose_forcefully(stream)

    async def _record(self, attempt: EgressAttempt) -> None:
        """Count and record one attempt, up to a bound: a loop in the sandbox must not fill the disk."""
        attempt.is_recorded = True
        self._attempts += 1
        if self._attempts <= self.limits.attempts:
            await self.on_decision(attempt)
            return
        exhausted = _exhausted("attempts", f"made its {self.limits.attempts} attempts")
        if self._attempts == self.limits.attempts + 1:
            attempt.decision = denial(exhausted)
            await self.on_decision(attempt)
        else:
            self.unrecorded += 1
        raise exhausted


@dataclass(eq=False)
class CountedStream(ByteStream):
    """A connection that counts its bytes in ``traffic``. Its maker closes it."""

    stream: SocketStream
    traffic: Traffic

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """See ``ByteReceiveStream.receive``."""
        data = await self.stream.receive(max_bytes)
        self.traffic.received_bytes += len(data)
        return data

    async def send(self, item: bytes) -> None:
        """See ``ByteSendStream.send``; counted as sent before it is known to be."""
        self.traffic.sent_bytes += len(item)
        await self.stream.send(item)

    async def send_eof(self) -> None:
        """See ``ByteStream.send_eof``."""
        await self.stream.send_eof()

    async def aclose(self) -> None:
        """Close the connection."""
        await self.stream.aclose()


def _target(attempt: EgressAttempt) -> EgressTarget:
    if attempt.target is None:
        raise RefusedError("egress.undecided", "Nothing was decided.", "")
    return attempt.target


def _exhausted(name: str, what: str) -> RefusedError:
    return RefusedError(f"egress.{name}", f"This call already {what}.", "Close some, or make another call.")
