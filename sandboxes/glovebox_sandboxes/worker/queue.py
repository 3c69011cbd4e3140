"""Prepared sandboxes of one plan: how many are wanted, and which call gets the next. For the worker's one thread.

Nothing here waits: a call whose sandbox is not ready is a waiter, and gets it when it is.
"""

import os
import re
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from glovebox_sandboxes.contract.base import Driver, Plan, SandboxSpec
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host.mounts import MountWatch, identity
from glovebox_sandboxes.sharing import FairLimiter, may_take
from glovebox_sandboxes.worker.source import LiveSandbox, PreparedSandbox, SourceThread

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


class Claimant(Protocol):
    """A call's claim to one sandbox."""

    key: str

    def grant(self, prepared: PreparedSandbox) -> None:
        """Hand a sandbox over."""

    def refuse(self) -> None:
        """Say that there will be none, since starting one is as quick."""


class Shop(Protocol):
    """The worker of a queue."""

    mounted: MountWatch
    starts: FairLimiter
    """Bounds sandboxes that are being started, ahead of calls and for them."""

    def begin(self, queue: "LeaseQueue") -> SourceThread:
        """Make a thread for it."""

    def siblings(self, queue: "LeaseQueue") -> "list[LeaseQueue]":
        """Return the queues that are kept and cleared together with it, itself included."""

    def watch(self, queue: "LeaseQueue", prepared: PreparedSandbox) -> Callable[[], None]:
        """Have ``drop`` called if a ready sandbox is not quiet, until what this returns is called."""

    def say(self, queue: "LeaseQueue", what: str, reason: str) -> None:
        """Tell servers of a change, for their logs."""


@dataclass(eq=False)
class Supply:
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
    failed: bool = False


