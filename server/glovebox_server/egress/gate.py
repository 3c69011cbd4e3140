"""The gate of one call's network. ``EgressGate.connect`` has the order of what happens to a connection."""

import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Protocol

from anyio import aclose_forcefully
from anyio.abc import ByteStream, SocketStream

from glovebox_profiles.egress.rules import EgressRule, decide, decide_inspected, denial
from glovebox_profiles.egress.targets import EgressTarget
from glovebox_sandboxes.contract.errors import Refusal, RefusedError
from glovebox_server.egress.dial import Dial, Resolver, dial, require_public, resolve, system_resolver, within
from glovebox_server.egress.events import EgressAnswer, EgressAttempt, EgressLimits, PeerError

if TYPE_CHECKING:
    from glovebox_server.egress.authority import Authority

MAX_UNNAMED = 4
"""Hosts of one call that a person may be asked about; a program may try many more."""


class StreamMask(Protocol):
    """Replaces keys in what a server sends: in a stream, or in a complete text."""

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; return those that they release."""

    def finish(self) -> bytes:
        """Return the rest, at a normal end."""

    def whole(self, text: str) -> str:
        """Return a complete text, masked."""


class LentKeys(Protocol):
    """The keys that a call's requests get."""

    def new_mask(self) -> StreamMask:
        """Return the mask of one answer."""

    async def find_stray(self, attempt: EgressAttempt, target: EgressTarget) -> None:
        """Report a placeholder where no key stands in for it."""

    async def inject(self, attempt: EgressAttempt, target: EgressTarget) -> None:
        """Put its key into an attempt."""


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
    """The network of one call. Its rules never change while it lives; a new profile is a new gate."""

    rules: Sequence[EgressRule]
    """The profile's, narrowed; empty denies everything."""
    on_decision: Callable[[EgressAttempt], Awaitable[None]]
    """Awaited before each connection is made or refused; if it raises, nothing is dialled."""
    on_answer: Callable[[EgressAnswer], None] = lambda _: None
    keys: LentKeys | None = None
    """Absent if no key is in scope."""
    on_connect: Sequence[Callable[[str], Awaitable[Refusal | None]]] = ()
    """Each counts a connection to a host against rates and budgets, or refuses it."""
    principal: str = ""
    """Look-ups are bounded for each."""
    resolver: Resolver | None = None
    """Resolver; by default the operating system's."""
    tls: ssl.SSLContext = field(default_factory=_system_tls)
    """Verifies servers; with the system's trust store by default."""
    connect_to: Dial = dial
    """Connects to checked addresses; a proof dials a server of its own."""
    limits: EgressLimits = field(default_factory=EgressLimits)
    authority: "Authority | None" = None
    """Certifies names for TLS that ends inside the sandbox; None if none does."""
    traffic: Traffic = field(default_factory=Traffic)
    unrecorded: int = 0
    """Refused attempts beyond the bound of records; for the call's last record."""
    unnamed: set[EgressTarget] = field(default_factory=set)
    """Requests to hosts that no rule names, up to ``MAX_UNNAMED``: an operator may be asked about them."""
    _attempts: int = 0
    _connections: int = 0
    _open: int = 0

    @asynccontextmanager
    async def recorded(self, attempt: EgressAttempt) -> AsyncIterator[None]:
        """Record a refusal in the block, within a bound, unless the attempt is on record."""
        try:
            yield
        except RefusedError as error:
            if not attempt.is_recorded:
                attempt.decision = denial(error)
                await self._record(attempt)
            raise

    def apply_rules(self, attempt: EgressAttempt, target: EgressTarget, *, inspected: bool = False) -> None:
        """Refuse what no rule allows; collect hosts that no rule names.

        With ``inspected`` allow a host to which any request could be allowed: its TLS ends inside the sandbox.
        """
        attempt.decision = decision = (decide_inspected if inspected else decide)(target, self.rules)
        if decision.effect == "deny":
            if decision.rule == "egress.host" and len(self.unnamed) < MAX_UNNAMED:
                # Requests come out of TLS that ends inside the sandbox, so a person is asked about a request.
                self.unnamed.add(replace(target, method="GET", path="/") if inspected else target)
            raise RefusedError(decision.rule, decision.reason, decision.hint)

    @asynccontextmanager
    async def connect(self, attempt: EgressAttempt, target: EgressTarget) -> AsyncIterator["CountedStream"]:
        """Decide, record and dial an attempt, inside of ``recorded``; close its connection after the block.

        Raises RefusedError if it is refused; PeerError if it could not be resolved or connected.
        """
        if self.keys:  # outside the rules: a stray placeholder is reported though they refuse the request
            await self.keys.find_stray(attempt, target)
        self.apply_rules(attempt, target)  # before all that leaves this host: a denied name is not resolved (GB-NET-5)
        if self.keys:  # a request whose key cannot be had uses up no connection
            await self.keys.inject(attempt, target)
        with self._place():  # before resolving: a look-up is a message too
            await self._resolve(attempt, target)  # once: a second answer (rebinding) has no effect
            require_public(target.host, attempt.addresses)  # of the whole answer, before budgets
            for count in self.on_connect:  # only what will be dialled is counted (GB-POL-27)
                refusal = await count(target.host)
                if refusal is not None:
                    raise RefusedError(refusal.rule, refusal.reason, refusal.hint)
            # On disk with the address, then seen by watch rules, before it is dialled (GB-NET-8).
            await self._record(attempt)
            if attempt.decision.effect != "allow":
                raise RuntimeError("A connection was to be dialled that was not allowed.")
            stream = await self.connect_to(target.host, attempt.addresses, target.port, self.limits, attempt.deadline)
            self.traffic.connections += 1
            try:
                yield CountedStream(stream, self.traffic)
            finally:
                await aclose_forcefully(stream)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Hold a connection's place; refuse those beyond the call's bounds, in total or at one time."""
        limits = self.limits
        if self._connections >= limits.connections:
            raise _exhausted("connections", f"made its {limits.connections} connections")
        if self._open >= limits.concurrent:
            raise _exhausted("concurrent", f"has {limits.concurrent} connections open")
        self._connections += 1
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def _resolve(self, attempt: EgressAttempt, target: EgressTarget) -> None:
        """Resolve the host; a failure is recorded, for the look-up was a message."""
        try:
            resolver = self.resolver or partial(system_resolver, principal=self.principal)
            seconds = within(self.limits.resolve_seconds, attempt.deadline)
            attempt.addresses = await resolve(target.host, resolver, seconds)
        except PeerError:
            await self._record(attempt)
            raise

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
    received: int = 0

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """See ``ByteReceiveStream.receive``."""
        data = await self.stream.receive(max_bytes)
        self.received += len(data)
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


def _exhausted(name: str, what: str) -> RefusedError:
    return RefusedError(f"egress.{name}", f"This call already {what}.", "Close some, or make another call.")
