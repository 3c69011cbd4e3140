"""The prepared sandboxes of one plan: the calls that lease them meet the task that refills the queue here."""

import os
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from glovebox_sandboxes.contract.base import Driver, Plan, Source
from glovebox_sandboxes.host import mounts
from glovebox_sandboxes.pool.idle_gate import IdleGate
from glovebox_sandboxes.pool.prepared import PreparedSandbox
from glovebox_sandboxes.pool.state import IDLE_SECONDS, Backoff, Demand, Event, State
from glovebox_sandboxes.sharing.turns import may_take


@dataclass(slots=True, eq=False)
class Waiter:
    """A call that waits for the next sandbox of a queue."""

    key: str
    answered: anyio.Event = field(default_factory=anyio.Event)
    granted: PreparedSandbox | None = None
    """None where there will be none."""

    def answer(self, granted: PreparedSandbox | None) -> None:
        """Let it go on."""
        self.granted = granted
        self.answered.set()


@dataclass(slots=True, eq=False)
class Supply:
    """Where a queue's sandboxes come from, for as long as one task refills it."""

    source: Source | None = None
    """None until it is open."""
    fingerprint: tuple[object, ...] = ()
    """What the plan's mounts led to before it was opened: a zygote's forks have what the zygote has mounted."""


class ReadyQueue:
    """The prepared sandboxes of one plan, those that wait for a call in the order in which they got ready."""

    def __init__(
        self,
        driver: Driver,
        plan: Plan,
        mounted: mounts.Watch,
        gate: IdleGate,
        siblings: "list[ReadyQueue]",
        *,
        shared: bool,
    ) -> None:
        """Take what is to be prepared, and what the queues of one pool share.

        Args:
            driver: whose sandboxes they are.
            plan: what each of them is.
            mounted: knows what is mounted inside a directory.
            gate: defers what calls need not wait for.
            siblings: the queues that are kept as long as this one is used; it adds itself.
            shared: whether calls have more than one key, so that each leaves sandboxes for others.
        """
        self.driver = driver
        self.plan = plan
        self.siblings = siblings
        siblings.append(self)
        self.demand = Demand(used_at=anyio.current_time())
        self.backoff = Backoff()
        self.supply: Supply | None = None
        """None where no task refills it."""
        self.sandboxes: set[PreparedSandbox] = set()
        """All that are not yet gone."""
        self.ready: deque[PreparedSandbox] = deque()
        """Those that are READY and claimed by nobody."""
        self.changed = anyio.Event()
        """Set when whoever refills it has to look at it; renewed by them."""
        self._waiters: list[Waiter] = []
        self._calls: Counter[str] = Counter()
        """Calls under way by their key, those that wait for a sandbox among them."""
        self._shared = shared
        self._mounted = mounted
        self._gate = gate

    @property
    def has_waiters(self) -> bool:
        """Whether a call waits for the next sandbox."""
        return bool(self._waiters)

    @property
    def preparing(self) -> int:
        """How many sandboxes are being prepared."""
        return sum(each.state is State.PREPARING for each in self.sandboxes)

    @property
    def missing(self) -> int:
        """How many more sandboxes are to be prepared now."""
        return self.demand.missing(ready=len(self.ready), preparing=self.preparing, waiters=len(self._waiters))

    @property
    def stale(self) -> bool:
        """Whether the mounts lead elsewhere than when the source was opened."""
        return self.supply is not None and self.supply.fingerprint != self.fingerprint()

    def fingerprint(self) -> tuple[object, ...]:
        """What the plan's mounts lead to now: a directory that was replaced since is not what is mounted.

        Nor is one in which something was mounted since, nor is a file covered that has taken the place of one that was.
        """
        found: list[object] = []
        for mount in self.plan.spec.mounts:
            try:
                status = os.stat(mount.source)  # noqa: PTH116 - of a few microseconds each counts
            except OSError as problem:
                found.append(problem.errno)
            else:
                found.append((status.st_dev, status.st_ino, self._mounted.inside(mount.source)))
            found += [_identity(f"{mount.source}/{name}") for name in self.plan.spec.masks]
        return tuple(found)

    @property
    def idle(self) -> bool:
        """Whether nothing is left of it, and no call needs it."""
        return self.supply is None and not self.sandboxes and not self._calls

    def retire(self) -> None:
        """Be refilled no longer than the calls last that are under way, unless another call comes."""
        self.demand.used_at = -IDLE_SECONDS
        self.changed.set()

    @contextmanager
    def in_use(self, key: str) -> Iterator[None]:
        """Count one call, for the length of the block."""
        self.demand.begin(anyio.current_time())
        self._calls[key] += 1
        try:
            yield
        finally:
            self.demand.end(anyio.current_time())
            self._calls[key] -= 1
            if not self._calls[key]:
                del self._calls[key]
            self.changed.set()

    async def lease(self, key: str, waits: Callable[[], Awaitable[None]]) -> PreparedSandbox | None:
        """Get a sandbox that is ready, or the next one that will be; None where starting one is as quick.

        Args:
            key: whose call it is that ``in_use`` counts.
            waits: called where none is ready, before the next is waited for or None is returned.
        """
        while True:
            sandbox = self._claim(key)
            if sandbox is None:
                await waits()
                # One may have become ready in that time, and none is prepared for waiters where one is ready.
                sandbox = self._claim(key) or await self._next(key)
            if sandbox is None:
                return None
            try:
                await sandbox.reached(State.LEASED)
            except BaseException:
                await sandbox.abandon()
                raise
            # Not as soon as it was claimed: whoever refills the queue would have its turn before this call.
            self.changed.set()
            if sandbox.state is State.LEASED:
                return sandbox

    def _claim(self, key: str) -> PreparedSandbox | None:
        """Take out the one that has been ready for longest and is not stale, unless it is left for other keys."""
        fingerprint = self.fingerprint() if self.ready else ()
        claimed = None
        others = self._calls[key] - 1
        while claimed is None and may_take(others, len(self.ready), shared=self._shared):
            first = self.ready.popleft()
            if first.fingerprint == fingerprint:
                claimed = first
                claimed.claim()
            else:
                first.discard()
        if claimed is None:
            self.changed.set()
        return claimed

    async def _next(self, key: str) -> PreparedSandbox | None:
        """Wait for the next one, where the source is quick; it comes LEASED."""
        source = self.supply.source if self.supply is not None else None
        if source is None or not source.quick or self.stale:
            return None
        waiter = Waiter(key)
        self._waiters.append(waiter)
        self.changed.set()
        self._gate.notify()
        try:
            await waiter.answered.wait()
        except BaseException:
            if waiter.granted is not None:
                waiter.granted.give_back()
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise
        return waiter.granted

    async def offer(self, sandbox: PreparedSandbox) -> None:
        """Grant one that is READY to a waiter; else hold it until a call claims it, or nobody is to get it.

        The waiter is the first of those whose key has the fewest calls.
        """
        claimed = self.has_waiters
        if claimed:
            waiter = min(self._waiters, key=lambda each: self._calls[each.key])
            self._waiters.remove(waiter)
            waiter.answer(sandbox)
        else:
            self.ready.append(sandbox)
            try:
                claimed = await sandbox.watch()
            finally:
                if sandbox in self.ready:
                    self.ready.remove(sandbox)
                    self.changed.set()
        # Discarded or given back in the meantime, it is ENDING, however the watch ended.
        if sandbox.state is State.READY:
            sandbox.advance(Event.GRANTED if claimed else Event.BROKE)

    def trim(self, keep: int) -> None:
        """Discard those that have been ready for the shortest time, but for so many."""
        while len(self.ready) > keep:
            self.ready.pop().discard()

    def close(self, supply: Supply) -> None:
        """Be without this supply: what is ready is discarded, and no call waits. Does nothing if it has another."""
        if self.supply is not supply:
            return
        self.supply = None
        self.trim(0)
        while self._waiters:
            self._waiters.pop(0).answer(None)


def _identity(path: str) -> tuple[int, ...]:
    """What tells a file or folder from one that has taken its place, even if it has the number of an older one."""
    try:
        status = os.lstat(path.rstrip("/"))
    except OSError as problem:
        return (problem.errno or -1,)
    return status.st_dev, status.st_ino, status.st_ctime_ns
