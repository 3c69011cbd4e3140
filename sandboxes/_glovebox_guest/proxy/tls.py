"""Terminates a program's TLS with a certificate from the host: the proxy reads the plain text.

``ssl``'s own C module does the work, between two buffers: no socket of ours ever blocks. See ``proxy.listener``.
"""

from __future__ import annotations

import os

from _glovebox_guest.loop import Loop, StreamHandler
from _glovebox_guest.proxy.http import Tunnel
from _glovebox_guest.stdlib import Any, Callable, Mapping, socket, ssl

_READ = 64 * 1024
_SHUT_WR = 1
_LINGER = 2 * 1024 * 1024
"""Bytes discarded of a program that still sends after the end: closing at once would lose it the answer."""
_PROTOCOLS = b"\x08http/1.1"
"""The ALPN offer (RFC 7301 section 3.1): the proxy reads nothing else."""


class Inspection:
    """Fetches the TLS context of each server from the host, once."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._contexts: dict[str, ssl._SSLContext | None] = {}

    def ask(
        self,
        tunnel: Tunnel,
        refused: Callable[[Mapping[str, Any]], None],
        answered: Callable[[ssl._SSLContext | None], None],
    ) -> int:
        """Call one of the two, now or later; return the stream that asks the host, 0 for none.

        ``refused`` takes the host's refusal, ``answered`` the context that terminates TLS, or None for a tunnel.
        """
        if tunnel.authority in self._contexts:
            answered(self._contexts[tunnel.authority])
            return 0

        def keep(leaf: str) -> None:
            try:
                # Bounded by the number of certificates that the host provides.
                context = self._contexts[tunnel.authority] = _context(leaf) if leaf else None
            except OSError as problem:  # no memory, no descriptors
                refused({"rule": "egress.failed", "reason": f"TLS cannot be ended here: {problem}.", "hint": ""})
                return
            answered(context)

        stream = self._loop.open("certificate", tunnel.meta, _CertificateStream(keep, refused), duplex=True)
        self._loop.send(self._loop.wire.end(stream))
        return stream


class _CertificateStream(StreamHandler):
    def __init__(self, keep: Callable[[str], None], refused: Callable[[Mapping[str, Any]], None]) -> None:
        self._keep = keep
        self._refused = refused
        self._leaf = ""

    def on_accept(self, body: Mapping[str, Any]) -> None:
        self._leaf = body["leaf"]

    def on_end(self) -> None:
        # Only now: open streams are bounded, and the callback opens another.
        self._keep(self._leaf)

    def on_reset(self, body: Mapping[str, Any]) -> None:
        self._refused(body)


class Plain:
    """Passes bytes between a program's TLS socket and ``end``; reads on when it has sent."""

    def __init__(  # noqa: PLR0917 - each is needed
        self,
        loop: Loop,
        client: socket.socket,
        context: ssl._SSLContext,
        first: bytes,
        established: bytes,
        tell: Callable[[str], None],
        tunnel: Tunnel,
        gone: Callable[[], None],
    ) -> None:
        """Take over the program's socket until ``close``.

        ``first`` are TLS bytes that have come already. ``established`` is an answer in the clear, sent before TLS.
        ``tell`` takes notices for the program's standard error. ``gone`` is called when nothing is left of it.
        """
        self._loop = loop
        self._client = client
        self._tell = tell
        self._tunnel = tunnel
        self._gone = gone
        self._inside, self.end = socket.socketpair()
        self._inside.setblocking(False)
        self.end.setblocking(False)
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context._wrap_bio(self._came, self._goes, True)  # type: ignore[attr-defined]  # noqa: SLF001
        self._up = bytearray()  # to the proxy
        self._down = bytearray(established)  # to the program
        self._begun = bool(first)
        self._agreed = False  # the handshake is over
        self._ending = False  # the proxy has said all
        self._over = False  # so has the program, or it does not read
        self._discarded = 0
        self._came.write(first)

    def start(self) -> None:
        """Start with the TLS bytes received so far."""
        self._loop.watch(self._client.fileno(), self._from_program)
        self._loop.watch(self._inside.fileno(), self._from_proxy)
        self._turn()

    def _from_program(self) -> None:
        try:
            data = self._client.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            if self._begun and not self._agreed:
                self._told("the program ended it in its handshake: " + _PINNED)
            self.close()
            return
        if self._ending:
            self._discarded += len(data)
            if self._discarded > _LINGER:
                self.close()
            return
        self._begun = True
        self._came.write(data)
        self._turn()

    def _from_proxy(self) -> None:
        try:
            data = self._inside.recv(_READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            if data:
                view = memoryview(data)
                while view:
                    view = view[self._tls.write(view) :]
            else:
                self._ending = True
                self._loop.unwatch(self._inside.fileno())
                self._tls.shutdown()
        except ssl.SSLError:
            # The shutdown waits for the program's close_notify, or there is no session to send it in.
            if data:
                self.close()
                return
        self._flush()

    def _turn(self) -> None:
        try:
            if not self._agreed:
                self._tls.do_handshake()
                self._agreed = True
            while not self._up:
                data = self._tls.read(_READ)
                if not data:  # the program's close_notify
                    self.close()
                    return
                self._up += data
                self._pass_up()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as problem:
            self._flush()  # the alert, if there is one
            reason = str(problem.reason or "unknown")
            if self._agreed:
                self._told(f"its TLS broke ({reason}).")
            elif "ALERT" in reason:
                self._told(f"the program ended it ({reason}): {_PINNED}")
            else:
                self._told(f"it is no TLS ({reason}): {_FOREIGN}")
            self.close()
            return
        self._flush()

    def _pass_up(self) -> None:
        """Send to the proxy; read on when it has taken all."""
        if self.closed:
            return
        try:
            while self._up:
                del self._up[: self._inside.send(self._up)]
        except BlockingIOError:
            self._loop.unwatch(self._client.fileno())
            self._loop.watch_writing(self._inside.fileno(), self._passed_up)
        except OSError:
            self._up.clear()  # the answer came before all of its request was sent

    def _passed_up(self) -> None:
        self._loop.watch_writing(self._inside.fileno(), None)
        self._pass_up()
        if not self._up:
            self._loop.watch(self._client.fileno(), self._from_program)
            self._turn()

    def _flush(self) -> None:
        """Send to the program; read from the proxy when it has taken all."""
        if self.closed:
            return
        self._down += self._goes.read()
        try:
            while self._down:
                del self._down[: self._client.send(self._down)]
        except BlockingIOError:
            self._loop.unwatch(self._inside.fileno())
            self._loop.watch_writing(self._client.fileno(), self._flush)
            if len(self._down) > _LINGER:  # a program that makes TLS itself answer, and reads none of it
                self.close()
            return
        except OSError:
            self.close()
            return
        self._loop.watch_writing(self._client.fileno(), None)
        if self._ending and self._over:
            self.close()
        elif self._ending:
            try:
                self._client.shutdown(_SHUT_WR)  # the program reads the end before what it still sends is refused
            except OSError:
                self.close()
        elif not self._loop.watches(self._inside.fileno()):
            self._loop.watch(self._inside.fileno(), self._from_proxy)

    def finish(self) -> None:
        """Close, once the program has received the answer."""
        self._over = True
        if self._ending:
            self._flush()

    @property
    def closed(self) -> bool:
        """Return whether nothing is left of it."""
        return self._client.fileno() < 0

    def _told(self, what: str) -> None:
        self._tell(f"{self._tunnel.asked} was cut off: {what}")

    def close(self) -> None:
        """End both sides; idempotent."""
        if self.closed:
            return
        for each in (self._client, self._inside):
            self._loop.unwatch(each.fileno())
            self._loop.watch_writing(each.fileno(), None)
            each.close()
        self._gone()


_PINNED = (
    "it may not accept the certificate that SSL_CERT_FILE lets it verify. What brings certificates of its own needs a "
    "rule with CONNECT."
)
_FOREIGN = "with inspected TLS only HTTPS passes. Anything else needs a rule with CONNECT."


def _context(leaf: str) -> ssl._SSLContext:
    """Return a server's TLS context: 1.2 or later, no client certificates, no resumption."""
    context = ssl._SSLContext(ssl.PROTOCOL_TLS_SERVER)  # noqa: SLF001 - as `ssl` calls it
    context.minimum_version = ssl.PROTO_TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0
    context._set_alpn_protocols(_PROTOCOLS)  # type: ignore[attr-defined]  # noqa: SLF001
    # OpenSSL reads files only, and a memfd has no name for other processes.
    descriptor = os.memfd_create("leaf", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, leaf.encode("ascii"))
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context
