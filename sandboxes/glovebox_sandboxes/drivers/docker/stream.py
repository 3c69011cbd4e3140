"""Take the Engine's attach stream apart into the byte stream of a sandbox.

All that the Engine sends passes here, so nothing is held beyond one header and one read. The format is described at
https://docs.docker.com/reference/api/engine/ under "Attach to a container": a header of eight bytes (stream, three
zeros, payload length in network order) and the payload.
"""

import anyio
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream

HEADER_BYTES = 8
STDOUT, STDERR = 1, 2
# Stream 3 carries the Engine's own complaints about the attachment; here they belong to the detail.
ENGINE_ERROR = 3
_DETAIL_BYTES = 2_000
"""Last bytes of errors of runtime and guest that are kept; see ``SandboxStats.detail``."""


class AttachedStream(ByteStream):
    """The guest's standard input and output as one byte stream; only the end of standard error is kept, apart."""

    def __init__(self, socket: ByteStream) -> None:
        self._socket = socket
        self._buffered = BufferedByteReceiveStream(socket)
        self._stream = 0
        self._remaining = 0
        self._words = b""

    @property
    def last_words(self) -> str:
        """Return the end of standard error."""
        return self._words.decode("utf-8", "replace")

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Receive standard output.

        Raises anyio.EndOfStream: the container has ended, the Engine is gone, or a terminal or another program answers.
        """
        try:
            while True:
                while self._remaining == 0:
                    header = await self._buffered.receive_exactly(HEADER_BYTES)
                    if header[0] not in (STDOUT, STDERR, ENGINE_ERROR) or header[1:4] != b"\0\0\0":
                        raise anyio.EndOfStream
                    self._stream, self._remaining = header[0], int.from_bytes(header[4:])
                data = await self._buffered.receive(min(max_bytes, self._remaining))
                self._remaining -= len(data)
                if self._stream == STDOUT:
                    return data
                self._words = (self._words + data)[-_DETAIL_BYTES:]
        except (anyio.BrokenResourceError, anyio.IncompleteRead) as problem:
            raise anyio.EndOfStream from problem

    async def send(self, item: bytes) -> None:
        """Send bytes to the guest's standard input; raises anyio.BrokenResourceError if it is gone."""
        await self._socket.send(item)

    async def send_eof(self) -> None:
        """Close the guest's standard input, which the guest takes as the end of its host: it exits."""
        await self._socket.send_eof()

    async def aclose(self) -> None:
        """Drop the connection; with ``StdinOnce`` the guest then reads the end of its input and exits."""
        await self._socket.aclose()
