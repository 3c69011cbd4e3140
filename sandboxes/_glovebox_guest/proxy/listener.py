"""An HTTP proxy on the sandbox's own loopback: the network of programs whose profile grants one.

It decides nothing and resolves nothing: each request goes to the host as a stream, see ``egress``.

Rule 1   ``CONNECT host:port`` becomes a ``connect`` stream: 200 once the host opened it, then bytes both ways.
         Where TLS is inspected, a ``certificate`` stream asks first. Unless it is to be a tunnel, TLS ends here, and
         the plain text is read as in rule 2, for the one server that was named.
Rule 2   A request with an absolute URL becomes a ``request`` stream; its answer comes back, and the connection closes.
Rule 3   A refusal is a 403 with its reason in the status line (all that many clients show) and in the body; a network
         failure is a 502. Anything else a program sends is a 400.
Rule 4   Failures that HTTP cannot carry, of a tunnel or within a body, are reported on the program's standard error.
Rule 5   A connection holds one head, and one window of the wire for the program; it reads on only as far as there is
         credit. There are MAX_CONNECTIONS of them, and none of their sockets ever blocks.
"""

from __future__ import annotations

import select

from _glovebox_guest.loop import Loop, ReceivedFile, StreamHandler
from _glovebox_guest.proxy.http import MAX_HEAD, BadRequestError, ProxyRequest, parse, refusal
from _glovebox_guest.stdlib import Any, Callable, Mapping, socket

PORT = 3128
"""The proxy's port on 127.0.0.1: the usual number, below the ephemeral ones."""
TRUST = "/tmp/.trust.pem"  # noqa: S108 - inside the sandbox
"""The certificate authorities the host trusts: a program in a tunnel verifies its peer itself."""
MAX_CONNECTIONS = 32
"""At once: half of the wire's streams, and four times what the host serves at once. More wait to be accepted."""
MAX_STREAMS = 8192
"""In one call: far beyond the host's bounds, and a quarter of the guest's stream ids, so that outputs have some."""
MAX_TOLD = 16
"""Notices on standard error; a program that continues after that does not read them."""

URL = f"http://127.0.0.1:{PORT}"
_DIRECT = "localhost,127.0.0.1,::1"
ENVIRONMENT: Mapping[str, str] = {
    "HTTP_PROXY": URL, "HTTPS_PROXY": URL, "NO_PROXY": _DIRECT, "http_proxy": URL, "https_proxy": URL,
    "no_proxy": _DIRECT, "SSL_CERT_FILE": TRUST,
}  # fmt: skip
"""Points a program to the proxy; its own server on loopback stays directly reachable."""
_TRUSTED = dict.fromkeys(("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"), TRUST)
"""For clients with authorities of their own, which lack the one that terminates TLS here."""


_READ = 64 * 1024
_LINGER = 2 * 1024 * 1024
"""Bytes discarded of a client that still sends after its answer: closing at once would lose it the answer."""
_SHUT_WR = 1


