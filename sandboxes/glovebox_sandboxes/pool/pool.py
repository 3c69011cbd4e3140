"""Provide each call with an attested sandbox: choose driver, ready or started now, with or without modules.

``SandboxProvider`` decides these three. ``Pool`` leases what the worker has ready, and starts what it has not. Nothing
of the server here.
"""

import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from anyio.lowlevel import checkpoint

from glovebox_sandboxes.contract.base import Driver, Plan, Sandbox, SandboxSpec
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.registry import Drivers, Waits
from glovebox_sandboxes.session.connection import AttestedSandbox, attest
from glovebox_sandboxes.sharing import STARTING, FairLimiter, weigh_all
from glovebox_sandboxes.worker.client import WorkerClient

MOST_CHOICES = 256
"""Cached choices of driver and plans: two for each profile and set of masks."""
MAX_SCANNED = 16 * 1024
"""Characters of a program that are scanned: a millisecond. A longer one is assumed to need the modules."""

_STATEMENT = re.compile(r"\b(?:from[ \t\f]+(\S+)[ \t\f]+import\b|import[ \t\f]+([^\n;#]*))")
_ELSEWHERE = ("exec(", "pickle", "runpy", "shelve")
"""Names that run other code, or make objects of modules that the text does not name."""

Choice = tuple[tuple[str, ...], SandboxSpec, bool]


class ProcessorShares:
    """Processor shares by key: of its sandboxes, and of the event loop's work for them.

    More sandboxes give a key no more of the processors, and a guest that always sends waits for others.
    """

    def __init__(self) -> None:
        self._running: dict[str, dict[Sandbox, int]] = {}
        self.loop = FairLimiter(1, shared=False)

    @contextmanager
    def shared(self, key: str, attested: AttestedSandbox) -> Iterator[None]:
        """Count a sandbox of a key during the block; a lone or unused one keeps the default at no cost."""
        attested.link.pause = partial(self.loop.pause, key)
        running = self._running.setdefault(key, {})
        running[attested.sandbox] = 1
        weigh_all(running)
        try:
            yield
        finally:
            del running[attested.sandbox]
            weigh_all(running)
            if not running:
                del self._running[key]


