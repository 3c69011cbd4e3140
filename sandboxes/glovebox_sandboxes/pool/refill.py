"""Keep one ready queue filled from one source, and hold each sandbox of it from PREPARING to GONE."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

import anyio
import anyio.abc
import structlog

from glovebox_sandboxes.contract.base import Driver, Plan, Sandbox, Source
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.contract.measure import describe
from glovebox_sandboxes.pool.ready_queue import (
    IDLE_SECONDS,
    MEMORY_SHARE,
    MOST_READY,
    RENEW_SECONDS,
    REVIEW_SECONDS,
    PreparedSandbox,
    ReadyQueue,
    SandboxEvent,
    SandboxState,
    Supply,
)
from glovebox_sandboxes.session.connection import AttestedSandbox
from glovebox_sandboxes.sharing import FairLimiter, IdleGate

PoolChange = Literal["opened", "limited", "failed", "recovered", "cleared"]
Announce = Callable[[PoolChange, ReadyQueue, str], Awaitable[None]]
Attest = Callable[[Sandbox, Driver, Plan], Awaitable[AttestedSandbox]]

_log = structlog.get_logger(__name__)


class Refill:
    """The task that keeps a queue filled, until it is unused or its source fails."""

    def __init__(
        self, queue: ReadyQueue, *, starts: FairLimiter, gate: IdleGate, attest: Attest, announce: Announce
    ) -> None:
        """Become the queue's supply; ``run`` must be started.

        ``starts`` bounds sandboxes that are being started, ``gate`` defers what calls need not wait for, ``attest``
        compares a ready sandbox with its plan, and ``announce`` gets each change for the log.
        """
        self._queue = queue
        self._supply = queue.supply = Supply()
        self._starts = starts
        self._gate = gate
        self._attest = attest
        self._announce = announce
        self._problem: SandboxError | None = None

    async def run(self) -> None:
        """Open the source, keep the queue filled, and close the source when no call uses its sandboxes."""
        queue, supply = self._queue, self._supply
        try:
            fingerprint = queue.fingerprint()
            async with queue.driver.source(queue.plan) as source, anyio.create_task_group() as keepers:
                if not queue.backoff.failing:
                    await self._announce("opened", queue, "")
                supply.source, supply.fingerprint = source, fingerprint
                try:
                    await self._fill(source, keepers)
                finally:
                    # From here on the queue may get another supply, while calls still use sandboxes of this one.
                    queue.close(supply)
                # A covered file may have been replaced: then these sandboxes are not as planned; others will be.
                await self._end(None if supply.fingerprint != queue.fingerprint() else self._problem)
        except Exception as problem:  # noqa: BLE001 - the next call reports it; the server continues
            queue.close(supply)
            await self._end(_unavailable(problem))

    async def keep(self, sandbox: PreparedSandbox, source: Source) -> None:
        """Hold one sandbox from PREPARING to GONE; for its calls see ``ReadyQueue.lease`` and ``Pool.take``."""
        queue = self._queue
        try:
            async with AsyncExitStack() as stack:
                try:
                    await self._gate.wait_until_idle(lambda: queue.has_waiters)
                    async with self._starts.turn(""):
                        sandbox.fingerprint = queue.fingerprint()
                        opened = await stack.enter_async_context(source.open())
                        sandbox.attested = await self._attest(opened, queue.driver, queue.plan)
                    await self._accept(sandbox.attested)
                    sandbox.advance(SandboxEvent.ATTESTED)
                    if queue.supply is self._supply:
                        await queue.offer(sandbox)
                    else:
                        sandbox.discard()
                    if sandbox.state is SandboxState.LEASED:
                        await sandbox.wait_for(SandboxState.ENDING)
                        await self._gate.wait_until_idle(lambda: sandbox.is_awaited)
                except BaseException:
                    sandbox.advance(SandboxEvent.FAILED)
                    raise
        except Exception as problem:  # noqa: BLE001 - calls still use others of this source
            self._problem = self._problem or _unavailable(problem)
            queue.changed.set()
        finally:
            sandbox.advance(SandboxEvent.CLOSED)
            queue.sandboxes.remove(sandbox)

    async def _accept(self, attested: AttestedSandbox) -> None:
        if attested.attestation.differences:
            reason = f"it is not what was planned ({describe(attested.attestation.differences)})"
            raise SandboxError("Preparing a sandbox", reason, "Run `glovebox doctor`.")
        if self._queue.backoff.failing:
            self._queue.backoff.delay = 0.0
            await self._announce("recovered", self._queue, "")

    async def _fill(self, source: Source, keepers: anyio.abc.TaskGroup) -> None:
        queue = self._queue
        opened_at = reviewed_at = anyio.current_time()
        queue.demand.capacity = capacity_of(_available_bytes(), source.bytes_each)
        while self._problem is None and not queue.stale and not self._expired(opened_at):
            queue.changed = anyio.Event()
            for _ in range(queue.missing):
                sandbox = PreparedSandbox()
                queue.sandboxes.add(sandbox)
                keepers.start_soon(self.keep, sandbox, source)
            with anyio.move_on_after(max(0.0, reviewed_at + REVIEW_SECONDS - anyio.current_time())):
                await queue.changed.wait()
                continue
            reviewed_at = anyio.current_time()
            if queue.demand.review(capacity_of(_available_bytes(), source.bytes_each)):
                await self._announce("limited", queue, "the host has little memory left")
            queue.trim(queue.demand.wanted)

    def _expired(self, opened_at: float) -> bool:
        used_at = max(sibling.demand.used_at for sibling in self._queue.siblings)
        return is_expired(anyio.current_time(), used_at=used_at, opened_at=opened_at)

    async def _end(self, problem: SandboxError | None) -> None:
        queue = self._queue
        if problem is None:
            await self._announce("cleared", queue, "nobody took from it for a while, or it is started anew")
            return
        first = not queue.backoff.failing
        queue.backoff.fail(anyio.current_time())
        if first:
            await self._announce("failed", queue, f"{problem.what}: {problem.reason}")


def _unavailable(problem: Exception) -> SandboxError:
    if isinstance(problem, SandboxError):
        return problem
    _log.error("preparing sandboxes failed", exc_info=problem)
    reason = f"nobody foresaw this ({type(problem).__name__})"
    return SandboxError("Preparing a sandbox", reason, "See the server's log, and report it.")


def _available_bytes() -> int:
    """Return what the host can give without swapping, see proc_meminfo(5)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def capacity_of(available_bytes: int, bytes_each: int) -> int:
    """Return how many sandboxes may be ready with this much memory left on the host."""
    return min(MOST_READY, available_bytes // MEMORY_SHARE // bytes_each)


def is_expired(now: float, *, used_at: float, opened_at: float) -> bool:
    """Return whether a source must be closed, because it is unused or too old."""
    return now - used_at >= IDLE_SECONDS or now - opened_at >= RENEW_SECONDS
