"""Register the server processes that have the log open: one small file each, in ``writers/`` beside it. Synchronous.

Rule 1  A server holds the lock on its file (flock) from before its first record until after its last. The kernel
        releases it however the process ends, even across containers, where process ids would mean nothing.
Rule 2  The file names an end of the chain, as ``head.json`` does, before which all calls of this server have ended. It
        may lag behind the truth, never run ahead of it.
Rule 3  A process that finds an unlocked file locks it, ends the calls of that server, and removes it. A server that
        ends in good order removes its own.

Files are made and taken while the log is locked. The outcome of a call is in the records alone: these files only say
where to look, and whose calls are over.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError, Head, Record
from glovebox_audit.event import WHOSE
from glovebox_audit.events import EVENTS, CallDecided, CallLost, ReceiptSigned
from glovebox_audit.place import LogDirectory, is_held, take_lock
from glovebox_audit.receipts.parts import LossCause

#: Calls that are remembered. A server runs 16 at once, so this is thousands of killed servers. Beyond it the oldest is
#: evicted, and nothing is reported about an unknown call.
MAX_UNDER_WAY = 65_536


@dataclass(slots=True, kw_only=True)
class Begun:
    """A call without an end, so far."""

    before: Head
    """The end of the chain before its first record."""
    server: str
    decided: str
    """Time of its first record."""
    whose: dict[str, str]
    last: str
    """Kind of its last record."""


class OpenCalls:
    """The calls that have begun and not ended. Give it every record, or all of one server, in the chain's order.

    The log's writer learns which calls still need an end, the verifier which records fit no call.
    """

    def __init__(self, *, forgot: bool = False) -> None:
        """Begin; in the middle of the chain, with unknown calls under way, if ``forgot``."""
        self._begun: dict[str, Begun] = {}
        self._ended: str | None = None
        self._forgot = forgot

    def __contains__(self, call_id: object) -> bool:
        return call_id in self._begun

    def owner_of(self, call_id: str) -> str | None:
        """Return the principal of one of the calls; None for any other."""
        begun = self._begun.get(call_id)
        return begun.whose.get("principal") if begun else None

    def ids(self) -> list[str]:
        """Return the calls, in the order in which they began."""
        return list(self._begun)

    def since(self, tail: Head) -> Head:
        """Return where the chain's records of these calls begin; ``tail``, its end, if there are none."""
        return next((each.before for each in self._begun.values()), tail)

    def note(self, record: Record, before: Head) -> str:
        """Note the next record and return why it cannot belong to one life of its call, or "".

        ``before`` is the end of the chain before it.
        """
        just_ended, self._ended = self._ended, None
        call = record.call_id
        if call is None or record.kind not in EVENTS:
            return ""
        if record.kind == CallDecided.kind:
            return self._begin(call, record, before)
        if record.kind == ReceiptSigned.kind:
            return "" if just_ended == call else f"it is not right after the end of call {call}"
        if call not in self._begun:
            return "" if self._forgot else f"call {call} is not under way here: it never began, or has ended before"
        if EVENTS[record.kind].ends_call:
            del self._begun[call]
            # A lost call has no receipt.
            self._ended = None if record.kind == CallLost.kind else call
        else:
            self._begun[call].last = record.kind
        return ""

    def lost(self, call: str, cause: LossCause, reason: str) -> CallLost:
        """Return the record that ends a call under way without another end."""
        begun = self._begun[call]
        return CallLost(
            call_id=call, cause=cause, reason=reason, run_by=begun.server, decided=begun.decided, last=begun.last,
            **begun.whose,
        )  # fmt: skip

    def _begin(self, call: str, record: Record, before: Head) -> str:
        if call in self._begun:
            return f"call {call} begins a second time"
        if record.data.get("effect") == "allow":
            whose = {name: record.data[name] for name in WHOSE if name in record.data}
            self._begun[call] = Begun(
                before=before, server=record.server, decided=record.time, last=record.kind, whose=whose
            )
            if len(self._begun) > MAX_UNDER_WAY:
                del self._begun[next(iter(self._begun))]
                self._forgot = True
        return ""


DIRECTORY = "writers"
_SUFFIX = ".json"

#: Growth of the chain before a server writes its position again: most that a start after a crash reads, beside what was
#: written since. A write of a cached page costs nothing beside the record's own.
STEP_BYTES = 1 << 20

