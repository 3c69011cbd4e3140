"""Counts the bytes that cross a call's connections: below TLS, so headers and handshakes are in it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from anyio.abc import ByteStream, SocketStream


@dataclass(slots=True)
class Traffic:
    """Sums over one call's connections; they grow while it runs."""

    connections: int = 0
    """Connections that were made, not those that were refused or failed."""
    sent_bytes: int = 0
    """Out of the sandbox, to the network."""
    received_bytes: int = 0
    """From the network."""


class Counted(ByteStream):
    """A connection whose bytes are added to ``traffic``."""

    def __init__(self, stream: SocketStream, traffic: Traffic) -> None:
        """Count on ``stream``, which stays its maker's to close."""
        self._stream = stream
        self._traffic = traffic

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """See ``ByteReceiveStream.receive``."""
        data = await self._stream.receive(max_bytes)
        self._traffic.received_bytes += len(data)
        return data

    async def send(self, item: bytes) -> None:
        """See ``ByteSendStream.send``; counted as sent before it is known to be."""
        self._traffic.sent_bytes += len(item)
        await self._stream.send(item)

    async def send_eof(self) -> None:
        """See ``ByteStream.send_eof``."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Close the connection."""
        await self._stream.aclose()

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        """Those of the connection."""
        return self._stream.extra_attributes
