"""One HTTP/1.1 exchange: what is sent is one request as another reader sees it; any answer is read or refused.

Nothing here waits, so there is no event loop: the coroutines are run to their ends by hand, which is many times faster.
"""

import zlib
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import anyio
import h11
from anyio.abc import ByteStream
from tests.fuzz.harness import bounded, pieces, text

from glovebox_profiles.egress.targets import METHODS, parse_url
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server.egress.events import READ_BYTES, EgressLimits, PeerError
from glovebox_server.egress.request import Exchange, RequestClock, request_headers

T = TypeVar("T")
LIMITS = EgressLimits(header_bytes=1024, body_bytes=4096, ratio_grace_bytes=512, request_header_bytes=1024)
"""Small, so that inputs of 16 KiB reach each of them."""
_BOUNDS = ("received bytes.", "times its size.", "interim responses.", "Receive buffer too long'.")
"""Ends of the sentences about bounds that are looked at with each read: these may depend on how the bytes were cut."""
_METHODS = sorted(METHODS - {"CONNECT"})
_GET = parse_url("GET", "http://files.example.org/")


class _Timeless(RequestClock):
    """A clock without an event loop: no wait ends because of it."""

    def __init__(self) -> None:
        """Have no deadline."""

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Wait without an end."""
        yield


class _Peer(ByteStream):
    """Takes everything, answers with these pieces, and closes."""

    def __init__(self, answer: Sequence[bytes] = ()) -> None:
        """Keep the pieces; the next one is the last."""
        self._answer = list(reversed(answer))
        self.taken = b""

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Hand out the next piece, in parts where it is too large for one read."""
        if not self._answer:
            raise anyio.EndOfStream
        piece = self._answer.pop()
        if len(piece) > max_bytes:
            self._answer.append(piece[max_bytes:])
        return piece[:max_bytes]

    async def send(self, item: bytes) -> None:
        """Keep what was sent."""
        self.taken += item

    async def send_eof(self) -> None:
        """Nothing to do."""

    async def aclose(self) -> None:
        """Nothing to do."""


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run to the end what never waits."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast("T", done.value)
    raise AssertionError("it waited")


async def _answered(answer: Sequence[bytes]) -> tuple[str, list[tuple[str, str]], bytes]:
    """Return how reading ended (a status or a sentence), the headers and the body."""
    headers: list[tuple[str, str]] = []
    body = b""
    exchange = Exchange(_Peer(answer), _Timeless(), LIMITS)
    await exchange.send(_GET, [], b"")
    try:
        status, headers = await exchange.head()
        async for piece in exchange.body():
            body += piece
    except PeerError as failed:
        return str(failed), headers, body
    return str(status), headers, body


def _packed(data: bytes) -> bytes:
    """First bytes: length of more head, how often the rest repeats; then that head, and the rest as a gzip body."""
    if len(data) < 2:
        return data
    head, rest = data[2 : 2 + data[0]], data[2 + data[0] :]
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    body = packer.compress(rest * data[1]) + packer.flush()
    said = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n" % len(body)
    return said + b"X: " + head + b"\r\n\r\n" + body


def _response(data: bytes, size: int) -> None:
    with bounded():
        end, headers, body = _run(_answered(list(pieces(data, 0))))
        cut = _run(_answered(list(pieces(data, size or 1))))
    for ended, _, read in ((end, headers, body), cut):
        assert len(read) <= LIMITS.body_bytes
        assert ended.isprintable()
        # h11 quotes a whole status line, of which each byte may be said in five characters.
        assert ended.isdigit() or (ended.endswith(".") and len(ended) < 6 * LIMITS.header_bytes)
    if not any(ended.endswith(_BOUNDS) for ended in (end, cut[0])) and len(data) <= READ_BYTES:
        # Which of two flaws is named first depends on how much is there; whether one is found does not.
        assert end.isdigit() == cut[0].isdigit()
        assert not end.isdigit() or (end, headers, body) == cut
    names = [name for name, _ in headers]
    assert not {"content-length", "transfer-encoding"} <= set(names)
    if end.isdigit() and end not in {"204", "304"} and not {"content-encoding", "transfer-encoding"} & set(names):
        said = [value for name, value in headers if name == "content-length"]
        assert not said or int(said[0]) == len(body)


def _request(data: bytes) -> None:
    """First byte: the method; then lines: the URL, headers up to an empty one, and the body."""
    method = _METHODS[data[0] % len(_METHODS)]
    head, _, body = data[1:].partition(b"\n\n")
    url, *lines = text(head).split("\n")
    asked = [(name, value) for name, _, value in (line.partition(":") for line in lines)]
    with bounded():
        try:
            target = parse_url(method, url)
            headers, _ = request_headers(asked, method, body, LIMITS)
        except RefusedError:
            return
        peer = _Peer()
        _run(Exchange(peer, _Timeless(), LIMITS).send(target, headers, body))
    reader = h11.Connection(h11.SERVER)
    reader.receive_data(peer.taken)
    event = reader.next_event()
    assert isinstance(event, h11.Request)
    assert (event.method.decode(), event.target.decode()) == (method, target.resource)
    names = [name for name, _ in event.headers]
    assert len(names) == len(set(names))
    assert dict(event.headers)[b"host"].decode() == target.authority
    assert peer.taken.partition(b"\r\n\r\n")[2] == body
    read = b""
    while isinstance(event := reader.next_event(), h11.Data):
        read += event.data
    assert isinstance(event, h11.EndOfMessage)
    assert read == body
    assert reader.trailing_data == (b"", False)


def check(data: bytes) -> None:
    """First byte: a request, a response as it is, or one with a packed body; for a response, second: size of pieces."""
    if len(data) < 2:
        return
    kind = data[0] % 3
    if kind == 0:
        _request(data[1:])
    else:
        _response(data[2:] if kind == 1 else _packed(data[2:]), data[1])