#: Most files read at one start. Each is of a server that runs now or was killed since the last start.
MAX_WRITERS = 4096


@dataclass(slots=True, kw_only=True)
class Writer:
    """The locked file of one server process."""

    server: str
    since: Head | None
    """Before this, all its calls have ended; None if the file does not say."""
    place: LogDirectory
    descriptor: int

    def settle(self, head: Head) -> None:
        """Write that before ``head`` all calls of this server have ended; once per ``STEP_BYTES``."""
        os.pwrite(self.descriptor, chain.encode_head(head), 0)
        self.since = head

    def close(self, *, remove: bool) -> None:
        """Release the file, and remove it unless calls of this server have no end yet."""
        if remove:
            with contextlib.suppress(FileNotFoundError):
                self.place.remove(_path(self.server))
        os.close(self.descriptor)


def register(place: LogDirectory, server: str, head: Head) -> Writer | None:
    """Lock and return the file of this process; None if another process has this id."""
    descriptor = place.open(_path(server), 0)
    if not take_lock(descriptor):
        os.close(descriptor)
        return None
    writer = Writer(server=server, since=None, place=place, descriptor=descriptor)
    writer.settle(head)
    # After a power cut the name must be there; without its content the log is read from the beginning.
    place.sync(DIRECTORY)
    return writer


def abandoned(place: LogDirectory) -> list[Writer]:
    """Lock and return the files of dead servers, at most ``MAX_WRITERS``."""
    place.folder(DIRECTORY)
    found: list[Writer] = []
    for name in place.names(DIRECTORY)[:MAX_WRITERS]:
        server = name.removesuffix(_SUFFIX)
        if name == server or not chain.is_name(server):
            continue
        try:
            descriptor = place.open(_path(server), 0, create=False)
        except FileNotFoundError:  # its server ended in good order, in this moment
            continue
        if not take_lock(descriptor):
            os.close(descriptor)
            continue
        try:
            since = chain.parse_head(os.pread(descriptor, chain.HEAD_BYTES + 1, 0))
        except EvidenceError:
            since = None
        found.append(Writer(server=server, since=since, place=place, descriptor=descriptor))
    return found


def live(log: Path) -> list[str]:
    """Return the ids of the servers that have a log open now, at most ``MAX_WRITERS``; reads no record.

    A server is about to lock a file without content: a lock on it would be in the way.
    """
    servers: list[str] = []
    folder = log / DIRECTORY
    for path in sorted(folder.iterdir())[:MAX_WRITERS] if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # its server ends in this moment
            if path.lstat().st_size and is_held(path):
                servers.append(path.name.removesuffix(_SUFFIX))
    return servers


def _path(server: str) -> str:
    return f"{DIRECTORY}/{server}{_SUFFIX}"


def under_way(directory: Path, tail: Head, gone: Sequence[Writer]) -> dict[str, OpenCalls]:
    """Return the calls that dead servers may have left open, up to ``tail``.

    Read from their files' positions, or from the beginning. They write no more, so reading needs no lock.
    """
    found = {writer.server: OpenCalls() for writer in gone}
    names = [server.encode() for server in found]
    with read.opened(directory) as log:
        known = [writer.since for writer in gone if writer.since is not None and _holds(log, writer.since, tail)]
        start = min(head.size for head in known) if len(known) == len(gone) else log.start
        for file, base, size in log.files_from(start):
            for at, line, free in read.raw_lines(file, max(start - base, 0), min(size, tail.size - base)):
                # Parsing is expensive, and most lines after a crash are other servers'.
                if free and any(name in line for name in names):
                    with contextlib.suppress(EvidenceError):
                        record = chain.parse(line)
                        lost = record.kind == CallLost.kind  # told of by another server, that did not get further
                        ran = record.data.get("run_by") if lost else record.server
                        if ran in found:
                            found[ran].note(record, Head(seq=record.seq - 1, hash=record.prev, size=base + at))
    return found


def _holds(log: read.Snapshot, head: Head, tail: Head) -> bool:
    if head.size == 0 or head.size > tail.size:
        return head == Head()
    try:
        record = chain.parse(log.line_before(head.size))
    except EvidenceError:  # or its segment was removed
        return False
    return (record.seq, record.hash) == (head.seq, head.hash)
