"""Terminates a program's TLS with a certificate from the host: the proxy reads the plain text.

``ssl``'s own C module does the work, between two buffers: no socket of ours ever blocks. See ``proxy.listener``.
"""

from __future__ import annotations

import os

from _glovebox_guest.stdlib import Any, Callable, socket, ssl

_READ = 64 * 1024
MAX_UNSENT = 2 * 1024 * 1024
"""Bytes for a program that makes TLS itself answer, and reads none of it."""
_PROTOCOLS = b"\x08http/1.1"
"""The ALPN offer (RFC 7301 section 3.1): the proxy reads nothing else."""
_PINNED = (
    "it may not accept the certificate that SSL_CERT_FILE lets it verify. What brings certificates of its own needs a "
    "rule with CONNECT."
)
_FOREIGN = "with inspected TLS only HTTPS passes. Anything else needs a rule with CONNECT."


class TlsSocket:
    """A program's TLS connection as a socket that does not block: what it receives and sends is plain text."""

    def __init__(
        self, client: socket.socket, context: Any, first: bytes, clear: bytes, tell: Callable[[str], None]
    ) -> None:
        """Take over the program's socket.

        ``first`` are TLS bytes that have come already, ``clear`` is an answer to send before TLS begins. ``tell`` takes
        why TLS failed, at most once.
        """
        self._client = client
        self._tell = tell
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context._wrap_bio(self._came, self._goes, True)  # noqa: SLF001 - as `ssl` calls it
        self._unsent = bytearray(clear)
        self._taken = 0  # bytes of plain text that are among the unsent ones
        self._begun = bool(first)
        self._agreed = False  # the handshake is over
        self._over = False  # nothing more is sent
        self._came.write(first)
        self.fileno = client.fileno
        self.close = client.close

    def recv(self, room: int) -> bytes:
        """Return what the program says, nothing at its end. Raises OSError, and BlockingIOError to wait."""
        while not self._over:
            try:
                if not self._agreed:
                    self._tls.do_handshake()
                    self._agreed = True
                return bytes(self._tls.read(room))
            except ssl.SSLWantReadError:
                self.push()
            except ssl.SSLError as problem:
                self._explain(str(problem.reason or "unknown"))
                self.push()  # the alert, if there is one
                raise
            try:
                data = self._client.recv(_READ)
            except ConnectionError:
                data = b""
            if not data:
                if self._begun and not self._agreed:
                    self._tell("the program ended it in its handshake: " + _PINNED)
                return b""
            self._begun = True
            self._came.write(data)
        return self._client.recv(room)

    def _explain(self, reason: str) -> None:
        if self._agreed:
            self._tell(f"its TLS broke ({reason}).")
        elif "ALERT" in reason:
            self._tell(f"the program ended it ({reason}): {_PINNED}")
        else:
            self._tell(f"it is no TLS ({reason}): {_FOREIGN}")

    def send(self, data: bytes | bytearray) -> int:
        """Send a beginning of ``data``; the same again after BlockingIOError. Raises OSError."""
        if not self._taken:
            self._taken = self._tls.write(memoryview(data)[:_READ])
        if not self.push():
            raise BlockingIOError
        taken, self._taken = self._taken, 0
        return taken

    def push(self) -> bool:
        """Send TLS's own bytes; return whether all are sent. Raises OSError."""
        self._unsent += self._goes.read()
        try:
            while self._unsent:
                del self._unsent[: self._client.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT:
                raise ConnectionError("the program reads nothing") from None
        return not self._unsent

    def shutdown(self, how: int) -> None:
        """Say that nothing follows; what the program still says is not decrypted.

        Raises OSError; after BlockingIOError it is to be called again.
        """
        self._over = True
        try:
            self._tls.shutdown()
        except ssl.SSLError:  # it waits for the program's close_notify, or there is no session to send one in
            self._taken = 0
        if not self.push():
            raise BlockingIOError
        self._client.shutdown(how)


def context_of(leaf: str) -> Any:
    """Return a server's TLS context: 1.2 or later, no client certificates, no resumption. Raises OSError."""
    context: Any = ssl._SSLContext(ssl.PROTOCOL_TLS_SERVER)  # noqa: SLF001 - as `ssl` calls it
    context.minimum_version = ssl.PROTO_TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    context.num_tickets = 0
    context._set_alpn_protocols(_PROTOCOLS)  # noqa: SLF001 - as `ssl` calls it
    # OpenSSL reads files only, and a memfd has no name for other processes.
    descriptor = os.memfd_create("leaf", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, leaf.encode("ascii"))
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context
