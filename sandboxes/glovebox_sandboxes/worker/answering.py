"""The answering thread: connections of servers, the leases of their calls, and the queues behind them.

Nothing here waits for a sandbox; other threads only call ``SandboxWorker.tell``.
"""

import heapq
import itertools
import os
import selectors
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal

from glovebox_sandboxes.contract.base import Driver, Plan, SandboxSpec, SandboxStats
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host.descriptors import opened, receive
from glovebox_sandboxes.host.mounts import MountWatch
from glovebox_sandboxes.sharing import RUNNING, STARTING, FairLimiter, weigh_all
from glovebox_sandboxes.worker import place
from glovebox_sandboxes.worker.messages import MAX_DESCRIPTORS, Message, Reader, encode
from glovebox_sandboxes.worker.plans import PlanFinder, read_spec
from glovebox_sandboxes.worker.queue import REVIEW_SECONDS, LeaseQueue
from glovebox_sandboxes.worker.source import PreparedSandbox, SourceThread

DEFER_SECONDS = 0.02
"""Longest that work is deferred for calls under way, which would wait for it: they share the processors."""
ANSWER_SECONDS = 0.002
"""After a call, so that its answer is written before deferred work begins."""
IDLE_SECONDS = 60.0
"""From the end of the last connection to the worker's own."""
_FULL_SECONDS = 0.05
"""Before the next look at a connection for which no descriptor is left."""
_AGAIN_SECONDS = 60.0
"""Before a plan that was not ours is prepared again, if its server asks."""
_MOST_SECONDS = 1e6
"""Of a lease."""
LATE_SECONDS = 5.0
"""After a lease's deadline, until its sandbox is ended whatever its server does."""
_START_SECONDS = 60.0
"""For a server to start a sandbox itself, until its turn is over."""
_SEND_SECONDS = 1.0
"""Until a server that reads nothing is dropped."""
_READ = 1 << 16


Then = Callable[["LeaseQueue | SandboxError"], None]


@dataclass(eq=False)
class HeldLease:
    """A call's claim to a sandbox, from its request to the sandbox's end."""

    connection: "ServerLink"
    number: int
    key: str
    seconds: float
    bound: int | None
    """Calls of its key that may run at one time with it."""
    known: bool
    """Its server has asked for its plan before."""
    queue: LeaseQueue | None = None
    prepared: PreparedSandbox | None = None
    has_turn: bool = False
    waits_to_start: bool = False
    starting: bool = False
    ending: bool = False

    def begin(self) -> None:
        """Take its turn: a sandbox that is ready, the next, or leave to start one."""
        self.has_turn = True
        self.connection.worker.begun(self)
        if self.ending:
            return
        if self.queue is None:
            self.refuse()
        elif self.queue.lease(self):
            self.connection.send({"kind": "waiting", "lease": self.number})

    def grant(self, prepared: PreparedSandbox) -> None:
        """Send the sandbox; its wire is then the server's alone."""
        self.prepared = prepared
        self.connection.worker.granted(self, prepared)
        made, alone = prepared.made, prepared.alone
        self.connection.tell_table(prepared)
        with ExitStack() as held:
            handed = made.hand_over()
            for what, path in made.counters.items():
                with suppress(OSError):  # what cannot be read is not counted
                    handed[what] = held.enter_context(opened(path))
            told: Message = {
                "kind": "granted", "lease": self.number, "sandbox": made.id, "table": prepared.table,
                **asdict(alone), "handed": [*handed], "fds": len(handed),
            }  # fmt: skip
            self.connection.send(told, [*handed.values()])
        made.wire.close()

    def refuse(self) -> None:
        """See ``queue.Claimant.refuse``."""
        self.waits_to_start = True
        self.connection.worker.starts.ask(self.key, self._may_start)
        if not self.starting:
            self.connection.send({"kind": "waiting", "lease": self.number})

    def _may_start(self) -> None:
        self.starting, self.waits_to_start = True, False
        worker = self.connection.worker
        worker.after(self.seconds + _START_SECONDS, self.connection.expire(self))
        self.connection.send({"kind": "refused", "lease": self.number, "known": self.known})

    def started(self) -> None:
        """Give back its turn to start a sandbox, or its wait for one."""
        starts = self.connection.worker.starts
        if self.starting:
            self.starting = False
            starts.release(self.key)
        elif self.waits_to_start:
            self.waits_to_start = False
            starts.withdraw(self.key, self._may_start)


