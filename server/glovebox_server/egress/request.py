"""The ``request`` exchange: the sandbox names a method and a URL, the host does the rest.

The sandbox never speaks HTTP to a server: the request is built here from parsed parts, so method and path rules always
hold. Redirects are followed here too, and each one passes the chain like a new request.
"""

import re
from collections.abc import Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urljoin

from anyio.abc import ByteStream
from anyio.lowlevel import checkpoint

from glovebox_profiles.egress.targets import EgressTarget, parse_url, quoted
from glovebox_profiles.model import Credential
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.session.connection import Duplex
from glovebox_server.egress.dial import secure, within
from glovebox_server.egress.events import EgressAnswer, EgressAttempt, EgressLimits, Headers, PeerError, refusal
from glovebox_server.egress.gate import EgressGate, StreamMask
from glovebox_server.egress.http1 import ACCEPTED, REDIRECTS, Exchange, RequestClock

PIECE_SEARCHED: Final = 16 * 1024
"""Bytes that are searched for keys at once: 0.2 ms of the event loop, and 2 ms if a hostile server repeats the prefix
of a key (``python -m tests.perf.lent``)."""
MAX_REASON: Final = 256
"""Characters of a failure's reason; it may quote the server."""

#: Request headers that a sandbox may set. None that authenticates (an allowed host is a way out to anybody with a key
#: there), none about framing, routing or connection, none that makes another request of it than the decided one (method
#: overrides, rewritten URLs) or another body than the whole (ranges). A profile may name further ones, for the one host
#: that gets the operator's key.
_PASSED = frozenset(
    {"accept", "accept-language", "if-match", "if-modified-since", "if-none-match", "if-unmodified-since", "user-agent"}
)
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
#: Not returned: framing and encoding are undone, the connection is ours, and a sandbox keeps no cookies.
_NOT_RETURNED = frozenset((
    "alt-svc", "connection", "content-encoding", "content-length", "keep-alive", "proxy-authenticate",
    "proxy-connection", "set-cookie", "set-cookie2", "strict-transport-security", "trailer", "transfer-encoding",
    "upgrade",
))  # fmt: skip
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?")
_MEDIA_TYPE = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,63}/[a-z0-9][a-z0-9!#$&^_.+-]{0,126}")
_USER_AGENT = "Glovebox"


async def request(
    gate: EgressGate, method: str, url: str, headers: Headers = (), body: bytes = b"", *, stream: Duplex
) -> None:
    """Make one HTTP request and pass the answer to ``stream`` as it comes, as ``serve`` says.

    What the guest takes to read counts towards ``request_seconds``. Raises only what ``gate``'s ``on_decision`` or
    ``stream`` raise.
    """
    asked = _Request(gate=gate, method=method, url=url, headers=headers, body=body, stream=stream)
    try:
        while await asked.hop():
            pass
    except RefusedError as refused:
        await stream.reset(refusal(refused, asked.hops))
    except PeerError as failed:
        # It may quote the server, which got the key.
        reason = gate.keys.new_mask().whole(str(failed)) if gate.keys else str(failed)
        reason = reason[:MAX_REASON]  # truncated only now: part of a key would not be masked
        failure = RefusedError("egress.failed", reason, "Try again later, or another address.")
        await stream.reset({"truncated": reason} if asked.answered else refusal(failure, asked.hops))


@dataclass(slots=True, kw_only=True)
class _Request:
    """One request and the state of its redirects."""

    gate: EgressGate
    method: str
    url: str
    headers: Headers
    body: bytes
    stream: Duplex
    clock: RequestClock = field(init=False)
    hops: list[dict[str, Any]] = field(default_factory=list)
    """Status and URL of each redirect, followed or refused."""
    seen: set[str] = field(default_factory=set)
    home: str | None = None
    """Host and port of the first server; None after a redirect to another."""
    answered: bool = False
    passed: int = 0
    """Bytes of the body that were passed on."""

    def __post_init__(self) -> None:
        self.clock = RequestClock(self.gate.limits)

    async def hop(self) -> bool:
        """Request from one server; return whether it redirected to a place to request next."""
        attempt = EgressAttempt(
            kind="request", asked=self.url, hop=len(self.hops), headers=self.headers, body=self.body,
            deadline=self.clock.deadline,
        )  # fmt: skip
        async with self.gate.recorded(attempt):
            target = attempt.target = parse_url(self.method, self.url)
            attempt.sent_headers, attempt.dropped = request_headers(
                self.headers, self.method, self.body, self.gate.limits
            )
            self._check_redirect(target)
            self.seen.add(target.url)
            if not self.hops:
                self.home = target.authority
            elif target.authority != self.home:
                self.home = None  # wherever redirects lead from there
            attempt.takes_key = self.home is not None
            async with self.gate.connect(attempt, target) as stream:
                return await self._exchange(attempt, target, stream)

    def _check_redirect(self, target: EgressTarget) -> None:
        if not self.hops:
            return
        most = self.gate.limits.hops
        if len(self.hops) > most:
            why = f"The request was redirected more than {most} times, now to {quoted(target.url)}."
        elif target.url in self.seen:
            why = "The redirects lead back to a URL that was already asked."
        elif target.scheme == "http" and self.hops[-1]["url"].startswith("https:"):
            why = "A redirect leads from https to http."
        else:
            return
        raise RefusedError("egress.redirect", why, "Ask for the final URL directly.")

    async def _exchange(self, attempt: EgressAttempt, target: EgressTarget, stream: ByteStream) -> bool:
        """Ask the server, and pass its answer on, or return True if it redirected."""
        gate = self.gate
        if target.scheme == "https":
            stream = await secure(stream, target.host, gate.tls, within(gate.limits.connect_seconds, attempt.deadline))
        exchange = Exchange(stream, self.clock, gate.limits)
        await exchange.send(attempt.sent_target or target, attempt.sent_headers, self.body)
        mask = gate.keys.new_mask() if gate.keys else None
        status, received = await exchange.head()
        if mask is not None:
            # A header name that contains a key is dropped: a client would read the rest of the head as the body.
            received = [(name, mask.whole(value)) for name, value in received if mask.whole(name) == name]
        answer = EgressAnswer(attempt=attempt, status=status, type=media_type(received))
        location = [value for name, value in received if name == "location"]
        if status in REDIRECTS and location and self.method in {"GET", "HEAD"}:
            if len(location) > 1:
                raise PeerError("The server redirected to several places at once.")
            gate.on_answer(answer)
            self.hops.append({"status": status, "url": target.url})
            self.url = _join(target.url, location[0])
            return True
        head = {
            "status": status,
            "headers": tuple((name, value) for name, value in received if name not in _NOT_RETURNED),
            "url": target.url,
            "hops": self.hops,
            "dropped": attempt.dropped,
        }
        await self._pass_answer(head, exchange, mask, answer)
        return False

    async def _pass_answer(
        self, head: Mapping[str, Any], exchange: Exchange, mask: StreamMask | None, answer: EgressAnswer
    ) -> None:
        self.answered, complete = True, False
        try:
            await self.stream.accept(head)
            async with aclosing(exchange.body()) as pieces:
                async for piece in pieces:
                    await self._pass_on(await _mask_piece(mask, piece) if mask else piece)
            await self._pass_on(mask.finish() if mask else b"")
            complete = True
        finally:
            self.gate.on_answer(replace(answer, bytes=self.passed, complete=complete))
        await self.stream.send_eof()

    async def _pass_on(self, data: bytes) -> None:
        if data:
            await self.stream.send(data)
            self.passed += len(data)


async def _mask_piece(mask: StreamMask, piece: bytes) -> bytes:
    """Mask keys in a piece, and let other tasks run in between."""
    passed = list[bytes]()
    for at in range(0, len(piece), PIECE_SEARCHED):
        passed.append(mask.feed(piece[at : at + PIECE_SEARCHED]))
        await checkpoint()
    return b"".join(passed)


def _join(base: str, location: str) -> str:
    """Resolve a ``Location``. ``urljoin`` drops control characters, so a location with any stays as it is."""
    if any(not "\x21" <= character <= "\x7e" for character in location):
        return location
    try:
        return urljoin(base, location)
    except ValueError:
        return location


def request_headers(
    headers: Headers, method: str, body: bytes, limits: EgressLimits, credential: Credential | None = None
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return the headers to send and the names of those left out.

    A credential whose key the request gets may name further headers. Raises RefusedError (``egress.header`` or
    ``egress.body``) if they are too long, repeated, or not plain text.
    """
    if body and method not in _WITH_BODY:
        raise RefusedError("egress.body", f"A {method} request carries no body.", "Put it into the URL's query.")
    if len(body) > limits.request_body_bytes:
        raise RefusedError(
            "egress.body", "The request's body is too large.", f"{limits.request_body_bytes} bytes are the limit."
        )
    if sum(len(name) + len(value) for name, value in headers) > limits.request_header_bytes:
        raise RefusedError(
            "egress.header", "The request's headers are too large.", f"{limits.request_header_bytes} bytes in all."
        )
    own = {name.lower() for name in credential.headers} if credential else set()
    fixed = {name.lower(): value for name, value in credential.set_headers.items()} if credential else {}
    passed: dict[str, str] = {}
    dropped: dict[str, None] = {}
    for written, value in headers:
        name = written.lower()
        typed = name == "content-type" and method in _WITH_BODY
        if name in fixed or not (typed or name in _PASSED or name in own):
            dropped[quoted(name)] = None
        elif name in passed or not _VALUE.fullmatch(value):
            raise RefusedError(
                "egress.header", f"The header {name} is said twice or is not plain text.", "Printable ASCII, once."
            )
        else:
            passed[name] = value
    passed |= fixed
    passed.setdefault("user-agent", _USER_AGENT)
    passed.setdefault("accept", "*/*")
    passed["accept-encoding"] = ACCEPTED
    return tuple(passed.items()), tuple(dropped)


def media_type(headers: Iterable[tuple[str, str]]) -> str | None:
    """Return a response's media type without parameters; None if missing or invalid."""
    said = next((value for name, value in headers if name == "content-type"), "").partition(";")[0].strip().lower()
    return said if _MEDIA_TYPE.fullmatch(said) else None
