"""The sandbox's proxy against any program: it tells the host at most one request, within the rules of the wire."""

import select
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import h11
from tests.fuzz.harness import bounded, pieces

from _glovebox_guest.loop import Loop, StreamHandler
from _glovebox_guest.proxy.http import MAX_HEAD
from _glovebox_guest.proxy.listener import Proxy, ProxyConnection
from _glovebox_guest.wire import Wire

if TYPE_CHECKING:
    import _socket

_HEAD: Mapping[str, Any] = {
    "status": 200, "headers": [["a", "b"], ["content-location", "/"]], "hops": [302], "url": "http://b.example/",
    "dropped": ["'cookie'"],
}  # fmt: skip
_REFUSED = {"rule": "egress.no_rule", "reason": "No rule\r\nallows it.", "hint": "\x1b"}
_ROOM = 1 << 20


class _Program:
    """The program's end of one connection, which a test holds instead of the kernel."""

    def __init__(self, sent: list[bytes]) -> None:
        self._sent = sent[::-1]
        self.received = bytearray()
        self.open = True

    def setblocking(self, _flag: bool) -> None:
        """It never blocks."""

    def fileno(self) -> int:
        """Any number; negative once closed."""
        return 9 if self.open else -1

    def recv(self, room: int) -> bytes:
        """What is sent next, nothing at the end."""
        assert 0 < room <= _ROOM
        if not self._sent:
            return b""
        piece = self._sent.pop()
        if piece[room:]:
            self._sent.append(piece[room:])
        return piece[:room]

    def send(self, data: bytes) -> int:
        """Take half of it, as a slow reader."""
        taken = (len(data) + 1) // 2
        self.received += data[:taken]
        return taken

    def shutdown(self, _how: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing is read or written after this."""
        self.open = False


class _Loop(Loop):
    """The guest's loop without descriptors: what it sends is read by a host at once."""

    def __init__(self) -> None:
        self.wire, self.host = Wire("guest"), Wire("host")
        self._streams: dict[int, StreamHandler] = {}
        self._reading: dict[int, Callable[[], object]] = {}
        self.seen: list[Any] = []
        self.host.receive(self.wire.message("ready", {}))
        self.wire.receive(self.host.message("job", {}))

    def watch(self, descriptor: int, happened: Callable[[], object] | None, event: int = select.POLLIN) -> None:
        """Remember what reads; nothing needs to wait for writing, as the program takes all."""
        if event == select.POLLOUT:
            assert happened is None, descriptor
        elif happened is not None:
            self._reading[descriptor] = happened
        else:
            self._reading.pop(descriptor, None)

    def watches(self, descriptor: int) -> bool:
        """Whether it is remembered."""
        return descriptor in self._reading

    def send(self, frames: bytes) -> None:
        """Hand the frames to the host, which must find no fault with them."""
        self.seen += self.host.receive(frames)

    def read(self) -> bool:
        """Let the connection read once, if it wants to."""
        for readable in tuple(self._reading.values()):
            readable()
        return bool(self._reading)

    def hear(self, frames: bytes) -> None:
        """Take what the host says."""
        self.take(frames)


class _Proxy(Proxy):
    """What a connection asks of it, without sockets."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.contexts, self.streams = loop, None, 0
        self.notices: list[str] = []
        self.gone: list[ProxyConnection] = []

    def tell(self, text: str) -> None:
        """Keep it."""
        self.notices.append(text)

    def forget(self, connection: ProxyConnection) -> None:
        """Count it."""
        self.gone.append(connection)


def _answer(loop: _Loop, stream: int, how: int) -> None:
    """The host's side of one stream: a refusal, an answer that breaks off, or a whole one."""
    if not loop.host.is_open(stream):
        return
    if how == 0:
        loop.hear(loop.host.reset(stream, _REFUSED))
        return
    loop.hear(loop.host.accept(stream, _HEAD))
    loop.hear(loop.host.data(stream, b"answer"))
    if loop.host.is_open(stream):
        loop.hear(loop.host.reset(stream, {"truncated": "It was."}) if how == 1 else loop.host.end(stream))


def _served(data: bytes, size: int, how: int) -> tuple[list[dict[str, Any]], bytes, bytes]:
    """Return what was opened, which bytes went up, and what the program got."""
    loop, program = _Loop(), _Program(list(pieces(data, size)))
    proxy = _Proxy(loop)
    ProxyConnection(proxy, cast("_socket.socket", program))
    answered = False
    for _ in range(2 * len(data) + 8):
        reads = loop.read()
        # Only then, so that what went up before does not depend on how the bytes were cut.
        if not answered and any(event[0] == "end" for event in loop.seen):
            answered = reads = True
            _answer(loop, loop.seen[0][1], how)
        if not reads:
            break
    assert not program.open or loop.seen, "neither closed nor asked"
    assert len(proxy.gone) <= 1
    assert all(notice.isprintable() for notice in proxy.notices)
    opened = [event[2] for event in loop.seen if event[0] == "open"]
    up = b"".join(event[2] for event in loop.seen if event[0] == "data")
    return opened, up, bytes(program.received)


def _second_reading(data: bytes) -> tuple[str, str, bytes] | None:
    """Method, target and what has come of the body, as h11 reads them; None where it refuses or waits for more."""
    reader = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
    try:
        reader.receive_data(data)
        event = reader.next_event()
    except h11.RemoteProtocolError:
        return None
    if not isinstance(event, h11.Request):
        return None
    carried = b""
    while True:
        try:
            following = reader.next_event()
        except h11.RemoteProtocolError:
            break
        if not isinstance(following, h11.Data):
            break
        carried += following.data
    return event.method.decode(), event.target.decode("latin-1"), carried


def check(data: bytes) -> None:
    """First byte: what the host answers; second: the size of pieces; then what the program sends."""
    if len(data) < 2:
        return
    how, sent = data[0] % 3, data[2:]
    with bounded():
        opened, up, got = _served(sent, 0, how)
        cut = _served(sent, data[1] or 1, how)
    assert (opened, up, got) == cut
    assert len(opened) <= 1
    if not opened:
        assert not up
        assert got[:13] in (b"", b"HTTP/1.1 400 ")
        return
    head, _, body = sent.partition(b"\r\n\r\n")
    if opened[0]["kind"] == "connect":
        assert up == body
        return
    fields = [
        (name.lower(), value.strip(b" \t"))
        for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
    ]
    lengths = {value for name, value in fields if name == b"content-length"}
    assert len(lengths) <= 1
    chunked = b"transfer-encoding" in dict(fields)
    if not chunked:
        assert body.startswith(up)
        assert len(up) == min(int(next(iter(lengths), b"0")), len(body))
    else:
        assert not lengths
    meta = opened[0]["meta"]
    theirs = _second_reading(sent)
    if theirs is not None:
        assert theirs[:2] == (meta["method"], meta["url"])
        # Of chunks that it refuses, h11 hands out none.
        assert up.startswith(theirs[2]) if chunked else theirs[2] == up
    # What comes back is one response, after at most one word that the body may come.
    got = got.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert got.count(b"HTTP/1.1 ") <= 1
