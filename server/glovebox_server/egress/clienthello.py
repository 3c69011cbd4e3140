"""Reads the server name from a TLS ClientHello incrementally. Sans-I/O: no sockets, no anyio.

Rule 1  Every byte is hostile; nothing is buffered beyond ``MAX_HELLO``, and each byte is read once.
Rule 2  The first byte must be that of a TLS handshake record: plain HTTP or SSH is refused at once.
Rule 3  Exactly one host name in exactly one ``server_name`` extension; none, two or an encrypted one is refused.
Sources: RFC 8446 sections 4.1.2 and 5.1, RFC 6066 section 3, RFC 9849 (encrypted ClientHello).
"""

from glovebox_profiles.egress.targets import parse_host
from glovebox_sandboxes.contract.errors import RefusedError

#: Post-quantum key shares make hellos of about 2 KiB, long session tickets 4 more.
MAX_HELLO = 16 * 1024

_HANDSHAKE_RECORD = 22
_TLS_MAJOR = 3
_RECORD_HEADER = 5
_CLIENT_HELLO = 1
_MESSAGE_HEADER = 4
_SERVER_NAME = 0
_HOST_NAME = 0
#: encrypted_client_hello, and the encrypted_server_name draft it replaced.
_ENCRYPTED = frozenset({0xFE0D, 0xFFCE})


class ClientHello:
    """A parser that is fed the client's bytes until it returns the name."""

    def __init__(self) -> None:
        self.raw = bytearray()
        """Everything fed so far, to be passed on once the name has been checked."""
        self._at = 0
        self._message = bytearray()

    @property
    def room(self) -> int:
        """Return how many more bytes it takes; read no more at a time, for others may follow the hello."""
        return MAX_HELLO - len(self.raw)

    def feed(self, data: bytes) -> str | None:
        """Take more bytes; return the canonical server name, or None while the hello is incomplete.

        Raises RefusedError (``egress.sni``) if it is no ClientHello, or has no single readable server name.
        """
        if len(data) > self.room:
            raise _refused(f"the first {MAX_HELLO} bytes hold no complete TLS ClientHello")
        self.raw += data
        while self._take_record():
            pass
        if not self._message:
            return None
        if self._message[0] != _CLIENT_HELLO:
            raise _refused("the first TLS message is not a ClientHello")
        if len(self._message) < _MESSAGE_HEADER:
            return None
        length = int.from_bytes(self._message[1:_MESSAGE_HEADER], "big")
        if length > MAX_HELLO:
            raise _refused(f"the ClientHello announces more than {MAX_HELLO} bytes")
        if len(self._message) < _MESSAGE_HEADER + length:
            return None
        if len(self._message) > _MESSAGE_HEADER + length:
            raise _refused("another message follows the ClientHello in its record")
        return _server_name(_Fields(bytes(self._message[_MESSAGE_HEADER:])))

    def _take_record(self) -> bool:
        header = self.raw[self._at : self._at + _RECORD_HEADER]
        if (header and header[0] != _HANDSHAKE_RECORD) or (len(header) > 1 and header[1] != _TLS_MAJOR):
            raise _refused("the bytes are not TLS")
        if len(header) < _RECORD_HEADER:
            return False
        length = int.from_bytes(header[3:], "big")
        if not 0 < length <= MAX_HELLO:
            raise _refused("a TLS record has an impossible length")
        end = self._at + _RECORD_HEADER + length
        if len(self.raw) < end:
            return False
        self._message += self.raw[self._at + _RECORD_HEADER : end]
        self._at = end
        return True


class _Fields:
    """A cursor over length-prefixed fields that refuses to read past the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise _refused("the ClientHello is cut short")
        part, self._at = self._data[self._at : end], end
        return part

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._at)

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def vector(self, size: int) -> "_Fields":
        return _Fields(self.take(self.number(size)))


def _server_name(hello: _Fields) -> str:
    hello.take(2 + 32)  # version, random
    hello.vector(1)  # session id
    hello.vector(2)  # cipher suites
    hello.vector(1)  # compression methods
    if not hello:
        raise _refused("the ClientHello has no server name")
    extensions = hello.vector(2)
    if hello:
        raise _refused("bytes follow the extensions of the ClientHello")
    seen: dict[int, _Fields] = {}
    while extensions:
        kind = extensions.number(2)
        if kind in seen:
            raise _refused("an extension of the ClientHello stands there twice")
        if kind in _ENCRYPTED:
            raise _refused("the server name is encrypted")
        seen[kind] = extensions.vector(2)
    if _SERVER_NAME not in seen:
        raise _refused("the ClientHello has no server name")
    names = seen[_SERVER_NAME].vector(2)
    if not names or names.number(1) != _HOST_NAME:
        raise _refused("the ClientHello has no server name")
    name = names.vector(2)
    if names or seen[_SERVER_NAME]:
        raise _refused("the ClientHello has more than one server name")
    return parse_host(name.rest().decode("latin-1"))


def _refused(what: str) -> RefusedError:
    return RefusedError(
        "egress.sni", f"The tunnel was closed: {what}.", "Speak TLS with the host's own name and without ECH."
    )
