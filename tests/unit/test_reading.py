"""Each caller's share of the time in which requests are read, in a clock that jumps."""

from typing import Any

import anyio
import pytest
from tests.fixtures.pools import jumping

from glovebox_server.transport import messages
from glovebox_server.transport.messages import Malformed
from glovebox_server.transport.reading import AHEAD_SECONDS, SHARE, WHOLE, Reading

BODY = b"{}"
CALLERS = 250
"""Connections of one token in the attack that was seen; a token alone has up to 900."""


class Slow:
    """Reading that takes a time: each body so many seconds of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        self.seconds = seconds
        self.spent = 0.0
        self.reading = Reading(lambda: anyio.current_time() + self.spent)
        monkeypatch.setattr(messages, "value_of", self._value_of)

    def _value_of(self, text: bytes) -> Any:
        self.spent += self.seconds
        return text


@jumping
async def test_one_who_sends_much_is_read_at_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """250 bodies that take 5 ms to read: one after the other, and in all no more than a quarter of the time.

    The control: another caller, meanwhile, is read at once.
    """
    slow = Slow(monkeypatch, 0.005)
    read: list[float] = []

    async def send() -> None:
        await slow.reading.value_of("token:much", BODY)
        read.append(slow.reading._clock())

    async with anyio.create_task_group() as tasks:
        for _ in range(CALLERS):
            tasks.start_soon(send)
        await anyio.sleep(3)
        assert 0 < len(read) < CALLERS
        before = anyio.current_time()
        await slow.reading.value_of("token:other", BODY)
        assert anyio.current_time() == before
    whole = CALLERS * slow.seconds * WHOLE
    assert read[-1] - read[0] >= (whole - AHEAD_SECONDS) / SHARE - 1
    for first, last in zip(read, read[50:], strict=False):
        # Within any stretch: what is spent of the loop is the share of it, and what one may be ahead.
        assert 50 * slow.seconds * WHOLE <= SHARE * (last - first) + AHEAD_SECONDS + 2 * slow.seconds * WHOLE


@jumping
async def test_ordinary_requests_never_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand a second, at the 20 µs that reading one takes."""
    slow = Slow(monkeypatch, 20e-6)
    for _ in range(5_000):
        before = anyio.current_time()
        await slow.reading.value_of("token:a", BODY)
        assert anyio.current_time() == before
        await anyio.sleep(0.001)


@jumping
async def test_what_is_malformed_is_paid_for_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error frees nobody from waiting, and the next one is read."""
    slow = Slow(monkeypatch, 0.1)

    def refuse(_text: bytes) -> Any:
        slow.spent += slow.seconds
        raise Malformed(-32700, "no")

    monkeypatch.setattr(messages, "value_of", refuse)
    before = anyio.current_time()
    for _ in range(3):
        with pytest.raises(Malformed):
            await slow.reading.value_of("token:a", BODY)
    assert anyio.current_time() - before >= 2 * (0.1 * WHOLE - AHEAD_SECONDS) / SHARE - 1


@jumping
async def test_one_that_stops_waiting_gives_its_turn_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that left, or was told to come later, keeps nobody waiting."""
    slow = Slow(monkeypatch, 0.1)
    await slow.reading.value_of("token:a", BODY)
    with anyio.move_on_after(0.1) as wait:
        await slow.reading.value_of("token:a", BODY)
    assert wait.cancelled_caught
    with anyio.fail_after(2 * 0.1 * WHOLE / SHARE):
        assert await slow.reading.value_of("token:a", BODY) == BODY
