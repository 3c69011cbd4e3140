"""Sandboxes prepared ahead of their calls: each is proved while it waits, used once, and gone after it.

One queue for each plan that is in use; those that differ in what is preloaded alone are kept and cleared together.
How many wait on one follows demand, below a ceiling that follows the host's memory; what cannot be prepared is started
for its call as if there were no pool. Nothing of the server here.
"""

import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import anyio
import anyio.abc
import structlog
from anyio.lowlevel import checkpoint

from glovebox_sandboxes.contract.base import Driver, Plan, Sandbox, Source
from glovebox_sandboxes.contract.errors import SandboxUnavailable
from glovebox_sandboxes.contract.measure import describe
from glovebox_sandboxes.host import mounts
from glovebox_sandboxes.pool.idle_gate import IdleGate
from glovebox_sandboxes.session.run import AttestedSandbox, attest

MOST_READY = 16
"""On one queue: as many as calls run at one time, so a full turn of them finds its sandboxes waiting."""
MEMORY_SHARE = 8
"""At most one part in so many of the memory the host has left is given to sandboxes that wait, for each queue."""
LOOK_SECONDS = 10.0
"""Between two looks at demand, memory and age; what is wanted falls by one at each."""
IDLE_SECONDS = 600.0
"""A queue nobody takes from is cleared: a pause for thought keeps it, a night does not."""
RENEW_SECONDS = 1800.0
"""A source is started anew after this: what its forks share (addresses, hash seed) is shared no longer than that."""
RETRY_SECONDS = (1.0, 30.0)
"""A source that failed is tried again when it is next wanted: first after the one, in the end after the other."""
MAKERS = 2 * (os.cpu_count() or 1)
"""Sandboxes being started at one time, for the pool and for calls that found none ready: more would only be slower."""

What = Literal["opened", "limited", "failed", "recovered", "cleared"]

_log = structlog.get_logger(__name__)


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


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    """A prepared sandbox on its queue."""

    proved: AttestedSandbox
    places: tuple[object, ...]
    watch: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    unwatched: anyio.Event = field(default_factory=anyio.Event)
    returned: anyio.Event = field(default_factory=anyio.Event)
    gone: anyio.Event = field(default_factory=anyio.Event)
    hurried: bool = False
    """Whether somebody waits for its end."""
    taken: bool = False
    ended: bool = False


@dataclass(slots=True, eq=False)
class _Asking:
    """A call that waits for the next sandbox of a queue."""

    answered: anyio.Event = field(default_factory=anyio.Event)
    found: _Waiting | None = None
    """None where there will be none."""


class _ReadyQueue:
    """The sandboxes of one plan."""

    def __init__(self, driver: Driver, plan: Plan, mounted: mounts.Watch, calls: IdleGate) -> None:
        self.driver = driver
        self.plan = plan
        self.mounted = mounted
        self.calls = calls
        self.waiting: deque[_Waiting] = deque()
        self.asking: deque[_Asking] = deque()
        self.preparing = 0
        self.most = MOST_READY
        self.busy = 0
        self.peak = 0
        self.used = anyio.current_time()
        self.serves = plan.spec.without_preload()
        self.source: Source | None = None
        self.places: tuple[object, ...] = ()
        """What the plan's mounts led to when the source was started: a zygote's forks have what it has mounted."""
        self.tended = False
        self.failures = 0
        self.not_before = 0.0
        self.changed = anyio.Event()

    @property
    def wanted(self) -> int:
        """How many are to wait: as many as calls have been under way at one time lately, and one for the next."""
        return min(self.peak + 1, self.most)

    @property
    def room(self) -> int:
        """How many more are to be prepared now: one while calls run, which it would slow down, the rest after them."""
        wanted = min(self.wanted, 1) if self.busy else self.wanted
        return wanted + len(self.asking) - len(self.waiting) - self.preparing

    @property
    def outdated(self) -> bool:
        """Whether the mounts lead elsewhere than when the source was started."""
        return _places(self.plan, self.mounted) != self.places

    @contextmanager
    def used_once(self) -> Iterator[None]:
        """Count one call, for the length of the block."""
        self.used = anyio.current_time()
        self.busy += 1
        self.peak = min(max(self.peak, self.busy), MOST_READY)
        try:
            yield
        finally:
            self.busy -= 1
            self.used = anyio.current_time()
            self.wake()

    def wake(self) -> None:
        """Have whoever tends it look at it."""
        self.changed.set()

    async def ask(self) -> _Waiting | None:
        """One that will be ready in a moment; None where starting another is as quick."""
        if self.source is None or not self.source.quick or self.outdated:
            return None
        asking = _Asking()
        self.asking.append(asking)
        self.wake()
        self.calls.notify()
        try:
            await asking.answered.wait()
        except BaseException:
            if asking.found is not None:
                asking.found.returned.set()
            elif asking in self.asking:
                self.asking.remove(asking)
            raise
        return asking.found

    def pop(self) -> _Waiting | None:
        """The one that has waited longest and is still what was asked for."""
        found = None
        places = _places(self.plan, self.mounted) if self.waiting else ()
        while self.waiting and found is None:
            first = self.waiting.popleft()
            first.taken = first.places == places
            first.watch.cancel()
            found = first if first.taken else None
        self.wake()
        return found


