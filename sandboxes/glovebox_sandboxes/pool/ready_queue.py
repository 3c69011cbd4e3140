"""Prepared sandboxes of one plan: their states, how many are wanted, and the calls that lease them.

::

    PREPARING ──ATTESTED──▶ READY ──GRANTED──▶ LEASED
        │                     │                   │
        └─────────────────────┴──▶ ENDING ◀───────┘
                                     └──CLOSED──▶ GONE

Rule 1: a sandbox never goes back, and may end at any time. Rule 2: a transition not in the table raises. Rule 3: each
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
"""Each queue's ready sandboxes get at most 1/8 of the memory the host has left."""
REVIEW_SECONDS = 10.0
"""Between two reviews of demand, memory and age; each lowers the demand peak by one."""
IDLE_SECONDS = 600.0
"""An unused queue is cleared after this: a pause for thought keeps it, a night does not."""
RENEW_SECONDS = 1800.0
"""A source is restarted after this: what its forks share (addresses, hash seed) is shared no longer."""
RETRY_SECONDS = (1.0, 30.0)
"""Shortest and longest backoff before a failed source is tried again, when it is next wanted."""


class SandboxState(IntEnum):
    """State of a prepared sandbox, in the order of its life."""

    PREPARING = auto()
    """It is being started and attested, or queued for that."""
    READY = auto()
    """It is attested, and watched until a call gets it."""
    LEASED = auto()
    ENDING = auto()
    """No call can get it; it is being removed, or queued for that."""
    GONE = auto()


class SandboxEvent(Enum):
    """An event of a prepared sandbox."""

    ATTESTED = auto()
    GRANTED = auto()
    """The call that claimed it, or the first waiter, gets it."""
    RETURNED = auto()
    """Its call is over, or was cancelled before it got what it had claimed."""
    BROKE = auto()
    """It ended while it was ready, or sent something unasked."""
    DISCARDED = auto()
    """It is stale or surplus, or its source is being closed."""
    FAILED = auto()
    """It could not be prepared or watched, or its task was cancelled."""
    CLOSED = auto()


# A call returns its sandbox whatever its state, for instance when the server is stopped under it.
TRANSITIONS: Mapping[SandboxState, Mapping[SandboxEvent, SandboxState]] = {
    SandboxState.PREPARING: {SandboxEvent.ATTESTED: SandboxState.READY, SandboxEvent.FAILED: SandboxState.ENDING},
    SandboxState.READY: {
        SandboxEvent.GRANTED: SandboxState.LEASED,
        SandboxEvent.RETURNED: SandboxState.ENDING,
        SandboxEvent.BROKE: SandboxState.ENDING,
        SandboxEvent.DISCARDED: SandboxState.ENDING,
        SandboxEvent.FAILED: SandboxState.ENDING,
    },
    SandboxState.LEASED: {SandboxEvent.RETURNED: SandboxState.ENDING, SandboxEvent.FAILED: SandboxState.ENDING},
    SandboxState.ENDING: {
        SandboxEvent.RETURNED: SandboxState.ENDING,
        SandboxEvent.FAILED: SandboxState.ENDING,
        SandboxEvent.CLOSED: SandboxState.GONE,
    },
    SandboxState.GONE: {SandboxEvent.RETURNED: SandboxState.GONE},
}


def next_state(state: SandboxState, event: SandboxEvent) -> SandboxState:
    """Return the next state. Raises RuntimeError without a transition: an error in the pool, never a sandbox's."""
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise RuntimeError(f"{event.name} cannot happen to a sandbox that is {state.name}") from None


class PreparedSandbox:
    """A sandbox prepared ahead of its call, used by it alone, and then gone. ``Refill.keep`` holds it throughout."""

    attested: AttestedSandbox
    """Set once it is READY."""
    fingerprint: tuple[object, ...]
    """Targets of its mounts when it was started; set once it is READY."""

    def __init__(self) -> None:
        self.state = SandboxState.PREPARING
        self._watch = anyio.CancelScope()
        # Made before a call comes, and derived: each is set at the state of its key, and after it.
        states = (SandboxState.LEASED, SandboxState.ENDING, SandboxState.GONE)
        self._reached = {state: anyio.Event() for state in states}

    def advance(self, event: SandboxEvent) -> None:
        """Apply an event, and wake the tasks that wait for its state. Raises RuntimeError."""
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
        """Report whether a task waits until it is GONE."""
        return self._reached[SandboxState.GONE].statistics().tasks_waiting > 0

    async def watch(self) -> bool:
        """Watch it while it is READY; return whether the watch was cancelled, not ended by the sandbox."""
        with self._watch:
            await self.attested.link.wait_while_quiet()
        return self._watch.cancelled_caught

    def claim(self) -> None:
        """Claim it for a call, unless it breaks at the same moment: wait for LEASED, then check."""
        self._watch.cancel()

    def discard(self) -> None:
        """Have it removed although it is READY."""
        self.advance(SandboxEvent.DISCARDED)
        self._watch.cancel()

    def give_back(self) -> None:
        """Report that its call is over, or that the claim is withdrawn."""
        self.advance(SandboxEvent.RETURNED)

    async def abandon(self) -> None:
        """Give it back and wait until it is gone; that is then not deferred for other calls."""
        self.give_back()
        with anyio.CancelScope(shield=True):
            await self.wait_for(SandboxState.GONE)


