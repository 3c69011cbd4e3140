"""The prepared sandboxes of one plan: their states, how many are wanted, and the calls that lease them.

::

    PREPARING ──ATTESTED──▶ READY ──GRANTED──▶ LEASED
        │                     │                   │
        └─────────────────────┴──▶ ENDING ◀───────┘
                                     └──CLOSED──▶ GONE

Rule 1: a sandbox never goes back, and may end at any time. Rule 2: what the table does not name raises. Rule 3: each
event is sent from one place: ATTESTED, FAILED and CLOSED from ``Refill.keep``, GRANTED and BROKE from
``ReadyQueue.offer``, RETURNED and DISCARDED from ``PreparedSandbox``.
"""

import os
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto

import anyio

from glovebox_sandboxes.contract.base import Driver, Plan, Source
from glovebox_sandboxes.host.watches import MountWatch
from glovebox_sandboxes.session.connection import AttestedSandbox
from glovebox_sandboxes.sharing import IdleGate, may_take

MOST_READY = 16
"""In one queue: as many as calls run at one time, so a full turn of them finds its sandboxes ready."""
MEMORY_SHARE = 8
"""At most one part in so many of the memory the host has left is given to ready sandboxes, for each queue."""
REVIEW_SECONDS = 10.0
"""Between two reviews of demand, memory and age; the demand peak falls by one at each."""
IDLE_SECONDS = 600.0
"""A queue nobody leases from is cleared: a pause for thought keeps it, a night does not."""
RENEW_SECONDS = 1800.0
"""A source is started anew after this: what its forks share (addresses, hash seed) is shared no longer than that."""
RETRY_SECONDS = (1.0, 30.0)
"""A source that failed is tried again when it is next wanted: first after the one, in the end after the other."""


class SandboxState(IntEnum):
    """Where a prepared sandbox is in its life; in the order in which it gets there."""

    PREPARING = auto()
    """It is being started and attested, or waits for its turn to be."""
    READY = auto()
    """It is attested, and watched until a call gets it."""
    LEASED = auto()
    """A call has it."""
    ENDING = auto()
    """Nobody gets it any more; it is being removed, or waits for its turn to be."""
    GONE = auto()
    """Nothing is left of it."""


class SandboxEvent(Enum):
    """What can happen to a prepared sandbox."""

    ATTESTED = auto()
    """Its guest is ready, and it is what was planned."""
    GRANTED = auto()
    """The call that claimed it, or was first among the waiters, gets it."""
    RETURNED = auto()
    """Its call is over, or was cancelled before it got what it had claimed."""
    BROKE = auto()
    """It ended while it was ready, or spoke unasked."""
    DISCARDED = auto()
    """It is stale, or more than is wanted, or its source is being closed."""
    FAILED = auto()
    """It could not be prepared or watched, or the task that holds it was cancelled."""
    CLOSED = auto()
    """It has been removed."""


# A call returns what it was granted whatever became of it meanwhile, as when the server is stopped under it.
TRANSITIONS: Mapping[SandboxState, Mapping[SandboxEvent, SandboxState]] = {
    SandboxState.PREPARING: {
        SandboxEvent.ATTESTED: SandboxState.READY,
        SandboxEvent.FAILED: SandboxState.ENDING,
    },
    SandboxState.READY: {
        SandboxEvent.GRANTED: SandboxState.LEASED,
        SandboxEvent.RETURNED: SandboxState.ENDING,
        SandboxEvent.BROKE: SandboxState.ENDING,
        SandboxEvent.DISCARDED: SandboxState.ENDING,
        SandboxEvent.FAILED: SandboxState.ENDING,
    },
    SandboxState.LEASED: {
        SandboxEvent.RETURNED: SandboxState.ENDING,
        SandboxEvent.FAILED: SandboxState.ENDING,
    },
    SandboxState.ENDING: {
        SandboxEvent.RETURNED: SandboxState.ENDING,
        SandboxEvent.FAILED: SandboxState.ENDING,
        SandboxEvent.CLOSED: SandboxState.GONE,
    },
    SandboxState.GONE: {
        SandboxEvent.RETURNED: SandboxState.GONE,
    },
}


def next_state(state: SandboxState, event: SandboxEvent) -> SandboxState:
    """Return the state that an event leads to.

    Raises:
        RuntimeError: it leads nowhere from there: an error in the pool, never in what a sandbox did.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise RuntimeError(f"{event.name} cannot happen to a sandbox that is {state.name}") from None


class PreparedSandbox:
    """A sandbox that is prepared ahead of its call, used by that call alone, and gone after it.

    ``Refill.keep`` takes it from PREPARING to GONE.
    """

    attested: AttestedSandbox
    """Once it is READY."""
    fingerprint: tuple[object, ...]
    """What its mounts led to when it was started; once it is READY."""

    def __init__(self) -> None:
        self.state = SandboxState.PREPARING
        self._watch = anyio.CancelScope()
        # Made before a call comes, and derived: each is set as soon as the state is at its key, or past it.
        states = (SandboxState.LEASED, SandboxState.ENDING, SandboxState.GONE)
        self._reached = {state: anyio.Event() for state in states}

    def advance(self, event: SandboxEvent) -> None:
        """Apply an event, and wake whoever waits for the state that it leads to. Raises RuntimeError."""
        self.state = next_state(self.state, event)
        for state, reached in self._reached.items():
            if state <= self.state:
                reached.set()

    async def wait_for(self, state: SandboxState) -> None:
        """Wait until it is LEASED, ENDING or GONE, or past that."""
        if self.state < state:
            await self._reached[state].wait()

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits until it is GONE."""
        return self._reached[SandboxState.GONE].statistics().tasks_waiting > 0

    async def watch(self) -> bool:
        """Listen to it while it is READY; returns whether that was called off, and not its own doing."""
        with self._watch:
            await self.attested.link.wait_while_quiet()
        return self._watch.cancelled_caught

    def claim(self) -> None:
        """Have it granted to a call, unless it breaks in the same moment: wait for LEASED, then check."""
        self._watch.cancel()

    def discard(self) -> None:
        """Have it removed although it is READY."""
        self.advance(SandboxEvent.DISCARDED)
        self._watch.cancel()

    def give_back(self) -> None:
        """Report that the call that claimed it or was granted it is over."""
        self.advance(SandboxEvent.RETURNED)

    async def abandon(self) -> None:
        """Give it back and wait until it is gone; that is then not deferred for other calls."""
        self.give_back()
        with anyio.CancelScope(shield=True):
            await self.wait_for(SandboxState.GONE)


