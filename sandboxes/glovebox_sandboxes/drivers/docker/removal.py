"""Remove containers off a call's path but without fail."""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import structlog

from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.drivers.docker import usage
from glovebox_sandboxes.drivers.docker.engine import Engine
from glovebox_sandboxes.host.owner import is_orphan

_AT_ONCE = 2
"""Removals at one time: each costs the daemon about 50 ms of a processor, which the next start needs too."""
_TRIES = 3
_RETRY_SECONDS = 0.5
_SHUTDOWN_SECONDS = 30
"""Longest wait at the end of ``running``: 256 containers take about 10 s."""

_log = structlog.get_logger(__name__)


class Remover:
    """Removals under way, and those that failed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turns = anyio.CapacityLimiter(_AT_ONCE)
        self._waiting: dict[str, anyio.CancelScope] = {}
        self._tasks: anyio.abc.TaskGroup | None = None
        self.leaked: dict[str, str] = {}
        """Containers that could not be removed, and why; the next server's ``reap`` tries again."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Work during the block, then until all containers are gone, at most 30 s."""
        problem: Exception | None = None
        try:
            async with anyio.create_task_group() as self._tasks:
                try:
                    yield
                except Exception as raised:  # noqa: BLE001 - raised below, as itself and not in the group's wrapping
                    problem = raised
                finally:
                    # No await from here on: the block may be leaving because it was cancelled. Removals are shielded,
                    # and the task group waits for them.
                    for scope in self._waiting.values():
                        scope.deadline = anyio.current_time() + _SHUTDOWN_SECONDS
        finally:
            for name in sorted(self._waiting):
                self._give_up(name, f"not done within {_SHUTDOWN_SECONDS} s of the server's end")
        if problem is not None:
            raise problem

    def start_soon(self, function: Callable[..., Coroutine[Any, Any, None]], *arguments: object) -> None:
        """Run a function beside the removals; it ends with them."""
        if self._tasks is None:
            raise RuntimeError("the driver is not running")
        self._tasks.start_soon(function, *arguments)

    def take(self, name: str, identifier: str) -> None:
        """Remove a container by name or id, also for a cancelled task; ``identifier``: empty if not reported."""
        self._waiting[name] = anyio.CancelScope(shield=True)
        self.start_soon(self._end, name, identifier)

    async def reap(self, label: str) -> None:
        """Remove every container whose ``label`` names a server of this machine that is gone."""
        for container in await self._engine.labelled(label):
            labels: Mapping[str, str] = container.get("Labels") or {}
            if is_orphan(labels.get(label, "")):
                _log.info("removing a container whose server is gone", container=container["Id"])
                self.take(container["Id"], container["Id"])

    async def _end(self, name: str, identifier: str) -> None:
        with self._waiting[name]:
            async with self._turns:
                await self._remove(name)
                # An Engine that is gone, or was killed in the middle of a start, leaves its processes running.
                if identifier and (killed := await anyio.to_thread.run_sync(usage.end, identifier)):
                    _log.warning("the Engine left processes of a container", container=identifier, killed=killed)
                del self._waiting[name]

    async def _remove(self, name: str) -> None:
        for _ in range(_TRIES):
            try:
                await self._engine.remove(name)
            except SandboxError as problem:
                reason = problem.reason
                await anyio.sleep(_RETRY_SECONDS)
            except Exception as problem:  # noqa: BLE001 - of one container; the others are still to be removed
                reason = f"nobody foresaw this ({type(problem).__name__}: {problem})"
                break
            else:
                return
        self._give_up(name, reason)

    def _give_up(self, name: str, reason: str) -> None:
        self.leaked[name] = reason
        _log.error("a container could not be removed", container=name, reason=reason, fix=f"docker rm -f {name}")
