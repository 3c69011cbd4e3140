"""A server, behind the gates of a case's calls, that hands back what it is sent in every way it knows; real TLS.

It listens on loopback. Names resolve to a public address, which is checked and recorded like any, and only the
connection to it leads here. Nothing of a gate but that is replaced.
"""

import base64
import gzip
import re
import ssl
import tempfile
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from ipaddress import ip_address
from typing import Final

import anyio
from anyio.abc import ByteStream, SocketAttribute, SocketStream
from anyio.streams.tls import TLSListener

from glovebox_profiles.egress.rules import EgressRule
from glovebox_profiles.egress.targets import Address
from glovebox_server.egress.authority import Authority
from glovebox_server.egress.events import EgressLimits, PeerError
from glovebox_server.egress.gate import EgressGate

KEYS, OTHER = "keys.example", "other.example"
"""What it is called: the one a case lends a key to, and another."""
_PUBLIC: Final = ip_address("1.1.1.1")
_MOST: Final = 64 * 1024

_WRITTEN: Mapping[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "base64": lambda said: base64.b64encode(b"x" + said),
    "hex": lambda said: said.hex().encode(),
    "percent": lambda said: "".join(f"%{byte:02X}" for byte in said).encode(),
    "escaped": lambda said: "".join(f"\\u{byte:04x}" for byte in said).encode(),
    "backwards": lambda said: said[::-1],
    "spread": lambda said: " ".join(said.decode()).encode(),
}


@asynccontextmanager
async def opened() -> AsyncIterator[Callable[..., EgressGate]]:
    """Listen for the length of the block; what makes gates that lead here and trust it."""
    authority = Authority([EgressRule(host=host) for host in (KEYS, OTHER)])
    ports: dict[tuple[str, int], int] = {}
    async with AsyncExitStack() as listening, anyio.create_task_group() as tasks:
        for host, port in ((KEYS, 443), (OTHER, 443), (KEYS, 80)):
            plain = await anyio.create_tcp_listener(local_host="127.0.0.1")
            ports[host, port] = plain.extra(SocketAttribute.local_port)  # noqa: S610 - not of Django
            listener = TLSListener(plain, _context(authority.leaf(host))) if port == 443 else plain
            listening.push_async_callback(plain.aclose)
            tasks.start_soon(listener.serve, _served)
        yield partial(
            EgressGate,
            resolver=_resolve,
            connect_to=partial(_dial, ports),
            tls=ssl.create_default_context(cadata=authority.pem.decode()),
        )
        tasks.cancel_scope.cancel()


async def _resolve(_host: str) -> tuple[Address, ...]:
    return (_PUBLIC,)


async def _dial(
    ports: Mapping[tuple[str, int], int], host: str, _: tuple[Address, ...], port: int, __: EgressLimits, ___: float
) -> SocketStream:
    if (host, port) not in ports:
        raise PeerError(f"{host} has nothing on port {port}.")
    return await anyio.connect_tcp("127.0.0.1", ports[host, port])


def _context(leaf: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile("w", prefix="glovebox-proof-") as file:  # the standard library reads files alone
        file.write(leaf)
        file.flush()
        context.load_cert_chain(file.name)
    return context


async def _served(stream: ByteStream) -> None:
    # The client may leave, as it does when it refuses to read on.
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError):
        async with stream:
            head = b""
            while b"\r\n\r\n" not in head and len(head) < _MOST:
                head += await stream.receive()
            for piece in _answer(head):
                await stream.send(piece)


def _answer(head: bytes) -> list[bytes]:
    """Hand back the key that came; without one what the query says, or nothing."""
    came = re.search(rb"(?im)^authorization: bearer (\S+)", head) or re.search(rb"[?&]say=(\w+)", head)
    said = came[1] if came else b"nothing"
    way = head.split(b" ")[1].partition(b"?")[0].rpartition(b"/")[2].decode()
    leads = {"elsewhere": f"https://{OTHER}/v1/plain", "downgrade": f"http://{KEYS}/v1/plain", "within": "/v1/plain"}
    if way in leads:
        return [_headed(b"", f"Location: {leads[way]}", status="302 Found")]
    told = b"<" + _WRITTEN.get(way, bytes)(said) + b">"
    pieces = [told[at : at + 1] for at in range(len(told))]
    chunks = b"".join(b"1\r\n%b\r\n" % each for each in pieces)
    framed = {
        "header": [_headed(b"", f"X-Told: {told.decode()}")],
        "error": [_headed(told, status="403 Forbidden")],
        "gzip": [_headed(gzip.compress(told), "Content-Encoding: gzip")],
        "deflate": [_headed(zlib.compress(told), "Content-Encoding: deflate")],
        "chunked": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"],
        "split": [_headed(told).removesuffix(told), *pieces],
    }
    return framed.get(way, [_headed(told)])


def _headed(body: bytes, *headers: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]).encode() + body
