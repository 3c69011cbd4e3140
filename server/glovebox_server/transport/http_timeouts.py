"""Uvicorn's HTTP/1.1 protocol, without starvation by connections that present no token. Knows no route.

Uvicorn bounds the head's size and the pause between requests. It bounds neither a silent connection nor a head that
arrives byte by byte, and when full it refuses the newest. Here a head must arrive in time, and a new connection
replaces the one that has waited longest without a request past the gate. So a flood of strangers only ends itself.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from glovebox_server.transport import auth

#: Seconds from the connection, or from the first byte of a later request, to the end of the request's head.
HEAD_SECONDS = 10.0
#: Bytes taken from a connection at once. asyncio's own 256 KiB, from a hundred connections in one turn of the event
#: loop, would block it for 50 ms.
_READ_BYTES = 32 * 1024


#: Bytes of a request's head, and its fields: the largest takes a millisecond to read. Proxies send about thirty.
HEAD_BYTES = 16 * 1024
HEAD_FIELDS = 100
#: Parts of requests (a head, a piece or chunk of a body, an end) read per connection in a turn of the event loop. A
#: read can hold thousands of one-byte chunks, before its sender is counted.
_PARTS = 4


class _PacedConnection(h11.Connection):
    """Reads a few parts of requests, then yields to others until the next turn."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES)
        self.parts_left = _PARTS

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event, as h11 does; ``NEED_DATA`` also if more is left for the next turn."""
        if not self.parts_left:
            return h11.NEED_DATA
        self.parts_left -= 1
        event = super().next_event()
        if isinstance(event, h11.Request) and len(event.headers) > HEAD_FIELDS:
            raise h11.RemoteProtocolError(f"more than {HEAD_FIELDS} fields", error_status_hint=431)
        return event


class TimeoutProtocol(H11Protocol):
    """Closes a connection whose request does not begin in time; from then on the gate counts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = self._parts = _PacedConnection()
        self._again: asyncio.Handle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start counting; if all places are taken, close an idle connection."""
        if len(self.connections) >= auth.MAX_CONNECTIONS - 1:
            self._make_room()
        transport.max_size = _READ_BYTES  # type: ignore[attr-defined]  # of asyncio's, which has no other way to say it
        super().connection_made(transport)
        self._count()

    def data_received(self, data: bytes) -> None:
        """Stop counting once a head is complete; start again with the next one."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._deadline is None:
            self._count()

    def handle_events(self) -> None:
        """Read a few parts of the input, and the rest after the others' turn."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self._parts.parts_left = _PARTS
        super().handle_events()
        if not self._parts.parts_left and not self.transport.is_closing():
            self._again = self.loop.call_soon(self.handle_events)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting."""
        self._stop()
        super().connection_lost(exc)

    def _make_room(self) -> None:
        waiting = [each for each in self.connections if isinstance(each, TimeoutProtocol) and not each.rank[0]]
        if waiting:
            longest = min(waiting, key=lambda each: each.rank)
            self.connections.discard(longest)
            longest.transport.abort()

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Return whether a request past the gate is under way, whether the latest was one, and since when it waits.

        Connections that were let through before go last: a client that pauses is not the flood.
        """
        known = self.scope is not None and auth.PRINCIPAL_SCOPE_KEY in self.scope
        return known and not self.cycle.response_complete, known, self.since

    def _count(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
