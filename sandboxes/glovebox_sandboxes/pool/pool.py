"""Sandboxes prepared ahead of their calls: each is attested while it waits, used once, and gone after it.

One queue for each plan that is in use; those that differ in what is preloaded alone are kept and cleared together.
How many are ready in one follows demand, below a capacity that follows the host's memory; what cannot be prepared is
started for its call as if there were no pool. Nothing of the server here.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import anyio
import anyio.abc
from anyio.lowlevel import checkpoint

from glovebox_sandboxes.contract.base import Driver, Plan, Sandbox
from glovebox_sandboxes.host import mounts
from glovebox_sandboxes.pool.idle_gate import IdleGate
from glovebox_sandboxes.pool.ready_queue import ReadyQueue
from glovebox_sandboxes.pool.refill import Refill, What
from glovebox_sandboxes.session.run import AttestedSandbox, attest
from glovebox_sandboxes.sharing.limiter import FairLimiter
from glovebox_sandboxes.sharing.processor import Processor

MOST_QUEUES = 64
"""From which on queues are forgotten whose masks are others by now."""
MOST_STARTING = 2 * (os.cpu_count() or 1)
"""Sandboxes being started at one time, for the pool and for calls that found none ready: more would only be slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEvent:
    """A change of the pool that a reader of the log may ask about."""

    what: What
    driver: str
    plan_digest: str
    ready: int
    """Sandboxes that wait."""
    most: int
    """How many may."""
    reason: str = ""


Tell = Callable[[PoolEvent], Awaitable[None]]
Describe = Callable[[Driver, AttestedSandbox], object]
"""Says what ``AttestedSandbox.record`` is to be; called before a call gets the sandbox."""


class Pool:
    """The prepared sandboxes of one server. Open it with ``opened``."""

    def __init__(self, tasks: anyio.abc.TaskGroup, tell: Tell, describe: Describe, *, shared: bool) -> None:
        """Take the task group everything lives in, and what ``opened`` takes."""
        self._tasks = tasks
        self._tell = tell
        self._describe = describe
        self._queues: dict[tuple[str, str], ReadyQueue] = {}
        self._starts = FairLimiter(MOST_STARTING, shared=shared)
        self._gate = IdleGate()
        self._processor = Processor()
        self._shared = shared
        self.mounted = mounts.Watch()

    def prepare(self, driver: Driver, plan: Plan) -> None:
        """Have sandboxes of this plan ready from now on, as long as they are used."""
        self._queue(driver, plan)

    def call(self) -> AbstractContextManager[None]:
        """Say that a call is under way, from before its sandbox to its result: refill and teardown are deferred."""
        return self._gate.call()

    @asynccontextmanager
    async def take(
        self,
        driver: Driver,
        plan: Plan,
        cold: Plan,
        *,
        key: str = "",
        waits: Callable[[], Awaitable[None]] = checkpoint,
    ) -> AsyncIterator[AttestedSandbox]:
        """An attested sandbox for one call: one that is ready, else one that is started now.

        Args:
            driver: whose it is.
            plan: what is prepared ahead.
            cold: the plan of a sandbox that is started for this call alone, where nothing could be prepared.
            key: whose call it is; those of one key share what is one key's.
            waits: called where none is ready, before one is waited for or started; perhaps more than once.

        Raises:
            SandboxError: it could not be started, or did not get ready.
        """
        queue = self._queue(driver, plan)
        with queue.in_use(key):
            leased = await queue.lease(key, waits)
            if leased is None:
                async with self.start(driver, cold, key) as attested:
                    yield attested
                return
            try:
                with self._processor.shared(key, leased.attested):
                    yield leased.attested
            except BaseException:
                # A call that was cancelled or failed returns when its sandbox is gone; others do not wait for that.
                await leased.abandon()
                raise
            leased.give_back()

    @asynccontextmanager
    async def start(self, driver: Driver, plan: Plan, key: str = "") -> AsyncIterator[AttestedSandbox]:
        """An attested sandbox that is started for one call of this key.

        Raises:
            SandboxError: it could not be started, or did not get ready.
        """
        async with AsyncExitStack() as stack:
            async with self._starts.turn(key):
                attested = await self._attest(await stack.enter_async_context(driver.open(plan)), driver, plan)
            with self._processor.shared(key, attested):
                yield attested

    async def _attest(self, sandbox: Sandbox, driver: Driver, plan: Plan) -> AttestedSandbox:
        attested = await attest(sandbox, plan)
        return replace(attested, record=self._describe(driver, attested))

    def _queue(self, driver: Driver, plan: Plan) -> ReadyQueue:
        """The queue of a plan, which is refilled from now on, and its siblings with it."""
        key = (driver.name, plan.digest)
        queue = self._queues.get(key)
        if queue is None or queue.driver is not driver:
            self._retire(plan)
            siblings = self._siblings(driver, plan)
            queue = self._queues[key] = ReadyQueue(
                driver, plan, self.mounted, self._gate, siblings, shared=self._shared
            )
        for each in queue.siblings:
            if each.supply is None and anyio.current_time() >= each.backoff.not_before:
                refill = Refill(
                    each, starts=self._starts, gate=self._gate, attest=self._attest, announce=self._announce
                )
                self._tasks.start_soon(refill.run)
        return queue

    def _retire(self, plan: Plan) -> None:
        """Have those go soon that differ from this plan in what is masked alone: that has changed, as a rule."""
        spec = replace(plan.spec.without_preload(), masks=())
        for key, each in list(self._queues.items()):
            if replace(each.plan.spec.without_preload(), masks=()) == spec and each.plan.spec.masks != plan.spec.masks:
                each.retire()
                if len(self._queues) >= MOST_QUEUES and all(sibling.idle for sibling in each.siblings):
                    del self._queues[key]

    def _siblings(self, driver: Driver, plan: Plan) -> list[ReadyQueue]:
        """The queues that are in use as long as that of this plan is: the same but for what is preloaded."""
        spec = plan.spec.without_preload()
        for each in self._queues.values():
            if each.driver is driver and each.plan.spec.without_preload() == spec:
                return each.siblings
        return []

    async def _announce(self, what: What, queue: ReadyQueue, reason: str) -> None:
        await self._tell(
            PoolEvent(
                what=what,
                driver=queue.driver.name,
                plan_digest=queue.plan.digest,
                ready=len(queue.ready),
                most=queue.demand.capacity,
                reason=reason,
            )
        )


@asynccontextmanager
async def opened(tell: Tell, describe: Describe = lambda *_: None, *, shared: bool = False) -> AsyncIterator[Pool]:
    """A pool, for the length of the block; nothing of it is left after it.

    Args:
        tell: hears of changes.
        describe: says what is to be remembered of each sandbox.
        shared: whether calls have more than one key, so that each leaves something for others.
    """
    async with anyio.create_task_group() as tasks:
        pool = Pool(tasks, tell, describe, shared=shared)
        try:
            yield pool
        finally:
            tasks.cancel_scope.cancel()
            pool.mounted.close()
