"""The ``request`` exchange: the sandbox names a method and a URL, the host does all the rest.

The sandbox never speaks HTTP to anybody: what is sent is built here from parsed parts, so method and path rules always
hold. Redirects are followed here too, and each one is decided as if it had been asked for.
"""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urljoin

from anyio.lowlevel import checkpoint

from glovebox_profiles.egress import EgressTarget, parse_url
from glovebox_profiles.egress.errors import InvalidTarget, quoted
from glovebox_profiles.model import Credential
from glovebox_server.egress.dial import Unreachable, secure, within
from glovebox_server.egress.events import (
    Body,
    Denied,
    EgressAnswer,
    EgressAttempt,
    End,
    Failed,
    Hop,
    ResponseHead,
    SendRequestEvent,
)
from glovebox_server.egress.gate import DeniedError, EgressGate
from glovebox_server.egress.headers import media_type, request_headers, returned_headers
from glovebox_server.egress.http1 import REDIRECTS, Clock, Exchange, PeerFailed
from glovebox_server.guards.credentials.injector import added, require_usable
from glovebox_server.guards.redaction.detector import KeyMasker

LOOKED_AT: Final = 16 * 1024
"""Bytes that are looked through for lent values at once: 0.2 ms of the event loop, and 2 ms where a hostile server
repeats how a value begins (``python -m tests.perf.lent``)."""
MAX_REASON: Final = 256
"""Characters of what is said of a failure; it may quote the server."""


async def request(
    gate: EgressGate,
    method: str,
    url: str,
    headers: Sequence[tuple[str, str]] = (),
    body: bytes = b"",
    *,
    send: SendRequestEvent,
) -> None:
    """Make one HTTP request and hand its events to ``send`` as they come.

    The last event is ``End``, ``Denied`` or ``Failed``. Awaiting ``send`` is the back-pressure; what it takes counts
    towards ``request_seconds``.

    Args:
        gate: The call's way out.
        method: Upper case.
        url: As the sandbox wrote it.
        headers: As the sandbox wrote them; only harmless ones are passed on.
        body: For POST, PUT and PATCH.
        send: Takes each event.

    Raises:
        Exception: Only what ``gate``'s ``on_decision`` or ``send`` raise.
    """
    asked = _Request(gate=gate, method=method, url=url, headers=headers, body=body, send=send, clock=Clock(gate.limits))
    try:
        while await asked.hop():
            pass
    except DeniedError as refused:
        await send(Denied(decision=refused.decision, hops=tuple(asked.hops)))
    except (PeerFailed, Unreachable) as failed:
        # It may quote the server, which knows what it was lent.
        reason = KeyMasker(gate.lender.used).whole(str(failed)) if gate.lender else str(failed)
        reason = reason[:MAX_REASON]  # cut only now: a key that is cut is none any more
        if asked.answered:
            await send(End(truncated=reason))
        else:
            await send(Failed(reason=reason, hops=tuple(asked.hops)))


