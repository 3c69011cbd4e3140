"""Write the files of the log: ``audit.jsonl``, ``head.json``, ``segments/``. Synchronous; the only writer.

Rule 1  Every change holds an exclusive lock on ``head.json``, so any number of processes share one chain.
Rule 2  ``audit.jsonl`` only grows. A failed write is truncated before the lock is released.
Rule 3  Records are on the disk (fdatasync) before ``head.json`` names them and before a caller gets them.
Rule 4  ``head.json`` is therefore never ahead of the log. A log shorter than its head has lost records. Nothing is
        appended to it, because that would bury the evidence.
Rule 5  Bytes after the last whole record, left by a crash, are ended with a line feed. A ``log.gap`` record with their
        length and digest follows. They stay in place: the file is evidence.
Rule 6  Every allowed call gets one end. If its own cannot be written, ``call.lost`` is. Its server writes it with the
        next record, or the next server that starts does after its server is gone (``writers``).
Rule 7  A segment's tree grows with each record, so no call waits for its seal. It is of what was written: a file that
        was changed since does not fit it. A file whose last record is a seal gets no more. It moves to ``segments/``.
        The next file takes its name when it is whole with its first record. Any process that finds a seal at the end
        finishes this.
Rule 8  A segment is removed after a record that says so, the oldest first.

Never call it on the event loop: it waits for the lock and for the disk.
"""

import contextlib
import fcntl
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from glovebox_audit import chain, place, read, writers
from glovebox_audit.chain import Draft, EvidenceError, Head, Record, draft
from glovebox_audit.events import GapRecorded, SegmentBegun, SegmentSealed
from glovebox_audit.place import AuditError
from glovebox_audit.segments import files, merkle, rotation
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME, SegmentStart
from glovebox_audit.segments.merkle import Contents
from glovebox_audit.segments.rotation import Removal, Rotation, Seal
from glovebox_audit.writers import OpenCalls, Writer

_log = logging.getLogger(__name__)

#: Most bytes after the last whole record that count as a crash: one commit and its longest line.
MAX_TORN_BYTES = 8 << 20

#: ``call.lost`` records in one write: far below ``MAX_TORN_BYTES``.
_MAX_LOST_AT_ONCE = 256

#: Segments removed at once, each with its record: far below ``MAX_TORN_BYTES`` too. The next call removes more.
_MAX_REMOVED_AT_ONCE = 1024

#: Growth of the log before a failed rotation is tried again.
_AGAIN_BYTES = 1 << 20

#: Records that are hashed together.
_MAX_FRESH = 64

#: Bytes of a segment that was there before, hashed after each commit: two milliseconds.
_STEP_BYTES = 1 << 17

#: Makes a draft from the record written right before it, to name its place and hash.
Follower = Callable[[Record], Draft]


