"""A driver of prepared sandboxes, so that its proof holds for calls that find one ready."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import anyio.abc

from glovebox_sandboxes.conformance.case import LIMITS
from glovebox_sandboxes.contract.base import Driver, Plan, Sandbox, Source
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.contract.spec import SandboxSpec


class Prepared:
    """A ``Driver`` that opens every sandbox from a source of its plan, which starts when first needed."""

    def __init__(self, driver: Driver, tasks: anyio.abc.TaskGroup) -> None:
        """Set the driver, and the task group of its sources."""
        self.name = driver.name
        self.capabilities = driver.capabilities
        self._driver = driver
        self._tasks = tasks
        self._sources: dict[str, Source] = {}
        self._turn = anyio.Lock()

    def plan(self, spec: SandboxSpec) -> Plan:
        """Return the driver's plan."""
        return self._driver.plan(spec)

    @asynccontextmanager
    async def open(self, plan: Plan) -> AsyncIterator[Sandbox]:
        """Open a prepared sandbox; see ``Driver.open``."""
        async with self._turn:
            if plan.digest not in self._sources:
                self._sources[plan.digest] = await self._tasks.start(self._hold, plan)
        async with self._sources[plan.digest].open() as sandbox:
            yield sandbox

    def source(self, plan: Plan) -> AbstractAsyncContextManager[Source]:
        """Return the driver's source."""
        return self._driver.source(plan)

    async def _hold(self, plan: Plan, *, task_status: anyio.abc.TaskStatus[Source]) -> None:
        async with self._driver.source(plan) as source:
            task_status.started(source)
            await anyio.sleep_forever()


@asynccontextmanager
async def prepared(driver: Driver) -> AsyncIterator[Driver]:
    """Provide the same driver, with every sandbox prepared, for the length of the block."""
    async with anyio.create_task_group() as tasks:
        yield Prepared(driver, tasks)
        tasks.cancel_scope.cancel()


async def has_another_way(driver: Driver) -> bool:
    """Return whether prepared sandboxes are made in another way than those started for a call."""
    try:
        async with driver.source(driver.plan(SandboxSpec(limits=LIMITS))) as source:
            return source.quick
    except SandboxError:
        # Then every claim is asked all the same, and fails for this reason.
        return True
