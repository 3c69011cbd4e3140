"""Deliver records live to readers: of this process, bounded and without delaying the log; or from the disk.

A slow reader gets the numbers of the records it missed and reads them from the disk.
"""

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import ObjectReceiveStream

from glovebox_audit import read
from glovebox_audit.chain import Record
from glovebox_audit.place import AuditError
from glovebox_audit.read import LogLine

#: Records that wait for one reader. A call makes about ten; a slower reader reads from the disk.
MAX_WAITING_RECORDS = 256

#: Polling interval of ``follow``. A person is reading.
_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """A notice of records that were not delivered. They are in the log."""

    count: int
    first: int
    """``seq`` of the first of them, as ``last`` of the last."""
    last: int


class Subscription(ObjectReceiveStream[Record | Missed]):
    """A stream of records in the order of the chain, with a ``Missed`` if the reader was too slow."""

    def __init__(self, call_id: str | None, principal: str | None, capacity: int = MAX_WAITING_RECORDS) -> None:
        """Take the filters, None for any, and how many records may wait."""
        self._call_id = call_id
        self._principal = principal
        self._capacity = capacity
        self._items: deque[Record | Missed] = deque()
        self._news = anyio.Event()
        self._over: type[Exception] | None = None
        self.offered = False
        """True once there has been a record for it."""

    def offer(self, record: Record) -> None:
        """Deliver one record without ever waiting; each record of a call names its principal."""
        owner = None if record.call_id is None else record.data.get("principal")
        wanted = self._call_id in {None, record.call_id} and self._principal in {None, owner}
        if not wanted or self._over is not None:
            return
        self.offered = True
        missed = self._items[-1] if self._items else None
        if isinstance(missed, Missed):
            # No record may overtake the notice of missed ones: count on until the reader gets it.
            self._items[-1] = Missed(count=missed.count + 1, first=missed.first, last=record.seq)
        elif len(self._items) < self._capacity:
            self._items.append(record)
        else:
            self._items.append(Missed(count=1, first=record.seq, last=record.seq))
        self._news.set()

    def give_up(self, unread: Record | Missed | None) -> Missed | None:
        """Return a notice of all that stays unread, with ``unread``, the last item; None for none."""
        left = [item for item in (unread, *self._items) if item is not None]
        self._items.clear()
        notices = [
            Missed(count=1, first=item.seq, last=item.seq) if isinstance(item, Record) else item for item in left
        ]
        if not notices:
            return None
        return Missed(count=sum(notice.count for notice in notices), first=notices[0].first, last=notices[-1].last)

    def finish(self) -> None:
        """End the stream after the waiting records: the log is closing."""
        self._over = self._over or anyio.EndOfStream
        self._news.set()

    async def receive(self) -> Record | Missed:
        """Return the next record, or a notice of those missed before it.

        Raises:
            anyio.EndOfStream: the log was closed.
            anyio.ClosedResourceError: this subscription was closed.
        """
        await anyio.lowlevel.checkpoint()
        while not self._items:
            if self._over is not None:
                raise self._over
            self._news = anyio.Event()
            await self._news.wait()
        return self._items.popleft()

    async def aclose(self) -> None:
        """Stop receiving."""
        self._items.clear()
        self._over = anyio.ClosedResourceError
        self._news.set()


async def follow(directory: Path, count: int) -> AsyncGenerator[LogLine, None]:
    """Yield the last ``count`` lines, then every new one of all server processes, until closed.

    Raises:
        AuditError: there is no log, it cannot be read, or it became shorter.
    """
    with read.opened(directory) as log:
        for line in await anyio.to_thread.run_sync(read.last_lines, log, count):
            yield line
        at = log.end
    while True:
        # What retention removes in this moment is passed over.
        with suppress(FileNotFoundError), read.opened(directory) as log:
            if log.end < at:
                attempted, fix = f"follow the audit log in {directory}", "Run `glovebox audit verify`."
                raise AuditError(attempted, "it became shorter", fix)
            at = max(at, log.start)
            for file, base, size in log.files_from(at):
                for line in read.lines(file, at - base, size):
                    yield line
                at = base + size
        await anyio.sleep(_POLL_SECONDS)