@dataclass(slots=True, kw_only=True)
class _Request:
    """One request and how far its redirects have come."""

    gate: EgressGate
    method: str
    url: str
    headers: Sequence[tuple[str, str]]
    body: bytes
    send: SendRequestEvent
    clock: Clock
    hops: list[Hop] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    home: str | None = ""
    """Host and port of the first server; None once a redirect has led to another."""
    answered: bool = False
    passed: int = 0
    """Bytes of the body that were passed on."""

    async def hop(self) -> bool:
        """Ask one server; return whether it redirected to a place that is to be asked next."""
        gate = self.gate
        attempt = EgressAttempt(kind="request", asked=self.url, hop=len(self.hops))
        try:
            target = parse_url(self.method, self.url)
            attempt = replace(attempt, target=target)
            headers, dropped = request_headers(self.headers, self.method, self.body, gate.limits)
            self._check_redirect(target)
            self.home = self.home if self.hops else target.authority
        except InvalidTarget as error:
            await gate.refuse(attempt, error)
        if gate.lender is not None and not self.hops:
            attempt = replace(attempt, strayed=await gate.lender.strayed(target, self.headers, self.body))
        attempt = await gate.allow(attempt)
        self.seen.add(target.url)
        sent, credential = target, self._credential(target)
        if credential is not None and gate.lender is not None:
            attempt = replace(attempt, credential=credential.name)
            try:
                require_usable(credential, target, self.headers)
                headers, dropped = request_headers(self.headers, self.method, self.body, gate.limits, credential)
                value = await gate.lender.value(credential)
            except InvalidTarget as error:
                await gate.refuse(attempt, error)
            said = gate.lender.placeholders.get(credential.name)
            sent, headers = added(credential, value, target, headers, None if said is None else (said, self.headers))
            if credential.header is not None:
                dropped = tuple(name for name in dropped if name != quoted(credential.header.lower()))
        async with gate.dialled(attempt, self.clock.deadline) as socket:
            stream = socket
            if target.scheme == "https":
                left = within(gate.limits.connect_seconds, self.clock.deadline)
                stream = await secure(socket, target.host, gate.tls, left)
            exchange = Exchange(stream, self.clock, gate.limits)
            await exchange.send(sent, headers, self.body)
            redactor = KeyMasker(gate.lender.used) if gate.lender else None
            status, received = await self._head(exchange, redactor)
            answer = EgressAnswer(attempt=attempt, status=status, type=media_type(received))
            location = [value for name, value in received if name == "location"]
            if status in REDIRECTS and location and self.method in {"GET", "HEAD"}:
                if len(location) > 1:
                    raise PeerFailed("The server redirected to several places at once.")
                self._over(answer)
                self.hops.append(Hop(status=status, url=target.url))
                self.url = _join(target.url, location[0])
                return True
            head = ResponseHead(
                status=status,
                headers=returned_headers(received),
                url=target.url,
                hops=tuple(self.hops),
                dropped=dropped,
            )
            await self._answer(head, exchange, redactor, answer)
            return False

    def _credential(self, target: EgressTarget) -> Credential | None:
        """The credential that is added: none once a redirect has led elsewhere, wherever it leads then."""
        if target.authority != self.home:
            self.home = None
        lender = self.gate.lender
        return lender.chosen(target, self.headers) if lender is not None and self.home is not None else None

    async def _head(self, exchange: Exchange, redactor: KeyMasker | None) -> tuple[int, list[tuple[str, str]]]:
        status, received = await exchange.head()
        if redactor is None:
            return status, received
        # What stands for a key is no header's name: a client would take the rest of the head for the body.
        return status, [(name, redactor.whole(value)) for name, value in received if redactor.whole(name) == name]

    async def _answer(
        self, head: ResponseHead, exchange: Exchange, redactor: KeyMasker | None, answer: EgressAnswer
    ) -> None:
        self.answered, complete = True, False
        try:
            await self.send(head)
            async with aclosing(exchange.body()) as pieces:
                async for piece in pieces:
                    await self._pass_on(await _without(redactor, piece) if redactor else piece)
            await self._pass_on(redactor.finish() if redactor else b"")
            complete = True
        finally:
            self._over(replace(answer, bytes=self.passed, complete=complete))
        await self.send(End(truncated=None))

    async def _pass_on(self, data: bytes) -> None:
        if data:
            await self.send(Body(data=data))
            self.passed += len(data)

    def _over(self, answer: EgressAnswer) -> None:
        if self.gate.on_answer is not None:
            self.gate.on_answer(answer)

    def _check_redirect(self, target: EgressTarget) -> None:
        """Refuse what no rule can make right about a redirect."""
        if not self.hops:
            return
        most = self.gate.limits.hops
        if len(self.hops) > most:
            why = f"The request was redirected more than {most} times, now to {quoted(target.url)}."
        elif target.url in self.seen:
            why = "The redirects lead back to a URL that was already asked."
        elif target.scheme == "http" and self.hops[-1].url.startswith("https:"):
            why = "A redirect leads from https to http."
        else:
            return
        raise InvalidTarget("egress.redirect", why, "Ask for the final URL directly.")


async def _without(redactor: KeyMasker, piece: bytes) -> bytes:
    """Look for lent values in a piece, with turns for everybody else between."""
    passed = list[bytes]()
    for at in range(0, len(piece), LOOKED_AT):
        passed.append(redactor.feed(piece[at : at + LOOKED_AT]))
        await checkpoint()
    return b"".join(passed)


def _join(base: str, location: str) -> str:
    """Resolve a ``Location``. ``urljoin`` drops control characters, so a location that has any is left as it is."""
    if any(not "\x21" <= character <= "\x7e" for character in location):
        return location
    try:
        return urljoin(base, location)
    except ValueError:
        return location
