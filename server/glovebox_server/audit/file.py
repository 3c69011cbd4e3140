"""The file behind the log: ``audit.jsonl`` and ``head.json`` in one directory. Synchronous; the only writer.

Rule 1  Every change happens under an exclusive lock on ``head.json``, so any number of processes share one chain.
Rule 2  ``audit.jsonl`` only grows. A write that failed is cut off again before the lock is released.
Rule 3  Records are on the disk (fdatasync) before ``head.json`` names them and before anyone is told.
Rule 4  ``head.json`` is therefore never ahead of the log. A log shorter than its head has lost records: nothing is
        appended to it, because that would bury the evidence.
Rule 5  Bytes after the last whole record, left by a crash, are ended with a line feed and followed by a ``log.gap``
        record with their length and digest. They stay in place: the file is evidence.
Rule 6  Every call that was allowed gets one end. Where its own could not be written, ``call.lost`` is: by its server
        with the next record that can be, or by the next server that starts after its server was gone (``writers``).

One file, no rotation: a chain over several files needs a rule for what may be deleted, and nobody has asked for one.
Never to be called on the event loop: it waits for the lock and for the disk.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from glovebox_server.audit import chain, writers
from glovebox_server.audit.chain import Draft, Edited, Head, NotARecord, Record
from glovebox_server.audit.events import CallLost, GapRecorded, draft
from glovebox_server.audit.underway import UnderWay
from glovebox_server.audit.writers import Writer
from glovebox_server.errors import AuditUnavailable

LOG_NAME = "audit.jsonl"
HEAD_NAME = "head.json"

#: How long a writer waits for the lock. A holder needs it for one disk write (under 1 ms); five seconds cover a
#: stalling disk, and a holder that was stopped (SIGSTOP) must not stop every other server with it.
LOCK_WAIT_SECONDS = 5.0

#: First and longest pause between two attempts at the lock: short against one fdatasync, few wake-ups when it is long.
_LOCK_PAUSE_SECONDS = (0.0001, 0.002)

#: Most bytes after the last whole record that are taken for a crash: one commit and its longest line.
MAX_TORN_BYTES = 8 << 20

#: ``call.lost`` records in one write: far below ``MAX_TORN_BYTES``.
_MAX_LOST_AT_ONCE = 256

#: Makes a draft from the record written right before it, whose place and hash it can therefore name.
Follower = Callable[[Record], Draft]

_FIX_DISK = "Free space on its file system, or point the state directory at another one."
_FIX_ACCESS = "Make the directory and its files writable for the user that runs Glovebox."
_FIX_EVIDENCE = (
    "Run `glovebox audit verify` and keep the directory as evidence; Glovebox starts a new log when it is moved away."
)


class LogFile:
    """The open log of one directory. Not safe for threads: its owner makes one call at a time."""

    def __init__(self, directory: Path, server: str) -> None:
        """Open or create the log for the server of that id.

        If the last writer crashed in mid-line, a gap is recorded; if servers died under their calls, these are lost.

        Raises:
            AuditUnavailable: the directory or a file is a link, somebody else's or open to others; the disk refuses;
                or records that ``head.json`` names are missing.
        """
        self._directory = directory
        self._server = server
        self._stack = contextlib.ExitStack()
        self._tail = Head()
        self._calls = UnderWay()
        with contextlib.ExitStack() as stack, self._translated("open the audit log"):
            self._prepare()
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            place = stack.enter_context(_closing(os.open(directory, flags)))
            self._check(os.fstat(place), stat.S_IFDIR, directory)
            self._head_fd = stack.enter_context(_closing(self._open(place, HEAD_NAME, 0)))
            with self._locked():
                self._log_fd = stack.enter_context(_closing(self._open(place, LOG_NAME, os.O_APPEND)))
                self._begin(place)
                self._catch_up()
                gone = self._take_abandoned(place)
            self._end_calls_of(gone, place)
            with self._locked():
                self._catch_up()
                self._writer = self._register(place)
                stack.callback(self._leave)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close the files. The log is complete at any time: nothing is flushed here."""
        self._stack.close()

    def _leave(self) -> None:
        # A call without an end is for the next server to tell of.
        self._writer.close(remove=not self._calls.ids())

    @property
    def head(self) -> Head:
        """The end of the chain as this process last saw it."""
        return self._tail

    def commit(self, drafts: Sequence[Draft | Follower], lost: Mapping[str, str] | None = None) -> list[Record]:
        """Append all of ``drafts`` with one write and one fdatasync; all of them are on the disk, or none.

        Args:
            drafts: what to append; the first is no ``Follower``.
            lost: calls of this process that are over and whose own last record could not be written, each with the
                reason. Those that have no end in the log get it in the same write.

        Returns:
            The records of lost calls, then one for each draft.

        Raises:
            AuditUnavailable: the disk refused, the lock is held too long, or the log was tampered with.
        """
        with self._translated(f"record {_kind(drafts[0])}"), self._locked():
            self._catch_up()
            # Where a failed write could not be cut off again, the end of a call may be there although we said no.
            without_end = {call: reason for call, reason in (lost or {}).items() if call in self._calls}
            ends = [draft(self._calls.lost(call, "log", reason)) for call, reason in without_end.items()]
            records = self._append([*ends, *drafts])
            with contextlib.suppress(OSError):  # the records are on the disk, and an older place is as good
                self._writer.settled(self._calls.since(self._tail))
            return records

    def _append(self, drafts: Sequence[Draft | Follower], torn: int = 0, ending: bytes = b"") -> list[Record]:
        """Write ``drafts`` behind the tail and ``torn`` bytes that are no records, after ending those."""
        tail = Head(seq=self._tail.seq, hash=self._tail.hash, size=self._tail.size + torn)
        records: list[Record] = []
        before: list[Head] = []
        for wanted in drafts:
            item = wanted if isinstance(wanted, Draft) else wanted(records[-1])
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            record = chain.seal(item, seq=tail.seq + 1, time=now, server=self._server, prev=tail.hash)
            before.append(tail)
            tail = Head(seq=record.seq, hash=record.hash, size=tail.size + len(record.line))
            records.append(record)
        self._write(ending + b"".join(record.line for record in records))
        for record, end in zip(records, before, strict=True):
            self._calls.note(record, end)
        self._move_head(tail)
        return records

    def _write(self, content: bytes) -> None:
        """Make ``content`` durable at the end of the file, or leave the file as it was."""
        before = os.fstat(self._log_fd).st_size
        try:
            written = 0
            while written < len(content):
                written += os.write(self._log_fd, content[written:])
            os.fdatasync(self._log_fd)
        except OSError:
            # If even this fails (an append-only file refuses it), the next commit finds the rest and records a gap.
            with contextlib.suppress(OSError):
                os.ftruncate(self._log_fd, before)
            raise

    def _move_head(self, tail: Head) -> None:
        # Not synced: after a power cut the head may lag behind the log, which rule 4 allows, and it halves the cost.
        self._tail = tail
        os.pwrite(self._head_fd, chain.encode_head(tail), 0)

    def _catch_up(self) -> None:
        """Follow what other processes appended; turn what is no record into a gap."""
        if os.fstat(self._head_fd).st_nlink == 0 or (now := os.fstat(self._log_fd)).st_nlink == 0:
            raise self._tampered("its files were removed or replaced while it was in use")
        if now.st_size < self._tail.size:
            raise self._tampered("it became shorter while it was in use")
        tail = self._tail
        while tail.size < now.st_size:
            line = self._line_at(tail.size)
            try:
                record = chain.parse(line)
            except Edited as error:
                raise self._tampered(f"a line after record {tail.seq} was edited") from error
            except NotARecord:
                break
            if (record.seq, record.prev) != (tail.seq + 1, tail.hash):
                raise self._tampered(f"record {record.seq} stands where record {tail.seq + 1} belongs")
            if record.server == self._server:
                self._calls.note(record, tail)
            tail = Head(seq=record.seq, hash=record.hash, size=tail.size + len(line))
        self._tail = tail
        if tail.size < now.st_size:
            self._record_gap(now.st_size - tail.size)

    def _line_at(self, offset: int) -> bytes:
        block = os.pread(self._log_fd, 4096, offset)
        if b"\n" not in block:
            block = os.pread(self._log_fd, chain.MAX_LINE_BYTES, offset)
        return block[: block.find(b"\n") + 1] or block

    def _record_gap(self, length: int) -> None:
        if length > MAX_TORN_BYTES:
            raise self._tampered(f"{length} bytes after its last record are none of ours")
        torn = os.pread(self._log_fd, length, self._tail.size)
        ending = b"" if torn.endswith(b"\n") else b"\n"
        whole = torn + ending
        gap = GapRecorded(bytes=len(whole), digest="sha256:" + hashlib.sha256(whole).hexdigest())
        self._append([draft(gap)], len(whole), ending)

    def _begin(self, place: int) -> None:
        """Find the tail: from ``head.json``, proved by the one record it names."""
        content = os.pread(self._head_fd, chain.HEAD_BYTES + 1, 0)
        size = os.fstat(self._log_fd).st_size
        if not content and size == 0:
            os.pwrite(self._head_fd, chain.encode_head(Head()), 0)
            os.fsync(self._head_fd)
            os.fsync(place)
            return
        try:
            head = chain.parse_head(content)
        except NotARecord as error:
            raise self._tampered(f"{HEAD_NAME} is missing or damaged") from error
        if head.size > size:
            raise self._tampered(f"records up to {head.seq} are missing at its end")
        if head.seq > 0:
            try:
                record = chain.parse(self._line_before(head.size))
            except NotARecord as error:
                raise self._tampered(f"record {head.seq} was changed") from error
            if (record.seq, record.hash) != (head.seq, head.hash):
                raise self._tampered(f"record {head.seq} was replaced")
        self._tail = head

    def _line_before(self, end: int) -> bytes:
        start = max(0, end - chain.MAX_LINE_BYTES - 1)
        block = os.pread(self._log_fd, end - start, start)
        return block[block.rfind(b"\n", 0, -1) + 1 :]

    def _take_abandoned(self, place: int) -> list[Writer]:
        with contextlib.suppress(FileExistsError):
            os.mkdir(writers.DIRECTORY, 0o700, dir_fd=place)
            os.fsync(place)
        found = os.stat(writers.DIRECTORY, dir_fd=place, follow_symlinks=False)
        self._check(found, stat.S_IFDIR, self._directory / writers.DIRECTORY)
        return writers.abandoned(place, lambda name: self._open(place, name, 0, create=False))

    def _register(self, place: int) -> Writer:
        writer = writers.register(place, lambda name: self._open(place, name, 0), self._server, self._tail)
        if writer is None:
            raise self._refused(f"another process writes to it as {self._server}", "Start this server again.")
        return writer

    def _end_calls_of(self, gone: Sequence[Writer], place: int) -> None:
        """Record the calls of servers that are gone as lost. They write no more, so reading needs no lock."""
        done = False
        try:
            under_way = self._under_way(gone, place) if gone else {}
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

    def _under_way(self, gone: Sequence[Writer], place: int) -> dict[str, UnderWay]:
        """Read what these servers may have left open, from where their files say or else from the beginning."""
        known = [writer.since for writer in gone if writer.since is not None and self._holds(writer.since)]
        start = min(head.size for head in known) if len(known) == len(gone) else 0
        found = {writer.server: UnderWay() for writer in gone}
        names = [server.encode() for server in found]
        with os.fdopen(os.open(LOG_NAME, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=place), "rb") as log:
            log.seek(start)
            while start < self._tail.size and (line := log.readline(chain.MAX_LINE_BYTES)):
                # Parsing is what costs, and most of what follows a crash is other servers'.
                if any(name in line for name in names):
                    with contextlib.suppress(NotARecord):
                        record = chain.parse(line)
                        lost = record.kind == CallLost.kind  # told of by another server, that did not get further
                        ran = record.data.get("run_by") if lost else record.server
                        if ran in found:
                            found[ran].note(record, Head(seq=record.seq - 1, hash=record.prev, size=start))
                start += len(line)
        return found

    def _holds(self, head: Head) -> bool:
        """Whether this is an end that the chain had."""
        if head.size == 0 or head.size > self._tail.size:
            return head == Head()
        try:
            record = chain.parse(self._line_before(head.size))
        except NotARecord:
            return False
        return (record.seq, record.hash) == (head.seq, head.hash)

    def _prepare(self) -> None:
        if not os.path.lexists(self._directory):
            self._directory.parent.mkdir(parents=True, exist_ok=True)
            self._directory.mkdir(mode=0o700, exist_ok=True)

    def _open(self, place: int, name: str, flags: int, *, create: bool = True) -> int:
        flags |= os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
        descriptor = os.open(name, flags, 0o600, dir_fd=place)
        try:
            self._check(os.fstat(descriptor), stat.S_IFREG, self._directory / name)
        except AuditUnavailable:
            os.close(descriptor)
            raise
        return descriptor

    def _check(self, found: os.stat_result, kind: int, path: Path) -> None:
        if stat.S_IFMT(found.st_mode) != kind or (kind == stat.S_IFREG and found.st_nlink != 1):
            raise self._refused(f"{path} is not a file of its own", "Move it away.")
        if found.st_uid != os.geteuid():
            fix = f"Run Glovebox as that user, or choose another state directory than {self._directory}."
            raise self._refused(f"{path} belongs to user {found.st_uid}", fix)
        if found.st_mode & 0o077:
            raise self._refused(f"{path} is open to other users", f"Run `chmod go= {path}`.")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # flock, not POSIX locks: those vanish when any other descriptor of the file is closed in this process.
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        pause, longest = _LOCK_PAUSE_SECONDS
        while True:
            try:
                fcntl.flock(self._head_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    reason = f"another process has held its lock for {LOCK_WAIT_SECONDS:g} seconds"
                    fix = f"Find it with `fuser {self._directory / HEAD_NAME}` and continue or end it."
                    raise self._refused(reason, fix) from None
                time.sleep(pause)
                pause = min(2 * pause, longest)
        try:
            yield
        finally:
            fcntl.flock(self._head_fd, fcntl.LOCK_UN)

    def _refused(self, reason: str, fix: str) -> AuditUnavailable:
        return AuditUnavailable(f"use the audit log in {self._directory}", reason, fix)

    def _tampered(self, reason: str) -> AuditUnavailable:
        return self._refused(reason, _FIX_EVIDENCE)

    @contextlib.contextmanager
    def _translated(self, attempted: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
            access = error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EEXIST}
            link = error.errno == errno.ELOOP or (error.errno == errno.ENOTDIR and self._directory.is_symlink())
            fix = _FIX_DISK if full else _FIX_ACCESS if access else "Check the disk and the kernel's log (`dmesg`)."
            reason = "it is a symbolic link" if link else (error.strerror or str(error))
            raise AuditUnavailable(
                f"{attempted} in {self._directory}", reason, "Replace the link." if link else fix
            ) from error


def _kind(item: Draft | Follower) -> str:
    return item.kind if isinstance(item, Draft) else "what follows"


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)