class Pool:
    """The prepared sandboxes of one server. Open it with ``opened``."""

    def __init__(self, tasks: anyio.abc.TaskGroup, tell: Tell, describe: Describe) -> None:
        """Take the task group everything lives in, who hears of changes, and what is noted of each sandbox."""
        self._tasks = tasks
        self._tell = tell
        self._describe = describe
        self._queues: dict[tuple[str, str], _ReadyQueue] = {}
        self._makers = anyio.CapacityLimiter(MAKERS)
        self._calls = IdleGate()
        self.mounted = mounts.Watch()

    def prepare(self, driver: Driver, plan: Plan) -> None:
        """Have sandboxes of this plan ready from now on, as long as they are used."""
        self._tended(driver, plan)

    def call(self) -> AbstractContextManager[None]:
        """Say that a call is under way, from before its sandbox to its result: what can wait, waits for it."""
        return self._calls.one()

    @asynccontextmanager
    async def take(
        self,
        driver: Driver,
        plan: Plan,
        cold: Plan,
        *,
        waits: Callable[[], Awaitable[None]] = checkpoint,
    ) -> AsyncIterator[AttestedSandbox]:
        """A proved sandbox for one call: one that waits, else one that is started now.

        Args:
            driver: whose it is.
            plan: what is prepared ahead.
            cold: the plan of a sandbox that is started for this call alone, where nothing could be prepared.
            waits: called where none is ready, before one is waited for or started; perhaps more than once.

        Raises:
            SandboxUnavailable: it could not be started, or did not get ready.
        """
        queue = self._tended(driver, plan)
        with queue.used_once():
            found = await self._another(queue, waits)
            while found is not None:
                try:
                    await found.unwatched.wait()
                    if not found.ended:
                        yield found.proved
                        return
                except BaseException:
                    # A call that was cancelled or failed returns when its sandbox is gone; others do not wait for that.
                    found.hurried = True
                    found.returned.set()
                    self._calls.notify()
                    with anyio.CancelScope(shield=True):
                        await found.gone.wait()
                    raise
                finally:
                    found.returned.set()
                found = await self._another(queue, waits)
            async with self.start(driver, cold) as proved:
                yield proved

    @asynccontextmanager
    async def start(self, driver: Driver, plan: Plan) -> AsyncIterator[AttestedSandbox]:
        """A proved sandbox that is started for one call.

        Raises:
            SandboxUnavailable: it could not be started, or did not get ready.
        """
        async with AsyncExitStack() as stack:
            async with self._makers:
                proved = await self._proved(await stack.enter_async_context(driver.open(plan)), driver, plan)
            yield proved

    async def _proved(self, sandbox: Sandbox, driver: Driver, plan: Plan) -> AttestedSandbox:
        proved = await attest(sandbox, plan)
        return replace(proved, record=self._describe(driver, proved))

    async def _another(self, queue: _ReadyQueue, waits: Callable[[], Awaitable[None]]) -> _Waiting | None:
        found = queue.pop()
        if found is None:
            await waits()
            # One may have become ready in that time, and none is prepared for those who ask where one waits.
            found = queue.pop() or await queue.ask()
        return found

    def _tended(self, driver: Driver, plan: Plan) -> _ReadyQueue:
        key = (driver.name, plan.digest)
        queue = self._queues.get(key)
        if queue is None or queue.driver is not driver:
            queue = self._queues[key] = _ReadyQueue(driver, plan, self.mounted, self._calls)
        for each in self._siblings(queue):
            if not each.tended and anyio.current_time() >= each.not_before:
                each.tended = True
                self._tasks.start_soon(self._tend, each)
        return queue

    def _siblings(self, queue: _ReadyQueue) -> list[_ReadyQueue]:
        """The queues that are in use as long as this one is: the same but for what is preloaded; itself among them."""
        return [each for each in self._queues.values() if each.driver is queue.driver and each.serves == queue.serves]

    async def _tend(self, queue: _ReadyQueue) -> None:
        """Keep a queue filled until nobody takes from it any more, or until its source fails."""
        try:
            places = _places(queue.plan, queue.mounted)
            async with queue.driver.source(queue.plan) as source, anyio.create_task_group() as keepers:
                if not queue.failures:
                    await self._say("opened", queue)
                queue.source, queue.places = source, places
                problem = None
                try:
                    problem = await self._fill(queue, source, keepers)
                finally:
                    # From here on the queue may be tended anew, while calls still use what they took from this source.
                    self._leave(queue)
                await self._ended(queue, problem)
        except Exception as failed:  # noqa: BLE001 - a call that meets it says so; the server goes on
            self._leave(queue)
            await self._ended(queue, _reason(failed))

    async def _ended(self, queue: _ReadyQueue, problem: SandboxUnavailable | None) -> None:
        if problem is None:
            await self._say("cleared", queue, "nobody took from it for a while, or it is started anew")
            return
        first, last = RETRY_SECONDS
        queue.not_before = anyio.current_time() + min(first * 2.0**queue.failures, last)
        queue.failures += 1
        if queue.failures == 1:
            await self._say("failed", queue, f"{problem.what}: {problem.reason}")

    def _leave(self, queue: _ReadyQueue) -> None:
        queue.source = None
        queue.tended = False
        while queue.waiting:
            queue.waiting.pop().watch.cancel()
        while queue.asking:
            queue.asking.popleft().answered.set()

    async def _fill(
        self, queue: _ReadyQueue, source: Source, keepers: anyio.abc.TaskGroup
    ) -> SandboxUnavailable | None:
        """Prepare what is wanted, until nothing is any more, or preparing one fails: then why."""
        problems: list[SandboxUnavailable] = []
        began = looked = anyio.current_time()
        queue.most = _most(source)
        while not problems and not queue.outdated and not self._over(queue, began):
            queue.changed = anyio.Event()
            for _ in range(queue.room):
                queue.preparing += 1
                keepers.start_soon(self._keep, queue, source, problems)
            with anyio.move_on_after(max(0.0, looked + LOOK_SECONDS - anyio.current_time())):
                await queue.changed.wait()
                continue
            looked = anyio.current_time()
            await self._look(queue, source)
        return problems[0] if problems else None

    def _over(self, queue: _ReadyQueue, began: float) -> bool:
        now, used = anyio.current_time(), max(each.used for each in (queue, *self._siblings(queue)))
        return now - used >= IDLE_SECONDS or now - began >= RENEW_SECONDS

    async def _look(self, queue: _ReadyQueue, source: Source) -> None:
        """Follow demand and memory."""
        queue.peak = max(queue.busy, queue.peak - 1)
        before, queue.most = queue.most, _most(source)
        if queue.most < min(before, queue.peak + 1):
            await self._say("limited", queue, "the host has little memory left")
        while len(queue.waiting) > queue.wanted:
            queue.waiting.pop().watch.cancel()

    async def _keep(self, queue: _ReadyQueue, source: Source, problems: list[SandboxUnavailable]) -> None:
        """Prepare one sandbox, and hold it until it has been used, or is of no use."""
        waiting = None
        try:
            async with AsyncExitStack() as stack:
                try:
                    await self._calls.idle(lambda: bool(queue.asking))
                    async with self._makers:
                        places = _places(queue.plan, queue.mounted)
                        sandbox = await stack.enter_async_context(source.open())
                        proved = await self._proved(sandbox, queue.driver, queue.plan)
                finally:
                    queue.preparing -= 1
                if proved.attestation.differences:
                    words = describe(proved.attestation.differences)
                    reason = f"it is not what was planned ({words})"
                    raise SandboxUnavailable("Preparing a sandbox", reason, "Run `glovebox doctor`.")  # noqa: TRY301 - one place
                if queue.failures:
                    queue.failures = 0
                    await self._say("recovered", queue)
                if queue.source is source:
                    waiting = _Waiting(proved=proved, places=places)
                    await _held(queue, waiting)
        except Exception as problem:  # noqa: BLE001 - calls are using what others of this queue hold
            problems.append(_reason(problem))
            queue.wake()
        finally:
            if waiting is not None:
                # However it came to this: nobody waits for it any more.
                waiting.ended = True
                waiting.unwatched.set()
                waiting.gone.set()

    async def _say(self, what: What, queue: _ReadyQueue, reason: str = "") -> None:
        await self._tell(
            PoolEvent(
                what=what,
                driver=queue.driver.name,
                plan_digest=queue.plan.digest,
                ready=len(queue.waiting),
                most=queue.most,
                reason=reason,
            )
        )


