"""A guest that keeps its server busy: what others wait meanwhile."""

import time

import anyio
from tests.fixtures.channels import OUTCOME, Channel, Guest
from tests.fixtures.wire_peers import frame, opening, running

from _glovebox_guest.wire import WINDOW
from glovebox_sandboxes.session.connection import GuestConnection
from glovebox_server import event_loop


class _Nothing:
    """A sink that keeps nothing."""

    async def data(self, data: bytes) -> None:
        """Throw it away."""

    async def end(self) -> None:
        """Nothing more comes."""


async def _accept(_kind: str, _meta: object) -> _Nothing:
    return _Nothing()


def stall_of(said: bytes) -> float:
    """Longest stall in milliseconds while a guest that has its job says this, and then its outcome."""

    async def talk() -> float:
        channel = Channel()

        async def script() -> None:
            guest = Guest(channel)
            await guest.start()
            await guest.say(said)
            await guest.done(OUTCOME)

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(script)
                link = GuestConnection(channel)
                await link.ready()
                event_loop.restart()
                await link.run({"kind": "python"}, (), _accept, None)
        finally:
            await channel.aclose()
        return event_loop.longest_stall_ms() or 0.0

    return event_loop.run(talk)


def test_a_flood_of_tiny_frames_leaves_others_their_turn() -> None:
    """1 MiB that comes at once holds 100,000 frames; between any two of them others may have theirs.

    The control reads the same bytes in one go, as it was.
    """
    flood = opening(1) + frame(3, 1, b"x") * (WINDOW // 10)
    host, _ = running()
    began = time.perf_counter()
    assert len(host.receive(flood)) > 100_000
    at_once = (time.perf_counter() - began) * 1000
    assert stall_of(flood) < at_once / 2
