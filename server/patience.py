"""Uvicorn's HTTP/1.1 protocol with a bound on how long a request's head may take. Knows no route and no caller.

Uvicorn bounds the head's size and the pause between requests, but neither a connection that says nothing nor a head
that arrives byte by byte. Both need no token, so a few hundred of them would keep everybody else out.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

#: Seconds from the connection, or from the first byte of a later request, to the end of the request's head.
HEAD_SECONDS = 10.0


class PatientProtocol(H11Protocol):
    """Closes a connection whose request does not begin in time; from then on the gate counts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See uvicorn."""
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Start counting."""
        super().connection_made(transport)
        self._count()

    def data_received(self, data: bytes) -> None:
        """Stop counting once a head is complete; start again with the next one."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._deadline is None:
            self._count()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting."""
        self._stop()
        super().connection_lost(exc)

    def _count(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
