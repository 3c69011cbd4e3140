"""What ends a program's TLS, against any program: it never raises, passes on what was said, and goes with the program.

The program is a real client of TLS, whose records the input breaks, cuts and adds to.
"""

import ssl
from contextlib import suppress
from functools import cache
from socket import SHUT_WR, socket, socketpair
from typing import Any, cast

from tests.fuzz.harness import bounded

from _glovebox_guest.proxy.tls import TlsSocket, context_of
from glovebox_profiles.egress.rules import EgressRule
from glovebox_server.egress.authority import Authority

_STEPS = 64
_SAID = b"0123456789abcdef"


class _Client:
    """The program's TLS, and its end of the connection."""

    def __init__(self, end: socket, trusting: ssl.SSLContext) -> None:
        self.said = bytearray()
        self._end = end
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = trusting.wrap_bio(self._came, self._goes, server_hostname="a.example")

    def step(self, what: int, where: int, how: int) -> None:
        """Say something, and break it."""
        with suppress(ssl.SSLError):
            self._tls.do_handshake()
            if what & 1:
                self._tls.write(_SAID)
                self.said += _SAID
            if what & 6 == 6:
                self._tls.unwrap()
        records = bytearray(self._goes.read())
        if what & 8 and records:
            records[where % len(records)] ^= how
        if what & 16:
            del records[len(records) * where // 256 :]
        if what & 32:
            records += bytes([where]) * how
        with suppress(OSError):
            if records:
                self._end.send(records)
            if what & 64 and how & 1:
                self._end.shutdown(SHUT_WR)

    def say(self, data: bytes) -> None:
        """Send this, unbroken."""
        self._tls.write(data)
        self._end.send(self._goes.read())

    def heard(self) -> bytes:
        """What has come, nothing at an end that TLS itself tells of. Raises ssl.SSLError."""
        return self._tls.read(65536)

    def read(self) -> None:
        """Take what has come."""
        with suppress(OSError):
            self._came.write(self._end.recv(65536))


@cache
def _contexts() -> tuple[Any, ssl.SSLContext]:
    """What TLS is ended with, and what trusts it."""
    authority = Authority([EgressRule(host="a.example")])
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.load_verify_locations(cadata=authority.pem.decode())
    return context_of(authority.leaf("a.example")), trusting


def check(data: bytes) -> None:
    """Three bytes a step; first, if they begin with 255, bytes that came with the request for the tunnel."""
    ending, trusting = _contexts()
    notices, heard = list[str](), bytearray()
    theirs, ours = socketpair()
    for end in (theirs, ours):
        end.setblocking(False)
    first = data[:40] if data[:1] == b"\xff" else b""
    with bounded():
        plain = TlsSocket(cast("Any", ours), ending, first, b"", notices.append)
        client = _Client(theirs, trusting)
        for at in range(0, min(len(data), 3 * _STEPS), 3):
            what, where, how = (*data[at : at + 3], 0, 0)[:3]
            client.step(what, where, how)
            for _ in range(1 + (what >> 7)):
                _proxied(plain, heard, ends=bool(how & 8))
            client.read()
        theirs.close()
        for _ in range(4):
            _proxied(plain, heard, ends=False)
    assert client.said.startswith(heard), "something was heard that was not said"
    assert plain.fileno() < 0, "it outlives its program"
    assert len(notices) <= 1
    assert all(notice.isprintable() for notice in notices)


def _proxied(plain: TlsSocket, heard: bytearray, *, ends: bool) -> None:
    """The proxy's side: it keeps what it hears, says it again, may end, and closes with the program."""
    if plain.fileno() < 0:
        return
    over = plain._over
    try:
        data = plain.recv(65536)
        if not over:
            heard += data
            plain.send(data)
        if not data:
            plain.close()
        elif ends and not over:
            plain.shutdown(SHUT_WR)
    except BlockingIOError:
        return
    except OSError:
        plain.close()