class ServerLink:
    """One server."""

    def __init__(self, worker: "SandboxWorker", link: socket.socket) -> None:
        self.worker, self._link = worker, link
        link.settimeout(_SEND_SECONDS)
        self._reader = Reader()
        self._leases: dict[int, HeldLease] = {}
        self._queues: dict[str, LeaseQueue | None] = {}
        """By the digest of a plan; None if it is not the worker's."""
        self._tables: set[str] = set()
        self._open = True

    def read(self) -> None:
        """Take what the server has sent; close the connection if that breaks a rule, or it has gone."""
        try:
            data, descriptors = receive(self._link, _READ, MAX_DESCRIPTORS)
            if not data:
                self.close()
            for message, given in self._reader.feed(data, descriptors):
                for descriptor in given:  # a server hands nothing over
                    os.close(descriptor)
                if self._open:
                    self._take(message)
        except Exception as problem:  # noqa: BLE001 - whatever it said, others go on
            self._lose(problem)

    def send(self, message: Message, descriptors: list[int] | None = None) -> None:
        """Send a message; close the connection if the server does not read it."""
        if not self._open:
            return
        try:
            data = encode(message)
            sent = socket.send_fds(self._link, [data], descriptors or [])
            self._link.sendall(data[sent:])
        except OSError as problem:
            self._lose(problem)

    def _lose(self, problem: Exception) -> None:
        print(f"a server's connection ended: {problem!r}", file=sys.stderr)  # noqa: T201 - the worker's log
        self.close()

    def close(self) -> None:
        """End all sandboxes of its calls."""
        if self._open:
            self._open = False
            self.worker.forget(self, self._link)
            self._link.close()
            self._reader.close()
            # First those that wait for a turn: they would get those of the others.
            for lease in sorted(self._leases.values(), key=lambda each: each.has_turn):
                _act(partial(self._end, lease))

    def tell_table(self, prepared: PreparedSandbox) -> None:
        """Send a table that this server has not got yet."""
        digest = prepared.table
        if digest not in self._tables:
            self._tables.add(digest)
            self.send({"kind": "table", "digest": digest, "table": prepared.supply.thread.tables[digest].encoded()})

    def expire(self, lease: HeldLease) -> Callable[[], None]:
        """Return what ends a lease that its server has not."""
        return lambda: self._end(lease)

    def unlearn(self, queue: LeaseQueue) -> None:
        """Drop a plan: if the server asks for its sandboxes, it has to prepare it again."""
        self._queues.pop(queue.plan.digest, None)

    def uses(self, queue: LeaseQueue) -> bool:
        """Return whether this server has asked for a plan's sandboxes."""
        return queue in self._queues.values()

    def _take(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "hello":
            self.send({"kind": "hello", "version": place.VERSION})
        elif kind in ("prepare", "drop", "lease"):
            {"prepare": self._prepare, "drop": self._drop, "lease": self._lease}[kind](message)
        elif kind in ("end", "started", "look"):
            lease = self._leases.get(message["lease"])
            if lease is None:
                return
            if kind == "end":
                self._end(lease)
            elif kind == "started":
                lease.started()
            elif lease.prepared is not None:
                self._look(lease, lease.prepared, kill=message["kill"])
        else:
            raise ValueError(f"unknown kind {kind!r}")

    def _prepare(self, message: Message) -> None:
        """Prepare sandboxes of a spec by a plan of our own, which has to be the server's."""
        plan, shared = message["plan"], message["shared"]
        if (type(plan), type(shared)) != (str, bool):
            raise ValueError("a plan that is none")

        def prepared(found: LeaseQueue | SandboxError) -> None:
            told: Message = {"kind": "prepared", "plan": plan}
            if isinstance(found, SandboxError):
                self._queues[plan] = None
                self.worker.after(_AGAIN_SECONDS, partial(self._forget, plan))
                told |= {"what": found.what, "reason": found.reason, "fix": found.fix}
            else:
                self._queues[plan] = found
            self.send(told)

        self.worker.prepare(message["driver"], read_spec(message["spec"]), plan, shared, prepared)

    def _drop(self, message: Message) -> None:
        """Drop what is ready of a plan that is no longer in effect."""
        if (queue := self._queues.get(message["plan"])) is not None:
            queue.clear()

    def _forget(self, plan: str) -> None:
        if self._queues.get(plan) is None:
            self._queues.pop(plan, None)

    def _lease(self, message: Message) -> None:
        number, key, plan, seconds, bound = (message[name] for name in ("lease", "key", "plan", "seconds", "bound"))
        named = (type(number), type(key), type(plan)) == (int, str, str) and number not in self._leases
        timed = type(seconds) in {int, float} and 0 <= seconds <= _MOST_SECONDS
        if not (named and timed and (bound is None or (type(bound) is int and bound > 0))):
            raise ValueError("a lease that is none")  # others' turns are compared with it
        lease = HeldLease(
            connection=self, number=number, key=key, seconds=seconds, bound=bound,
            known=plan in self._queues, queue=self._queues.get(plan),
        )  # fmt: skip
        self._leases[number] = lease
        self.worker.turns.ask(lease.key, lease.begin, lease.bound)
        if not lease.has_turn:
            self.send({"kind": "queued", "lease": lease.number})

    def _look(self, lease: HeldLease, prepared: PreparedSandbox, *, kill: bool) -> None:
        def told(found: SandboxStats | None) -> None:
            self.send({"kind": "looked", "lease": lease.number, "found": found and asdict(found)})

        prepared.supply.thread.look(prepared.made, told, kill=kill)

    def _end(self, lease: HeldLease) -> None:
        """End a lease: its sandbox, its wait for one, or for its turn."""
        if lease.ending:
            return
        lease.ending = True
        self._leases.pop(lease.number, None)
        queue, prepared = lease.queue, lease.prepared
        if queue is not None and lease in queue.waiting:
            queue.waiting.remove(lease)

        def ended(stayed: str) -> None:
            self.send({"kind": "ended", "lease": lease.number, "stayed": stayed})

        if queue is not None and prepared is not None:
            self.worker.later(lambda: queue.end(prepared, ended))
        lease.started()
        self.worker.over(lease)


def _act(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception:  # noqa: BLE001 - of one server or sandbox; the others go on
        traceback.print_exc()


class SandboxWorker:
    """Everything that the answering thread has; other threads only call ``tell``."""

    def __init__(self, listener: socket.socket, data: Path, portal: BlockingPortal) -> None:
        self._listener, self._portal = listener, portal
        self.plans = PlanFinder(data, portal, self.tell)
        self._selector = selectors.DefaultSelector()
        self._connections: set[ServerLink] = set()
        self._queues: dict[tuple[str, str], LeaseQueue] = {}
        self.mounted = MountWatch()
        self.turns = FairLimiter(RUNNING, shared=False)
        self.starts = FairLimiter(STARTING, shared=False)
        self._running: dict[str, dict[Any, int]] = {}
        """Weights of the control groups that calls use, by key."""
        self._active = 0
        self._told: deque[Callable[[], None]] = deque()
        self._deferred: list[Callable[[], None]] = []
        self._defer_until = 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._idle_since = time.monotonic()
        self._listen()
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: os.eventfd_read(self._wake))
        self.after(REVIEW_SECONDS, self._review)

    def run(self) -> None:
        """Answer servers until none has been there for ``IDLE_SECONDS``."""
        self._idle_since = time.monotonic()
        while self._connections or time.monotonic() - self._idle_since < IDLE_SECONDS:
            self.step()

    def step(self) -> None:
        """Wait until there is something to do, and do it."""
        for found, _ in self._selector.select(self._pause()):
            _act(found.data)
        while self._told:
            _act(self._told.popleft())
        while self._timers and self._timers[0][0] <= time.monotonic():
            _act(heapq.heappop(self._timers)[2])
        if self._deferred and (time.monotonic() >= self._defer_until or self._urgent()):
            deferred, self._deferred = self._deferred, []
            for action in deferred:
                _act(action)

    def tell(self, action: Callable[[], None]) -> None:
        """Have the answering thread call a function; for other threads."""
        self._told.append(action)
        os.eventfd_write(self._wake, 1)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call a function later."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), action))

    def later(self, action: Callable[[], None]) -> None:
        """Call a function when no call runs, or in ``DEFER_SECONDS``: they would share the processors."""
        if not self._deferred:
            self._defer_until = time.monotonic() + (DEFER_SECONDS if self._active else ANSWER_SECONDS)
        self._deferred.append(action)

    def prepare(self, driver: str, spec: SandboxSpec, digest: str, shared: bool, then: Then) -> None:
        """Call ``then`` with the queue of a plan that we make too, and that has this digest, or why there is none."""

        def found(made: tuple[Driver, Plan] | SandboxError) -> None:
            known = self._queues.get((driver, digest))
            if known is None:
                if isinstance(made, SandboxError):
                    then(made)
                    return
                self._retire(made[1])
                known = self._queues[driver, digest] = LeaseQueue(self, *made)
            for each in (known, self.turns, self.starts):
                each.shared |= shared
            for sibling in self.siblings(known):
                sibling.keep_filled()
            then(known)

        known = self._queues.get((driver, digest))
        if known is None:
            self.plans.find(driver, spec, digest, found)
        else:
            found((known.driver, known.plan))

    def siblings(self, queue: LeaseQueue) -> list[LeaseQueue]:
        """Return the queues that differ from it only in what is preloaded: they are kept and cleared together."""
        return [each for each in self._queues.values() if each.driver is queue.driver and each.without == queue.without]

    def begun(self, lease: HeldLease) -> None:
        """Note that a call has its turn: what others need is deferred."""
        self._active += 1
        if lease.queue is not None:
            for sibling in self.siblings(lease.queue):
                sibling.keep_filled()
            self.later(lease.queue.order)

    def granted(self, lease: HeldLease, prepared: PreparedSandbox) -> None:
        """Share the processors among the sandboxes of its key, and end it some time after its deadline."""
        running = self._running.setdefault(lease.key, {})
        running[prepared.made] = 1
        weigh_all(running)
        self.after(lease.seconds + LATE_SECONDS, lease.connection.expire(lease))

    def over(self, lease: HeldLease) -> None:
        """Note that a call needs its turn, if it had one, and its sandbox no more."""
        if not lease.has_turn:
            self.turns.withdraw(lease.key, lease.begin)
            return
        self._active -= 1
        if not self._active:
            self._defer_until = min(self._defer_until, time.monotonic() + ANSWER_SECONDS)
        if lease.prepared is not None:
            running = self._running[lease.key]
            del running[lease.prepared.made]
            weigh_all(running)
            if not running:
                del self._running[lease.key]
        if lease.queue is not None:
            lease.queue.over(lease.key)
            self.later(lease.queue.order)
        self.turns.release(lease.key, lease.bound)

    def forget(self, connection: ServerLink, link: socket.socket) -> None:
        """Drop a server that has gone."""
        self._selector.unregister(link)
        self._connections.discard(connection)
        self._idle_since = time.monotonic()

    def _listen(self) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:  # no descriptor is left: others are answered meanwhile
            self._selector.unregister(self._listener)
            self.after(_FULL_SECONDS, self._listen)
            raise
        try:
            place.require_peer(link)
        except OSError as problem:
            print(f"a connection was refused: {problem}", file=sys.stderr)  # noqa: T201 - the worker's log
            link.close()
            return
        self.serve(link)

    def serve(self, link: socket.socket) -> None:
        """Answer a server."""
        connection = ServerLink(self, link)
        self._connections.add(connection)
        self._selector.register(link, selectors.EVENT_READ, connection.read)

    def _pause(self) -> float:
        ends = [time.monotonic() + REVIEW_SECONDS, *(each[0] for each in self._timers[:1])]
        if self._deferred:
            ends.append(self._defer_until)
        if not self._connections:
            ends.append(self._idle_since + IDLE_SECONDS)
        return max(0.0, min(ends) - time.monotonic())

    def _urgent(self) -> bool:
        return any(queue.waiting for queue in self._queues.values())

    def _review(self) -> None:
        self.after(REVIEW_SECONDS, self._review)
        for queue in self._queues.values():
            _act(queue.review)
            self.later(queue.order)

    def begin(self, queue: LeaseQueue) -> SourceThread:
        """See ``queue.Shop``."""
        return SourceThread(queue.driver, queue.plan, self._portal, self.tell)

    def watch(self, queue: LeaseQueue, prepared: PreparedSandbox) -> Callable[[], None]:
        """See ``queue.Shop``: it has ended then, or speaks without a job."""
        wire = prepared.made.wire

        def drop() -> None:
            queue.drop(prepared)
            self.later(queue.order)

        self._selector.register(wire, selectors.EVENT_READ, drop)
        return lambda: self._selector.unregister(wire) and None

    def say(self, queue: LeaseQueue, what: str, reason: str) -> None:
        """See ``queue.Shop``."""
        told: Message = {
            "kind": "event", "what": what, "driver": queue.driver.name, "plan": queue.plan.digest,
            "ready": len(queue.ready), "most": queue.capacity, "reason": reason,
        }  # fmt: skip
        for connection in tuple(self._connections):
            if connection.uses(queue):
                connection.send(told)
        if what == "opened":
            self.later(queue.order)

    def _retire(self, plan: Plan) -> None:
        """Retire queues that differ from this plan in masks alone: those have usually changed."""
        spec = replace(plan.spec, preload=(), masks=())
        for key, queue in list(self._queues.items()):
            if replace(queue.plan.spec, preload=(), masks=()) == spec and queue.plan.spec.masks != plan.spec.masks:
                queue.retire()
                if queue.supply is None and not queue.calls:
                    del self._queues[key]
                    for connection in self._connections:
                        connection.unlearn(queue)