@dataclass(slots=True, kw_only=True)
class Demand:
    """Number of sandboxes of one plan in use at one time, and number that should be ready. Pure."""

    used_at: float
    """Time at which a call last began or ended."""
    capacity: int = MOST_READY
    """The most that may be ready; follows the memory of the host."""
    in_use: int = 0
    peak: int = 0
    """The most calls under way at one time, lately."""

    @property
    def wanted(self) -> int:
        """Return how many should be ready: the recent peak of calls under way, and one more."""
        return min(self.peak + 1, self.capacity)

    def begin(self, now: float) -> None:
        """Count a call that begins."""
        self.used_at = now
        self.in_use += 1
        self.peak = min(max(self.peak, self.in_use), MOST_READY)

    def end(self, now: float) -> None:
        """Count a call that ends."""
        self.used_at = now
        self.in_use -= 1

    def missing(self, *, ready: int, preparing: int, waiters: int) -> int:
        """Return how many more to prepare now: one while calls run, which it slows, the rest afterwards."""
        wanted = min(self.wanted, 1) if self.in_use else self.wanted
        return wanted + waiters - ready - preparing

    def review(self, capacity: int) -> bool:
        """Lower the peak and set the capacity; return whether the capacity has become the limit."""
        self.peak = max(self.in_use, self.peak - 1)
        before, self.capacity = self.capacity, capacity
        return capacity < min(before, self.peak + 1)


@dataclass(slots=True)
class SourceBackoff:
    """Retry times of a source that failed. Pure."""

    delay: float = 0.0
    """Zero unless its last attempt failed."""
    not_before: float = 0.0

    @property
    def failing(self) -> bool:
        """Report whether it failed and has prepared nothing since."""
        return self.delay > 0

    def fail(self, now: float) -> None:
        """Double the delay."""
        first, last = RETRY_SECONDS
        self.delay = min(max(first, self.delay * 2), last)
        self.not_before = now + self.delay


@dataclass(slots=True, eq=False)
class WaitingCall:
    """A call that waits for the next sandbox of a queue."""

    key: str
    answered: anyio.Event = field(default_factory=anyio.Event)
    granted: PreparedSandbox | None = None
    """Stays None if there will be none."""

    def answer(self, granted: PreparedSandbox | None) -> None:
        """Wake the call with its sandbox."""
        self.granted = granted
        self.answered.set()


@dataclass(slots=True, eq=False)
class Supply:
    """The source of a queue's sandboxes while one task refills it."""

    source: Source | None = None
    fingerprint: tuple[object, ...] = ()
    """Targets of the plan's mounts before it was opened: forks have the mounts of their zygote."""


