"""The source of prepared sandboxes for drivers that start each of them as for a call. No I/O of its own."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from glovebox_sandboxes.contract.base import Plan, Sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """Starts every sandbox from nothing."""

    start: Callable[[], AbstractAsyncContextManager[Sandbox]]
    bytes_each: int
    quick: bool = False

    def open(self) -> AbstractAsyncContextManager[Sandbox]:
        """See ``Source.open``."""
        return self.start()


@asynccontextmanager
async def starting(
    start: Callable[[Plan], AbstractAsyncContextManager[Sandbox]], plan: Plan, bytes_each: int
) -> AsyncIterator[Starting]:
    """A source that starts sandboxes by ``start(plan)``, for the length of the block."""
    yield Starting(start=lambda: start(plan), bytes_each=bytes_each)
