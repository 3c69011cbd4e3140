"""A connection whose TLS the sandbox's proxy ends: what follows the end of TLS is nobody's, and the end is told."""

from socket import SHUT_WR, SO_LINGER, SOL_SOCKET, create_connection, create_server, socket, socketpair
from struct import pack
from typing import Any, cast

import pytest
from tests.fuzz.proxy import _Loop, _Proxy
from tests.fuzz.tls import _Client, _contexts

from _glovebox_guest.proxy.listener import ProxyConnection
from _glovebox_guest.proxy.tls import TlsSocket

_HEAD = {"status": 200, "headers": [], "hops": [], "url": "https://a.example/", "dropped": []}


def _pair() -> tuple[socket, socket]:
    ends = socketpair()
    for end in ends:
        end.setblocking(False)
    return ends


def _handshake(loop: _Loop, client: _Client) -> None:
    for _ in range(4):
        client.step(0, 0, 0)
        loop.read()
        client.read()


def test_a_body_that_goes_on_after_its_answer_is_discarded() -> None:
    """What it says behind the end of TLS is cipher text, and no part of its body."""
    ending, trusting = _contexts()
    loop, (theirs, ours) = _Loop(), _pair()
    proxy = _Proxy(loop)
    proxy.contexts = {"a.example:443": ending}
    ProxyConnection(proxy, cast("Any", ours))
    theirs.send(b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\n\r\n")
    loop.read()
    theirs.recv(65536)
    client = _Client(theirs, trusting)
    _handshake(loop, client)
    client.say(b"POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: 1000\r\n\r\nbody")
    loop.read()
    stream = loop.seen[0][1]
    loop.hear(loop.host.accept(stream, _HEAD) + loop.host.end(stream))
    client.say(b"more")
    loop.read()
    assert b"".join(event[2] for event in loop.seen if event[0] == "data") == b"body"
    theirs.close()
    loop.read()
    assert proxy.gone


def test_the_end_of_tls_waits_for_room() -> None:
    """A program that reads slowly is still told that nothing was cut off."""

    class Full:
        room = False

        def __init__(self, end: socket) -> None:
            self.fileno, self.close, self.recv, self.shutdown = end.fileno, end.close, end.recv, end.shutdown
            self._end = end

        def send(self, data: bytes) -> int:
            if not self.room:
                raise BlockingIOError
            return self._end.send(data)

    ending, trusting = _contexts()
    theirs, ours = _pair()
    full = Full(ours)
    plain, client = TlsSocket(cast("Any", full), ending, b"", b"", print), _Client(theirs, trusting)
    full.room = True
    for _ in range(3):
        client.step(0, 0, 0)
        with pytest.raises(BlockingIOError):
            plain.recv(1)
        client.read()
    full.room = False
    with pytest.raises(BlockingIOError):
        plain.shutdown(SHUT_WR)
    full.room = True
    plain.shutdown(SHUT_WR)
    client.read()
    assert client.heard() == b"", "the end came without TLS's own"
    theirs.close()
    plain.close()


def test_a_program_that_resets_its_handshake_is_told() -> None:
    """Some refuse a certificate without an alert."""
    ending, trusting = _contexts()
    with create_server(("127.0.0.1", 0)) as server:
        theirs = create_connection(server.getsockname())
        ours, _ = server.accept()
    told = list[str]()
    plain = TlsSocket(cast("Any", ours), ending, b"", b"", told.append)
    client = _Client(theirs, trusting)
    client.step(0, 0, 0)
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        plain.recv(1)
    theirs.setsockopt(SOL_SOCKET, SO_LINGER, pack("ii", 1, 0))
    theirs.close()
    assert plain.recv(1) == b""
    assert "SSL_CERT_FILE" in told[0]
    plain.close()
