"""The worker: one thread that answers servers, and a thread for each source of sandboxes.

``python -m glovebox_sandboxes.worker.main STATE DATA`` is started by the first server of a state directory, and ends a
minute after the last has gone. It holds no key, decides no policy and writes no log. Of a sandbox's wire it reads the
measurement and no byte more. A server that goes away, by whatever end, takes the sandboxes of its calls along.
"""

import heapq
import itertools
import os
import select
import selectors
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal, start_blocking_portal

from glovebox_sandboxes.contract.base import Driver, Limits, Mount, Plan, SandboxSpec
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_sandboxes.drivers.registry import DRIVERS
from glovebox_sandboxes.host import owner
from glovebox_sandboxes.host.descriptors import opened
from glovebox_sandboxes.host.mounts import MountWatch
from glovebox_sandboxes.pool.ready_queue import REVIEW_SECONDS
from glovebox_sandboxes.sharing import ANSWER_SECONDS, DEFER_SECONDS, weigh_all
from glovebox_sandboxes.worker import place
from glovebox_sandboxes.worker.messages import MAX_DESCRIPTORS, Message, Reader, encode
from glovebox_sandboxes.worker.queue import LeaseQueue
from glovebox_sandboxes.worker.source import PreparedFork, SourceThread

IDLE_SECONDS = 60.0
"""From the end of the last connection to the worker's own."""
LATE_SECONDS = 5.0
"""After a lease's deadline, until its sandbox is ended whatever its server does."""
_SEND_SECONDS = 1.0
"""Until a server that reads nothing is dropped."""
_FULL_SECONDS = 0.05
"""Before the next look at a connection for which no descriptor is left."""
_READ = 1 << 16
_MOST_DRIVERS = 8
"""Of one name, each with what was installed when it was connected: servers keep what they began with."""
_RESTART = "Restart the servers of this state directory together."


@dataclass(eq=False)
class HeldLease:
    """A call's claim to a sandbox, from its request to the sandbox's end."""

    connection: "ServerLink"
    number: int
    key: str
    seconds: float
    queue: LeaseQueue | None = None
    prepared: PreparedFork | None = None
    ending: bool = False

    def grant(self, prepared: PreparedFork) -> None:
        """Send the sandbox; its wire is then the server's alone."""
        worker = self.connection.worker
        self.prepared = prepared
        worker.granted(self)
        fork, alone = prepared.fork, prepared.alone
        self.connection.tell_table(prepared)
        with ExitStack() as held:
            counters = {}
            for what, path in fork.group.counters().items():
                with suppress(OSError):  # what cannot be read is not counted
                    counters[what] = held.enter_context(opened(path))
            descriptors = [fork.wire.fileno(), fork.pidfd, fork.detail, *counters.values()]
            told: Message = {
                "kind": "granted", "lease": self.number, "sandbox": fork.id, "table": prepared.table,
                **asdict(alone), "counters": [*counters], "fds": len(descriptors),
            }  # fmt: skip
            self.connection.send(told, descriptors)
        fork.wire.close()

    def refuse(self, problem: SandboxError | None) -> None:
        """See ``queue.Claimant.refuse``."""
        told: Message = {"kind": "refused", "lease": self.number, "known": self.queue is not None}
        if problem is not None:
            told |= {"what": problem.what, "reason": problem.reason, "fix": problem.fix}
        self.connection.forget(self)
        self.connection.send(told)


