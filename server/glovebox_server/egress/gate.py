"""The gate of one call's network: the steps that every connection takes, whoever asks for it.

Rules, then (for a tunnel) the name inside TLS, then resolving once, checking every address, the audit record; only then
is an address dialled, and only one that was checked. ``exchange.request`` and ``tunnel.connect`` build on it.
"""

import math
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from typing import NoReturn

from anyio import aclose_forcefully
from anyio.abc import ByteStream, SocketStream

from glovebox_profiles.egress import EgressDecision, EgressRule, EgressTarget, decide, decide_inspected
from glovebox_profiles.egress.errors import InvalidTarget
from glovebox_profiles.egress.rules import denial
from glovebox_server.egress.dial import Dial, Resolver, Unreachable, check, dial, resolve, system_resolver, within
from glovebox_server.egress.events import EgressAttempt, OnAnswer, OnConnection, OnDecision
from glovebox_server.egress.limits import EgressLimits
from glovebox_server.egress.tls.authority import Authority
from glovebox_server.egress.traffic import Counted, Traffic
from glovebox_server.guards.credentials.injector import CredentialInjector

Decide = Callable[[EgressTarget, Sequence[EgressRule]], EgressDecision]
MAX_UNNAMED = 4
"""Hosts of one call that somebody may be asked about: a program that tries many asks nobody about most."""


class DeniedError(Exception):
    """Carries a refusal, already recorded, from where it was decided to where the exchange ends."""

    def __init__(self, decision: EgressDecision) -> None:
        """Take the decision, whose effect is deny."""
        super().__init__(decision.reason)
        self.decision = decision


class EgressGate:
    """The network of one call. Its rules never change while it lives; a new profile is a new gate."""

    def __init__(
        self,
        *,
        rules: Sequence[EgressRule],
        on_decision: OnDecision,
        on_connection: OnConnection | None = None,
        on_answer: OnAnswer | None = None,
        principal: str = "",
        resolver: Resolver | None = None,
        tls: ssl.SSLContext | None = None,
        dial: Dial = dial,
        limits: EgressLimits | None = None,
        lender: CredentialInjector | None = None,
        authority: Authority | None = None,
    ) -> None:
        """Allow what ``rules`` allow, and nothing else.

        Args:
            rules: The profile's rules after narrowing; empty denies everything.
            on_decision: Awaited before each connection is made or refused; if it raises, nothing is dialled.
            on_connection: Asked before each connection that is otherwise allowed; it may refuse it.
            on_answer: Told of each answer when it is over.
            principal: Whose call it is; look-ups are bounded for each.
            resolver: Where names are looked up; the operating system unless a test brings its own zone.
            tls: How servers are verified; the system's trust store when left out.
            dial: Connects to checked addresses; a proof's leads to a server of its own.
            limits: Bounds of this call.
            lender: What requests may have added to them; None where the profile lends nothing.
            authority: Who certifies that TLS may end inside the sandbox; None where it does not.
        """
        self.rules = tuple(rules)
        self.limits = limits or EgressLimits()
        self.tls = tls or _system_tls()
        self.lender = lender
        self.authority = authority
        self.traffic = Traffic()
        """What went over all connections so far."""
        self.unrecorded = 0
        """Attempts refused without a record of their own because there were too many; for the call's last record."""
        self.unnamed: set[EgressTarget] = set()
        """Requests to hosts that no rule names, up to ``MAX_UNNAMED``: an operator may be asked about them."""
        self.on_answer = on_answer
        self._on_decision = on_decision
        self._on_connection = on_connection
        self._connect = dial
        self._resolver = resolver or partial(system_resolver, principal=principal)
        self._attempts = 0
        self._connections = 0
        self._open = 0

    async def allow(self, attempt: EgressAttempt, by: Decide = decide) -> EgressAttempt:
        """Hold a readable target against the rules; return the attempt with the decision that allows it.

        Args:
            attempt: What was asked.
            by: How the rules are read.

        Raises:
            DeniedError: After the refusal has been recorded.
        """
        if attempt.target is None:
            await self.refuse(attempt)
        decided = replace(attempt, decision=by(attempt.target, self.rules))
        if decided.decision.effect == "deny":
            if decided.decision.rule == "egress.host" and len(self.unnamed) < MAX_UNNAMED:
                # What comes out of TLS that ends inside are requests, so that is what somebody is asked about.
                inspected = by is decide_inspected
                self.unnamed.add(replace(attempt.target, method="GET", path="/") if inspected else attempt.target)
            await self.refuse(decided)
        return decided

    async def refuse(self, attempt: EgressAttempt, error: InvalidTarget | None = None) -> NoReturn:
        """Record a refusal and raise it; ``error`` replaces the attempt's decision.

        Raises:
            DeniedError: Always, unless recording failed.
        """
        if error is not None:
            attempt = replace(attempt, decision=denial(error))
        await self._record(attempt)
        raise DeniedError(attempt.decision)

    @asynccontextmanager
    async def dialled(self, attempt: EgressAttempt, deadline: float = math.inf) -> AsyncIterator[ByteStream]:
        """Connect to an attempt's target, which ``allow`` has passed, for the length of the block.

        ``deadline`` is on the event loop's clock and shortens resolving and connecting.

        Raises:
            DeniedError: An address of it is not public, or the call has no connections left; recorded.
            Unreachable: It could not be resolved or connected.
        """
        target = attempt.target
        if target is None or attempt.decision.effect != "allow":
            await self.refuse(attempt)
        limits = self.limits
        if self._connections >= limits.connections:
            await self.refuse(attempt, _exhausted("connections", f"made its {limits.connections} connections"))
        if self._open >= limits.concurrent:
            await self.refuse(attempt, _exhausted("concurrent", f"has {limits.concurrent} connections open"))
        self._connections += 1
        self._open += 1
        try:
            stream = await self._dial(attempt, target, deadline)
            self.traffic.connections += 1
            try:
                yield Counted(stream, self.traffic)
            finally:
                await aclose_forcefully(stream)
        finally:
            self._open -= 1

    async def _dial(self, attempt: EgressAttempt, target: EgressTarget, deadline: float) -> SocketStream:
        try:
            addresses = await resolve(target.host, self._resolver, within(self.limits.resolve_seconds, deadline))
        except Unreachable:
            await self._record(attempt)
            raise
        attempt = replace(attempt, addresses=tuple(map(str, addresses)))
        try:
            check(target.host, addresses)
        except InvalidTarget as error:
            await self.refuse(attempt, error)
        if self._on_connection and (refusal := await self._on_connection(target.host)):
            await self.refuse(attempt, InvalidTarget(refusal.rule, refusal.reason, refusal.hint))
        await self._record(attempt)
        return await self._connect(target.host, addresses, target.port, self.limits, deadline)

    async def _record(self, attempt: EgressAttempt) -> None:
        """Count and record one attempt, up to a number that a loop in the sandbox cannot turn into a full disk."""
        self._attempts += 1
        if self._attempts > self.limits.attempts:
            exhausted = denial(_exhausted("attempts", f"made its {self.limits.attempts} attempts"))
            if self._attempts == self.limits.attempts + 1:
                await self._on_decision(replace(attempt, decision=exhausted))
            else:
                self.unrecorded += 1
            raise DeniedError(exhausted)
        await self._on_decision(attempt)


def _exhausted(name: str, what: str) -> InvalidTarget:
    return InvalidTarget(f"egress.{name}", f"This call already {what}.", "Close some, or make another call.")


@cache
def _system_tls() -> ssl.SSLContext:
    """Return the system's trust store, certificate and host name required (the standard library's client default)."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
