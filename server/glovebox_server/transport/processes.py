"""Several server processes behind one listening socket, each session in one of them.

A small parent binds the port, starts the processes, and starts a dead one again. They accept from one socket: with one
each (``SO_REUSEPORT``), a killed process would take waiting connections along.

Rule 1  A session's id begins with the number of its process. Before a process parses a request, the first of a
        connection or a later one, it looks for an id; a request of another's session goes there, socket and bytes. The
        owner parses and authenticates it from the start: an id says where, and nothing else.
Rule 2  The first request of a connection, if it names none, goes in the same way to the process with the fewest
        connections and sessions.
Rule 3  What waits for a process outlives it. Requests for a session of one that is not up get 404.
"""

import asyncio
import mmap
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from time import monotonic
from typing import Any
from uuid import UUID, uuid4

import h11
import mcp.server.sse
import mcp.server.streamable_http_manager
import structlog

from glovebox_sandboxes.host import cgroup
from glovebox_sandboxes.host.descriptors import receive
from glovebox_sandboxes.host.owner import new_mark
from glovebox_sandboxes.host.process import end_with_parent
from glovebox_server.exits import ENDING
from glovebox_server.mcp.server import MESSAGES_PATH
from glovebox_server.transport.http_timeouts import TimeoutProtocol

_DIGITS = 2
"""Of an id, for the number; 114 bits of it are random."""
_END = re.compile(rb"\n\r?\n")
_ID = re.compile(
    rb"\A\S+ [^\s?]*" + MESSAGES_PATH.rstrip("/").encode() + rb"/?\?(?:\S*&)?session_id=([0-9a-f]{32})(?![0-9a-f])"
    rb"|^mcp-session-id:[ \t]*([0-9a-f]{32})[ \t]*\r?$",
    re.IGNORECASE | re.MULTILINE,
)
"""A session's id in a request's head, in the address for SSE. It takes time in proportion to the head, of whatever."""
_AT_ONCE = 32
"""Connections taken from the others in one turn of the event loop."""
_MESSAGE_BYTES = 1 << 18
"""More than a process has read of a connection before it looks (a head, and what one read adds), and than is sent."""
_AGAIN_SECONDS = 0.05
"""Before a connection is offered again to a process that takes none now."""
_RESTART_SECONDS = (0.1, 5.0)
"""Shortest and longest pause before a process that has ended is started again."""
_LASTING_SECONDS = 60.0
"""A process that lived this long is started again after the shortest pause."""
_LOOK_SECONDS = 0.05
"""Between two looks at a process that starts."""
_log = structlog.get_logger(__name__)


class Seats:
    """The listening socket, the inboxes and the counts of all processes."""

    def __init__(self, count: int, listener: socket.socket) -> None:
        self.count = count
        self.listener = listener
        self.inboxes = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        """By process, what it reads connections of others from, and what those write to. The parent holds them too."""
        for each in chain.from_iterable(self.inboxes):
            each.setblocking(False)
        rows = [memoryview(mmap.mmap(-1, 8 * count)).cast("q") for _ in range(3 + count)]
        self.up, self.load, self.taken, *self.handed = rows
        """By process: whether it serves; its connections and sessions; how many connections others gave it so far; and,
        by giver, how many each did. Each number has one writer, so that none needs a lock."""


