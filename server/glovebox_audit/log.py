"""Append to the audit log of a server: durable before it answers, lossless or refused, with live subscriptions.

Waiting appends share one disk write (group commit): the holder of the turn writes for all. The write runs in a worker
thread, so a stalling disk stops the calls that need a record, not heartbeats and kills.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import anyio
import anyio.to_thread

from glovebox_audit import chain
from glovebox_audit.chain import Draft, Head, Record, draft
from glovebox_audit.event import Event
from glovebox_audit.file import Follower, LogFile
from glovebox_audit.place import AuditError
from glovebox_audit.segments.rotation import Rotation
from glovebox_audit.subscription import Subscription

#: Appends in one disk write, and their bytes: even a torn write stays far below ``file.MAX_TORN_BYTES``. One append
#: alone may have more: a decision, an end and a receipt of at most 1 MiB each.
MAX_BATCH_APPENDS = 256
MAX_BATCH_BYTES = 4 << 20

#: Most waiting appends: several for every call of a server. More is a fault, and refusing is cheaper than remembering.
MAX_WAITING_APPENDS = 16384

#: Seconds the disk may take for one commit, longer than any journal flush seen in practice. After it this process stops
#: using the log, because the late write may still land.
COMMIT_WAIT_SECONDS = 30.0


#: Calls that wait for their ``call.lost``. Each write carries all, and a call needs a write to begin, so they never
#: exceed the calls under way. The next server that starts reports any beyond it.
MAX_LOST = 1024


@dataclass(slots=True, kw_only=True)
class _Waiting:
    items: Sequence[Draft | Follower]
    size: int
    """Return the bytes of all it asks for."""
    outcome: list[Record] | AuditError | None = None


class AuditLog:
    """One server's handle on the log of a directory. Make it with ``AuditLog.open``."""

    def __init__(self, file: LogFile) -> None:
        self._file = file
        self._turn = anyio.Lock(fast_acquire=True)
        self._thread = ThreadPoolExecutor(1, "audit log")
        self._queue: deque[_Waiting] = deque()
        self._lost: dict[str, str] = {}
        self._subscriptions: set[Subscription] = set()
        self._observers: list[Callable[[Record], None]] = []
        self._unusable: str | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, directory: Path, server_id: str, rotates: Rotation | None = None) -> AsyncIterator[Self]:
        """Open the log in ``directory``, made (0700) if it is missing.

        Several processes may have it open. A torn last line is first recorded as a gap, calls of dead servers as lost.

        Args:
            directory: a directory of its own, below the state directory.
            server_id: of the writer: 1 to 128 of ``A-Z a-z 0-9 . _ : @ -``, unique per process.
            rotates: None to seal no segment.

        Raises:
            AuditError: the log cannot be written to, or records are missing from it; says how to fix it.
            ValueError: ``server_id`` is not a name.
        """
        if not chain.is_name(server_id):
            raise ValueError(f"server_id {server_id!r} is not a name")
        file = await anyio.to_thread.run_sync(LogFile, directory, server_id, rotates)
        log = cls(file)
        try:
            yield log
        finally:
            with anyio.CancelScope(shield=True):
                async with log._turn:
                    log._close()

    @property
    def head(self) -> Head:
        """Return the end of the chain after this process's last record: the anchor in results."""
        return self._file.head

    @property
    def usable(self) -> bool:
        """Return whether it is open, and the disk has answered every write in time."""
        return self._unusable is None

    async def append(self, event: Event) -> Record:
        """Write one event and return its record once it is on the disk.

        Cancelling the caller does not interrupt a write: the cancellation takes effect after it.

        Raises:
            AuditError: the record is not in the log (or, after ``COMMIT_WAIT_SECONDS``, may not be), so what it
                announces must not happen.
        """
        (record,) = await self.append_all([event])
        return record

    async def append_all(
        self, events: Sequence[Event | Draft], then: Callable[[Sequence[Draft]], tuple[Follower, int]] | None = None
    ) -> list[Record]:
        """Append several events by one disk write, all or none.

        ``then`` returns what makes one more event from the last one's record, e.g. to name its place, and an upper
        bound of that event's canonical JSON, in bytes. What it returns is called in the log's thread while the chain is
        locked: short, no I/O, and it does not fail. Neither is called if the events cannot be recorded.

        Raises:
            AuditError: none of them is in the log.
        """
        attempted = f"record {events[-1].kind}"
        try:
            drafts = [event if isinstance(event, Draft) else draft(event) for event in events]
        except ValueError as error:
            fix = "Send smaller arguments, or let the profile keep their digest alone."
            raise AuditError(attempted, f"the record cannot be written: {error}", fix) from error
        items: list[Draft | Follower] = [*drafts]
        size = sum(len(each.encoded) for each in drafts)
        if then is not None:
            follower, most = then(drafts)
            if most > chain.MAX_LINE_BYTES - 1024:
                raise AuditError(attempted, f"what follows it takes {most} bytes", "Give back fewer files.")
            items.append(follower)
            size += most
        if len(self._queue) >= MAX_WAITING_APPENDS:
            raise AuditError(attempted, "the disk does not keep up", "Try again, with fewer calls.")
        waiting = _Waiting(items=items, size=size)
        self._queue.append(waiting)
        with anyio.CancelScope(shield=True):
            async with self._turn:
                while waiting.outcome is None:
                    await self._commit()
        if isinstance(waiting.outcome, AuditError):
            raise waiting.outcome
        return waiting.outcome or []

    def lose(self, call_id: str, reason: str) -> None:
        """Record with the next write that an ended call has lost its last record.

        Nothing more is appended for it. The reason is one sentence, without host paths.
        """
        if len(self._lost) < MAX_LOST:
            self._lost[call_id] = reason

    def owner_of(self, call_id: str) -> str | None:
        """Return the principal of a call under way here; None for any other, with no more records."""
        return self._file.calls.owner_of(call_id)

    @asynccontextmanager
    async def subscribe(self, call_id: str | None = None, principal: str | None = None) -> AsyncIterator[Subscription]:
        """Yield this process's records as they are written, filtered by call and principal.

        With a principal, only records of its calls are delivered. For other processes' records use ``read.follow``.

        A slow reader never delays the log: it gets a ``Missed`` with the numbers to read from the disk.
        """
        subscription = Subscription(call_id, principal)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
            await subscription.aclose()

    @contextmanager
    def observed(self, hear: Callable[[Record], None]) -> Iterator[None]:
        """Call ``hear`` with each of this process's records once it is on the disk, during the block.

        It returns at once and raises nothing.
        """
        self._observers.append(hear)
        try:
            yield
        finally:
            self._observers.remove(hear)

    async def _commit(self) -> None:
        """Write the waiting entries, oldest first; the caller holds the turn. Every entry taken gets its outcome."""
        batch, lost = self._take(), dict(self._lost)
        drafts = [item for waiting in batch for item in waiting.items]
        try:
            written = await self._write(drafts, lost)
        except AuditError as error:
            for waiting in batch:
                waiting.outcome = AuditError(error.what, error.reason, error.fix)
            return
        for call in lost:
            self._lost.pop(call, None)
        records = iter(written[len(written) - len(drafts) :])
        for waiting in batch:
            waiting.outcome = [next(records) for _ in waiting.items]
        for record in written:
            for subscription in self._subscriptions:
                subscription.offer(record)
            for hear in self._observers:
                hear(record)

    def _take(self) -> list[_Waiting]:
        batch = [self._queue.popleft()]
        size = batch[0].size
        while self._queue and len(batch) < MAX_BATCH_APPENDS:
            size += self._queue[0].size
            if size > MAX_BATCH_BYTES:
                break
            batch.append(self._queue.popleft())
        return batch

    async def _write(self, drafts: list[Draft | Follower], lost: Mapping[str, str]) -> list[Record]:
        if self._unusable is not None:
            raise AuditError("write a record", self._unusable, "Look at the disk, then restart the server.")
        commit = partial(copy_context().run, self._file.commit, drafts, lost)
        with anyio.move_on_after(COMMIT_WAIT_SECONDS):
            # Not by anyio.to_thread: a call is suspended three times there for one write.
            return await asyncio.get_running_loop().run_in_executor(self._thread, commit)
        self._unusable = f"the disk did not answer within {COMMIT_WAIT_SECONDS:g} seconds"
        return await self._write(drafts, lost)

    def _close(self) -> None:
        for subscription in self._subscriptions:
            subscription.finish()
        self._thread.shutdown(wait=False)
        if self._unusable is None:
            self._file.close()
            self._unusable = "the log was closed"