class LogFile:
    """The open log of one directory. Not thread-safe: its owner makes one call at a time."""

    def __init__(self, directory: Path, server: str, rotates: Rotation | None = None) -> None:
        """Open or create the log for the server of that id.

        Record a crash in mid-line as a gap, and open calls of dead servers as lost. No ``rotates``, no seals.

        Raises:
            AuditError: the directory or a file is a link, another user's or open to others; the disk refuses; or
                records that ``head.json`` names are missing.
        """
        self._directory = directory
        self._server = server
        self._stack = contextlib.ExitStack()
        self.head = Head()
        """The end of the chain as this process last saw it."""
        self.calls = OpenCalls()
        self._rotation = rotates
        self._log_fd = -1
        self._start = SegmentStart()
        self._due_size, self._due_time = sys.maxsize, math.inf
        self._fresh: list[Record] = []
        self._hash_nothing()
        self._sealed = False
        self._tables: set[bytes] = set()
        """The tables of sandboxes that this process has written to the segment."""
        with contextlib.ExitStack() as stack, place.translated(directory, "open the audit log"):
            self._place = stack.enter_context(place.opened(directory))
            if self._place.found(files.DIRECTORY):
                self._place.folder(files.DIRECTORY)
            self._head_fd = self._place.open(HEAD_NAME, 0)
            stack.callback(os.close, self._head_fd)
            stack.callback(self._close_file)
            with self._locked():
                self._begin()
                self._catch_up()
                gone = writers.abandoned(self._place)
            self._end_calls_of(gone)
            with self._locked():
                self._catch_up()
                writer = writers.register(self._place, server, self.head)
                if writer is None:
                    reason = f"another process writes to it as {server}"
                    raise self._place.refused(reason, "Start this server again.")
                self._writer = writer
                # The next server reports a call without an end.
                stack.callback(lambda: writer.close(remove=not self.calls.ids()))
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close the files. Nothing is flushed: the log is complete at any time."""
        self._stack.close()

    def commit(self, drafts: Sequence[Draft | Follower], lost: Mapping[str, str] | None = None) -> list[Record]:
        """Append all of ``drafts`` with one write and one fdatasync: all or none.

        The first is no ``Follower``. ``lost`` are ended calls of this process whose own last record could not be
        written, each with the reason. Those without an end in the log get it in the same write. Return the records of
        tables and of lost calls, then one for each draft.

        Raises:
            AuditError: the disk refused, the lock is held too long, or the log was tampered with.
        """
        try:
            with self._locked():
                self._catch_up()
                # If a failed write could not be truncated, the end of a call may be there although we reported none.
                without_end = {call: reason for call, reason in (lost or {}).items() if call in self.calls}
                ends = [draft(self.calls.lost(call, "log", reason)) for call, reason in without_end.items()]
                named = {each.table.encoded: each.table for each in drafts if isinstance(each, Draft) and each.table}
                tables = [table for encoded, table in named.items() if encoded not in self._tables]
                records = self._append([*tables, *ends, *drafts])
                self._tables.update(named)
                since = self.calls.since(self.head)
                written = self._writer.since
                if written is None or since.size - written.size >= writers.STEP_BYTES:
                    with contextlib.suppress(OSError):  # the records are on the disk, and an older place is as good
                        self._writer.settle(since)
        except OSError as error:
            raise place.unavailable(
                self._directory, f"record {getattr(drafts[0], 'kind', 'what follows')}", error
            ) from error
        # The records are on the disk, whatever becomes of this.
        self._keep_up()
        return records

    def _keep_up(self) -> None:
        """Hash some of what was there before, and seal a segment that is due and hashed; one that is overdue anyway."""
        overdue = self.head.size >= self._due_size + _AGAIN_BYTES or time.time() >= self._due_time
        due = overdue or self.head.size >= self._due_size
        if (not due and self._hashed.seq >= self.head.seq) or (due and not self._place.may_rename(self._log_fd)):
            return
        try:
            if self._hash(sys.maxsize if overdue else _STEP_BYTES) and due:
                self._rotate()
        except (OSError, AuditError) as error:
            # Once more after some growth. The next commit finishes what is begun.
            self._due_size, self._due_time = self.head.size + _AGAIN_BYTES, math.inf
            self._hash_nothing()
            _log.warning("The audit log continues in one file, not sealed: %s", error)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            fcntl.flock(self._head_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._place.lock(self._head_fd)
        try:
            yield
        finally:
            fcntl.flock(self._head_fd, fcntl.LOCK_UN)

    def seal(self) -> int | None:
        """End the current segment and return its number, or None if it is empty.

        Raises:
            AuditError: the log cannot be written to, or its file may not be renamed.
        """
        with place.translated(self._directory, "seal a segment"):
            if not self._place.may_rename(self._log_fd):
                fix = f"Run `chattr -a {self._directory / LOG_NAME}`, or make the directory writable."
                raise self._place.refused(f"{LOG_NAME} may not be renamed", fix)
            return self._rotate()

    def retain(self) -> list[int]:
        """Remove expired segments and return their numbers; raises AuditError if the log cannot be written."""
        with place.translated(self._directory, "remove old segments"), self._locked():
            self._catch_up()
            return self._retain()

    def _append(self, drafts: Sequence[Draft | Follower], torn: int = 0, ending: bytes = b"") -> list[Record]:
        """Append ``drafts`` after the tail and ``torn`` bytes of no record, ended by ``ending``."""
        tail = Head(seq=self.head.seq, hash=self.head.hash, size=self.head.size + torn)
        records: list[Record] = []
        before: list[Head] = []
        time = _now()
        for wanted in drafts:
            item = wanted if isinstance(wanted, Draft) else wanted(records[-1])
            record = chain.seal(item, seq=tail.seq + 1, time=time, server=self._server, prev=tail.hash)
            before.append(tail)
            tail = Head(seq=record.seq, hash=record.hash, size=tail.size + len(record.line))
            records.append(record)
        self._write(ending + b"".join(record.line for record in records))
        for record, end in zip(records, before, strict=True):
            self.calls.note(record, end)
        for record, end in zip(records, before, strict=True):
            self._add(record, end)
        self._move_head(tail)
        return records

    def _write(self, content: bytes) -> None:
        before = os.fstat(self._log_fd).st_size
        try:
            _write_all(self._log_fd, content)
        except OSError:
            # If this fails too (an append-only file), the next commit finds the rest and records a gap.
            with contextlib.suppress(OSError):
                os.ftruncate(self._log_fd, before)
            raise

    def _move_head(self, tail: Head) -> None:
        # Not synced, at half the cost: after a power cut the head may lag behind the log, which rule 4 allows.
        self.head = tail
        os.pwrite(self._head_fd, chain.encode_head(tail), 0)

    def _catch_up(self) -> None:
        """Read what other processes appended; turn any other bytes into a gap."""
        if os.fstat(self._head_fd).st_nlink == 0:
            raise self._place.tampered("its files were removed or replaced while it was in use")
        while self._follow():
            self._go_on()

    def _follow(self) -> bool:
        """Read this file to its end and return whether that is a seal."""
        now, base = os.fstat(self._log_fd), self._start.before.size
        if now.st_size < self.head.size - base:
            raise self._place.tampered("it became shorter while it was in use")
        tail = self.head
        while not self._sealed and tail.size - base < now.st_size:
            line = files.line_at(self._log_fd, tail.size - base)
            try:
                record = chain.parse(line)
            except EvidenceError as error:
                if error.kind is None:
                    break
                edited = self._place.tampered(f"a line after record {tail.seq} was edited")
                raise (edited if error.kind == "edited" else self._place.newer(error)) from error
            if (record.seq, record.prev) != (tail.seq + 1, tail.hash):
                raise self._place.tampered(f"record {record.seq} stands where record {tail.seq + 1} belongs")
            if record.server == self._server:
                self.calls.note(record, tail)
            self._add(record, tail)
            tail = Head(seq=record.seq, hash=record.hash, size=tail.size + len(line))
            self._sealed = record.kind == SegmentSealed.kind
        self.head = tail
        if not self._sealed and now.st_nlink == 0:
            raise self._place.tampered("its files were removed or replaced while it was in use")
        if not self._sealed and tail.size - base < now.st_size:
            self._record_gap(now.st_size - (tail.size - base))
        return self._sealed

    def _record_gap(self, length: int) -> None:
        if length > MAX_TORN_BYTES:
            raise self._place.tampered(f"{length} bytes after its last record are none of ours")
        torn = os.pread(self._log_fd, length, self.head.size - self._start.before.size)
        ending = b"" if torn.endswith(b"\n") else b"\n"
        whole = torn + ending
        gap = GapRecorded(bytes=len(whole), digest=chain.digest_of(whole))
        self._append([draft(gap)], len(whole), ending)

    def _begin(self) -> None:
        """Find the tail from ``head.json``, proved by the one record it names."""
        content = os.pread(self._head_fd, chain.HEAD_BYTES + 1, 0)
        there = self._place.found(LOG_NAME)
        left = () if content and there else files.listed(self._directory)[0]
        # If a crash left sealed files alone, continue from the last one.
        descriptor = self._place.open(LOG_NAME if there or not left else files.name(left[-1]), os.O_APPEND)
        try:
            start = files.start_of(files.line_at(descriptor, 0))
        except EvidenceError as error:
            os.close(descriptor)
            raise self._place.newer(error) from error
        self._take(descriptor, start)
        size, before = os.fstat(self._log_fd).st_size, self._start.before
        if not content and size == 0 and not left:
            os.pwrite(self._head_fd, chain.encode_head(Head()), 0)
            os.fsync(self._head_fd)
            self._place.sync()
            return
        try:
            head = chain.parse_head(content)
        except EvidenceError as error:
            raise self._place.tampered(f"{HEAD_NAME} is missing or damaged") from error
        if head.size > before.size + size:
            raise self._place.tampered(f"records up to {head.seq} are missing at its end")
        if head.size <= before.size:  # it lags behind the beginning of this file
            if head.seq > before.seq or (head.seq == before.seq and head.hash != before.hash):
                raise self._place.tampered(f"record {head.seq} was replaced")
            self.head = before
            return
        try:
            record = chain.parse(files.line_before(self._log_fd, head.size - before.size))
        except EvidenceError as error:
            changed = self._place.tampered(f"record {head.seq} was changed")
            raise (self._place.newer(error) if error.kind == "newer" else changed) from error
        if (record.seq, record.hash) != (head.seq, head.hash):
            raise self._place.tampered(f"record {head.seq} was replaced")
        self.head, self._sealed = head, record.kind == SegmentSealed.kind

    def _take(self, descriptor: int, start: SegmentStart) -> None:
        self._close_file()
        self._log_fd, self._start, self._sealed = descriptor, start, False
        self._tables.clear()
        self._hash_nothing()
        if self._rotation is not None:
            if self._place.may_rename(descriptor):
                self._hashed = start.before
            self._due_size = start.before.size + self._rotation.segment_bytes
            self._due_time = (start.time or time.time()) + self._rotation.segment_seconds

    def _close_file(self) -> None:
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1

    def _rotate(self) -> int | None:
        """Seal the segment."""
        if self._rotation is None or not self._place.may_rename(self._log_fd):
            return None
        start = self._start
        self._hash()
        with self._locked():
            self._catch_up()
            # Another process was first, or it holds nothing but its beginning.
            if self._start is not start or self.head.seq - start.before.seq <= (start.number > 1):
                return None
            self._place.folder(files.DIRECTORY)  # what may fail comes before the seal
            for number in files.listed(self._directory)[0]:
                self._place.check(files.name(number))
            size = self.head.size - start.before.size
            self._hash()
            seal = Seal.of(start.number, self._contents, size=size, after=start.before, last=self.head, time=_now())
            self._append([draft(seal.event(self._rotation.signer))])
            self._sealed = True
            self._go_on()
            self._retain()
        return start.number

    def _add(self, record: Record, before: Head) -> None:
        """Hash one more record, if all before it are; some at a time."""
        if self._hashed.seq == before.seq:
            self._fresh.append(record)
            self._hashed = Head(seq=record.seq, hash=record.hash, size=before.size + len(record.line))
        if len(self._fresh) == _MAX_FRESH:
            self._hash_fresh()

    def _hash_nothing(self) -> None:
        """Begin a tree that no record is added to."""
        self._contents, self._hashed = Contents(), Head(seq=sys.maxsize)
        self._fresh.clear()

    def _hash_fresh(self) -> None:
        for record in self._fresh:
            self._contents.tree.add(merkle.leaf_hash(record.line))
            self._contents.count(record.call_id, record.data)
        self._fresh.clear()

    def _hash(self, most: int = sys.maxsize) -> bool:
        """Hash at most ``most`` bytes that were there before, if they are chained; return whether all are hashed."""
        if self._hashed.seq > self.head.seq:  # it failed before
            self._hash_nothing()
            self._hashed = self._start.before
        self._hash_fresh()
        first, base = self._hashed, self._start.before.size
        with os.fdopen(os.dup(self._log_fd), "rb") as file:
            until = min(first.size + most, self.head.size)
            for at, line, free in read.raw_lines(file, first.size - base, until - base):
                if free:
                    end = chain.linked(line, self._hashed)
                    if end is None:  # also right behind the tail, as nothing else may be there
                        break
                    self._contents.add(line)
                    self._hashed = Head(seq=end.seq, hash=end.hash, size=base + at + len(line))
        if (self._hashed.seq, self._hashed.hash) == (self.head.seq, self.head.hash):
            return True
        if most < sys.maxsize:  # a line that is longer, or a gap, whose record is further on
            return self._hashed is first and self._hash()
        raise self._place.tampered("a record in it was changed, so it is not sealed")

    def _go_on(self) -> None:
        """Move a file that ends with a seal away, unless that was done, and enter the next."""
        tail, number = self.head, self._start.number
        named = self._place.found(LOG_NAME)
        if named and os.path.samestat(named, os.fstat(self._log_fd)):
            self._place.folder(files.DIRECTORY)
            if self._place.found(files.name(number)):
                raise self._place.tampered(f"{files.name(number)} is there already")
            self._place.rename(LOG_NAME, files.name(number))
            self._place.sync(files.DIRECTORY)
            self._place.sync()
        if not self._place.found(LOG_NAME):
            self._begin_segment(number + 1, tail)
            return
        self._begin()
        if self.head.seq < tail.seq:
            raise self._place.tampered("it became shorter while it was in use")

    def _begin_segment(self, number: int, before: Head) -> None:
        event = SegmentBegun(format=chain.FORMAT, segment=number, offset=before.size)
        record = chain.seal(draft(event), seq=before.seq + 1, time=_now(), server=self._server, prev=before.hash)
        descriptor = self._place.open(files.NEXT_NAME, os.O_APPEND)
        try:
            os.ftruncate(descriptor, 0)  # what a crash left
            _write_all(descriptor, record.line)
            self._place.rename(files.NEXT_NAME, LOG_NAME)
        except OSError:
            os.close(descriptor)
            raise
        self._take(descriptor, SegmentStart(number=number, before=before, time=time.time()))
        self._add(record, before)
        self._place.sync()
        self._move_head(Head(seq=record.seq, hash=record.hash, size=before.size + len(record.line)))
        # Else a power cut could leave it one file behind, whose records the next start would read.
        os.fsync(self._head_fd)

    def _retain(self) -> list[int]:
        if self._rotation is None:
            return []
        gone = writers.abandoned(self._place)
        try:
            needed = min((writer.since.size if writer.since else 0 for writer in gone), default=None)
        finally:
            for writer in gone:
                writer.close(remove=False)
        current = self.head.size - self._start.before.size
        wanted = rotation.removable(self._directory, self._rotation.retention, current=current, needed=needed)
        going = wanted[:_MAX_REMOVED_AT_ONCE]
        if not going:
            return []
        said = [
            Removal(segment=each.number, root=each.root, time=_now(), seal=each.seal, reason=reason)
            for each, reason in going
        ]
        self._append([draft(each.event(self._rotation.signer)) for each in said])
        for each in said:
            self._place.remove(files.name(each.segment))
        self._place.sync(files.DIRECTORY)
        return [each.segment for each in said]

    def _end_calls_of(self, gone: Sequence[Writer]) -> None:
        """Record the calls of dead servers as lost. They write no more, so reading needs no lock."""
        done = False
        try:
            under_way = writers.under_way(self._directory, self.head, gone) if gone else {}
            reason = "Its server was gone before it could record an end."
            ends = [draft(calls.lost(call, "server", reason)) for calls in under_way.values() for call in calls.ids()]
            for start in range(0, len(ends), _MAX_LOST_AT_ONCE):
                with self._locked():
                    self._catch_up()
                    self._append(ends[start : start + _MAX_LOST_AT_ONCE])
            done = True
        finally:
            for writer in gone:
                writer.close(remove=done)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _write_all(descriptor: int, content: bytes) -> None:
    written = 0
    while written < len(content):
        written += os.write(descriptor, content[written:])
    os.fdatasync(descriptor)
