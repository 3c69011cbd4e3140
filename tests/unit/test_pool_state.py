"""The states of a prepared sandbox: every cell of the table; and how many are wanted, for whom and for how long."""

import ast
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from glovebox_sandboxes.pool import ready_queue as module
from glovebox_sandboxes.pool.ready_queue import (
    IDLE_SECONDS,
    MEMORY_SHARE,
    MOST_READY,
    RENEW_SECONDS,
    RETRY_SECONDS,
    TRANSITIONS,
    Demand,
    SandboxEvent,
    SandboxState,
    SourceBackoff,
    next_state,
)
from glovebox_sandboxes.pool.refill import capacity_of, is_expired

#: Written out again, so that a change of the table is a change in two places. What is not here is refused.
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
LEGAL = {
    (SandboxState.PREPARING, SandboxEvent.ATTESTED): SandboxState.READY,
    (SandboxState.PREPARING, SandboxEvent.FAILED): SandboxState.ENDING,
    (SandboxState.READY, SandboxEvent.GRANTED): SandboxState.LEASED,
    (SandboxState.READY, SandboxEvent.RETURNED): SandboxState.ENDING,
    (SandboxState.READY, SandboxEvent.BROKE): SandboxState.ENDING,
    (SandboxState.READY, SandboxEvent.DISCARDED): SandboxState.ENDING,
    (SandboxState.READY, SandboxEvent.FAILED): SandboxState.ENDING,
    (SandboxState.LEASED, SandboxEvent.RETURNED): SandboxState.ENDING,
    (SandboxState.LEASED, SandboxEvent.FAILED): SandboxState.ENDING,
    (SandboxState.ENDING, SandboxEvent.RETURNED): SandboxState.ENDING,
    (SandboxState.ENDING, SandboxEvent.FAILED): SandboxState.ENDING,
    (SandboxState.ENDING, SandboxEvent.CLOSED): SandboxState.GONE,
    (SandboxState.GONE, SandboxEvent.RETURNED): SandboxState.GONE,
}


@pytest.mark.parametrize(("state", "event"), list(product(SandboxState, SandboxEvent)), ids=lambda each: each.name)
def test_every_cell_of_the_table(state: SandboxState, event: SandboxEvent) -> None:
    """It leads where it is meant to, or raises and says what cannot happen to what."""
    if (state, event) in LEGAL:
        assert next_state(state, event) is LEGAL[state, event]
    else:
        with pytest.raises(RuntimeError) as caught:
            next_state(state, event)
        assert str(caught.value) == f"{event.name} cannot happen to a sandbox that is {state.name}"


def test_a_sandbox_is_leased_once_and_never_comes_back() -> None:
    """From what the table says alone: no way leads back, one leads to LEASED, and nothing leads out of GONE."""
    steps = [(before, event, then) for before, row in TRANSITIONS.items() for event, then in row.items()]
    assert set(TRANSITIONS) == set(SandboxState)
    assert all(then >= before for before, _, then in steps)
    assert [(before, event) for before, event, then in steps if then is SandboxState.LEASED] == [
        (SandboxState.READY, SandboxEvent.GRANTED)
    ]
    assert {then for before, _, then in steps if before is SandboxState.GONE} == {SandboxState.GONE}
    # What holds one may fail at any time before that, and a call may give back whatever it was granted.
    assert all(SandboxEvent.FAILED in TRANSITIONS[state] for state in SandboxState if state is not SandboxState.GONE)
    assert all(
        SandboxEvent.RETURNED in TRANSITIONS[state] for state in SandboxState if state is not SandboxState.PREPARING
    )


def test_each_event_is_sent_from_one_place() -> None:
    """Whoever asks how a sandbox got into a state finds one line of code, beside the table."""
    sent: Counter[str] = Counter()
    for file in Path(module.__file__).parent.glob("*.py"):
        functions = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, FUNCTIONS))
        names = (node for function in functions for node in ast.walk(function) if isinstance(node, ast.Attribute))
        sent.update(node.attr for node in names if ast.unparse(node.value) == "SandboxEvent")
    assert sent == {event.name: 1 for event in SandboxEvent}