class ServerLink:
    """One server."""

    def __init__(self, worker: "SandboxWorker", link: socket.socket) -> None:
        self.worker, self._link = worker, link
        link.settimeout(_SEND_SECONDS)
        self._reader = Reader()
        self._leases: dict[int, HeldLease] = {}
        self._queues: dict[str, LeaseQueue] = {}
        """By the digest of a plan."""
        self._tables: set[str] = set()
        self._open = True

    def read(self) -> None:
        """Take what the server has sent; close the connection if that breaks a rule, or it has gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._link, _READ, MAX_DESCRIPTORS)
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
            for lease in tuple(self._leases.values()):
                self._end(lease)

    def forget(self, lease: HeldLease) -> None:
        """Drop a lease that is over."""
        if self._leases.pop(lease.number, None) is not None and lease.queue is not None:
            lease.queue.over(lease.key)

    def tell_table(self, prepared: PreparedFork) -> None:
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
        elif kind == "prepare":
            self._prepare(message)
        elif kind == "lease":
            self._lease(message)
        elif kind in ("cancel", "end"):
            lease = self._leases.get(message["lease"])
            if lease is not None:
                self._end(lease)
        else:
            raise ValueError(f"unknown kind {kind!r}")

    def _prepare(self, message: Message) -> None:
        """Prepare sandboxes of a spec by a plan of our own, which has to be the server's."""
        told: Message = {"kind": "prepared", "plan": message["plan"]}
        try:
            spec = _spec_of(message["spec"])
            self._queues[message["plan"]] = self.worker.queue(
                message["driver"], spec, message["plan"], shared=message["shared"]
            )
        except (SandboxError, UnsupportedSpecError) as problem:
            told |= {"what": problem.what, "reason": problem.reason, "fix": problem.fix}
        self.send(told)

    def _lease(self, message: Message) -> None:
        lease = HeldLease(connection=self, number=message["lease"], key=message["key"], seconds=message["seconds"])
        self._leases[lease.number] = lease
        queue = lease.queue = self._queues.get(message["plan"])
        if queue is None:
            lease.refuse(None)
            return
        for sibling in self.worker.siblings(queue):
            sibling.keep_filled()
        self.worker.leased(lease)
        if queue.lease(lease):
            self.send({"kind": "waiting", "lease": lease.number})

    def _end(self, lease: HeldLease) -> None:
        """End a lease: its sandbox, or its wait for one."""
        if lease.ending:
            return
        lease.ending = True
        queue, prepared = lease.queue, lease.prepared
        if queue is not None and lease in queue.waiting:
            queue.waiting.remove(lease)
        self.forget(lease)
        if queue is None or prepared is None:
            return

        def ended(stayed: str) -> None:
            self.send({"kind": "ended", "lease": lease.number, "stayed": stayed})

        self.worker.over(lease)
        self.worker.later(lambda: queue.end(prepared, ended))


def _spec_of(told: Message) -> SandboxSpec:
    """Read a spec; no value is converted, or its plan would have another digest. Raises TypeError, LookupError."""
    mounts = tuple(Mount(**each) for each in told["mounts"])
    lists = {name: tuple(told[name]) for name in ("masks", "preload")}
    labels = tuple((name, value) for name, value in told["labels"])
    return SandboxSpec(**{**told, **lists, "limits": Limits(**told["limits"]), "mounts": mounts, "labels": labels})


def _act(action: Callable[[], object]) -> None:
    try:
        action()
    except Exception:  # noqa: BLE001 - of one server or sandbox; the others go on
        traceback.print_exc()


