"""Provides each call with an attested sandbox: of which driver, ready or started now, with or without modules.

The one place that decides these three, so that whoever needs a sandbox knows none of them. Nothing of the server here.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from glovebox_sandboxes.contract.base import Driver, Plan
from glovebox_sandboxes.contract.spec import SandboxSpec
from glovebox_sandboxes.drivers.registry import Drivers
from glovebox_sandboxes.pool.pool import Pool
from glovebox_sandboxes.pool.preload import needs_preload
from glovebox_sandboxes.session.run import AttestedSandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a call wants of its sandbox."""

    isolation: tuple[str, ...]
    """Names of the drivers that will do, the preferred one first."""
    spec: SandboxSpec
    prepared: bool
    """Whether one that stood ready before the call will do."""
    code: str | None = None
    """The program, where it is one in Python: it may need none of the modules that ``spec`` preloads."""
    key: str = ""
    """Whose call it is, for fair shares of what is ready and of the processors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxProvider:
    """Provides sandboxes to the calls of one server."""

    drivers: Drivers
    pool: Pool
    prewarm: bool = True
    """Whether sandboxes are prepared ahead of calls. Not worth it for one call alone."""

    @asynccontextmanager
    async def acquire(
        self, wanted: Wanted, before_start: Callable[[], Awaitable[None]]
    ) -> AsyncIterator[AttestedSandbox]:
        """A sandbox for one call, gone after the block.

        Args:
            wanted: what it must be.
            before_start: awaited where none stands ready, before the host is looked at or anything is waited for or
                started; perhaps more than once.

        Raises:
            UnsupportedSpec: no driver can enforce the spec here; nothing was started.
            SandboxUnavailable: it could not be started, or did not get ready.
        """
        spec = wanted.spec
        if spec.preload and wanted.code is not None and not needs_preload(wanted.code, spec.preload):
            spec = spec.without_preload()
        known = self.drivers.chosen(wanted.isolation, spec)
        if known is None:
            await before_start()
        driver, plan = known or await self.drivers.choose(wanted.isolation, spec)
        cold = plan
        if spec.preload:
            # A sandbox that is made while its call waits does not import what the program may not need.
            _, cold = await self.drivers.choose((driver.name,), spec.without_preload())
        if self.prewarm and wanted.prepared:
            async with self.pool.take(driver, plan, cold, key=wanted.key, waits=before_start) as sandbox:
                yield sandbox
        else:
            await before_start()
            async with self.pool.start(driver, cold, wanted.key) as sandbox:
                yield sandbox

    async def choose(self, isolation: Sequence[str], spec: SandboxSpec) -> tuple[Driver, Plan]:
        """The first of these drivers that can enforce every part of the spec, and its plan; see ``Drivers.choose``."""
        return await self.drivers.choose(tuple(isolation), spec)

    async def prepare(self, isolation: Sequence[str], spec: SandboxSpec) -> None:
        """Have sandboxes of this spec ready from now on, as long as they are used.

        Raises:
            UnsupportedSpec: no driver can enforce it here.
        """
        self.pool.prepare(*await self.choose(isolation, spec))