def demand(calls: int = 0, over: int = 0, capacity: int = MOST_READY) -> Demand:
    """After so many calls at one time, of which so many are over."""
    found = Demand(used_at=0.0, capacity=capacity)
    for now in range(calls):
        found.begin(now)
    for now in range(over):
        found.end(calls + now)
    return found


@pytest.mark.parametrize(
    ("calls", "capacity", "wanted"),
    [(0, MOST_READY, 1), (1, MOST_READY, 2), (5, MOST_READY, 6), (5, 3, 3), (5, 0, 0), (100, 100, MOST_READY + 1)],
)
def test_as_many_are_wanted_as_calls_ran_at_one_time_and_one_for_the_next(
    calls: int, capacity: int, wanted: int
) -> None:
    """As far as memory allows; a burst is remembered for as many as may be ready."""
    assert demand(calls, calls, capacity).wanted == wanted


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
def test_what_is_missing(calls: tuple[int, int], counts: tuple[int, int, int], missing: int) -> None:
    """While calls run, which it would slow down, one is prepared and no more, but for calls that wait."""
    ready, preparing, waiters = counts
    assert demand(*calls).missing(ready=ready, preparing=preparing, waiters=waiters) == missing


def test_the_peak_falls_by_one_at_each_review_but_not_below_the_calls_under_way() -> None:
    """Demand of a while ago is forgotten step by step."""
    found = demand(5, 3)
    peaks = []
    for _ in range(5):
        assert not found.review(MOST_READY)
        peaks.append(found.peak)
    assert peaks == [4, 3, 2, 2, 2]


def test_a_review_says_once_when_memory_has_come_to_limit() -> None:
    """Not where it was the limit already, nor where it is more than anybody wants."""
    found = demand(5, 5)
    assert not found.review(5)
    assert found.review(3)
    assert not found.review(3)
    assert found.wanted == 3
    assert not found.review(MOST_READY)


def test_demand_knows_when_it_was_last_used() -> None:
    """By the beginning of a call, and by its end."""
    found = Demand(used_at=1.0)
    found.begin(2.0)
    assert (found.used_at, found.in_use) == (2.0, 1)
    found.end(3.0)
    assert (found.used_at, found.in_use) == (3.0, 0)


@pytest.mark.parametrize(
    ("share", "capacity"), [(0, 0), (99, 0), (100, 1), (399, 3), (100 * MOST_READY, MOST_READY), (10**9, MOST_READY)]
)
def test_what_is_ready_takes_a_share_of_the_memory_that_is_left(share: int, capacity: int) -> None:
    """And is no more than a full turn of calls."""
    assert capacity_of(share * MEMORY_SHARE, 100) == capacity


@pytest.mark.parametrize(
    ("now", "used_at", "over"),
    [
        (IDLE_SECONDS - 1, 0.0, False),
        (IDLE_SECONDS, 0.0, True),
        (RENEW_SECONDS - 1, RENEW_SECONDS - 2, False),
        (RENEW_SECONDS, RENEW_SECONDS, True),
    ],
)
def test_a_source_is_closed_when_nobody_uses_it_or_when_it_is_old(now: float, used_at: float, over: bool) -> None:
    """Use keeps it from the one and not from the other."""
    assert is_expired(now, used_at=used_at, opened_at=0.0) is over


def test_a_source_that_fails_is_tried_after_twice_the_time_each_time_up_to_a_bound() -> None:
    """However often it fails: a day of it too is only a number. And anew from the first once it has worked."""
    first, last = RETRY_SECONDS
    assert not SourceBackoff().failing
    backoff = SourceBackoff()
    delays = []
    for _ in range(2000):
        backoff.fail(100.0)
        delays.append(backoff.not_before - 100.0)
    assert delays[:6] == [first, first * 2, first * 4, first * 8, first * 16, last]
    assert set(delays[6:]) == {last}
    told = [backoff.failing]
    backoff.delay = 0.0
    told.append(backoff.failing)
    backoff.fail(0.0)
    assert (told, backoff.not_before) == ([True, False], first)