class Proxy:
    """Listens until ``close``. Created before the program it serves starts."""

    def __init__(self, loop: Loop, tell: Callable[[str], None]) -> None:
        """Listen, and put the host's trust store in place.

        ``tell`` takes notices for the program's standard error. Raises OSError without a loopback interface that is up.
        """
        self.loop = loop
        self._tell = tell
        self._told = 0
        self.streams = 0
        """Streams that were opened to the host, or refused."""
        self._connections: set[ProxyConnection] = set()
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.setblocking(False)
        self._listener.bind(("127.0.0.1", PORT))
        self._listener.listen(MAX_CONNECTIONS)
        trust = _Trust(TRUST)
        loop.open("trust", {}, trust, duplex=True)
        while not trust.over:
            loop.step(None)
        self.environment = {**ENVIRONMENT, **_TRUSTED} if trust.inspect else ENVIRONMENT
        self.contexts: dict[str, Any] | None = {} if trust.inspect else None
        """TLS context by server, None for a tunnel; the host's certificates bound it. None: TLS is not inspected."""
        loop.watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """End everything; the program is dead."""
        for connection in tuple(self._connections):
            connection.close()
        self.loop.watch(self._listener.fileno(), None)
        self._listener.close()

    def tell(self, text: str) -> None:
        """Print a notice on the program's standard error, as far as there is one that reads it."""
        self._told += 1
        if self._told <= MAX_TOLD:
            self._tell(text)

    def forget(self, connection: ProxyConnection) -> None:
        """Accept another connection in the place of one that is closed."""
        self._connections.discard(connection)
        self.loop.watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            self.loop.watch(self._listener.fileno(), None)
            return
        try:
            descriptor, _ = self._listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001 - all that `socket.accept` does
        except OSError:  # the program gave it up, or it has no memory left for it
            return
        client = socket.socket(fileno=descriptor)
        # An answer goes in pieces: none waits until the program has acknowledged the one before.
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.add(ProxyConnection(self, client))


