"""Which drivers there are, and how one is brought up: probed when it is first needed, kept until the server ends."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import anyio
import anyio.abc

from glovebox_sandboxes.contract.base import Driver, Plan
from glovebox_sandboxes.contract.errors import SandboxUnavailable, UnsupportedSpec
from glovebox_sandboxes.contract.spec import SandboxSpec
from glovebox_sandboxes.drivers.bubblewrap import driver as bubblewrap

NAMES: Final = ("bubblewrap", "docker", "gvisor")
"""Every driver, strongest claim to be everywhere first."""

RETRY_SECONDS = 5.0
"""How long a driver that cannot be used is not asked again: an Engine that is started later is found."""

_Connecting = AbstractAsyncContextManager[Driver]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A driver that is up, and how to take it down."""

    driver: Driver
    scope: anyio.CancelScope
    since: float

    def age(self) -> float:
        """Seconds since it was probed."""
        return anyio.current_time() - self.since


class Drivers:
    """The drivers of one server. Open it with ``opened``."""

    def __init__(self, tasks: anyio.abc.TaskGroup, connect: Mapping[str, Callable[[], _Connecting]]) -> None:
        """Take the task group drivers live in, and how to make each."""
        self._tasks = tasks
        self._connect = connect
        self._ready: dict[str, _Held] = {}
        self._plans: dict[tuple[str, SandboxSpec], Plan] = {}
        self._locks = {name: anyio.Lock() for name in connect}

    async def get(self, name: str) -> Driver:
        """The driver of that name, probed now if it was not before, or if it could not be used a while ago."""
        async with self._locks[name]:
            held = self._ready.get(name)
            if held is not None and not held.driver.capabilities.usable and held.age() > RETRY_SECONDS:
                held.scope.cancel()
                held = None
            if held is None:
                # In a task of its own: a driver's clean-up must not depend on the call that happened to need it first.
                held = self._ready[name] = await self._tasks.start(self._hold, name)
            return held.driver

    async def _hold(self, name: str, *, task_status: anyio.abc.TaskStatus["_Held"]) -> None:
        with anyio.CancelScope() as scope:
            async with self._connect[name]() as driver:
                task_status.started(_Held(driver=driver, scope=scope, since=anyio.current_time()))
                await anyio.sleep_forever()

    def _plan(self, driver: Driver, spec: SandboxSpec) -> Plan:
        """A plan is pure, so one of a spec is as good as the next: there are two for each profile at most."""
        key = (driver.name, spec)
        if key not in self._plans:
            self._plans[key] = driver.plan(spec)
        return self._plans[key]

    def chosen(self, names: tuple[str, ...], spec: SandboxSpec) -> tuple[Driver, Plan] | None:
        """What ``choose`` says, where it need not look at the host for that; else None."""
        for name in names:
            held = self._ready.get(name)
            if held is None or not held.driver.capabilities.usable:
                return None
            with suppress(UnsupportedSpec, SandboxUnavailable):
                return held.driver, self._plan(held.driver, spec)
        return None

    async def choose(self, names: tuple[str, ...], spec: SandboxSpec) -> tuple[Driver, Plan]:
        """The first driver that can enforce every part of the spec, and its plan.

        Raises:
            UnsupportedSpec: none can; says why for each.
        """
        reasons: list[str] = []
        fixes: list[str] = []
        for name in names:
            if name not in self._connect:
                reasons.append(f"{name}: this version has no such driver")
                continue
            try:
                driver = await self.get(name)
                return driver, self._plan(driver, spec)
            except (UnsupportedSpec, SandboxUnavailable) as problem:
                reasons.append(f"{name}: {problem.reason}")
                fixes.append(problem.fix)
        fix = next(iter(fixes), "Run `glovebox doctor`.")
        raise UnsupportedSpec("isolation", "no driver can enforce this profile here: " + "; ".join(reasons), fix)


# Imported when it is needed: the Engine's client takes a tenth of a second, and bubblewrap has no use for it.


def _docker() -> _Connecting:
    from glovebox_sandboxes.drivers.docker.driver import DockerDriver  # noqa: PLC0415 - see above

    return DockerDriver.connect()


def _gvisor(data: Path, server_id: str) -> _Connecting:
    from glovebox_sandboxes.drivers import gvisor  # noqa: PLC0415 - see above

    return gvisor.connect(data, server_id)


@asynccontextmanager
async def opened(data: Path, server_id: str) -> AsyncIterator[Drivers]:
    """The drivers, for the length of the block; nothing of theirs is left after it.

    Args:
        data: directory of the embedded runtime.
        server_id: marks what this server makes.
    """
    connect: dict[str, Callable[[], _Connecting]] = {
        "bubblewrap": lambda: bubblewrap.connect(data, server_id),
        "docker": _docker,
        "gvisor": lambda: _gvisor(data, server_id),
    }
    async with anyio.create_task_group() as tasks:
        yield Drivers(tasks, connect)
        tasks.cancel_scope.cancel()
