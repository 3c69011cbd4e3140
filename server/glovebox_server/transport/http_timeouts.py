"""Uvicorn's HTTP/1.1 protocol, in which connections that need no token keep nobody out. Knows no route.

Uvicorn bounds the head's size and the pause between requests, but neither a connection that says nothing nor a head
that arrives byte by byte; and where there are too many connections, it refuses whoever comes next. Here a head has a
time to arrive in, and who comes next takes the place of who has waited longest without a request that the gate let
through. A flood of strangers so only ends itself.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from glovebox_server.transport import auth

#: Seconds from the connection, or from the first byte of a later request, to the end of the request's head.
HEAD_SECONDS = 10.0

#: Bytes taken from a connection at once. asyncio's own 256 KiB, from a hundred connections in one turn of the event
#: loop, are 50 ms in which nobody else is served.
_READ_BYTES = 32 * 1024


#: Bytes of a request's head, and its fields: reading the most of them takes a millisecond. Proxies send about thirty.
HEAD_BYTES = 16 * 1024
HEAD_FIELDS = 100

#: Parts of requests (a head, a piece or chunk of a body, an end) read of one connection in a turn of the event loop. A
#: read can hold thousands of chunks of one byte each, and nobody has counted its sender yet.
_PARTS = 4


class _PacedConnection(h11.Connection):
    """Reads a few parts of requests, then has the others wait for the next turn."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_BYTES)
        self.parts_left = _PARTS

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """See h11; ``NEED_DATA`` also where there is more for the next turn."""
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
        """Start counting; where all places are taken, take one of those that nobody works in."""
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
        """Read a few parts of what has come, and the rest when others had their turn."""
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
        waiting = [each for each in self.connections if isinstance(each, TimeoutProtocol) and not each.working]
        if waiting:
            # Who was let through before goes last: a client that pauses is not the flood.
            longest = min(waiting, key=lambda each: (each.known, each.since))
            self.connections.discard(longest)
            longest.transport.abort()

    @property
    def known(self) -> bool:
        """Return whether the gate let its latest request through."""
        return self.scope is not None and auth.PRINCIPAL_SCOPE_KEY in self.scope

    @property
    def working(self) -> bool:
        """Return whether such a request is under way."""
        return self.known and not self.cycle.response_complete

    def _count(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