@dataclass(slots=True, kw_only=True)
class Demand:
    """How many sandboxes of one plan calls need at one time, and how many are therefore to be ready. Pure."""

    used_at: float
    """When a call last began or ended."""
    capacity: int = MOST_READY
    """The most that may be ready; follows the memory of the host."""
    in_use: int = 0
    """Calls under way."""
    peak: int = 0
    """The most calls under way at one time, lately."""

    @property
    def wanted(self) -> int:
        """How many are to be ready: as many as calls were under way at one time lately, and one for the next."""
        return min(self.peak + 1, self.capacity)

    def begin(self, now: float) -> None:
        """Count a call."""
        self.used_at = now
        self.in_use += 1
        self.peak = min(max(self.peak, self.in_use), MOST_READY)

    def end(self, now: float) -> None:
        """End a call that was counted."""
        self.used_at = now
        self.in_use -= 1

    def missing(self, *, ready: int, preparing: int, waiters: int) -> int:
        """Return how many more to prepare now: one while calls run, which it would slow down, the rest after them."""
        wanted = min(self.wanted, 1) if self.in_use else self.wanted
        return wanted + waiters - ready - preparing

    def review(self, capacity: int) -> bool:
        """Let the peak fall and the capacity follow; returns whether the capacity has come to be what limits."""
        self.peak = max(self.in_use, self.peak - 1)
        before, self.capacity = self.capacity, capacity
        return capacity < min(before, self.peak + 1)


@dataclass(slots=True)
class SourceBackoff:
    """When a source that failed may be tried again. Pure."""

    delay: float = 0.0
    """Zero where it did not fail the last time."""
    not_before: float = 0.0

    @property
    def failing(self) -> bool:
        """Whether it failed and has prepared nothing since."""
        return self.delay > 0

    def fail(self, now: float) -> None:
        """Wait twice as long as the last time."""
        first, last = RETRY_SECONDS
        self.delay = min(max(first, self.delay * 2), last)
        self.not_before = now + self.delay


@dataclass(slots=True, eq=False)
class WaitingCall:
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
        mounted: MountWatch,
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
        self.backoff = SourceBackoff()
        self.supply: Supply | None = None
        """None where no task refills it."""
        self.sandboxes: set[PreparedSandbox] = set()
        """All that are not yet gone."""
        self.ready: deque[PreparedSandbox] = deque()
        """Those that are READY and claimed by nobody."""
        self.changed = anyio.Event()
        """Set when whoever refills it has to look at it; renewed by them."""
        self._waiters: list[WaitingCall] = []
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
    def missing(self) -> int:
        """How many more sandboxes are to be prepared now."""
        preparing = sum(sandbox.state is SandboxState.PREPARING for sandbox in self.sandboxes)
        return self.demand.missing(ready=len(self.ready), preparing=preparing, waiters=len(self._waiters))

    @property
    def stale(self) -> bool:
        """Whether the mounts lead elsewhere than when the source was opened."""
        return self.supply is not None and self.supply.fingerprint != self.fingerprint()

    def fingerprint(self) -> tuple[object, ...]:
        """Return what the plan's mounts lead to now: a directory that was replaced since is not what is mounted.

        Nor is one in which something was mounted since, nor is a file covered that has taken the place of one that was.
        """
        parts: list[object] = []
        for mount in self.plan.spec.mounts:
            try:
                status = os.stat(mount.source)  # noqa: PTH116 - of a few microseconds each counts
            except OSError as problem:
                parts.append(problem.errno)
            else:
                parts.append((status.st_dev, status.st_ino, self._mounted.inside(mount.source)))
            parts += [_identity(f"{mount.source}/{name}") for name in self.plan.spec.masks]
        return tuple(parts)

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
                await sandbox.wait_for(SandboxState.LEASED)
            except BaseException:
                await sandbox.abandon()
                raise
            # Not as soon as it was claimed: whoever refills the queue would have its turn before this call.
            self.changed.set()
            if sandbox.state is SandboxState.LEASED:
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
        waiter = WaitingCall(key)
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
            waiter = min(self._waiters, key=lambda call: self._calls[call.key])
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
        if sandbox.state is SandboxState.READY:
            sandbox.advance(SandboxEvent.GRANTED if claimed else SandboxEvent.BROKE)

    def trim(self, keep: int) -> None:
        """Discard those that have been ready for the shortest time, but for ``keep``."""
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
    """Return what tells a file or folder from one that has taken its place, even with the number of an older one."""
    try:
        status = os.lstat(path.rstrip("/"))
    except OSError as problem:
        return (problem.errno or -1,)
    return status.st_dev, status.st_ino, status.st_ctime_ns