class ReadyQueue:
    """Prepared sandboxes of one plan; those that wait for a call in the order in which they got ready."""

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
        """Set up an empty queue.

        ``mounted`` reports mounts inside a directory, and ``gate`` defers what calls need not wait for. ``siblings``
        live as long as this queue is used; it adds itself. If ``shared``, calls have more than one key and leave
        sandboxes for others.
        """
        self.driver = driver
        self.plan = plan
        self.siblings = siblings
        siblings.append(self)
        self.demand = Demand(used_at=anyio.current_time())
        self.backoff = SourceBackoff()
        self.supply: Supply | None = None
        """Set while a task refills it."""
        self.sandboxes: set[PreparedSandbox] = set()
        """All that are not yet gone."""
        self.ready: deque[PreparedSandbox] = deque()
        """Those that are READY and unclaimed."""
        self.changed = anyio.Event()
        """Set when the refilling task should check the queue; renewed by that task."""
        self._waiters: list[WaitingCall] = []
        self._calls: Counter[str] = Counter()
        """Calls under way by key, including those that wait for a sandbox."""
        self._shared = shared
        self._mounted = mounted
        self._gate = gate

    @property
    def has_waiters(self) -> bool:
        """Report whether a call waits for the next sandbox."""
        return bool(self._waiters)

    @property
    def missing(self) -> int:
        """Return how many more sandboxes to prepare now."""
        preparing = sum(sandbox.state is SandboxState.PREPARING for sandbox in self.sandboxes)
        return self.demand.missing(ready=len(self.ready), preparing=preparing, waiters=len(self._waiters))

    @property
    def stale(self) -> bool:
        """Report whether the mounts lead elsewhere than when the source was opened."""
        return self.supply is not None and self.supply.fingerprint != self.fingerprint()

    def fingerprint(self) -> tuple[object, ...]:
        """Return what the plan's mounts lead to now; replaced directories or covers, and new mounts, change it."""
        parts: list[object] = []
        for mount in self.plan.spec.mounts:
            try:
                status = os.stat(mount.source)  # noqa: PTH116 - every microsecond counts
            except OSError as problem:
                parts.append(problem.errno)
            else:
                parts.append((status.st_dev, status.st_ino, self._mounted.inside(mount.source)))
            parts += [_identity(f"{mount.source}/{name}") for name in self.plan.spec.masks]
        return tuple(parts)

    @property
    def idle(self) -> bool:
        """Report whether nothing is left of it, and no call needs it."""
        return self.supply is None and not self.sandboxes and not self._calls

    def retire(self) -> None:
        """Stop refilling when the calls under way are over, unless another call comes."""
        self.demand.used_at = -IDLE_SECONDS
        self.changed.set()

    @contextmanager
    def in_use(self, key: str) -> Iterator[None]:
        """Count one call during the block."""
        self.demand.begin(anyio.current_time())
        self._calls[key] += 1
        try:
            yield
        finally:
            self.demand.end(anyio.current_time())
            self._calls[key] -= 1
            if not self._calls[key]:
                del self._calls[key]
            self._serve_waiting()
            self.changed.set()

    async def lease(self, key: str, waits: Callable[[], Awaitable[None]]) -> PreparedSandbox | None:
        """Lease a sandbox that is ready, or wait for the next; None if starting one is as quick.

        ``waits`` is called if none is ready, before the next is waited for or None is returned.
        """
        while True:
            sandbox = self._claim(key)
            if sandbox is None:
                await waits()
                # One may have become ready meanwhile, and none is prepared for waiters while one is ready.
                sandbox = self._claim(key) or await self._next(key)
            if sandbox is None:
                return None
            try:
                await sandbox.wait_for(SandboxState.LEASED)
            except BaseException:
                await sandbox.abandon()
                raise
            # Not at the claim: the refilling task would have its turn before this call.
            self.changed.set()
            if sandbox.state is SandboxState.LEASED:
                return sandbox

    def _claim(self, key: str) -> PreparedSandbox | None:
        """Take out the oldest ready one that is not stale, unless it is reserved for other keys."""
        fingerprint = self.fingerprint() if self.ready else ()
        claimed = None
        others = self._calls[key] - 1
        while claimed is None and self.ready and (not self._shared or may_take(others, len(self.ready))):
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
        """Wait for the next one, if the source is quick; it comes LEASED."""
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

    def _serve_waiting(self) -> None:
        """Grant ready ones to waiters that they are no longer reserved from: nothing more is prepared for those."""
        while self._waiters:
            waiter = self._fewest_calls()
            claimed = self._claim(waiter.key)
            if claimed is None:
                return
            self._waiters.remove(waiter)
            waiter.answer(claimed)

    def _fewest_calls(self) -> WaitingCall:
        return min(self._waiters, key=lambda call: self._calls[call.key])

    async def offer(self, sandbox: PreparedSandbox) -> None:
        """Grant it to the first waiter of the key with fewest calls; else hold it until claimed or discarded."""
        claimed = self.has_waiters
        if claimed:
            waiter = self._fewest_calls()
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
        # If discarded or given back meanwhile, it is ENDING, however the watch ended.
        if sandbox.state is SandboxState.READY:
            sandbox.advance(SandboxEvent.GRANTED if claimed else SandboxEvent.BROKE)

    def trim(self, keep: int) -> None:
        """Discard all except the ``keep`` that have been ready for longest."""
        while len(self.ready) > keep:
            self.ready.pop().discard()

    def close(self, supply: Supply) -> None:
        """Detach this supply: discard what is ready and wake all waiters. Does nothing if it has another."""
        if self.supply is not supply:
            return
        self.supply = None
        self.trim(0)
        while self._waiters:
            self._waiters.pop(0).answer(None)


def _identity(path: str) -> tuple[int, ...]:
    """Return what identifies a file or folder, even if a new one reuses the inode number."""
    try:
        status = os.lstat(path.rstrip("/"))
    except OSError as problem:
        return (problem.errno or -1,)
    return status.st_dev, status.st_ino, status.st_ctime_ns
