"""PreparedFork sandboxes of one plan: how many are wanted, and which call gets the next. For the worker's one thread.

Nothing here waits: a call whose sandbox is not ready is a waiter, and gets it when it is.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from glovebox_sandboxes.contract.base import Driver, Plan
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host.mounts import MountWatch
from glovebox_sandboxes.pool.ready_queue import (
    IDLE_SECONDS,
    MOST_READY,
    RENEW_SECONDS,
    RETRY_SECONDS,
    capacity,
    targets,
)
from glovebox_sandboxes.sharing import may_take
from glovebox_sandboxes.worker.source import PreparedFork, SourceThread


class Claimant(Protocol):
    """A call's claim to one sandbox."""

    key: str

    def grant(self, prepared: PreparedFork) -> None:
        """Hand a sandbox over."""

    def refuse(self, problem: SandboxError | None) -> None:
        """Say that there will be none: with a problem, or since starting one is as quick."""


class Shop(Protocol):
    """The worker of a queue."""

    mounted: MountWatch

    def begin(self, queue: "LeaseQueue") -> SourceThread:
        """Make a thread for it."""

    def watch(self, queue: "LeaseQueue", prepared: PreparedFork) -> Callable[[], None]:
        """Have ``drop`` called if a ready sandbox is not quiet, until what this returns is called."""

    def say(self, queue: "LeaseQueue", what: str, reason: str) -> None:
        """Tell servers of a change, for their logs."""


@dataclass(eq=False)
class ForkSupply:
    """A source of the queue's sandboxes; the queue may have another by the end of this one."""

    thread: SourceThread
    fingerprint: object
    """Targets of the plan's mounts before it was opened: forks have the mounts of their zygote."""
    began: float
    bytes_each: int = 0
    """Zero until it is open."""
    preparing: int = 0
    living: int = 0
    """Sandboxes that were made and are not ended."""


