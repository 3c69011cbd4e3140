"""How many prepared sandboxes are wanted."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import anyio
import pytest
from tests.fixtures.pools import PLAN

from glovebox_sandboxes.pool.ready_queue import MOST_READY, ReadyQueue


@contextmanager
def demand(calls: int = 0, over: int = 0, capacity: int = MOST_READY) -> Iterator[ReadyQueue]:
    """After so many calls at one time, of which so many are over."""
    unused: Any = None
    found = ReadyQueue(unused, PLAN, unused, [])
    found.capacity = capacity
    with ExitStack() as under_way, ExitStack() as ended:
        for number in range(calls):
            (ended if number < over else under_way).enter_context(found.in_use("key"))
        ended.close()
        yield found


@pytest.mark.parametrize(
    ("calls", "capacity", "wanted"),
    [(0, MOST_READY, 1), (1, MOST_READY, 2), (5, MOST_READY, 6), (5, 3, 3), (5, 0, 0), (100, 100, MOST_READY + 1)],
)
async def test_as_many_are_wanted_as_calls_ran_at_one_time_and_one_for_the_next(
    calls: int, capacity: int, wanted: int
) -> None:
    """As far as memory allows; a burst is remembered for as many as may be ready."""
    with demand(calls, calls, capacity) as found:
        assert found.wanted == wanted


@pytest.mark.parametrize(
    ("calls", "counts", "missing"),
    [
        ((0, 0), (0, 0, 0), 1),
        ((0, 0), (1, 0, 0), 0),
        ((0, 0), (0, 1, 0), 0),
        ((3, 3), (1, 0, 0), 3),  # nobody runs: all that is wanted
        ((3, 3), (1, 2, 0), 1),
        ((3, 2), (0, 0, 0), 1),  # a call runs: the next one alone
        ((3, 2), (1, 0, 0), 0),
        ((3, 0), (0, 0, 2), 3),  # and one for each that waits
        ((3, 0), (0, 2, 2), 1),
        ((3, 3), (6, 0, 0), -2),
    ],
)
async def test_what_is_missing(calls: tuple[int, int], counts: tuple[int, int, int], missing: int) -> None:
    """While calls run, which it would slow down, one is prepared and no more, but for calls that wait."""
    ready, preparing, waiters = counts
    found: Any
    with demand(*calls) as found:
        found.ready.extend(range(ready))
        found._waiters.extend(range(waiters))
        assert found.missing(preparing) == missing
        found._waiters.clear()


async def test_the_peak_falls_by_one_at_each_review_but_not_below_the_calls_under_way() -> None:
    """Demand of a while ago is forgotten step by step."""
    peaks = []
    with demand(5, 3) as found:
        for _ in range(5):
            assert not found.review(MOST_READY)
            peaks.append(found.peak)
    assert peaks == [4, 3, 2, 2, 2]


async def test_a_review_says_once_when_memory_has_come_to_limit() -> None:
    """Not where it was the limit already, nor where it is more than anybody wants."""
    with demand(5, 5) as found:
        assert not found.review(5)
        assert found.review(3)
        assert not found.review(3)
        assert found.wanted == 3
        assert not found.review(MOST_READY)


async def test_a_queue_knows_when_it_was_last_used() -> None:
    """By the beginning of a call, and by its end."""
    before = anyio.current_time()
    with demand() as found:
        with found.in_use("key"):
            begun = found.used_at
            await anyio.sleep(0.001)
        assert before <= begun < found.used_at


async def test_a_flood_is_forgotten_as_soon_as_the_most_that_may_be_ready() -> None:
    """A review in the midst of it remembers no more calls than a new one does."""
    with demand(100) as found:
        found.review(MOST_READY)
        assert found.peak == MOST_READY
