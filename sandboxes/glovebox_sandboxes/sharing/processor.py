"""Divides processors by key: what one key's sandboxes compute, and what the event loop does for them.

More sandboxes of a key are not more of the processors, and a guest that always has something to say waits for others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from anyio.lowlevel import checkpoint

from glovebox_sandboxes.contract.base import Sandbox
from glovebox_sandboxes.session.run import AttestedSandbox
from glovebox_sandboxes.sharing.limiter import FairLimiter


class Processor:
    """The running sandboxes by key."""

    def __init__(self) -> None:
        self._running: dict[str, list[Sandbox]] = {}
        self._parts: dict[str, int] = {}
        """Of a key whose sandboxes have less than the default."""
        self._loop = FairLimiter(1, shared=False)

    @contextmanager
    def shared(self, key: str, attested: AttestedSandbox) -> Iterator[None]:
        """Have a sandbox be one of its key's, for the length of the block.

        One that is alone, and one that is not used yet, keeps the default and costs nothing here.
        """
        sandbox = attested.sandbox
        attested.link.pause = partial(self._pause, key)
        running = self._running.setdefault(key, [])
        running.append(sandbox)
        self._divide(key, running)
        parts = self._parts.get(key, 1)
        if parts > 1:
            sandbox.weigh(parts)
        try:
            yield
        finally:
            running.remove(sandbox)
            self._divide(key, running)
            if not running:
                del self._running[key]

    def _divide(self, key: str, running: list[Sandbox]) -> None:
        # In powers of two: each change is a write for each sandbox, and most calls begin and end without one.
        parts = 1 << max(0, len(running) - 1).bit_length()
        if parts != self._parts.get(key, 1):
            self._parts[key] = parts
            if parts == 1:
                del self._parts[key]
            for each in running:
                each.weigh(parts)

    async def _pause(self, key: str) -> None:
        """Return when it is the turn of a guest of this key: in each turn of the loop, that of one guest at most."""
        async with self._loop.turn(key):
            await checkpoint()