@dataclass(slots=True, kw_only=True)
class Seat:
    """One process's place among them."""

    number: int
    seats: Seats
    sessions: Sized = ()
    """Those over streamable HTTP, which need no connection."""
    _turn: int = field(default=0, init=False)
    _taking: set[asyncio.Task[object]] = field(default_factory=set, init=False)

    def owner_of(self, head: bytes, *, new: bool) -> int:
        """Return the process to which a request belongs; ``new``: it is the first of its connection."""
        found = _ID.search(head)
        if found is None:
            return self._least() if new else self.number
        owner = int((found[1] or found[2])[:_DIGITS], 16)
        return owner if owner < self.seats.count and self.seats.up[owner] else self.number

    def hand(self, owner: int, connection: socket.socket, data: bytes) -> bool:
        """Give a connection and what was read of it to another process; return whether that can take it now."""
        try:
            socket.send_fds(self.seats.inboxes[owner][1], [data], [connection.fileno()])
        except OSError:  # it takes none, or too many are on their way (unix(7)); or so many bytes are not sent at once
            return False
        self.seats.handed[self.number][owner] += 1
        return True

    def health(self) -> dict[str, int]:
        """Return for ``/health`` which process answers, and how many serve."""
        return {"process": self.number, "processes": sum(self.seats.up)}

    def open(self, make: Callable[..., asyncio.BaseProtocol]) -> None:
        """Begin to take what others give; ``make`` makes a protocol that was ``given`` what was read."""
        for module in (mcp.server.sse, mcp.server.streamable_http_manager):
            vars(module)["uuid4"] = self._new_id  # the SDK has no other way to name sessions
        asyncio.get_running_loop().add_reader(self._inbox, self._take, make)
        self.seats.up[self.number] = True

    def close(self) -> None:
        """Take no more; what comes waits for who has this seat next."""
        self.seats.up[self.number] = False
        asyncio.get_running_loop().remove_reader(self._inbox)

    @property
    def _inbox(self) -> socket.socket:
        return self.seats.inboxes[self.number][0]

    def _new_id(self) -> UUID:
        return UUID(hex=f"{self.number:0{_DIGITS}x}{uuid4().hex[_DIGITS:]}")

    def _take(self, make: Callable[..., asyncio.BaseProtocol]) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_AT_ONCE):
            try:
                data, given = receive(self._inbox, _MESSAGE_BYTES, 1)
            except BlockingIOError:
                return
            self.seats.taken[self.number] += 1
            if not given:  # too many files are open here: the connection is closed
                continue
            connection = socket.socket(fileno=given[0])
            task = loop.create_task(loop.connect_accepted_socket(partial(make, given=data), connection))
            self._taking.add(task)
            task.add_done_callback(self._taking.discard)

    def _least(self) -> int:
        seats, own = self.seats, self.number
        self._turn += 1  # among equals, each in turn

        def load(each: int) -> tuple[int, int]:
            coming = sum(row[each] for row in seats.handed) - seats.taken[each]
            return seats.load[each] + coming - (each == own), (each + self._turn) % seats.count

        return min((each for each in range(seats.count) if seats.up[each] or each == own), key=load)


class SharedProtocol(TimeoutProtocol):
    """Hands requests to the processes to which they belong."""

    def __init__(self, seat: Seat, *args: Any, given: bytes = b"", **kwargs: Any) -> None:
        """Serve a connection, of which another process has read ``given``."""
        super().__init__(*args, **kwargs)
        self._seat = seat
        self._given = given
        self._new = not given

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Count it, and begin with what was read of it."""
        super().connection_made(transport)
        self._note()
        if self._given:
            self.data_received(self._given)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count it no more."""
        super().connection_lost(exc)
        self._note()

    def handle_events(self) -> None:
        """Before a request is parsed, see whose it is."""
        if not self.transport.is_closing() and (self.conn.their_state is not h11.IDLE or not self._moved()):
            super().handle_events()

    def _moved(self) -> bool:
        data, _ = self.conn.trailing_data
        end = _END.search(data)
        if end is None:
            return False
        owner = self._seat.owner_of(data[: end.start()], new=self._new)
        self._new = False
        if owner == self._seat.number:
            return False
        if self.transport.get_write_buffer_size():
            self.transport.close()  # its client did not wait for the last answer, which still goes out: RFC 9112, 9.3.2
        elif self._seat.hand(owner, self.transport.get_extra_info("socket"), data):
            self.transport.abort()
        else:
            self.flow.pause_reading()  # until the time of a head, or of a kept connection, is over
            self._again = self.loop.call_later(_AGAIN_SECONDS, self.handle_events)
        return True

    def _note(self) -> None:
        self._seat.seats.load[self._seat.number] = len(self.connections) + len(self._seat.sessions)


