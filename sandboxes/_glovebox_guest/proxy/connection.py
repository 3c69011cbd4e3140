"""Serves one connection of a program to the sandbox's proxy, as a stream to the host.

Upwards (program to host) it is in one of three states: reading a head (``_exchange`` is None), passing bytes on
(``_left`` is not 0), or discarding what still comes; where another request may follow, that is kept. Downwards
everything goes through ``_out``. It must not import ``proxy.listener``, which accepted it: what it needs of it is
passed in.
"""

from __future__ import annotations

from _glovebox_guest.loop import Loop, StreamHandler
from _glovebox_guest.proxy.http import MAX_HEAD, BadRequestError, ProxyRequest, Tunnel, parse, refusal
from _glovebox_guest.stdlib import TYPE_CHECKING, Any, Callable, Mapping, socket

if TYPE_CHECKING:
    from _glovebox_guest.proxy.tls import Inspection, Plain
    from _glovebox_guest.stdlib import ssl

_READ = 64 * 1024
_LINGER = 2 * 1024 * 1024
"""Bytes discarded of a client that still sends after its answer: closing at once would lose it the answer."""
_SHUT_WR = 1


class ProxyConnection(StreamHandler):
    """A client's connection to the proxy."""

    paced = True

    def __init__(
        self,
        loop: Loop,
        client: socket.socket,
        *,
        may_open: Callable[[], bool],
        tell: Callable[[str], None],
        gone: Callable[[ProxyConnection], None],
        inspection: Callable[[], Inspection] | None = None,
    ) -> None:
        """Serve the socket until ``close``.

        ``may_open`` returns whether one more stream may be opened to the host, and counts it. ``tell`` takes notices
        for the program's standard error. ``gone`` is called once, when the connection is closed. ``inspection`` is None
        where TLS is not inspected.
        """
        client.setblocking(False)
        self._loop = loop
        self._may_open = may_open
        self._tell = tell
        self._gone = gone
        self._inspection = inspection
        self._authority = ""  # of the server that the program speaks TLS with
        self._plain: Plain | None = None
        self._client = client
        self._descriptor = client.fileno()
        self._head = bytearray()
        self._exchange: Tunnel | ProxyRequest | None = None
        self._stream = 0
        self._left = 0  # bytes that are still to be passed on
        self._ended = False  # our direction of the stream
        self._hung_up = False  # the program sends no more
        self._discarded = 0
        self._out = bytearray()
        self._owed = 0  # bytes of the host's for which credit is due once _out has gone
        self._answered = False
        self._ending = False  # nothing will be added to _out
        self._another = False  # and then there may be another request
        self._shut = False  # _out has gone, and our sending direction is shut down
        self._loop.watch(self._descriptor, self._readable)

    # ------------------------------------------------------------------ upwards

    def _readable(self) -> None:
        room = self._room()
        if room <= 0:
            self._loop.unwatch(self._descriptor)  # until there is credit, or the next request is read
            return
        try:
            data = self._client.recv(room)
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        if not data:
            self._hang_up()
        elif self._exchange is None:
            self._take(data)
        elif self._left:
            self._pass_on(data)
        elif self._exchange.keeps and not self._shut:
            self._head += data  # of the next request
        else:
            self._discarded += len(data)
            if self._discarded > _LINGER:
                self.close()

    def _room(self) -> int:
        if self._left:
            return min(self._left, self._loop.wire.credit(self._stream), _READ)
        if self._exchange is None or (self._exchange.keeps and not self._shut):
            return MAX_HEAD - len(self._head)
        return _READ

    def _take(self, data: bytes) -> None:
        """Add to the head; once it is whole, send the request to the host."""
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0 and len(self._head) < MAX_HEAD:
            return
        try:
            exchange = parse(bytes(self._head), end, self._authority)
        except BadRequestError as problem:
            self._exchange = Tunnel("")
            if self._authority:
                self._tell(f"What came for {self._authority[:100]} was no request of HTTP/1.1: {problem}")
            self._refuse(400, "egress.proxy", str(problem), "")
            return
        rest = bytes(self._head[end + 4 :])
        self._head.clear()
        self._exchange = exchange
        if not self._may_open():
            self._refuse(403, "egress.attempts", "This call has asked for too many connections.", "")
            return
        if self._inspection is not None and isinstance(exchange, Tunnel):
            self._loop.unwatch(self._descriptor)
            asked = self._inspection().ask(exchange, self.on_reset, lambda leaf: self._secure(exchange, leaf, rest))
            self._stream = asked or self._stream  # unless it was answered already
            return
        self._ask(exchange, rest)

    def _secure(self, exchange: Tunnel, context: ssl._SSLContext | None, rest: bytes) -> None:
        """Terminate the program's TLS, or open a tunnel; continue with the plain text or the tunnel."""
        if self._client.fileno() < 0:
            return
        if context is None:
            self._loop.watch(self._descriptor, self._readable)
            self._ask(exchange, rest)
            return
        from _glovebox_guest.proxy.tls import Plain

        established = exchange.head({})
        try:
            self._plain = Plain(self._loop, self._client, context, rest, established, self._tell, exchange, self._over)
        except OSError:  # no descriptors
            self.close()
            return
        self._authority = exchange.authority
        self._exchange = None
        self._client = self._plain.end
        self._descriptor = self._client.fileno()
        self._loop.watch(self._descriptor, self._readable)
        self._plain.start()

    def _ask(self, exchange: Tunnel | ProxyRequest, rest: bytes) -> None:
        self._stream = self._loop.open(exchange.kind, exchange.meta, self, duplex=True)
        self._left = exchange.body
        if exchange.expects:
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._head += rest[self._left :]
        self._pass_on(rest[: self._left])

    def _pass_on(self, data: bytes) -> None:
        chunks = self._asked.chunks
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
            self._refuse(400, "egress.proxy", chunks.problem, "")
        elif self._left == 0:
            self._end_stream()

    def _hang_up(self) -> None:
        """End the program's side: half of a tunnel, but all of a request, whose answer has no reader."""
        self._hung_up = True
        self._left = 0
        if isinstance(self._exchange, Tunnel) and not self._shut and self._loop.wire.is_open(self._stream):
            self._loop.unwatch(self._descriptor)
            self._end_stream()
        else:
            self.close()

    def _end_stream(self) -> None:
        if not self._ended and self._loop.wire.is_open(self._stream):
            self._ended = True
            self._loop.send(self._loop.wire.end(self._stream))

    def on_credit(self) -> None:
        if self._left and not self._loop.watches(self._descriptor):
            self._loop.watch(self._descriptor, self._readable)

    # ---------------------------------------------------------------- downwards

    def on_accept(self, body: Mapping[str, Any]) -> None:
        """Send the host's answer: the tunnel is open, or this is the response's head."""
        self._answered = True
        self._write(self._asked.head(body))

    def on_data(self, data: bytes) -> None:
        self._owed += len(data)
        self._write(self._asked.data(data))

    def on_end(self) -> None:
        self._another = self._asked.keeps and self._ended and not self._hung_up
        self._end(self._asked.last())

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
            self._tell(f"{self._asked.asked} was cut off: {why}")
        self._end(b"")

    @property
    def _asked(self) -> Tunnel | ProxyRequest:
        if self._exchange is None:
            raise TypeError("there is no stream before there is a request")
        return self._exchange

    def _refuse(self, status: int, rule: str, reason: str, hint: str) -> None:
        self._answered = True
        self._end(refusal(status, rule, reason, hint))

    def _end(self, last: bytes) -> None:
        self._ending = True
        self._write(last)

    def _write(self, data: bytes) -> None:
        self._out += data
        self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                del self._out[: self._client.send(self._out)]
        except BlockingIOError:
            self._loop.watch_writing(self._descriptor, self._flush)
            return
        except OSError:
            self.close()
            return
        self._loop.watch_writing(self._descriptor, None)
        owed, self._owed = self._owed, 0
        self._loop.send(self._loop.wire.consumed(self._stream, owed))
        if self._ending and self._another:
            self._next()
        elif self._ending:
            self._shut_down()

    def _next(self) -> None:
        self._exchange = None
        self._answered = self._ended = self._ending = self._another = False
        if not self._loop.watches(self._descriptor):
            self._loop.watch(self._descriptor, self._readable)
        if self._head:
            self._take(b"")

    def _shut_down(self) -> None:
        """Close after the last answer, unless the program still sends, or would lose that answer."""
        if not self._shut:
            self._shut = True
            try:
                self._client.shutdown(_SHUT_WR)
            except OSError:
                self.close()
                return
        if self._hung_up:
            self.close()
        elif not self._loop.wire.is_open(self._stream):
            self._left = 0
            self._loop.watch(self._descriptor, self._readable)

    def close(self) -> None:
        """End the connection and its stream; idempotent."""
        if self._client.fileno() < 0:
            return
        self._loop.unwatch(self._descriptor)
        self._loop.watch_writing(self._descriptor, None)
        self._client.close()
        self._out.clear()
        self._left = 0
        self._loop.send(self._loop.wire.reset(self._stream))
        if self._plain is not None:
            self._plain.finish()
        self._over()

    def _over(self) -> None:
        if self._client.fileno() < 0 and (self._plain is None or self._plain.closed):
            self._gone(self)
