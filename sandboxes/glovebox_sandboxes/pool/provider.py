"""Provides each call with an attested sandbox: of which driver, ready or started now, with or without modules.

The one place that decides these three, so that whoever needs a sandbox knows none of them. Nothing of the server here.
"""

import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from glovebox_sandboxes.contract.base import Driver, Plan
from glovebox_sandboxes.contract.spec import SandboxSpec
from glovebox_sandboxes.drivers.registry import Drivers
from glovebox_sandboxes.pool.pool import Pool
from glovebox_sandboxes.session.run import AttestedSandbox

MAX_SCANNED = 16 * 1024
"""Characters that are looked at: a millisecond. A longer program is taken to want them."""

_STATEMENT = re.compile(r"\b(?:from[ \t\f]+(\S+)[ \t\f]+import\b|import[ \t\f]+([^\n;#]*))")
_ELSEWHERE = ("exec(", "pickle", "runpy", "shelve")
"""What runs other code of which the text says nothing, or makes objects of modules that it does not name."""


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
            UnsupportedSpecError: no driver can enforce the spec here; nothing was started.
            SandboxError: it could not be started, or did not get ready.
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
            UnsupportedSpecError: no driver can enforce it here.
        """
        self.pool.prepare(*await self.choose(isolation, spec))


def needs_preload(code: str, preload: Sequence[str]) -> bool:
    """Return whether ``code`` names one of these modules, or imports or runs what is not in view and may need them.

    What was imported ahead costs a program that does not use it milliseconds. A wrong guess costs time and nothing
    else. So the text is not parsed: a parser of strangers' programs on the host would be something to attack
    (https://docs.python.org/3/library/ast.html#ast.parse).
    """
    words = (*_ELSEWHERE, *(module.partition(".")[0] for module in preload))
    if len(code) > MAX_SCANNED or any(word in code for word in words):
        return True
    return any(name not in sys.stdlib_module_names for name in _imported(code.replace("\\\n", " ")))


def _imported(code: str) -> Iterator[str]:
    """First names of what is imported, also in strings and comments; empty for what is relative or not understood."""
    for statement in _STATEMENT.finditer(code):
        package, listed = statement.groups()
        for each in [package] if package else listed.split(","):
            words = each.split()
            yield words[0].partition(".")[0] if words else ""
