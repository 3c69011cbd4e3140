"""TLS ClientHellos for tests: the standard library's own, and hand-made ones with any extension."""

import ssl
from contextlib import suppress


def real_hello(name: str | None) -> bytes:
    """Return what OpenSSL sends first to a server of this name; without a name, no server_name extension."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def vector(size: int, data: bytes) -> bytes:
    """Return data behind its length in ``size`` bytes."""
    return len(data).to_bytes(size, "big") + data


def server_name(*names: bytes, kind: int = 0) -> tuple[int, bytes]:
    """Return a server_name extension."""
    return 0, vector(2, b"".join(bytes([kind]) + vector(2, name) for name in names))


def made_hello(*extensions: tuple[int, bytes], record: int = 16384, after: bytes = b"") -> bytes:
    """Return a ClientHello with these extensions, cut into records of at most ``record`` bytes."""
    body = b"\x03\x03" + bytes(32) + vector(1, b"") + vector(2, b"\x13\x01") + vector(1, b"\x00")
    body += vector(2, b"".join(kind.to_bytes(2, "big") + vector(2, data) for kind, data in extensions))
    message = b"\x01" + vector(3, body) + after
    pieces = [message[at : at + record] for at in range(0, len(message), record)]
    return b"".join(b"\x16\x03\x01" + vector(2, piece) for piece in pieces)