class Pool:
    """Sandboxes of one server: the worker's if there is one, else its own."""

    def __init__(
        self,
        describe: Callable[[Driver, AttestedSandbox], object] = lambda *_: None,
        *,
        shared: bool = False,
        worker: WorkerClient | None = None,
    ) -> None:
        """Set it up; ``describe`` returns ``AttestedSandbox.record``, and if ``shared``, calls have several keys."""
        self._describe, self._worker = describe, worker
        self._starts = FairLimiter(STARTING, shared=shared)
        self._processor = ProcessorShares()

    @asynccontextmanager
    async def take(
        self,
        driver: Driver,
        plan: Plan,
        cold: Plan,
        *,
        key: str = "",
        bound: int | None = None,
        waits: Waits = checkpoint,
    ) -> AsyncIterator[AttestedSandbox]:
        """Provide an attested sandbox for one call: one that is ready, else one that is started now by ``cold``.

        Calls of one ``key`` share its part, ``bound`` of them at most. ``waits`` is called if none is ready, before
        waiting for one or starting one; perhaps more than once. Raises SandboxError if it could not be started, or did
        not get ready.
        """
        if self._worker is None:
            await waits()
            async with self.start(driver, cold, key) as attested:
                yield attested
            return
        async with self._worker.lease(driver, plan, key, waits, bound) as lease:
            if lease.sandbox is None:
                await waits()
                async with self.start(driver, cold, key) as attested:
                    lease.started()
                    yield attested
                return
            lease.sandbox.link.pause = partial(self._processor.loop.pause, key)
            yield replace(lease.sandbox, record=self._describe(driver, lease.sandbox))

    @asynccontextmanager
    async def start(self, driver: Driver, plan: Plan, key: str = "") -> AsyncIterator[AttestedSandbox]:
        """Start an attested sandbox for one call of this key. Raises SandboxError if it does not get ready."""
        async with AsyncExitStack() as stack:
            async with self._starts.turn(key):
                attested = await attest(await stack.enter_async_context(driver.open(plan)), plan)
                attested = replace(attested, record=self._describe(driver, attested))
            with self._processor.shared(key, attested):
                yield attested

    async def keep(self, driver: Driver, plan: Plan) -> None:
        """Keep sandboxes of a plan ready while they are used; one that cannot be prepared is started for its call."""
        if self._worker is not None:
            with suppress(SandboxError):  # its calls report it
                await self._worker.prepare(driver, plan)

    def keep_only(self, specs: Iterable[SandboxSpec]) -> None:
        """Drop what is ready for others than these, whatever they preload or mask. Calls keep what they have."""
        link = self._worker and self._worker.link
        if link:
            kept = {spec for each in specs for spec in (each, each.without_preload())}
            for plan in [plan for plan, spec in link.prepared.items() if replace(spec, masks=()) not in kept]:
                del link.prepared[plan]
                link.send({"kind": "drop", "plan": plan})


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxProvider:
    """Source of sandboxes for the calls of one server."""

    drivers: Drivers
    pool: Pool
    _choices: dict[Choice, tuple[Driver, Plan, Plan]] = field(default_factory=dict, init=False)

    @asynccontextmanager
    async def acquire(
        self,
        isolation: tuple[str, ...],
        spec: SandboxSpec,
        waits: Waits,
        *,
        prepared: bool,
        code: str | None,
        key: str,
        bound: int | None = None,
    ) -> AsyncIterator[AttestedSandbox]:
        """Provide a sandbox for one call of this key, gone after the block.

        ``isolation`` names acceptable drivers, the preferred one first. ``code`` is the program, if in Python: it may
        need none of the modules that ``spec`` preloads. ``bound``: see ``Pool.take``.

        ``waits`` is awaited if none is ready, before the host is examined, or anything is waited for or started;
        perhaps more than once.

        Raises:
            UnsupportedSpecError: no driver can enforce the spec here; nothing was started.
            SandboxError: it could not be started, or did not get ready.
        """
        preloads = bool(spec.preload) and (code is None or needs_preload(code, spec.preload))
        choice = (isolation, spec, preloads)
        driver, plan, cold = self._choices.get(choice) or await self._choose(choice, waits)
        if prepared:
            async with self.pool.take(driver, plan, cold, key=key, bound=bound, waits=waits) as sandbox:
                yield sandbox
        else:
            await waits()
            async with self.pool.start(driver, cold, key) as sandbox:
                yield sandbox

    async def _choose(self, choice: Choice, waits: Waits) -> tuple[Driver, Plan, Plan]:
        """Choose the driver, its plan and the plan of a cold start; cache what stays valid."""
        isolation, spec, preloads = choice
        if not preloads:
            spec = spec.without_preload()
        driver, plan = await self.drivers.choose(isolation, spec, waits)
        cold = plan
        if preloads:
            # A sandbox started while its call waits does not import what the program may not need.
            _, cold = await self.drivers.choose((driver.name,), spec.without_preload())
        if driver.name == isolation[0]:  # a usable driver stays so; a preferred one may become usable
            if len(self._choices) >= MOST_CHOICES:
                self._choices.clear()
            self._choices[choice] = driver, plan, cold
        return driver, plan, cold

    async def prepare(self, isolation: tuple[str, ...], spec: SandboxSpec) -> None:
        """Keep sandboxes of this spec ready while they are used. Raises UnsupportedSpecError if no driver can."""
        await self.pool.keep(*await self.drivers.choose(isolation, spec))


def needs_preload(code: str, preload: Sequence[str]) -> bool:
    """Return whether ``code`` names one of these modules, or may import or run them out of sight.

    A needless preload costs milliseconds, and a wrong guess costs only time. So the text is not parsed: a parser of
    untrusted programs on the host could be attacked (https://docs.python.org/3/library/ast.html#ast.parse).
    """
    words = (*_ELSEWHERE, *(module.partition(".")[0] for module in preload))
    if len(code) > MAX_SCANNED or any(word in code for word in words):
        return True
    # Also in strings and comments; a relative name, or one that is not understood, is not the standard library's.
    for package, listed in _STATEMENT.findall(code.replace("\\\n", " ")):
        for name in [package] if package else listed.split(","):
            first, *_ = name.split() or [""]
            if first.partition(".")[0] not in sys.stdlib_module_names:
                return True
    return False
