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

import os

from _glovebox_guest.loop import Loop, StreamHandler
from _glovebox_guest.proxy.connection import ProxyConnection
from _glovebox_guest.stdlib import TYPE_CHECKING, Any, Callable, Mapping, socket

if TYPE_CHECKING:
    from _glovebox_guest.proxy.tls import Inspection

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
    "HTTP_PROXY": URL,
    "HTTPS_PROXY": URL,
    "NO_PROXY": _DIRECT,
    "http_proxy": URL,
    "https_proxy": URL,
    "no_proxy": _DIRECT,
    "SSL_CERT_FILE": TRUST,
}
"""Points a program to the proxy; its own server on loopback stays directly reachable."""
_TRUSTED = dict.fromkeys(("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"), TRUST)
"""For clients with authorities of their own, which lack the one that terminates TLS here."""


class Proxy:
    """Listens until ``close``. Created before the program it serves starts."""

    def __init__(self, loop: Loop, tell: Callable[[str], None]) -> None:
        """Listen, and put the host's trust store in place.

        ``tell`` takes notices for the program's standard error. Raises OSError without a loopback interface that is up.
        """
        self._loop = loop
        self._tell = tell
        self._told = 0
        self._streams = 0
        self._connections: set[ProxyConnection] = set()
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.setblocking(False)
        self._listener.bind(("127.0.0.1", PORT))
        self._listener.listen(MAX_CONNECTIONS)
        trust = _Trust(TRUST)
        loop.open("trust", {}, trust, duplex=True)
        while not trust.over:
            loop.step(None)
        self.environment = ENVIRONMENT
        self._inspects = trust.inspect
        self._inspection: Inspection | None = None
        if trust.inspect:
            self.environment = {**ENVIRONMENT, **_TRUSTED}
        loop.watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """End everything; the program is dead."""
        self._loop.unwatch(self._listener.fileno())
        for connection in tuple(self._connections):
            connection.close()
        self._listener.close()

    def _notice(self, text: str) -> None:
        self._told += 1
        if self._told <= MAX_TOLD:
            self._tell(text)

    def _may_open(self) -> bool:
        self._streams += 1
        return self._streams <= MAX_STREAMS

    def _inspecting(self) -> Inspection:
        """Return the TLS inspection: loaded at a program's first TLS connection, which takes milliseconds."""
        if self._inspection is None:
            from _glovebox_guest.proxy.tls import Inspection

            self._inspection = Inspection(self._loop)
        return self._inspection

    def _ended(self, connection: ProxyConnection) -> None:
        self._connections.discard(connection)
        if not self._loop.watches(self._listener.fileno()):
            self._loop.watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            self._loop.unwatch(self._listener.fileno())
            return
        try:
            descriptor, _ = self._listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001 - all that `socket.accept` does
        except OSError:  # the program gave it up, or it has no memory left for it
            return
        client = socket.socket(fileno=descriptor)
        self._connections.add(
            ProxyConnection(
                self._loop,
                client,
                may_open=self._may_open,
                tell=self._notice,
                gone=self._ended,
                inspection=self._inspecting if self._inspects else None,
            )
        )


class _Trust(StreamHandler):
    def __init__(self, path: str) -> None:
        self.over = False
        self.inspect = False
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)

    def on_accept(self, body: Mapping[str, Any]) -> None:
        self.inspect = body["inspect"]

    def on_data(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]

    def on_end(self) -> None:
        os.close(self._file)
        self.over = True

    def on_reset(self, body: Mapping[str, Any]) -> None:  # noqa: ARG002 - nobody is trusted then
        self.on_end()
