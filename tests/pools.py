"""Drivers, sandboxes and a clock in memory, for tests of what waits: hours pass at once, and a hang is a failure."""

import asyncio
import functools
import os
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec

import anyio
from tests.channels import READY, Channel

from _glovebox_guest import wire
from glovebox_sandboxes.contract.base import Capabilities, Plan, SandboxStats, Source
from glovebox_sandboxes.contract.measure import Expected
from glovebox_sandboxes.contract.spec import GUEST_UID, Limits, SandboxSpec
from glovebox_sandboxes.host.host_view import HostView, unseen
from glovebox_sandboxes.pool import idle_gate
from glovebox_sandboxes.pool import pool as pools
from glovebox_sandboxes.pool.pool import Pool, PoolEvent
from glovebox_sandboxes.session.run import AttestedSandbox, host_namespaces

LIMITS = Limits(
    wall_seconds=2.5, cpu_seconds=4, memory_bytes=512 * 2**20, pids=64, scratch_bytes=2**20, output_bytes=2**20,
    output_files=8, stream_bytes=2**14,
)  # fmt: skip
EXPECTED = Expected(uid=GUEST_UID, interfaces=("lo",), writable=(), mounts=(), namespaces=("net",))
PLAN = Plan(driver="fake", level="namespaces", spec=SandboxSpec(limits=LIMITS), action={}, expected=EXPECTED)
COLD = replace(PLAN, action={"cold": True})

P = ParamSpec("P")


