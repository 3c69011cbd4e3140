"""The ``request`` exchange: the sandbox names a method and a URL, the host does the rest.

The sandbox never speaks HTTP to a server: the request is built here from parsed parts, so method and path rules always
hold. Redirects are followed here too, and each one passes the gate like a new request. h11 (sans-I/O) reads and writes
the protocol; ``Exchange`` adds I/O, deadlines and bounds, and reads one response per connection, which is used for
nothing else: request smuggling has no victim.
"""

import re
import zlib
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import urljoin

import anyio
import h11
from anyio.abc import ByteStream
from anyio.lowlevel import checkpoint

from glovebox_profiles.egress.targets import EgressTarget, parse_url, quoted
from glovebox_profiles.model import Credential
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.session.connection import Duplex
from glovebox_server.egress import dial, events
from glovebox_server.egress.gate import EgressGate, StreamMask

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
#: Statuses whose ``Location`` a GET or HEAD may follow (RFC 9110 section 15.4); 300 and 304 are answers.
REDIRECTS = frozenset({301, 302, 303, 307, 308})

#: Encodings that the standard library decodes in bounded steps.
ACCEPTED = "gzip, deflate"
#: Decoded bytes returned at a time; a bomb is noticed after one piece.
PIECE_BYTES = 64 * 1024
#: zlib's window for automatic detection of gzip and zlib headers (https://www.zlib.net/manual.html#Advanced).
_AUTOMATIC = 32 + zlib.MAX_WBITS
_BROKEN = (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


class RequestClock:
    """The time one request has left, spent by one wait after another."""

    def __init__(self, limits: events.EgressLimits) -> None:
        self._limits = limits
        self.deadline = anyio.current_time() + limits.request_seconds
        """On the event loop's clock; connecting keeps to it too."""

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Wait in the block for the idle limit, or the rest of the total. Raises PeerError if it ended the wait."""
        left = self.deadline - anyio.current_time()
        with anyio.move_on_after(max(0.0, min(self._limits.idle_seconds, left))) as scope:
            yield
        if scope.cancelled_caught:
            if anyio.current_time() >= self.deadline:
                raise events.PeerError(f"The request took longer than {self._limits.request_seconds:g} seconds.")
            raise events.PeerError(f"The server was silent for {self._limits.idle_seconds:g} seconds.")


class Exchange:
    """One exchange: call ``send``, then ``head``, then ``body``."""

    def __init__(self, stream: ByteStream, clock: RequestClock, limits: events.EgressLimits) -> None:
        self._stream, self._clock, self._limits = stream, clock, limits
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=limits.header_bytes)
        self._received = 0
        self._encoding = ""
        self._closed = False

    async def send(self, target: EgressTarget, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        """Send the request; ``headers`` excludes ``Host``, ``Connection`` and length. Raises PeerError if not taken."""
        own = [("Host", target.authority), ("Connection", "close")]
        if body or target.method in _WITH_BODY:
            own.append(("Content-Length", str(len(body))))
        request = h11.Request(method=target.method, target=target.resource, headers=[*own, *headers])
        parts = [request, *([h11.Data(data=body)] if body else []), h11.EndOfMessage()]
        data = b"".join(self._http.send(part) or b"" for part in parts)
        with self._clock.wait():
            try:
                await self._stream.send(data)
            except _BROKEN:
                raise events.PeerError("The server closed the connection.") from None

    async def head(self) -> tuple[int, list[tuple[str, str]]]:
        """Return status and headers (lower-case names) of the final response.

        Raises PeerError if it is not HTTP/1.1, too large, too slow, an upgrade, or framed in two ways at once.
        """
        interim = 0
        while not isinstance(event := self._event(), h11.Response):
            if event is None:
                self._http.receive_data(await self._read())
                continue
            interim += 1
            if interim > self._limits.interim_responses:
                raise events.PeerError("The server sent too many interim responses.")
        headers = [(name.decode("ascii"), value.decode("latin-1")) for name, value in event.headers]
        if sum(len(name) + len(value) for name, value in headers) > self._limits.header_bytes:
            raise events.PeerError(f"The response has more than {self._limits.header_bytes} bytes of headers.")
        names = {name for name, _ in headers}
        if {"content-length", "transfer-encoding"} <= names:
            # RFC 9112 section 6.1: such a message "might indicate an attempt to perform request smuggling".
            raise events.PeerError("The response states its length in two ways at once.")
        self._encoding = ",".join(value for name, value in headers if name == "content-encoding")
        return event.status_code, headers

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield the decoded body in pieces. No cancel scope is held across a ``yield``: each wait has its own.

        Raises PeerError if the body breaks off, is too slow or too large; the pieces before are valid.
        """
        limits, passed = self._limits, 0
        decoder = BodyDecoder(self._encoding, ratio=limits.ratio, grace=limits.ratio_grace_bytes)
        while data := await self._data():
            for piece in decoder.feed(data):
                room = limits.body_bytes - passed
                if room:
                    yield piece[:room]
                passed += len(piece)
                if passed > limits.body_bytes:
                    raise events.PeerError(f"The body was cut at {limits.body_bytes} bytes.")
        decoder.finish()

    async def _data(self) -> bytes:
        """Return the body bytes of one read, none at the end: many tiny chunks become one piece."""
        pieces: list[bytes] = []
        while self._http.their_state is h11.SEND_BODY:
            event = self._event()
            if isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
            elif event is None and pieces:
                break
            elif event is None:
                self._http.receive_data(await self._read())
        return b"".join(pieces)

    def _event(self) -> h11.Event | None:
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise events.PeerError(f"The server broke HTTP/1.1: {str(error)!a}.") from None
        return event if isinstance(event, h11.Event) else None

    async def _read(self) -> bytes:
        # Framing costs bytes too: a chunk of one byte has five around it, and endless interim responses have no body.
        if self._received > self._limits.body_bytes + 2 * self._limits.header_bytes:
            raise events.PeerError(f"The response was cut at {self._received} received bytes.")
        with self._clock.wait():
            try:
                data = await self._stream.receive(events.READ_BYTES)
            except anyio.EndOfStream:
                if self._closed or self._received == 0:
                    raise events.PeerError("The server closed the connection without a response.") from None
                self._closed = True
                return b""
            except _BROKEN:
                raise events.PeerError("The connection broke.") from None
        self._received += len(data)
        return data


class BodyDecoder:
    """A decoder of one response's body."""

    def __init__(self, encoding: str, *, ratio: int, grace: int) -> None:
        """Take the ``Content-Encoding``, decoded bytes allowed per received byte, and bytes free of that ratio.

        Raises PeerError for an encoding that was not offered, or several at once.
        """
        name = encoding.strip().lower()
        if name not in {"", "identity", "gzip", "x-gzip", "deflate"}:
            raise events.PeerError("The server used a content encoding that was not asked for.")
        self._inflate = None if name in {"", "identity"} else zlib.decompressobj(_AUTOMATIC)
        self._ratio, self._grace = ratio, grace
        self._received = self._decoded = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield pieces of at most ``PIECE_BYTES``. Raises PeerError for corrupt or extra data, or above the ratio."""
        self._received += len(data)
        inflate = self._inflate
        if inflate is None:
            yield data
            return
        piece = b""
        # A full piece may leave more output inside zlib although all of the input is consumed.
        while data or len(piece) == PIECE_BYTES:
            try:
                piece = inflate.decompress(data, PIECE_BYTES)
            except zlib.error:
                raise events.PeerError("The compressed body is corrupt.") from None
            data = inflate.unconsumed_tail or inflate.unused_data
            self._decoded += len(piece)
            if self._decoded > self._grace + self._ratio * self._received:
                raise events.PeerError(f"The body decompresses to more than {self._ratio} times its size.")
            if piece:
                yield piece
            if inflate.eof:
                if data:
                    raise events.PeerError("Bytes follow the end of the compressed body.")
                return

    def finish(self) -> None:
        """End the body. Raises PeerError if the compressed stream is incomplete."""
        if self._inflate is not None and self._received and not self._inflate.eof:
            raise events.PeerError("The compressed body is truncated.")


async def request(
    gate: EgressGate, method: str, url: str, headers: events.Headers = (), body: bytes = b"", *, stream: Duplex
) -> None:
    """Make one HTTP request and pass the answer to ``stream`` as it comes, as ``serve`` says.

    What the guest takes to read counts towards ``request_seconds``. Raises only what ``gate``'s ``on_decision`` or
    ``stream`` raise.
    """
    clock = RequestClock(gate.limits)
    asked = _Request(gate=gate, method=method, url=url, headers=headers, body=body, stream=stream, clock=clock)
    try:
        while await asked.hop():
            pass
    except RefusedError as refused:
        await stream.reset(events.refusal(refused, asked.hops))
    except events.PeerError as failed:
        # It may quote the server, which got the key.
        reason = gate.keys.new_mask().whole(str(failed)) if gate.keys else str(failed)
        reason = reason[:MAX_REASON]  # truncated only now: part of a key would not be masked
        failure = RefusedError("egress.failed", reason, "Try again later, or another address.")
        await stream.reset({"truncated": reason} if asked.answered else events.refusal(failure, asked.hops))


@dataclass(slots=True, kw_only=True)
class _Request:
    """One request and the state of its redirects."""

    gate: EgressGate
    method: str
    url: str
    headers: events.Headers
    body: bytes
    stream: Duplex
    clock: RequestClock
    hops: list[dict[str, Any]] = field(default_factory=list)
    """Status and URL of each redirect, followed or refused."""
    seen: set[str] = field(default_factory=set)
    home: str | None = None
    """Host and port of the first server; None after a redirect to another."""
    answered: bool = False
    passed: int = 0
    """Bytes of the body that were passed on."""

    async def hop(self) -> bool:
        """Request from one server; return whether it redirected to a place to request next."""
        attempt = events.EgressAttempt(
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

    async def _exchange(self, attempt: events.EgressAttempt, target: EgressTarget, stream: ByteStream) -> bool:
        """Ask the server, and pass its answer on, or return True if it redirected."""
        gate = self.gate
        if target.scheme == "https":
            seconds = dial.within(gate.limits.connect_seconds, attempt.deadline)
            stream = await dial.secure(stream, target.host, gate.tls, seconds)
        exchange = Exchange(stream, self.clock, gate.limits)
        await exchange.send(attempt.sent_target or target, attempt.sent_headers, self.body)
        mask = gate.keys.new_mask() if gate.keys else None
        status, received = await exchange.head()
        if mask is not None:
            # A header name that contains a key is dropped: a client would read the rest of the head as the body.
            received = [(name, mask.whole(value)) for name, value in received if mask.whole(name) == name]
        answer = events.EgressAnswer(attempt=attempt, status=status, type=media_type(received))
        location = [value for name, value in received if name == "location"]
        if status in REDIRECTS and location and self.method in {"GET", "HEAD"}:
            if len(location) > 1:
                raise events.PeerError("The server redirected to several places at once.")
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
        self.answered, complete = True, False
        try:
            await self.stream.accept(head)
            async with aclosing(exchange.body()) as pieces:
                async for piece in pieces:
                    await self._pass_on(await _mask_piece(mask, piece) if mask else piece)
            await self._pass_on(mask.finish() if mask else b"")
            complete = True
        finally:
            gate.on_answer(replace(answer, bytes=self.passed, complete=complete))
        await self.stream.send_eof()
        return False

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
    with suppress(ValueError):
        if all("\x21" <= character <= "\x7e" for character in location):
            return urljoin(base, location)
    return location


def request_headers(
    headers: events.Headers, method: str, body: bytes, limits: events.EgressLimits, credential: Credential | None = None
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return the headers to send and the names of those left out.

    A credential whose key the request gets may name further headers. Raises RefusedError (``egress.header`` or
    ``egress.body``) if they are too long, repeated, or not plain text.
    """
    if body and method not in _WITH_BODY:
        raise RefusedError("egress.body", f"A {method} request carries no body.", "Put it into the URL's query.")
    if sum(len(name) + len(value) for name, value in headers) > limits.request_header_bytes:
        hint = f"{limits.request_header_bytes} bytes in all."
        raise RefusedError("egress.header", "The request's headers are too large.", hint)
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
            reason = f"The header {name} is said twice or is not plain text."
            raise RefusedError("egress.header", reason, "Printable ASCII, once.")
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
