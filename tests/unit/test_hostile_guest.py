"""A guest that keeps its server busy: what others wait meanwhile, in processor time, which no other process changes."""

import gc
import time
from collections.abc import Iterator

import anyio
import anyio.lowlevel
import pytest
from tests.fixtures.wire_peers import frame, opening, running
from tests.perf import stalls_guest
from tests.perf.stalls import BOUND_MS

from _glovebox_guest.wire import WINDOW
from glovebox_server import event_loop

INPUTS = list(stalls_guest.inputs())


@pytest.fixture(autouse=True)
def _processor_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(event_loop, "monotonic", time.thread_time)
    yield
    gc.unfreeze()


@pytest.mark.parametrize(("before", "after"), [each[1:] for each in INPUTS], ids=[each[0] for each in INPUTS])
def test_whatever_a_guest_says_others_have_their_turn(before: bytes, after: bytes) -> None:
    """Before its job and after it; the control is below."""
    assert 0 < stalls_guest.stall(before, after) < BOUND_MS


def test_a_flood_of_tiny_frames_that_is_read_at_once_is_a_stall() -> None:
    """The control: the same 100,000 frames as above, as they were read before."""

    async def read() -> float | None:
        host, _ = running()
        event_loop.restart()
        assert len(host.receive(opening(1) + frame(3, 1, b"x") * (WINDOW // 10))) > 100_000
        await anyio.lowlevel.checkpoint()
        return event_loop.longest_stall_ms()

    stalled = event_loop.run(read)
    assert stalled is not None
    assert stalled > BOUND_MS