@asynccontextmanager
async def opened(tell: Tell, describe: Describe = lambda *_: None) -> AsyncIterator[Pool]:
    """A pool, for the length of the block; nothing of it is left after it.

    Args:
        tell: hears of changes.
        describe: says what is to be remembered of each sandbox.
    """
    async with anyio.create_task_group() as tasks:
        pool = Pool(tasks, tell, describe)
        try:
            yield pool
        finally:
            tasks.cancel_scope.cancel()
            pool.mounted.close()


async def _held(queue: _ReadyQueue, waiting: _Waiting) -> None:
    """Let one wait on its queue until it is taken and given back, or of no use to anybody."""
    if queue.asking:
        asking = queue.asking.popleft()
        asking.found = waiting
        waiting.taken = True
        asking.answered.set()
    else:
        queue.waiting.append(waiting)
        with waiting.watch:
            await waiting.proved.link.quiet()
            waiting.ended = True
    if waiting.taken:
        waiting.unwatched.set()
        await waiting.returned.wait()
        await queue.calls.idle(lambda: waiting.hurried)
    elif waiting in queue.waiting:
        # It has ended, or spoke unasked. Whatever it is, nobody gets it.
        queue.waiting.remove(waiting)
        queue.wake()


def _reason(problem: Exception) -> SandboxUnavailable:
    if isinstance(problem, SandboxUnavailable):
        return problem
    _log.error("preparing sandboxes failed", exc_info=problem)
    reason = f"nobody foresaw this ({type(problem).__name__})"
    return SandboxUnavailable("Preparing a sandbox", reason, "See the server's log, and report it.")


def _places(plan: Plan, watch: mounts.Watch) -> tuple[object, ...]:
    """What the plan's mounts lead to now: a directory that was replaced since is not what is mounted.

    Nor is one in which something was mounted since.
    """
    found: list[object] = []
    for mount in plan.spec.mounts:
        try:
            status = os.stat(mount.source)  # noqa: PTH116 - of a few microseconds each counts
        except OSError as problem:
            found.append(problem.errno)
        else:
            found.append((status.st_dev, status.st_ino, watch.inside(mount.source)))
    return tuple(found)


def _most(source: Source) -> int:
    return min(MOST_READY, _available_bytes() // MEMORY_SHARE // source.bytes_each)


def _available_bytes() -> int:
    """What the host can give without swapping, see proc_meminfo(5)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