class LeaseQueue:
    """The sandboxes of one plan that wait for a call, in the order in which they got ready."""

    def __init__(self, shop: "Shop", driver: Driver, plan: Plan) -> None:
        """Set up an empty queue in a worker."""
        self.driver, self.plan = driver, plan
        self.without = plan.spec.without_preload()
        self.shared = False
        """Calls have more than one key, and each leaves something for others."""
        self.used_at = time.monotonic()
        self.capacity = MOST_READY
        self.peak = 0
        self.ready: deque[PreparedSandbox] = deque()
        self.waiting: list[Claimant] = []
        self.supply: Supply | None = None
        self.calls: Counter[str] = Counter()
        self._shop = shop
        self._watched: dict[LiveSandbox, Callable[[], None]] = {}
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
        if self.supply is None or not self.supply.thread.quick or self._is_stale(self.supply):
            lease.refuse()
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
            self.supply = Supply(thread=self._shop.begin(self), fingerprint=self.fingerprint(), began=now)
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
            self.keep_filled()
            return
        wanted = min(self.wanted, 1) if self.calls else self.wanted
        # Those that are ready may be reserved from those who wait.
        for _ in range(max(0, wanted - len(self.ready)) + len(self.waiting) - supply.preparing):
            supply.preparing += 1
            supply.living += 1
            if supply.thread.quick:
                self._make(supply)
            else:
                self._shop.starts.ask("", partial(self._make, supply))

    def _make(self, supply: Supply) -> None:
        if supply is self.supply:
            supply.thread.make(supply.fingerprint, partial(self._made, supply))
            return
        supply.preparing -= 1
        self._shop.starts.release("")  # it has waited for its turn, until it was closed
        self._gone(supply)

    def review(self) -> None:
        """Lower the peak, follow the host's memory, and close a source that is old or unused."""
        supply, now = self.supply, time.monotonic()
        if supply is None or not supply.bytes_each:
            return
        used_at = max(each.used_at for each in self._shop.siblings(self))
        if now - supply.began >= RENEW_SECONDS or now - used_at >= IDLE_SECONDS:
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

    def clear(self) -> None:
        """Drop what is ready, until another call comes; a source that is not open yet at the next review."""
        self.retire()
        if self.supply is not None and self.supply.bytes_each:
            self._close(self.supply)

    def end(self, prepared: PreparedSandbox, ended: Callable[[str], None] = lambda _: None) -> None:
        """Order the end of a sandbox; ``ended`` gets what stayed, or nothing."""
        supply = prepared.supply

        def over(stayed: str) -> None:
            ended(stayed)
            self._gone(supply)

        supply.thread.end(prepared.made, over)

    def drop(self, prepared: PreparedSandbox) -> None:
        """Discard a ready sandbox that ended, or sent something without a job."""
        if prepared in self.ready:
            self.end(self._out(prepared))

    def _claim(self, key: str) -> PreparedSandbox | None:
        """Take out the oldest ready one that is fit for a call, unless it is reserved for other keys."""
        fingerprint = self.fingerprint() if self.ready else ()
        others = self.calls[key] - 1
        while self.ready and (not self.shared or may_take(others, len(self.ready))):
            first = self._out(self.ready[0])
            if first.fingerprint == fingerprint and _is_quiet(first.made.wire):
                return first
            self.end(first)
        return None

    def _out(self, prepared: PreparedSandbox) -> PreparedSandbox:
        """Take one out of those that are ready."""
        self.ready.remove(prepared)
        self._watched.pop(prepared.made)()
        return prepared

    def _next(self) -> Claimant:
        return min(self.waiting, key=lambda lease: self.calls[lease.key])

    def _answer(self, lease: Claimant, prepared: PreparedSandbox) -> None:
        self.waiting.remove(lease)
        lease.grant(prepared)

    def _opened(self, supply: Supply, bytes_each: int) -> None:
        supply.bytes_each = bytes_each
        self.capacity = capacity(bytes_each)
        if not self._delay:
            self._shop.say(self, "opened", "")
        if supply is not self.supply:
            self._gone(supply)

    def _made(self, supply: Supply, made: PreparedSandbox | SandboxError) -> None:
        supply.preparing -= 1
        if not supply.thread.quick:
            self._shop.starts.release("")
        if isinstance(made, PreparedSandbox):
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
                self._watched[made.made] = self._shop.watch(self, made)

    def _gone(self, supply: Supply) -> None:
        supply.living -= supply.living > 0
        if supply is not self.supply and not supply.living:
            supply.thread.stop()

    def _close(self, supply: Supply) -> None:
        """Detach a source: calls still use its sandboxes, and no call gets another."""
        if self.supply is supply:
            self.supply = None
            while self.ready:
                self.end(self._out(self.ready[-1]))
            while self.waiting:  # a refusal may end others of its server
                self.waiting.pop(0).refuse()
        if not supply.living:
            supply.thread.stop()

    def _fail(self, supply: Supply, problem: SandboxError) -> None:
        # A covered file may have been replaced: then these sandboxes are not as planned, and others will be.
        if self.supply is supply and not self._is_stale(supply):
            supply.failed = True
            first, (least, most) = not self._delay, RETRY_SECONDS
            self._delay = min(max(least, self._delay * 2), most)
            self._retry_at = time.monotonic() + self._delay
            if first:
                self._shop.say(self, "failed", f"{problem.what}: {problem.reason}")
        self._close(supply)

    def _closed(self, supply: Supply, problem: BaseException | None) -> None:
        if problem is not None:
            known = isinstance(problem, SandboxError)
            reason = f"internal error ({type(problem).__name__})"
            unknown = SandboxError("Preparing a sandbox", reason, "See the worker's log, and report it.")
            self._fail(supply, problem if known else unknown)  # type: ignore[arg-type]  # known, so of that class
        elif supply.bytes_each and not supply.failed:
            self._shop.say(self, "cleared", "unused for a while, or started anew")

    def _is_stale(self, supply: Supply) -> bool:
        """Return whether the mounts lead elsewhere than when the source was opened."""
        return supply.fingerprint != self.fingerprint()

    def fingerprint(self) -> tuple[object, ...]:
        """Return the ``targets`` of the plan's mounts."""
        return targets(self.plan.spec, self._shop.mounted)


def _is_quiet(wire: socket.socket) -> bool:
    """Return whether a guest without a job lives and says nothing, also at this moment. The wire does not block."""
    try:
        wire.recv(1, socket.MSG_PEEK)
    except OSError as problem:
        return isinstance(problem, BlockingIOError)
    return False


def targets(spec: SandboxSpec, mounted: MountWatch) -> tuple[object, ...]:
    """Return what a spec's mounts lead to now; replaced directories or covers, and new mounts, change it."""
    parts: list[object] = []
    for mount in spec.mounts:
        parts += [identity(os.lstat, f"{mount.source}/{name}".rstrip("/")) for name in spec.masks]
        parts += [identity(os.stat, mount.source)[:2], mounted.inside(mount.source)]
    return tuple(parts)


def capacity(bytes_each: int) -> int:
    """Return how many sandboxes may be ready with the memory that is left on the host."""
    return min(MOST_READY, _available_bytes() // MEMORY_SHARE // bytes_each)


def _available_bytes() -> int:
    """Return what the host can give without swapping, see proc_meminfo(5)."""
    found = re.search(r"^MemAvailable: *(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