class LeaseQueue:
    """The sandboxes of one plan that wait for a call, in the order in which they got ready."""

    def __init__(self, shop: "Shop", driver: Driver, plan: Plan, *, shared: bool) -> None:
        """Set up an empty queue in a worker."""
        self.driver, self.plan = driver, plan
        self.shared = shared
        self.used_at = time.monotonic()
        self.capacity = MOST_READY
        self.peak = 0
        self.ready: deque[PreparedFork] = deque()
        self.waiting: list[Claimant] = []
        self.supply: ForkSupply | None = None
        self.calls: Counter[str] = Counter()
        self._shop = shop
        self._watched: dict[int, Callable[[], None]] = {}
        self._delay = self._retry_at = 0.0

    @property
    def wanted(self) -> int:
        """Return how many should be ready: the recent peak of calls under way, and one more."""
        return min(self.peak + 1, self.capacity)

    def lease(self, lease: Claimant) -> bool:
        """Grant a sandbox now, or refuse it; return whether the lease has to wait for the next instead."""
        self.used_at = time.monotonic()
        self.calls[lease.key] += 1
        self.peak = min(max(self.peak, self.calls.total()), MOST_READY)
        prepared = self._claim(lease.key)
        if prepared is not None:
            lease.grant(prepared)
            return False
        if self.supply is None or not self.supply.bytes_each or self._is_stale(self.supply):
            lease.refuse(None)
            return False
        self.waiting.append(lease)
        return True

    def over(self, key: str) -> None:
        """Note that a call of this key needs its sandbox, or its place in the queue, no more."""
        self.used_at = time.monotonic()
        self.calls -= Counter([key])
        # Ready ones may no longer be reserved from those who wait.
        while self.waiting and (prepared := self._claim(self._next().key)) is not None:
            self._answer(self._next(), prepared)

    def keep_filled(self) -> None:
        """Begin a source, unless there is one, or it has failed of late."""
        now = time.monotonic()
        if self.supply is None and now >= self._retry_at:
            self.supply = ForkSupply(thread=self._shop.begin(self), fingerprint=self.fingerprint(), began=now)
            supply = self.supply
            supply.thread.opened = lambda bytes_each: self._opened(supply, bytes_each)
            supply.thread.closed = lambda problem: self._closed(supply, problem)
            try:
                supply.thread.start()
            except RuntimeError as problem:  # no thread is left
                self._closed(supply, problem)

    def order(self) -> None:
        """Order what is missing: one while calls run, which it slows, the rest afterwards."""
        supply = self.supply
        if supply is None or not supply.bytes_each:
            return
        if self._is_stale(supply):
            self._close(supply)
            return
        wanted = min(self.wanted, 1) if self.calls else self.wanted
        for _ in range(wanted + len(self.waiting) - len(self.ready) - supply.preparing):
            supply.preparing += 1
            supply.living += 1
            supply.thread.make(supply.fingerprint, lambda made: self._made(supply, made))

    def review(self) -> None:
        """Lower the peak, follow the host's memory, and close a source that is old or unused."""
        supply, now = self.supply, time.monotonic()
        if supply is None or not supply.bytes_each:
            return
        if now - supply.began >= RENEW_SECONDS or now - self.used_at >= IDLE_SECONDS:
            self._close(supply)
            return
        self.peak = min(max(self.calls.total(), self.peak - 1), MOST_READY)
        before, self.capacity = self.capacity, capacity(supply.bytes_each)
        if self.capacity < min(before, self.peak + 1):
            self._shop.say(self, "limited", "the host has little memory left")
        while len(self.ready) > self.wanted:
            self.end(self._out(self.ready[-1]))

    def retire(self) -> None:
        """Close its source at the next review, unless another call comes."""
        self.used_at = -IDLE_SECONDS

    def end(self, prepared: PreparedFork, ended: Callable[[str], None] = lambda _: None) -> None:
        """Order the end of a sandbox; ``ended`` gets what stayed, or nothing."""
        supply = prepared.supply

        def over(stayed: str) -> None:
            ended(stayed)
            self._gone(supply)

        supply.thread.end(prepared.fork, over)

    def drop(self, prepared: PreparedFork) -> None:
        """Discard a ready sandbox that ended, or sent something without a job."""
        if prepared in self.ready:
            self.end(self._out(prepared))

    def close(self) -> None:
        """Discard what is ready, and end the source when nothing of it lives."""
        if self.supply is not None:
            self._close(self.supply)

    def _claim(self, key: str) -> PreparedFork | None:
        """Take out the oldest ready one that is not stale, unless it is reserved for other keys."""
        fingerprint = self.fingerprint() if self.ready else ()
        others = self.calls[key] - 1
        while self.ready and (not self.shared or may_take(others, len(self.ready))):
            first = self._out(self.ready[0])
            if first.fingerprint == fingerprint:
                return first
            self.end(first)
        return None

    def _out(self, prepared: PreparedFork) -> PreparedFork:
        """Take one out of those that are ready."""
        self.ready.remove(prepared)
        self._watched.pop(prepared.fork.pidfd)()
        return prepared

    def _next(self) -> Claimant:
        return min(self.waiting, key=lambda lease: self.calls[lease.key])

    def _answer(self, lease: Claimant, prepared: PreparedFork) -> None:
        self.waiting.remove(lease)
        lease.grant(prepared)

    def _opened(self, supply: ForkSupply, bytes_each: int) -> None:
        supply.bytes_each = bytes_each
        self.capacity = capacity(bytes_each)
        if not self._delay:
            self._shop.say(self, "opened", "")
        if supply is not self.supply:
            self._gone(supply)

    def _made(self, supply: ForkSupply, made: PreparedFork | SandboxError) -> None:
        supply.preparing -= 1
        if isinstance(made, PreparedFork):
            made.supply = supply
        if isinstance(made, SandboxError):
            supply.living -= 1
            self._fail(supply, made)
        elif supply is not self.supply:
            self.end(made)
        elif self._is_stale(supply):
            self.end(made)
            self._close(supply)
        else:
            if self._delay:
                self._delay = 0.0
                self._shop.say(self, "recovered", "")
            if self.waiting:
                self._answer(self._next(), made)
            else:
                self.ready.append(made)
                self._watched[made.fork.pidfd] = self._shop.watch(self, made)

    def _gone(self, supply: ForkSupply) -> None:
        supply.living -= supply.living > 0
        if supply is not self.supply and not supply.living:
            supply.thread.orders.put(None)

    def _close(self, supply: ForkSupply) -> None:
        """Detach a source: calls still use its sandboxes, and no call gets another."""
        if self.supply is supply:
            self.supply = None
            while self.ready:
                self.end(self._out(self.ready[-1]))
            while self.waiting:  # a refusal may end others of its server
                self.waiting.pop(0).refuse(None)
        if not supply.living:
            supply.thread.orders.put(None)

    def _fail(self, supply: ForkSupply, problem: SandboxError) -> None:
        if self.supply is supply:
            first, (least, most) = not self._delay, RETRY_SECONDS
            self._delay = min(max(least, self._delay * 2), most)
            self._retry_at = time.monotonic() + self._delay
            if first:
                self._shop.say(self, "failed", f"{problem.what}: {problem.reason}")
        self._close(supply)

    def _closed(self, supply: ForkSupply, problem: BaseException | None) -> None:
        if problem is not None:
            known = isinstance(problem, SandboxError)
            reason = f"internal error ({type(problem).__name__})"
            unknown = SandboxError("Preparing a sandbox", reason, "See the worker's log, and report it.")
            self._fail(supply, problem if known else unknown)  # type: ignore[arg-type]  # known, so of that class
        elif supply.bytes_each:
            self._shop.say(self, "cleared", "unused for a while, or started anew")

    def _is_stale(self, supply: ForkSupply) -> bool:
        """Return whether the mounts lead elsewhere than when the source was opened."""
        return supply.fingerprint != self.fingerprint()

    def fingerprint(self) -> tuple[object, ...]:
        """Return the ``targets`` of the plan's mounts."""
        return targets(self.plan.spec, self._shop.mounted)
