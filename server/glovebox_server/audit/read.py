"""Reading the log back: its lines, its end, one call, and what comes next. Never writes, never trusts the bytes.

Works on a copy in another place and as another user, too. Reads of one line are bounded by ``chain.MAX_LINE_BYTES``.
"""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import anyio
import anyio.to_thread

from glovebox_server.audit import chain
from glovebox_server.audit.chain import Head, NotARecord, Record
from glovebox_server.audit.file import HEAD_NAME, LOG_NAME
from glovebox_server.errors import AuditUnavailable

#: How long a reader waits for a writer in mid-line. Then it reads anyway: it may see a line that is not yet whole.
_LOCK_WAIT_SECONDS = 1.0

#: How often ``follow`` looks. A person is reading.
_POLL_SECONDS = 0.25

#: Bytes per step when looking for the last lines.
_BLOCK_BYTES = 1 << 16

#: Most lines ``tail`` returns: a screen's scrollback. More is what the file itself is for.
MAX_TAIL_LINES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the file, or one part of a line longer than ``chain.MAX_LINE_BYTES``."""

    number: int
    """Line number, counted from 1 at the place where reading began; parts of one line share it."""
    raw: bytes
    """Its bytes, line feed included; at most ``chain.MAX_LINE_BYTES``."""
    end: int
    """Offset in the file of the byte after it."""
    record: Record | None
    """What it holds; None when it is no record."""
    error: NotARecord | None
    """Why it is no record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The log at a moment when nobody was writing."""

    head: bytes | None
    """The bytes of ``head.json``, at most one more than it may have; None when it is missing."""
    size: int
    """Length of ``audit.jsonl`` in bytes."""


def _open(directory: Path, name: str) -> BinaryIO:
    # O_NONBLOCK: a FIFO in the place of the file must not hang a reader.
    descriptor = os.open(directory / name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("it is not a regular file")
    return open(descriptor, "rb")  # noqa: PTH123 - a descriptor, not a path


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[tuple[BinaryIO, Snapshot]]:
    """Open the log for reading and note how far it is whole.

    Raises:
        AuditUnavailable: there is no log, or it cannot be read.
    """
    with contextlib.ExitStack() as stack:
        try:
            log = stack.enter_context(_open(directory, LOG_NAME))
            snapshot = _snapshot(directory, log)
        except OSError as error:
            attempted = f"read the audit log in {directory}"
            fix = "Name the directory that holds audit.jsonl, as a user who may read it."
            raise AuditUnavailable(attempted, error.strerror or str(error), fix) from error
        yield log, snapshot


def _snapshot(directory: Path, log: BinaryIO) -> Snapshot:
    try:
        head = _open(directory, HEAD_NAME)
    except FileNotFoundError:
        return Snapshot(head=None, size=os.fstat(log.fileno()).st_size)
    with head:
        deadline = time.monotonic() + _LOCK_WAIT_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(head, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            time.sleep(0.001)
        return Snapshot(head=head.read(chain.HEAD_BYTES + 1), size=os.fstat(log.fileno()).st_size)


def head(directory: Path) -> Head:
    """Return the end of the chain as ``head.json`` states it.

    Raises:
        AuditUnavailable: there is no log, it cannot be read, or ``head.json`` is missing or damaged.
    """
    with opened(directory) as (_, snapshot):
        try:
            return chain.parse_head(snapshot.head or b"")
        except NotARecord as error:
            attempted = f"read {HEAD_NAME} in {directory}"
            raise AuditUnavailable(attempted, "it is missing or damaged", "Run `glovebox audit verify`.") from error


def lines(log: BinaryIO, start: int, end: int) -> Iterator[Line]:
    """Yield the lines between two offsets; whatever the bytes are, nothing is raised for them."""
    log.seek(start)
    number, fresh = 0, True
    while start < end:
        raw = log.readline(min(chain.MAX_LINE_BYTES, end - start))
        if not raw:
            return
        start += len(raw)
        number += fresh
        record, error = _parsed(raw) if fresh else (None, NotARecord("the line is too long"))
        yield Line(number=number, raw=raw, end=start, record=record, error=error)
        fresh = raw.endswith(b"\n")


def _parsed(raw: bytes) -> tuple[Record | None, NotARecord | None]:
    try:
        return chain.parse(raw), None
    except NotARecord as error:
        return None, error


def tail(directory: Path, count: int) -> list[Line]:
    """Return the last ``count`` lines, at most ``MAX_TAIL_LINES``; raises like ``opened``."""
    with opened(directory) as (log, snapshot):
        start = _start_of_last(log, snapshot.size, min(max(count, 0), MAX_TAIL_LINES))
        return list(lines(log, start, snapshot.size))


def _start_of_last(log: BinaryIO, size: int, count: int) -> int:
    if count == 0:
        return size
    # The line feed at the very end belongs to the last line, so it is one more to pass.
    wanted = count + 1
    end = size
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        log.seek(start)
        block = log.read(end - start)
        if end == size and not block.endswith(b"\n"):
            wanted -= 1
        at = len(block)
        while wanted > 0 and (at := block.rfind(b"\n", 0, at)) >= 0:
            wanted -= 1
        if wanted == 0:
            return start + at + 1
        end = start
    return 0


def records_of(directory: Path, call_id: str) -> Iterator[Record]:
    """Yield the records of one call, reading the whole log; raises like ``opened``.

    The first is its ``call.decided``, which names the principal: whoever shows them to a client checks that first.
    """
    needle = call_id.encode()
    with opened(directory) as (log, snapshot):
        start = 0
        # Lines are parsed only where the id appears at all: parsing is what costs.
        while start < snapshot.size and (raw := log.readline(min(chain.MAX_LINE_BYTES, snapshot.size - start))):
            start += len(raw)
            if needle in raw:
                with contextlib.suppress(NotARecord):
                    record = chain.parse(raw)
                    if record.call_id == call_id:
                        yield record


async def follow(directory: Path, count: int) -> AsyncGenerator[Line, None]:
    """Yield the last ``count`` lines and then every new one, of all server processes, until it is closed.

    Raises:
        AuditUnavailable: there is no log, it cannot be read, or it became shorter.
    """
    found = await anyio.to_thread.run_sync(tail, directory, count)
    with opened(directory) as (log, snapshot):
        at = found[-1].end if found else snapshot.size
        for line in found:
            yield line
        while True:
            size = (await anyio.to_thread.run_sync(_snapshot, directory, log)).size
            if size < at:
                attempted, fix = f"follow the audit log in {directory}", "Run `glovebox audit verify`."
                raise AuditUnavailable(attempted, "it became shorter", fix)
            for line in lines(log, at, size):
                yield line
                at = line.end
            await anyio.sleep(_POLL_SECONDS)