class _Jumping(selectors.DefaultSelector):
    """Where nothing is to be done before a time, it is that time."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        """What is ready now; else the clock jumps to when something will be."""
        found = super().select(0)
        if not found:
            assert timeout is not None, "everything waits for something that will not come"
            self.now += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def jumping(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run a test with a clock that jumps."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        anyio.run(functools.partial(test, *args, **kwargs), backend_options={"loop_factory": _Loop})

    return run


class Sandbox:
    """A channel on whose other end a guest has said that it is ready."""

    def __init__(self, driver: "Fake", how: str, inode: int) -> None:
        self.driver = driver
        self.id = f"s{driver.opened}"
        self.how = how
        self.inode = inode
        """Of the workspace it would have mounted."""
        self.dead = False
        self.channel = Channel()
        namespaces = {"net": host_namespaces()["net"] + 1}
        body = {**READY, "namespaces": namespaces, **driver.measured}
        self.channel.to_host.send_nowait(wire.Wire("guest").message("ready", body))

    async def kill(self) -> None:
        """Be gone."""
        self.dead = True
        await self.channel.aclose()

    def die(self) -> None:
        """End by itself."""
        self.dead = True
        self.channel.to_host.close()

    async def host_view(self) -> HostView:
        """There is no process to look at."""
        return unseen("it is a channel of the test")

    async def stats(self) -> SandboxStats:
        """Nothing is known."""
        return SandboxStats()


@dataclass
class Fake:
    """A driver; ``quick`` like one with a zygote."""

    name: str = "fake"
    quick: bool = False
    bytes_each: int = 1
    capabilities: Capabilities = field(
        default_factory=lambda: Capabilities(driver="fake", level="namespaces", version="1", limits={})
    )
    measured: dict[str, Any] = field(default_factory=dict)
    problem: Exception | None = None
    """Raised where a prepared one is opened."""
    source_problem: Exception | None = None
    opened: int = 0
    sources: int = 0
    """That are open now."""
    tried: list[float] = field(default_factory=list)
    """When a source was opened."""
    starting: int = 0
    at_once: int = 0
    """The most that were being started at one time."""
    live: list[Sandbox] = field(default_factory=list)
    steps: int = 3
    """Turns of the event loop it takes to start one."""

    def plan(self, _spec: SandboxSpec) -> Plan:
        """The one plan."""
        return PLAN

    def open(self, plan: Plan) -> Any:
        """One for a call alone."""
        return self._sandbox("cold" if plan.action else "alone", _inode(plan))

    @asynccontextmanager
    async def source(self, plan: Plan) -> AsyncIterator[Source]:
        """A zygote or nothing: it holds the workspace as it was when it started."""
        self.tried.append(anyio.current_time())
        await anyio.lowlevel.checkpoint()
        if self.source_problem is not None:
            raise self.source_problem
        self.sources += 1
        try:
            yield _Source(self, plan, _inode(plan))
        finally:
            assert not [each for each in self.live if each.how == f"source {self.tried[-1]}"]
            self.sources -= 1

    @asynccontextmanager
    async def _sandbox(self, how: str, inode: int) -> AsyncIterator[Sandbox]:
        self.starting += 1
        self.at_once = max(self.at_once, self.starting)
        try:
            for _ in range(self.steps):
                await anyio.lowlevel.checkpoint()
            if self.problem is not None and how == "prepared":
                raise self.problem
        finally:
            self.starting -= 1
        self.opened += 1
        sandbox = Sandbox(self, how, inode)
        self.live.append(sandbox)
        try:
            yield sandbox
        finally:
            with anyio.CancelScope(shield=True):
                await sandbox.kill()
                await anyio.lowlevel.checkpoint()
            self.live.remove(sandbox)


@dataclass
class _Source:
    driver: Fake
    plan: Plan
    inode: int

    @property
    def quick(self) -> bool:
        return self.driver.quick

    @property
    def bytes_each(self) -> int:
        return self.driver.bytes_each

    def open(self) -> Any:
        return self.driver._sandbox("prepared", self.inode if self.quick else _inode(self.plan))


def _inode(plan: Plan) -> int:
    return os.stat(plan.spec.mounts[0].source).st_ino if plan.spec.mounts else 0  # noqa: PTH116


@dataclass
class Scene:
    """A pool and what it works with."""

    pool: Pool
    driver: Fake
    events: list[PoolEvent]
    plan: Plan = PLAN

    async def settle(self, seconds: float = 0.0) -> list[Sandbox]:
        """Let time pass, and everything happen that happens by itself; returns what waits then."""
        await anyio.sleep(seconds)
        for _ in range(4):
            # What waits for calls waits no longer than this, and something else may wait for that.
            await anyio.sleep(idle_gate.LULL_SECONDS)
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
        return [each for each in self.driver.live if each.how == "prepared"]

    @asynccontextmanager
    async def take(self) -> AsyncIterator[Sandbox]:
        """One call's sandbox."""
        cold = replace(self.plan, action=COLD.action)
        async with self.pool.take(self.driver, self.plan, cold) as proved:
            yield sandbox_of(proved)

    async def call(self) -> Sandbox:
        """One call; it must find what is fit for one."""
        async with self.take() as sandbox:
            assert [each for each in self.driver.live if each is sandbox and not each.dead]
        # It is removed when the call has its answer, and not on its way.
        await anyio.sleep(idle_gate.ANSWER_SECONDS)
        for _ in range(10):
            await anyio.lowlevel.checkpoint()
        assert sandbox.dead
        return sandbox

    def told(self) -> list[str]:
        """What was recorded."""
        return [event.what for event in self.events]


def sandbox_of(proved: AttestedSandbox) -> Sandbox:
    """The fake one behind it."""
    assert isinstance(proved.sandbox, Sandbox)
    return proved.sandbox


@asynccontextmanager
async def a_scene(driver: Fake | None = None, plan: Plan = PLAN) -> AsyncIterator[Scene]:
    """A pool over a driver; nothing of it may be left afterwards."""
    driver, events = driver or Fake(), []

    async def tell(event: PoolEvent) -> None:
        await anyio.lowlevel.checkpoint()
        events.append(event)

    async with pools.opened(tell) as pool:
        yield Scene(pool, driver, events, plan)
    assert driver.live == []
    assert (driver.sources, driver.starting) == (0, 0)
