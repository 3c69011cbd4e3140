"""Prepared sandboxes of one plan: the task that keeps them ready, how many are wanted, and the calls that lease them.

One task holds each sandbox from its start to its end. It is *settled* once a call has it or none ever will, *over* when
no call needs it any more, and then *gone*: three events, each happens once, and none is taken back.
"""

import os
import re
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import anyio.abc
import structlog

from glovebox_sandboxes.contract.base import Driver, Plan, Sandbox, SandboxSpec, Source
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host.mounts import MountWatch, identity
from glovebox_sandboxes.session.connection import AttestedSandbox, attest
from glovebox_sandboxes.sharing import FairLimiter, IdleGate, may_take

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

_log = structlog.get_logger(__name__)


PoolChange = Literal["opened", "limited", "failed", "recovered", "cleared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent:
    """A change of the pool for the log."""

    what: PoolChange
    driver: str
    plan_digest: str
    ready: int
    most: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """Parts that the queues of one pool share."""

    tasks: anyio.abc.TaskGroup
    describe: Callable[[Driver, AttestedSandbox], object]
    """Makes the record of an attested sandbox."""
    tell: Callable[[PoolEvent], Awaitable[None]]
    starts: FairLimiter
    """Bounds sandboxes that are being started."""
    shared: bool
    """True if calls have more than one key, and so leave sandboxes for others."""
    gate: IdleGate = field(default_factory=IdleGate)
    """Defers what calls need not wait for."""
    mounted: MountWatch = field(default_factory=MountWatch)

    async def attest(self, sandbox: Sandbox, driver: Driver, plan: Plan) -> AttestedSandbox:
        """Compare a sandbox with its plan once it is ready. Raises SandboxError if it does not get ready."""
        attested = await attest(sandbox, plan)
        return replace(attested, record=self.describe(driver, attested))


@dataclass(eq=False)
class PreparedSandbox:
    """A sandbox prepared ahead of its call, used by it alone, and then gone."""

    attested: AttestedSandbox
    fingerprint: tuple[object, ...]
    """Targets of its mounts when it was started."""
    leased: bool = False
    settled: anyio.Event = field(default_factory=anyio.Event)
    over: anyio.Event = field(default_factory=anyio.Event)
    gone: anyio.Event = field(default_factory=anyio.Event)
    watch: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """While it is ready; cancelled when a call claims it, who then waits whether it broke at the same moment."""

    def discard(self) -> None:
        """Have it removed although it is ready."""
        self.over.set()
        self.watch.cancel()

    async def abandon(self) -> None:
        """Give it back and wait until it is gone; that is then not deferred for other calls."""
        self.over.set()
        with anyio.CancelScope(shield=True):
            await self.gone.wait()


@dataclass(slots=True, eq=False)
class _Waiter:
    """A call that waits for the next sandbox of a queue; it is answered with None if there will be none."""

    key: str
    answered: anyio.Event = field(default_factory=anyio.Event)
    granted: PreparedSandbox | None = None


@dataclass(slots=True, eq=False)
class _Supply:
    """The source of a queue's sandboxes while one task refills it; the queue may have another by its end."""

    fingerprint: tuple[object, ...]
    """Targets of the plan's mounts before it was opened: forks have the mounts of their zygote."""
    source: Source | None = None
    problem: SandboxError | None = None
    preparing: int = 0
    """Of this source: what is left of an earlier one is for no call."""


class ReadyQueue:
    """Prepared sandboxes of one plan; those that wait for a call in the order in which they got ready."""

    def __init__(self, driver: Driver, plan: Plan, workshop: Workshop, siblings: "list[ReadyQueue]") -> None:
        """Set up an empty queue; it adds itself to ``siblings``, which live as long as it is used."""
        self.driver = driver
        self.plan = plan
        self.siblings = siblings
        siblings.append(self)
        self.used_at = anyio.current_time()
        """When a call last began or ended."""
        self.capacity = MOST_READY
        """The most that may be ready; follows the memory of the host."""
        self.peak = 0
        """The most calls under way at one time, lately."""
        self.ready: deque[PreparedSandbox] = deque()
        """Those that no call has claimed."""
        self._workshop = workshop
        self._supply: _Supply | None = None
        """Set while a task refills it."""
        self._delay = self._retry_at = 0.0
        """The delay is zero unless the last attempt to prepare one failed."""
        self._changed = anyio.Event()
        """Set when the refilling task should check the queue; renewed by that task."""
        self._waiters: list[_Waiter] = []
        self._calls: Counter[str] = Counter()
        """Calls under way by key, including those that wait for a sandbox."""

    @property
    def idle(self) -> bool:
        """Return whether no task refills it and no call needs it."""
        return self._supply is None and not self._calls

    @property
    def wanted(self) -> int:
        """Return how many should be ready: the recent peak of calls under way, and one more."""
        return min(self.peak + 1, self.capacity)

    def missing(self, preparing: int) -> int:
        """Return how many more to prepare now: one while calls run, which it slows, the rest afterwards."""
        wanted = min(self.wanted, 1) if self._calls else self.wanted
        return wanted + len(self._waiters) - len(self.ready) - preparing

    def review(self, capacity: int) -> bool:
        """Lower the peak and set the capacity; return whether the capacity has become the limit."""
        self.peak = min(max(self._calls.total(), self.peak - 1), MOST_READY)
        before, self.capacity = self.capacity, capacity
        return capacity < min(before, self.peak + 1)

    def retire(self) -> None:
        """Stop refilling when the calls under way are over, unless another call comes."""
        self.used_at = -IDLE_SECONDS
        self._changed.set()

    @contextmanager
    def in_use(self, key: str) -> Iterator[None]:
        """Count one call during the block."""
        self.used_at = anyio.current_time()
        self._calls[key] += 1
        self.peak = min(max(self.peak, self._calls.total()), MOST_READY)
        try:
            yield
        finally:
            self.used_at = anyio.current_time()
            self._calls -= Counter([key])
            # Ready ones may no longer be reserved from those who wait, and nothing more is prepared for these.
            while self._waiters and (claimed := self._claim(self._next_waiter().key)) is not None:
                self._answer(self._next_waiter(), claimed)
            self._changed.set()

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
                await sandbox.settled.wait()
            except BaseException:
                await sandbox.abandon()
                raise
            # Not at the claim: the refilling task would have its turn before this call.
            self._changed.set()
            if sandbox.leased:
                return sandbox

    def _claim(self, key: str) -> PreparedSandbox | None:
        """Take out the oldest ready one that is not stale, unless it is reserved for other keys."""
        fingerprint = self._fingerprint() if self.ready else ()
        others = self._calls[key] - 1
        while self.ready and (not self._workshop.shared or may_take(others, len(self.ready))):
            first = self.ready.popleft()
            if first.fingerprint == fingerprint:
                first.watch.cancel()
                return first
            first.discard()
        self._changed.set()
        return None

    async def _next(self, key: str) -> PreparedSandbox | None:
        """Wait for the next one, if the source is quick."""
        supply = self._supply
        if supply is None or supply.source is None or not supply.source.quick or self._is_stale(supply):
            return None
        waiter = _Waiter(key)
        self._waiters.append(waiter)
        self._changed.set()
        self._workshop.gate.notify()
        try:
            await waiter.answered.wait()
        except BaseException:
            if waiter.granted is not None:
                waiter.granted.over.set()
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise
        return waiter.granted

    def _next_waiter(self) -> _Waiter:
        return min(self._waiters, key=lambda waiter: self._calls[waiter.key])

    def _answer(self, waiter: _Waiter, granted: PreparedSandbox | None) -> None:
        self._waiters.remove(waiter)
        waiter.granted = granted
        waiter.answered.set()

    def keep_filled(self) -> None:
        """Start the task that refills it, unless there is one, or it has failed of late."""
        if self._supply is None and anyio.current_time() >= self._retry_at:
            self._supply = _Supply(self._fingerprint())
            self._workshop.tasks.start_soon(self._refill, self._supply)

    async def _refill(self, supply: _Supply) -> None:
        """Open the source, keep the queue filled, and close the source when no call uses its sandboxes."""
        try:
            async with self.driver.source(self.plan) as source, anyio.create_task_group() as keepers:
                if not self._delay:
                    await self._tell("opened")
                supply.source = source
                try:
                    await self._fill(supply, source, keepers)
                finally:
                    # From here on the queue may get another supply, while calls still use sandboxes of this one.
                    self._close(supply)
                # A covered file may have been replaced: then these sandboxes are not as planned; others will be.
                await self._end(None if self._is_stale(supply) else supply.problem)
        except Exception as problem:  # noqa: BLE001 - the next call reports it; the server continues
            self._close(supply)
            await self._end(_unavailable(problem))

    async def _fill(self, supply: _Supply, source: Source, keepers: anyio.abc.TaskGroup) -> None:
        renew_at = anyio.current_time() + RENEW_SECONDS
        review_at = anyio.current_time() + REVIEW_SECONDS
        self.capacity = capacity(source.bytes_each)
        while supply.problem is None and not self._is_stale(supply):
            now, used_at = anyio.current_time(), max(sibling.used_at for sibling in self.siblings)
            if now >= renew_at or now - used_at >= IDLE_SECONDS:
                return
            self._changed = anyio.Event()
            for _ in range(self.missing(supply.preparing)):
                supply.preparing += 1
                keepers.start_soon(self._keep, supply, source)
            with anyio.move_on_after(max(0.0, review_at - now)):
                await self._changed.wait()
                continue
            review_at = anyio.current_time() + REVIEW_SECONDS
            if self.review(capacity(source.bytes_each)):
                await self._tell("limited", "the host has little memory left")
            self._trim(self.wanted)

    async def _keep(self, supply: _Supply, source: Source) -> None:
        """Hold one sandbox from its start to its end."""
        gate, gone = self._workshop.gate, anyio.Event()
        try:
            async with AsyncExitStack() as stack:
                try:
                    await gate.wait_until_idle(lambda: bool(self._waiters))
                    sandbox = await self._prepare(source, stack)
                finally:
                    supply.preparing -= 1
                gone = sandbox.gone
                try:
                    sandbox.leased = supply is self._supply and await self._offer(sandbox)
                finally:
                    sandbox.settled.set()
                if sandbox.leased:
                    await sandbox.over.wait()
                    await gate.wait_until_idle(lambda: gone.statistics().tasks_waiting > 0)
        except Exception as problem:  # noqa: BLE001 - calls still use others of this source
            supply.problem = supply.problem or _unavailable(problem)
            self._changed.set()
        finally:
            gone.set()

    async def _prepare(self, source: Source, stack: AsyncExitStack) -> PreparedSandbox:
        async with self._workshop.starts.turn(""):
            fingerprint = self._fingerprint()
            opened = await stack.enter_async_context(source.open())
            attested = await self._workshop.attest(opened, self.driver, self.plan)
        attested.require_as_planned()
        if self._delay:
            self._delay = 0.0
            await self._tell("recovered")
        return PreparedSandbox(attested, fingerprint)

    async def _offer(self, sandbox: PreparedSandbox) -> bool:
        """Grant it to a waiter of the key with fewest calls, or hold it until claimed; return whether a call has it."""
        if self._waiters:
            self._answer(self._next_waiter(), sandbox)
            return True
        self.ready.append(sandbox)
        try:
            with sandbox.watch:
                await sandbox.attested.link.wait_while_quiet()
        finally:
            if sandbox in self.ready:
                self.ready.remove(sandbox)
                self._changed.set()
        return sandbox.watch.cancelled_caught and not sandbox.over.is_set()

    def _trim(self, keep: int) -> None:
        """Discard all except the ``keep`` that have been ready for longest."""
        while len(self.ready) > keep:
            self.ready.pop().discard()

    def _close(self, supply: _Supply) -> None:
        """Detach this supply: discard what is ready and wake all waiters. Does nothing if it has another."""
        if self._supply is supply:
            self._supply = None
            self._trim(0)
            for waiter in tuple(self._waiters):
                self._answer(waiter, None)

    async def _end(self, problem: SandboxError | None) -> None:
        if problem is None:
            await self._tell("cleared", "unused for a while, or started anew")
            return
        first, (least, most) = not self._delay, RETRY_SECONDS
        self._delay = min(max(least, self._delay * 2), most)
        self._retry_at = anyio.current_time() + self._delay
        if first:
            await self._tell("failed", f"{problem.what}: {problem.reason}")

    async def _tell(self, what: PoolChange, reason: str = "") -> None:
        event = PoolEvent(
            what=what, driver=self.driver.name, plan_digest=self.plan.digest, ready=len(self.ready),
            most=self.capacity, reason=reason,
        )  # fmt: skip
        await self._workshop.tell(event)

    def _is_stale(self, supply: _Supply) -> bool:
        """Return whether the mounts lead elsewhere than when the source was opened."""
        return supply.fingerprint != self._fingerprint()

    def _fingerprint(self) -> tuple[object, ...]:
        return targets(self.plan.spec, self._workshop.mounted)


def targets(spec: SandboxSpec, mounted: MountWatch) -> tuple[object, ...]:
    """Return what a spec's mounts lead to now; replaced directories or covers, and new mounts, change it."""
    parts: list[object] = []
    for mount in spec.mounts:
        parts += [identity(os.lstat, f"{mount.source}/{name}".rstrip("/")) for name in spec.masks]
        parts += [identity(os.stat, mount.source)[:2], mounted.inside(mount.source)]
    return tuple(parts)


def _unavailable(problem: Exception) -> SandboxError:
    if isinstance(problem, SandboxError):
        return problem
    _log.error("preparing sandboxes failed", exc_info=problem)
    reason = f"internal error ({type(problem).__name__})"
    return SandboxError("Preparing a sandbox", reason, "See the server's log, and report it.")


def capacity(bytes_each: int) -> int:
    """Return how many sandboxes may be ready with the memory that is left on the host."""
    return min(MOST_READY, _available_bytes() // MEMORY_SHARE // bytes_each)


def _available_bytes() -> int:
    """Return what the host can give without swapping, see proc_meminfo(5)."""
    found = re.search(r"^MemAvailable: *(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
