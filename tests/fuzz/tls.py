"""What ends a program's TLS, against any program: it never raises, passes on what was said, and goes with the program.

The program is a real client of TLS, whose records the input breaks, cuts and adds to.
"""

import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from socket import SHUT_WR, socket, socketpair
from typing import Any, cast

from tests.fuzz.harness import bounded

from _glovebox_guest.loop import Loop
from _glovebox_guest.proxy.http import Tunnel
from _glovebox_guest.proxy.tls import Plain, _context
from glovebox_server.egress.issuer import Issuer

_STEPS = 64
_SAID = b"0123456789abcdef"


class _Loop(Loop):
    """The guest's loop in turns instead of waiting: whoever is watched is called, ready or not."""

    def __init__(self) -> None:
        self.readers: dict[int, Callable[[], None]] = {}
        self.writers: dict[int, Callable[[], None]] = {}

    def watch(self, descriptor: int, readable: Callable[[], None]) -> None:
        """Remember it."""
        assert descriptor >= 0
        self.readers[descriptor] = readable

    def unwatch(self, descriptor: int) -> None:
        """Forget it."""
        self.readers.pop(descriptor, None)

    def watches(self, descriptor: int) -> bool:
        """Whether it is remembered."""
        return descriptor in self.readers

    def watch_writing(self, descriptor: int, writable: Callable[[], None] | None) -> None:
        """Remember or forget it."""
        self.writers.pop(descriptor, None)
        if writable is not None:
            self.writers[descriptor] = writable

    def turn(self) -> None:
        """Call each once."""
        for watched in (self.writers, self.readers):
            for descriptor, each in tuple(watched.items()):
                if watched.get(descriptor) is each:
                    each()


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

    def read(self) -> None:
        """Take what has come."""
        with suppress(OSError):
            self._came.write(self._end.recv(65536))


@cache
def _contexts() -> tuple[Any, ssl.SSLContext]:
    """What TLS is ended with, and what trusts it."""
    issuer = Issuer(["a.example"])
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.load_verify_locations(cadata=issuer.pem.decode())
    return _context(issuer.leaf("a.example")), trusting


def check(data: bytes) -> None:
    """Three bytes a step; first, if they begin with 255, bytes that came with the request for the tunnel."""
    ending, trusting = _contexts()
    loop, notices, gone, heard = _Loop(), list[str](), list[int](), bytearray()
    theirs, ours = socketpair()
    for end in (theirs, ours):
        end.setblocking(False)
    first = data[:40] if data[:1] == b"\xff" else b""
    with bounded():
        plain = Plain(
            loop, cast("Any", ours), ending, first, b"", notices.append, Tunnel("a.example:443"), lambda: gone.append(1)
        )
        plain.start()
        client = _Client(theirs, trusting)
        for at in range(0, min(len(data), 3 * _STEPS), 3):
            what, where, how = (*data[at : at + 3], 0, 0)[:3]
            client.step(what, where, how)
            for _ in range(1 + (what >> 7)):
                loop.turn()
            _proxied(plain, heard, ends=bool(how & 8))
            loop.turn()
            client.read()
        theirs.close()
        for _ in range(4):
            loop.turn()
            _proxied(plain, heard, ends=False)
        plain.end.close()
        plain.finish()
        for _ in range(4):
            loop.turn()
    assert client.said.startswith(heard), "something was heard that was not said"
    assert plain.closed, "it outlives its program"
    assert (gone, loop.readers, loop.writers) == ([1], {}, {})
    assert len(notices) <= 1
    assert all(notice.isprintable() for notice in notices)


def _proxied(plain: Plain, heard: bytearray, *, ends: bool) -> None:
    """The proxy's side: it keeps what it hears, says it again, and may end."""
    if plain.end.fileno() < 0:
        return
    with suppress(OSError):
        data = plain.end.recv(65536)
        heard += data
        plain.end.send(data)
        if ends:
            plain.end.shutdown(SHUT_WR)
