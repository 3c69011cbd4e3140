"""Keeping the head and the tail of a stream, with an exact count of what fell out between. Pure."""

from collections import deque

from glovebox_sandboxes.contract.outcome import Captured


class HeadAndTail:
    """Holds at most ``limit`` bytes: the first half, and the last half of what came after."""

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._head = bytearray()
        self._head_limit = limit // 2
        self._tail: deque[bytes] = deque()
        self._tail_limit = limit - limit // 2
        self._tail_size = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self.total += len(data)
        room = self._head_limit - len(self._head)
        self._head += data[:room]
        rest = data[room:] if room < len(data) else b""
        if not rest:
            return
        self._tail.append(rest)
        self._tail_size += len(rest)
        # Whole chunks fall out; the first one left is cut when the result is read.
        while self._tail_size - len(self._tail[0]) >= self._tail_limit:
            self._tail_size -= len(self._tail.popleft())

    def captured(self) -> Captured:
        """What was kept, as text."""
        tail = b"".join(self._tail)[-self._tail_limit :] if self._tail else b""
        dropped = self.total - len(self._head) - len(tail)
        if not dropped:
            text = (bytes(self._head) + tail).decode("utf-8", "replace")
        else:
            head_text = self._head.decode("utf-8", "replace")
            text = f"{head_text}\n[… {dropped} bytes left out …]\n{tail.decode('utf-8', 'replace')}"
        return Captured(text=text, total_bytes=self.total, dropped_bytes=dropped)