def usual() -> int:
    """Return one process for two processors, at most four."""
    return max(1, min(4, len(os.sched_getaffinity(0)) // 2))


def share(count: int, listener: socket.socket, on_up: Callable[[], None]) -> Seat:
    """Become the parent of ``count`` processes, and return in each of them its seat.

    The parent exits once it was asked to and they have ended, with their exit code; or with that of the first one, if
    it could not start. ``on_up`` is called once that serves.
    """
    for group in getattr(cgroup.detect(new_mark()), "parents", ()):
        group.rmdir()  # alone in our group, we may have left it, which the first process could not
    asked = {n for n in (*ENDING, signal.SIGALRM) if signal.getsignal(n) is not signal.SIG_IGN}
    asked |= {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*asked, signal.SIGCHLD})
    parent = _Parent(Seats(count, listener))
    while True:
        seat = parent.start()
        if seat is not None:
            end_with_parent(parent.pid)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return seat
        if not parent.living and (parent.ending or not parent.announced):
            sys.exit(parent.code)
        if not parent.announced and parent.seats.up[0]:
            parent.announced = True
            on_up()
            continue
        found = signal.sigtimedwait({*asked, signal.SIGCHLD}, parent.patience())
        if found is not None and found.si_signo != signal.SIGCHLD:
            parent.end(found.si_signo)
        parent.reap()


class _Parent:
    def __init__(self, seats: Seats) -> None:
        self.seats = seats
        self.pid = os.getpid()
        self.living: dict[int, int] = {}
        """Numbers, by process id."""
        self.announced = self.ending = False
        self.code = 0
        self._due = dict.fromkeys(range(seats.count), 0.0)
        """When those that do not live are started."""
        self._pauses, self._begun = [0.0] * seats.count, [0.0] * seats.count

    def start(self) -> Seat | None:
        """Start who is due, the first alone; return the seat in a new process."""
        for number, due in sorted(self._due.items()):
            if self.ending or due > monotonic() or (number and not self.announced):
                continue
            self._begun[number] = monotonic()
            try:
                pid = os.fork()
            except OSError as problem:
                if not self.announced:
                    raise
                self._later(number, "a server process cannot be started", reason=problem.strerror)
                continue
            if not pid:
                return Seat(number=number, seats=self.seats)
            del self._due[number]
            self.living[pid] = number
        return None

    def patience(self) -> float:
        """Return for how long nothing has to be done unless a signal comes."""
        if not self.announced:
            return _LOOK_SECONDS
        return max(0.0, min(self._due.values(), default=monotonic() + 3600.0) - monotonic())

    def end(self, number: int) -> None:
        """Pass a signal on; from now on none is started."""
        self.ending = True
        for pid in self.living:
            os.kill(pid, number)

    def reap(self) -> None:
        """Note who has ended, and when it is started again."""
        while self.living:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            number, code = self.living.pop(pid), os.waitstatus_to_exitcode(status)
            self.seats.up[number] = self.seats.load[number] = 0
            if self.ending or not self.announced:
                self.code = max(self.code, code if code >= 0 else 128 - code)
                continue
            self._later(number, "a server process has ended", pid=pid, code=code)

    def _later(self, number: int, what: str, **told: object) -> None:
        least, most = _RESTART_SECONDS
        lasted = monotonic() - self._begun[number] >= _LASTING_SECONDS
        self._pauses[number] = pause = least if lasted else min(max(least, 2 * self._pauses[number]), most)
        self._due[number] = monotonic() + pause
        _log.warning(f"{what}; it is tried again", number=number, seconds=pause, **told)