class SandboxWorker:
    """Everything that the answering thread has; other threads only call ``tell``."""

    def __init__(self, listener: socket.socket, data: Path, portal: BlockingPortal, held: ExitStack) -> None:
        self._listener, self._data, self._portal, self._held = listener, data, portal, held
        self._selector = selectors.DefaultSelector()
        self._connections: set[ServerLink] = set()
        self._drivers: dict[str, list[Driver]] = {}
        """By name, the newest last."""
        self._strange: set[str] = set()
        """Digests of plans for which a driver was connected anew."""
        self._queues: dict[tuple[str, str], LeaseQueue] = {}
        self.mounted = MountWatch()
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
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, lambda: os.eventfd_read(self._wake))
        self.after(REVIEW_SECONDS, self._review)

    def run(self) -> None:
        """Answer servers until none has been there for ``IDLE_SECONDS``."""
        self._idle_since = time.monotonic()
        while self._connections or time.monotonic() - self._idle_since < IDLE_SECONDS:
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

    def queue(self, driver: str, spec: SandboxSpec, digest: str, *, shared: bool) -> LeaseQueue:
        """Return the queue of a plan that we made too, and that has this digest. Raises SandboxError."""
        known = self._queues.get((driver, digest))
        if known is None:
            found, plan = self._plan(driver, spec, digest)
            self._retire(plan)
            known = self._queues[driver, digest] = LeaseQueue(self, found, plan, shared=shared)
        known.shared |= shared
        for sibling in self.siblings(known):
            sibling.keep_filled()
        return known

    def siblings(self, queue: LeaseQueue) -> list[LeaseQueue]:
        """Return the queues that differ from it only in what is preloaded: they are kept and cleared together."""
        spec = queue.plan.spec.without_preload()
        return [
            each for each in self._queues.values()
            if each.driver is queue.driver and each.plan.spec.without_preload() == spec
        ]  # fmt: skip

    def leased(self, lease: HeldLease) -> None:
        """Note that a call has begun: what others need is deferred."""
        if lease.queue is not None:
            self.later(lease.queue.order)

    def granted(self, lease: HeldLease) -> None:
        """Share the processors among the sandboxes of its key, and end it some time after its deadline."""
        self._active += 1
        if lease.prepared is not None:
            running = self._running.setdefault(lease.key, {})
            running[lease.prepared.fork.group] = 1
            weigh_all(running)
        self.after(lease.seconds + LATE_SECONDS, lease.connection.expire(lease))

    def over(self, lease: HeldLease) -> None:
        """Note that a call needs its sandbox no more."""
        self._active -= 1
        if not self._active:
            self._defer_until = min(self._defer_until, time.monotonic() + ANSWER_SECONDS)
        if lease.prepared is not None:
            running = self._running[lease.key]
            del running[lease.prepared.fork.group]
            weigh_all(running)
            if not running:
                del self._running[lease.key]
        if lease.queue is not None:
            self.later(lease.queue.order)

    def forget(self, connection: ServerLink, link: socket.socket) -> None:
        """Drop a server that has gone."""
        self._selector.unregister(link)
        self._connections.discard(connection)
        self._idle_since = time.monotonic()

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:  # no descriptor is left
            time.sleep(_FULL_SECONDS)
            raise
        try:
            place.require_peer(link)
        except OSError as problem:
            print(f"a connection was refused: {problem}", file=sys.stderr)  # noqa: T201 - the worker's log
            link.close()
            return
        connection = ServerLink(self, link)
        self._connections.add(connection)
        self._selector.register(link, selectors.EVENT_READ, connection.read)

    def _pause(self) -> float:
        ends = [each[0] for each in self._timers[:1]]
        if self._deferred:
            ends.append(self._defer_until)
        if not self._connections:
            ends.append(self._idle_since + IDLE_SECONDS)
        return max(0.0, min(ends) - time.monotonic())

    def _urgent(self) -> bool:
        return any(queue.waiting for queue in self._queues.values())

    def _review(self) -> None:
        for queue in self._queues.values():
            queue.review()
            self.later(queue.order)
        self.after(REVIEW_SECONDS, self._review)

    def begin(self, queue: LeaseQueue) -> SourceThread:
        """See ``queue.Shop``."""
        return SourceThread(queue.driver, queue.plan, self._portal, self.tell)

    def watch(self, queue: LeaseQueue, prepared: PreparedFork) -> Callable[[], None]:
        """See ``queue.Shop``: it has ended then, or speaks without a job."""
        wire = prepared.fork.wire
        self._selector.register(wire, selectors.EVENT_READ, lambda: queue.drop(prepared))
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

    def _plan(self, name: str, spec: SandboxSpec, digest: str) -> tuple[Driver, Plan]:
        """Return the driver that makes this plan; connect one anew if none does: what is installed may have changed."""
        drivers = self._drivers.setdefault(name, [])
        while True:
            for driver in reversed(drivers):
                with suppress(UnsupportedSpecError):
                    plan = driver.plan(spec)
                    if plan.digest == digest:
                        return driver, plan
            if digest in self._strange or len(drivers) == _MOST_DRIVERS:
                raise SandboxError("Preparing a sandbox", "its worker makes another plan of it", _RESTART)
            self._strange.add(digest)
            (entry,) = [each for each in DRIVERS if each.name == name]
            connecting = entry.connect(self._data, owner.server_id())
            drivers.append(self._held.enter_context(self._portal.wrap_async_context_manager(connecting)))

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


def main(state: Path, data: Path, *, alone: bool = False) -> None:
    """Listen, tell who started this that it is so by closing standard output, and answer servers.

    Who starts it holds the lock on the directory, or it starts ``alone``. Raises SandboxError if one is there then.
    """
    with place.directory(state) as directory, socket.socket(socket.AF_UNIX) as listener:
        path = place.address(directory, place.name(data))
        with place.locked(directory, path) if alone else nullcontext():
            _listen(listener, path)
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 1)
        try:
            with start_blocking_portal() as portal, ExitStack() as drivers:
                worker = SandboxWorker(listener, data, portal, drivers)
                while True:
                    worker.run()
                    place.lock(directory)
                    if not select.select([listener], [], [], 0)[0]:  # no connection is pending
                        os.unlink(path)  # noqa: PTH108 - below an open directory
                        os._exit(0)
                    place.unlock(directory)
        except BaseException:  # noqa: BLE001 - it ends, whatever it was
            traceback.print_exc()
            os._exit(1)


def _listen(listener: socket.socket, path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108 - of a worker that was killed
    listener.bind(path)
    listener.listen()


if __name__ == "__main__":
    if os.fork():  # no child of a server, which may end before
        os._exit(0)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
