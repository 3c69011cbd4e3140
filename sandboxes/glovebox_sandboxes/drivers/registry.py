"""List the drivers, one entry each, from which every other list is derived, and bring them up.

A driver is its entry in ``DRIVERS`` and, in the folder of its name beside this module, ``driver`` with ``connect(data,
server_id)``. It is probed at first need, and kept until the server ends.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Final

import anyio.abc
from anyio.lowlevel import checkpoint

from glovebox_sandboxes.contract.base import Driver, Level, Plan, SandboxSpec
from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError

_Connecting = AbstractAsyncContextManager[Driver]
Waits = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class DriverEntry:
    """One kind of isolation."""

    name: str
    level: Level
    purpose: str
    experimental: str = ""

    def connect(self, data: Path, server_id: str) -> _Connecting:
        """Probe and hold it during the block. Its folder is imported now: the Engine's client takes 0.1 s."""
        folder = import_module(f"glovebox_sandboxes.drivers.{self.name}.driver")
        connecting: _Connecting = folder.connect(data, server_id)
        return connecting


DRIVERS: Final = (
    DriverEntry("bubblewrap", "namespaces", "user namespaces, bwrap 0.8, Landlock; no daemon, no image, no root"),
    DriverEntry("docker", "container", "a local Docker Engine 20.10, our image"),
    DriverEntry(
        "gvisor",
        "userspace-kernel",
        "what bubblewrap needs but Landlock, and `runsc`; no daemon, no image, no root",
        experimental="it is younger than the other two; `glovebox doctor --prove --driver gvisor` says what it holds "
        "here",
    ),
)
"""Weakest first, by what an attacker has to break: the kernel through one filter; the same and a container runtime's
own measures; a kernel of its own in user space first. It is also the order of how many hosts have it."""

NAMES: Final = tuple(each.name for each in DRIVERS)

RETRY_SECONDS = 5.0
"""Pause before an unusable driver is probed again: an Engine that is started later is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A driver that is up, and how to take it down."""

    driver: Driver
    plan: Callable[[SandboxSpec], Plan]
    """The driver's, cached: a plan is pure."""
    scope: anyio.CancelScope
    since: float


class Drivers:
    """Drivers of one server. Open it with ``opened``."""

    def __init__(self, tasks: anyio.abc.TaskGroup, connect: Mapping[str, Callable[[], _Connecting]]) -> None:
        self._tasks = tasks
        self._connect = connect
        self._ready: dict[str, _Held] = {}
        self._locks = {name: anyio.Lock() for name in connect}

    async def get(self, name: str) -> Driver:
        """Return the driver of that name; probe it at first use, or if it was unusable RETRY_SECONDS ago."""
        return (await self._get(name)).driver

    async def _get(self, name: str, waits: Waits = checkpoint) -> _Held:
        held = self._ready.get(name)
        if held is not None and held.driver.capabilities.usable:
            return held
        await waits()
        async with self._locks[name]:
            held = self._ready.get(name)
            if held and not held.driver.capabilities.usable and anyio.current_time() > held.since + RETRY_SECONDS:
                held.scope.cancel()
                held = None
            if held is None:
                # In a task of its own: a driver's clean-up must not depend on the call that needed it first.
                held = self._ready[name] = await self._tasks.start(self._hold, name)
            return held

    async def _hold(self, name: str, *, task_status: anyio.abc.TaskStatus[_Held]) -> None:
        with anyio.CancelScope() as scope:
            async with self._connect[name]() as driver:
                plan = lru_cache(maxsize=256)(driver.plan)
                task_status.started(_Held(driver=driver, plan=plan, scope=scope, since=anyio.current_time()))
                await anyio.sleep_forever()

    async def choose(self, names: tuple[str, ...], spec: SandboxSpec, waits: Waits = checkpoint) -> tuple[Driver, Plan]:
        """Return the first driver that can enforce every part of the spec, and its plan.

        ``waits`` is awaited before each look at the host; never if a driver that is known can enforce it.

        Raises UnsupportedSpecError: none can; says what the first one lacks and what to do, then why no other can.
        """
        reasons: list[tuple[str, str]] = []
        for name in names:
            if name not in self._connect:
                reasons.append((f"{name}: this version has no such driver", ""))
                continue
            try:
                held = await self._get(name, waits)
                return held.driver, held.plan(spec)
            except (UnsupportedSpecError, SandboxError) as problem:
                reasons.append((f"{name}: {problem.reason}", problem.fix))
        (reason, fix), *others = sorted(reasons, key=lambda each: not each[1])  # what can be fixed comes first
        fix = " ".join([fix or "Run `glovebox doctor`.", *(f"Nor can {other}." for other, _ in others)])
        raise UnsupportedSpecError("isolation", f"no driver can enforce this profile here: {reason}", fix)


@asynccontextmanager
async def opened(data: Path, server_id: str) -> AsyncIterator[Drivers]:
    """Provide the drivers during the block; ``server_id`` marks what they make, and nothing of it is left."""
    connect = {each.name: partial(each.connect, data, server_id) for each in DRIVERS}
    async with anyio.create_task_group() as tasks:
        yield Drivers(tasks, connect)
        tasks.cancel_scope.cancel()
