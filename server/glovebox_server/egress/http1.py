"""One HTTP/1.1 request and its response over one connection that is used for nothing else.

h11 (sans-I/O) reads and writes the protocol; this module adds I/O, deadlines and bounds. The host builds the request
from parsed parts and reads only one response per connection, so request smuggling has no victim.
"""

import zlib
from collections.abc import AsyncGenerator, Iterator, Sequence

import anyio
import h11
from anyio.abc import ByteStream

from glovebox_profiles.egress.targets import EgressTarget
from glovebox_server.egress.events import READ_BYTES, EgressLimits, PeerError

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

    def __init__(self, limits: EgressLimits) -> None:
        self._limits = limits
        self.deadline = anyio.current_time() + limits.request_seconds
        """On the event loop's clock; connecting keeps to it too."""

    def wait(self) -> anyio.CancelScope:
        """Return a scope for one wait: the idle limit, or the rest of the total."""
        return anyio.move_on_after(max(0.0, min(self._limits.idle_seconds, self.deadline - anyio.current_time())))

    def expired(self) -> PeerError:
        """Return the error of the limit that ended a wait."""
        if anyio.current_time() >= self.deadline:
            return PeerError(f"The request took longer than {self._limits.request_seconds:g} seconds.")
        return PeerError(f"The server was silent for {self._limits.idle_seconds:g} seconds.")


class Exchange:
    """One exchange: call ``send``, then ``head``, then ``body``."""

    def __init__(self, stream: ByteStream, clock: RequestClock, limits: EgressLimits) -> None:
        self._stream, self._clock, self._limits = stream, clock, limits
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=limits.header_bytes)
        self._received = 0
        self._encoding = ""
        self._over = self._closed = False

    async def send(self, target: EgressTarget, headers: Sequence[tuple[str, str]], body: bytes) -> None:
        """Send the request; ``headers`` excludes ``Host``, ``Connection`` and length. Raises PeerError if not taken."""
        own = [("Host", target.authority), ("Connection", "close")]
        if body or target.method in {"POST", "PUT", "PATCH"}:
            own.append(("Content-Length", str(len(body))))
        request = h11.Request(method=target.method, target=target.resource, headers=[*own, *headers])
        data = [self._http.send(request), self._http.send(h11.Data(data=body)) if body else b""]
        data.append(self._http.send(h11.EndOfMessage()))
        with self._clock.wait() as scope:
            try:
                await self._stream.send(b"".join(piece for piece in data if piece))
            except _BROKEN:
                raise PeerError("The server closed the connection.") from None
        if scope.cancelled_caught:
            raise self._clock.expired()

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
                raise PeerError("The server sent too many interim responses.")
        headers = [(name.decode("ascii"), value.decode("latin-1")) for name, value in event.headers]
        if sum(len(name) + len(value) for name, value in headers) > self._limits.header_bytes:
            raise PeerError(f"The response has more than {self._limits.header_bytes} bytes of headers.")
        names = {name for name, _ in headers}
        if {"content-length", "transfer-encoding"} <= names:
            # RFC 9112 section 6.1: such a message "might indicate an attempt to perform request smuggling".
            raise PeerError("The response states its length in two ways at once.")
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
                    raise PeerError(f"The body was cut at {limits.body_bytes} bytes.")
        decoder.finish()

    async def _data(self) -> bytes:
        """Return the body bytes of one read, none at the end: many tiny chunks become one piece."""
        pieces: list[bytes] = []
        while not self._over:
            event = self._event()
            if isinstance(event, h11.Data):
                pieces.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                self._over = True
            elif pieces:
                break
            else:
                self._http.receive_data(await self._read())
        return b"".join(pieces)

    def _event(self) -> h11.Event | None:
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise PeerError(f"The server broke HTTP/1.1: {str(error)!a}.") from None
        return event if isinstance(event, h11.Event) else None

    async def _read(self) -> bytes:
        # Framing costs bytes too: a chunk of one byte has five around it, and endless interim responses have no body.
        if self._received > self._limits.body_bytes + 2 * self._limits.header_bytes:
            raise PeerError(f"The response was cut at {self._received} received bytes.")
        with self._clock.wait():
            try:
                data = await self._stream.receive(READ_BYTES)
            except anyio.EndOfStream:
                if self._closed or self._received == 0:
                    raise PeerError("The server closed the connection without a response.") from None
                self._closed = True
                return b""
            except _BROKEN:
                raise PeerError("The connection broke.") from None
            self._received += len(data)
            return data
        raise self._clock.expired()


class BodyDecoder:
    """A decoder of one response's body."""

    def __init__(self, encoding: str, *, ratio: int, grace: int) -> None:
        """Take the ``Content-Encoding``, decoded bytes allowed per received byte, and bytes free of that ratio.

        Raises PeerError for an encoding that was not offered, or several at once.
        """
        name = encoding.strip().lower()
        if name not in {"", "identity", "gzip", "x-gzip", "deflate"}:
            raise PeerError("The server used a content encoding that was not asked for.")
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
                raise PeerError("The compressed body is corrupt.") from None
            data = inflate.unconsumed_tail or inflate.unused_data
            self._decoded += len(piece)
            if self._decoded > self._grace + self._ratio * self._received:
                raise PeerError(f"The body decompresses to more than {self._ratio} times its size.")
            if piece:
                yield piece
            if inflate.eof:
                if data:
                    raise PeerError("Bytes follow the end of the compressed body.")
                return

    def finish(self) -> None:
        """End the body. Raises PeerError if the compressed stream is incomplete."""
        if self._inflate is not None and self._received and not self._inflate.eof:
            raise PeerError("The compressed body is cut short.")
