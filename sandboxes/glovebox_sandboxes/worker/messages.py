"""Messages between a server and its worker: JSON with a length before it, and descriptors beside it. Sans-I/O.

Rule 1  A message is ``length: u32`` (network order) and that many bytes: one JSON object of at most ``MAX_BYTES``.
Rule 2  ``fds`` is the number of descriptors that come with it, by SCM_RIGHTS (unix(7)), no later than its last byte.
        Nothing else depends on descriptors: what they stand for could be streams of another kind.
Rule 3  ``kind`` says what it is. The server sends ``hello``, ``prepare``, ``drop``, ``lease``, ``started``, ``look``
        and ``end``; the worker ``hello``, ``prepared``, ``table``, ``queued`` (for a turn), ``waiting`` (for one),
        ``granted``, ``refused`` (the server starts one itself), ``looked``, ``ended`` and ``event``.
Rule 4  What breaks a rule ends the connection.
"""

import json
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

MAX_BYTES = 1 << 22
"""Of one message: a spec that masks thousands of paths."""
MAX_DESCRIPTORS = 16
"""Of one message: a wire, a pidfd, words and counters."""
HEAD = struct.Struct("!I")

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return HEAD.pack(len(text)) + text


class Reader:
    """Turns received bytes and descriptors into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._descriptors: deque[int] = deque()

    def feed(self, data: bytes, descriptors: Iterable[int]) -> Iterator[tuple[Message, list[int]]]:
        """Take what was received, and yield each whole message with its descriptors, which the caller closes.

        Raises ValueError if the peer broke a rule.
        """
        self._buffer += data
        self._descriptors += descriptors
        while len(self._buffer) >= HEAD.size:
            (length,) = HEAD.unpack_from(self._buffer)
            if length > MAX_BYTES:
                raise ValueError(f"a message of {length} bytes")
            end = HEAD.size + length
            if len(self._buffer) < end:
                break
            text = bytes(self._buffer[HEAD.size : end])
            del self._buffer[:end]
            try:
                message = json.loads(text)
                count = message.get("fds", 0)
                if not 0 <= count <= len(self._descriptors):
                    raise ValueError(f"a message with {count} descriptors, where {len(self._descriptors)} came")
                yield message, [self._descriptors.popleft() for _ in range(count)]
            except (AttributeError, TypeError, IndexError) as problem:
                raise ValueError(f"not a message: {problem}") from problem
        if self._descriptors and not self._buffer:  # the next message would get another's
            raise ValueError("no message came for a descriptor")

    def close(self) -> None:
        """Close descriptors that no message came for."""
        while self._descriptors:
            os.close(self._descriptors.popleft())