class ProxyConnection(StreamHandler):
    """A program's connection to the proxy, as one stream to the host after the other.

    Upwards (program to host) it is in one of three states: reading a head (``_exchange`` is None), passing bytes on
    (``_left`` is not 0), or discarding what still comes; where another request may follow, that is kept. Downwards
    everything goes through ``_out``.
    """

    paced = True

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        """Serve the socket until ``close``."""
        client.setblocking(False)
        self._proxy = proxy
        self._loop = proxy.loop
        self._authority = ""  # of the server that the program speaks TLS with
        self._leaf: str | None = None  # the host's answer about TLS, until its stream has ended
        self._client: Any = client  # or the plain text of its TLS
        self._descriptor = client.fileno()
        self._head = bytearray()
        self._exchange: Any = None  # a ProxyRequest, from its head on
        self._stream = 0
        self._left = 0  # bytes that are still to be passed on
        self._ended = False  # our direction of the stream
        self._hung_up = False  # the program sends no more
        self._discarded = 0
        self._out = bytearray()
        self._owed = 0  # bytes of the host's for which credit is due once _out has gone
        self._answered = False
        self._then: Callable[[], None] | None = None  # once _out has gone; until it is set, more may be added
        self._shut = False  # _out has gone, and our sending direction is shut down
        self._loop.watch(self._descriptor, self._readable)

    # ------------------------------------------------------------------ upwards

    def _readable(self) -> None:
        # TLS may hold more than was read, of which poll(2) knows nothing, and may have to answer by itself.
        while self._read() and self._authority:
            pass
        if self._authority and self._client.fileno() >= 0:
            self._flush()

    def _read(self) -> bool:
        """Read once, if there is room; return whether there may be more."""
        room, take = self._upwards()
        if room <= 0:
            self._loop.watch(self._descriptor, None)  # until there is credit, or the next request is read
            return False
        try:
            data = self._client.recv(room)
        except BlockingIOError:
            return False
        except OSError:
            self.close()
            return False
        if data:
            take(data)
        else:
            self._hang_up()
        return self._loop.watches(self._descriptor)

    def _upwards(self) -> tuple[int, Callable[[bytes], object]]:
        """Return how many of the program's bytes there is room for, and what takes them."""
        if self._left:
            return min(self._left, self._loop.wire.credit(self._stream), _READ), self._pass_on
        if self._exchange is None:
            return MAX_HEAD - len(self._head), self._take
        if self._exchange.keeps and not self._shut:
            return MAX_HEAD - len(self._head), self._head.extend  # of the next request
        return _READ, self._discard

    def _discard(self, data: bytes) -> None:
        self._discarded += len(data)
        if self._discarded > _LINGER:
            self.close()

    def _resume(self) -> None:
        if not self._loop.watches(self._descriptor):
            self._loop.watch(self._descriptor, self._readable)
            if self._authority:
                self._readable()

    def _take(self, data: bytes) -> None:
        """Add to the head; once it is whole, send the request to the host."""
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0 and len(self._head) < MAX_HEAD:
            return
        try:
            exchange = parse(bytes(self._head), end, self._authority)
        except BadRequestError as problem:
            self._exchange = ProxyRequest("connect", "", {})
            if self._authority:
                self._proxy.tell(f"What came for {self._authority[:100]} was no request of HTTP/1.1: {problem}")
            self._refuse(400, "egress.proxy", str(problem))
            return
        self._exchange = exchange
        del self._head[: end + 4]
        contexts = self._proxy.contexts
        self._proxy.streams += 1
        if self._proxy.streams > MAX_STREAMS:
            self._head.clear()
            self._refuse(403, "egress.attempts", "This call has asked for too many connections.")
        elif contexts is None or exchange.kind != "connect":
            self._ask()
        elif exchange.meta["authority"] in contexts:
            self._secure(contexts[exchange.meta["authority"]])
        else:
            self._loop.watch(self._descriptor, None)
            self._stream = self._loop.open("certificate", exchange.meta, self, duplex=True)
            self._loop.send(self._loop.wire.end(self._stream))

    def _told_of_tls(self, leaf: str) -> None:
        """Keep the host's answer: a certificate, or nothing for a tunnel. Open streams are bounded, so it has ended."""
        contexts, authority = self._proxy.contexts, self._exchange.meta["authority"]
        if contexts is None or self._client.fileno() < 0:
            return
        from _glovebox_guest.proxy.tls import context_of

        try:
            contexts[authority] = context_of(leaf) if leaf else None
        except OSError as problem:  # no memory, no descriptors
            self._refuse(502, "egress.failed", f"TLS cannot be ended here: {problem}.")
            return
        self._secure(contexts[authority])

    def _secure(self, context: Any) -> None:
        """Terminate the program's TLS, or open a tunnel; continue with the plain text or the tunnel."""
        if context is None:
            self._resume()
            self._ask()
            return
        from _glovebox_guest.proxy.tls import TlsSocket

        exchange, first = self._exchange, bytes(self._head)
        self._head.clear()
        self._exchange = None
        self._authority = exchange.meta["authority"]

        def tell(what: str) -> None:
            self._proxy.tell(f"{exchange.asked} was cut off: {what}")

        self._client = TlsSocket(self._client, context, first, exchange.head({}), tell)
        self._loop.watch(self._descriptor, None)
        self._resume()

    def _ask(self) -> None:
        exchange, rest = self._exchange, bytes(self._head)
        self._stream = self._loop.open(exchange.kind, exchange.meta, self, duplex=True)
        self._left = exchange.body
        if exchange.expects:
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        del self._head[: self._left]
        self._pass_on(rest[: self._left])

    def _pass_on(self, data: bytes) -> None:
        chunks = self._exchange.chunks
        if chunks is None:
            self._left -= len(data)
        else:
            data = chunks.feed(data)
            if chunks.over:
                self._left = 0
                self._head += chunks.rest
        if data and self._loop.wire.is_open(self._stream):
            self._loop.send(self._loop.wire.data(self._stream, data))
        if chunks is not None and chunks.problem:
            self._left = 0
            self._loop.send(self._loop.wire.reset(self._stream))
            self._refuse(400, "egress.proxy", chunks.problem)
        elif self._left == 0:
            self._end_stream()

    def _hang_up(self) -> None:
        """End the program's side: half of a tunnel, but all of a request, whose answer has no reader."""
        self._hung_up = True
        self._left = 0
        is_tunnel = self._exchange is not None and self._exchange.kind == "connect"
        if is_tunnel and not self._shut and self._loop.wire.is_open(self._stream):
            self._loop.watch(self._descriptor, None)
            self._end_stream()
        else:
            self.close()

    def _end_stream(self) -> None:
        if not self._ended and self._loop.wire.is_open(self._stream):
            self._ended = True
            self._loop.send(self._loop.wire.end(self._stream))

    def on_credit(self) -> None:
        if self._left:
            self._resume()

    # ---------------------------------------------------------------- downwards

    def on_accept(self, body: Mapping[str, Any]) -> None:
        """Send the host's answer: the tunnel is open, or this is the response's head."""
        if "leaf" in body:
            self._leaf = body["leaf"]
            return
        self._answered = True
        self._write(self._exchange.head(body))

    def on_data(self, data: bytes) -> None:
        self._owed += len(data)
        self._write(self._exchange.data(data))

    def on_end(self) -> None:
        if self._leaf is not None:
            self._told_of_tls(self._leaf)
            self._leaf = None
            return
        another = self._exchange.keeps and self._ended and not self._hung_up
        self._write(self._exchange.last(), self._next if another else self._shut_down)

    def on_reset(self, body: Mapping[str, Any]) -> None:
        """Report a refusal, or an early end."""
        reply = {key: str(value) for key, value in body.items()}
        self._left = 0
        if not self._answered:
            rule = reply.get("rule", "egress.failed")
            status = 502 if rule == "egress.failed" else 403
            self._refuse(status, rule, reply.get("reason", ""), reply.get("hint", ""))
            return
        why = " ".join(reply[key] for key in ("truncated", "reason", "hint") if reply.get(key))
        if why:
            self._proxy.tell(f"{self._exchange.asked} was cut off: {why}")
        self._write(b"", self._shut_down)

    def _refuse(self, status: int, rule: str, reason: str, hint: str = "") -> None:
        self._answered = True
        self._write(refusal(status, rule, reason, hint), self._shut_down)

    def _write(self, data: bytes, then: Callable[[], None] | None = None) -> None:
        self._out += data
        self._then = then or self._then
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._client.send(self._out)]
            blocked = self._authority and not self._client.push()
        except BlockingIOError:
            blocked = True
        except OSError:
            self.close()
            return
        self._loop.watch(self._descriptor, self._flush if blocked else None, select.POLLOUT)
        if blocked:
            return
        owed, self._owed = self._owed, 0
        self._loop.send(self._loop.wire.consumed(self._stream, owed))
        if self._then is not None:
            self._then()

    def _next(self) -> None:
        self._exchange = None
        self._answered = self._ended = False
        self._then = None
        self._loop.watch(self._descriptor, self._readable)
        if self._head:
            self._take(b"")
        if self._authority and self._loop.watches(self._descriptor):
            self._readable()

    def _shut_down(self) -> None:
        """Close after the last answer, unless the program still sends, or would lose that answer."""
        self._shut = True
        try:
            self._client.shutdown(_SHUT_WR)
        except BlockingIOError:
            self._loop.watch(self._descriptor, self._flush, select.POLLOUT)
        except OSError:
            self.close()
            return
        if self._hung_up:
            self.close()
        elif self._authority or not self._loop.wire.is_open(self._stream):
            self._left = 0  # of the rest: behind the end of TLS it is not decrypted
            self._loop.watch(self._descriptor, self._readable)

    def close(self) -> None:
        """End the connection and its stream; idempotent."""
        if self._client.fileno() < 0:
            return
        self._loop.watch(self._descriptor, None)
        self._loop.watch(self._descriptor, None, select.POLLOUT)
        self._client.close()
        self._out.clear()
        self._left = 0
        self._loop.send(self._loop.wire.reset(self._stream))
        self._proxy.forget(self)


class _Trust(ReceivedFile):
    inspect = False

    def on_accept(self, body: Mapping[str, Any]) -> None:
        self.inspect = body["inspect"]

    def on_reset(self, body: Mapping[str, Any]) -> None:  # noqa: ARG002 - nobody is trusted then
        self.on_end()
