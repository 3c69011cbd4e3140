"""Hides the workspace's secret files from programs: masked before the start, watched during the run."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from glovebox_sandboxes.contract.base import ORIGINAL, WORKSPACE, SandboxSpec
from glovebox_sandboxes.contract.errors import RefusedError, SandboxError
from glovebox_server.core.call import Call
from glovebox_server.tools.base import Tool

if TYPE_CHECKING:
    from glovebox_sandboxes.hidden.index import SecretFileGuard, SecretFileIndex, SecretFileIndexes

MAX_HELD: Final = 64 * 1024
"""Characters of live output withheld until the workspace was checked; beyond it none is shown."""
_MANY: Final = 1000
"""Number of secret files from which masks are computed in a thread."""


class Hiding:
    """Secret files in the workspaces of a server: unknown until a program is to see a workspace."""

    def __init__(self) -> None:
        self.changed = anyio.Event()
        """Set once new secret files appear; renewed by the waiting task."""
        self.used_at = time.monotonic()
        self._indexes: SecretFileIndexes | None = None

    async def masked(self, spec: SandboxSpec, tool: Tool, reveal: Sequence[str]) -> SandboxSpec:
        """Return the spec of a sandbox that hides secret files from this tool, except revealed ones.

        Raises UnsupportedSpecError: they cannot be hidden.
        """
        index = await self._index(spec, tool)
        return spec if index is None else replace(spec, masks=await _masks(index, _revealed(reveal)))

    @asynccontextmanager
    async def guarding(self, spec: SandboxSpec, tool: Tool, reveal: Sequence[str]) -> AsyncIterator["Hidden | None"]:
        """Yield the same and a guard for one call, for the block; None if it sees no workspace.

        Raises UnsupportedSpecError: they cannot be hidden.
        """
        revealed, index = _revealed(reveal), await self._index(spec, tool)
        if index is None:
            yield None
            return
        self.used_at = time.monotonic()
        loop, scope = asyncio.get_running_loop(), anyio.CancelScope()

        def cancel() -> None:
            loop.call_soon_threadsafe(scope.cancel)

        # Guarded before it is asked what there is: nothing comes in between.
        with index.guarding(revealed, cancel) as guard:
            if not index.settled:  # what a thread took in before the guard was there may not be said yet
                await anyio.to_thread.run_sync(index.drain)
            spec = replace(spec, masks=await _masks(index, revealed))
            hidden = Hidden(spec=spec, index=index, guard=guard, scope=scope)
            try:
                yield hidden
            except SandboxError:
                await hidden.require()  # a cover may have gone while the sandbox was made, which its proof told
                raise

    async def mask(self, call: Call) -> None:
        """Mask secret files in the sandbox, and watch the workspace until the program has ended (GB-FILE-12)."""
        now = call.now
        if now.spec is None:
            raise AssertionError(call.request.id)
        hidden = await call.stack.enter_async_context(self.guarding(now.spec, call.tool, now.reveal))
        if hidden is not None:
            now.spec = hidden.spec
            now.wrap_live.append(hidden.printed)
            now.around_program.append(hidden.watching())

    async def _index(self, spec: SandboxSpec, tool: Tool) -> "SecretFileIndex | None":
        shown = [mount for mount in spec.mounts if mount.target in {WORKSPACE, ORIGINAL}]
        if not shown or not tool.imports:
            return None
        if self._indexes is None:
            from glovebox_sandboxes.hidden.index import SecretFileIndexes  # noqa: PLC0415 - only where a program sees files

            loop = asyncio.get_running_loop()

            def changed() -> None:
                with suppress(RuntimeError):  # the server has ended
                    loop.call_soon_threadsafe(self.changed.set)

            self._indexes = SecretFileIndexes(changed)
        return await self._indexes.of(shown[0].source)

    def close(self) -> None:
        """Stop watching."""
        if self._indexes is not None:
            self._indexes.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hidden:
    """The secret files hidden from one call's program."""

    spec: SandboxSpec
    index: "SecretFileIndex"
    guard: "SecretFileGuard"
    scope: anyio.CancelScope

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Cancel the block if a secret file appears. Raises RefusedError: as ``require``; the result is withheld."""
        with self.scope:
            yield
        await self.require()

    async def require(self) -> None:
        """Refuse if a secret file appeared, or replaced a masked one. Raises RefusedError: one has."""
        if not self.guard.holds:
            await anyio.to_thread.run_sync(self.index.drain)
        if self.guard.broken:
            raise RefusedError(
                "workspace.secret",
                "While it ran, a file that is named as secrets are appeared in the workspace or was replaced there: "
                "the program was ended, and what it put out is withheld.",
                "Call again.",
            )

    def printed(self, show: Callable[[str], None]) -> Callable[[str], None]:
        """Wrap ``show``: hold live output back until no secret file can be in it."""
        held, size = list[str](), 0

        def printed(text: str) -> None:
            nonlocal size
            if size > MAX_HELD:
                return
            held.append(text)
            size += len(text)
            if size > MAX_HELD:
                held.clear()
            elif self.guard.holds:
                show("".join(held))
                held.clear()
                size = 0

        return printed


async def _masks(index: "SecretFileIndex", revealed: frozenset[str]) -> tuple[str, ...]:
    if index.count > _MANY:
        return await anyio.to_thread.run_sync(index.masks, revealed)
    return index.masks(revealed)


def _revealed(reveal: Sequence[str]) -> frozenset[str]:
    return frozenset(path.strip("/") for path in reveal)
