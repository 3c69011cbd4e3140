"""Demultiplex the Engine's attach stream (no I/O) into the byte stream of a sandbox.

All that the Engine sends passes here, so nothing is held beyond one header and one read.

The format is described at https://docs.docker.com/reference/api/engine/ under "Attach to a container": a header of
eight bytes (stream, three zeros, payload length in network order) and the payload.
"""

from collections import deque
from dataclasses import dataclass

import anyio
from anyio.abc import ByteStream, SocketStream

HEADER_BYTES = 8
STDOUT, STDERR = 1, 2
# Stream 3 carries the Engine's own complaints about the attachment; here they belong to the detail.
ENGINE_ERROR = 3
DETAIL_BYTES = 2_000
"""Last bytes of errors of runtime and guest that are kept; see ``SandboxStats.detail``."""
_READ_BYTES = 256 * 1024
"""Most bytes read from the socket at once: one wire frame and a little."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of one stream's payload; a long frame arrives as several chunks."""

    stream: int
    data: bytes


class Demultiplexer:
    """A parser of bytes into chunks. Holds at most an unfinished header."""

    def __init__(self) -> None:
        self._header = b""
        self._stream = 0
        self._remaining = 0

    def receive(self, data: bytes) -> list[Chunk]:
        """Return the chunks in ``data``, none empty. Raises ValueError if a terminal or another program answers."""
        chunks: list[Chunk] = []
        at = 0
        while at < len(data):
            if self._remaining == 0:
                part = data[at : at + HEADER_BYTES - len(self._header)]
                self._header += part
                at += len(part)
                if len(self._header) == HEADER_BYTES:
                    self._begin()
                continue
            payload = data[at : at + self._remaining]
            self._remaining -= len(payload)
            at += len(payload)
            chunks.append(Chunk(self._stream, payload))
        return chunks

    def _begin(self) -> None:
        header, self._header = self._header, b""
        if header[0] not in (STDOUT, STDERR, ENGINE_ERROR) or header[1:4] != b"\0\0\0":
            raise ValueError(f"a frame header is {header.hex()}")
        self._stream = header[0]
        self._remaining = int.from_bytes(header[4:])


class AttachedStream(ByteStream):
    """The guest's standard input and output as one byte stream; only the end of standard error is kept, apart."""

    def __init__(self, socket: SocketStream) -> None:
        self._socket = socket
        self._demultiplexer = Demultiplexer()
        self._waiting: deque[bytes] = deque()
        self._words = b""

    @property
    def last_words(self) -> str:
        """Return the end of standard error."""
        return self._words.decode("utf-8", "replace")

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Receive standard output. Raises anyio.EndOfStream if the container has ended, or the Engine is gone."""
        while not self._waiting:
            # Payload is never longer than one read, so the queue never holds more.
            try:
                read = await self._socket.receive(min(max_bytes, _READ_BYTES))
                chunks = self._demultiplexer.receive(read)
            except (anyio.BrokenResourceError, ValueError) as problem:
                raise anyio.EndOfStream from problem
            for chunk in chunks:
                if chunk.stream == STDOUT:
                    self._waiting.append(chunk.data)
                else:
                    self._words = (self._words + chunk.data)[-DETAIL_BYTES:]
        data = self._waiting.popleft()
        if len(data) > max_bytes:
            self._waiting.appendleft(data[max_bytes:])
            data = data[:max_bytes]
        return data

    async def send(self, item: bytes) -> None:
        """Send bytes to the guest's standard input; raises anyio.BrokenResourceError if it is gone."""
        await self._socket.send(item)

    async def send_eof(self) -> None:
        """Close the guest's standard input, which the guest takes as the end of its host: it exits."""
        await self._socket.send_eof()

    async def aclose(self) -> None:
        """Drop the connection; with ``StdinOnce`` the guest then reads the end of its input and exits."""
        await self._socket.aclose()
