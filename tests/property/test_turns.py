"""Fair turns, for every order in which calls come, go and give up."""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from glovebox_sandboxes.sharing import SHARE, FairLimiter

KEYS = st.sampled_from(["a", "b", "c", "d", "e"])
STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "release", "withdraw"]), KEYS, st.integers(0, 10**6)), max_size=200
)


class Hall:
    """Turns, and who holds and waits for them by the tests' own count."""

    def __init__(self, most: int, *, shared: bool, bounds: Sequence[int | None] = (None,)) -> None:
        self.most = most
        self.bounds = bounds
        self.shared = shared
        self.turns: Any = FairLimiter(most, shared=shared)
        self.running: list[tuple[str, int]] = []
        self.waiting: list[tuple[str, int]] = []
        self.waiters: dict[tuple[str, int], Any] = {}

    def step(self, what: str, key: str, which: int) -> None:
        """Do one thing, where it can be done, and look at every rule."""
        if what == "ask":
            one = (key, len(self.waiters) + 1)
            self.waiting.append(one)
            self.waiters[one] = partial(self.granted, one)
            self.turns.ask(key, self.waiters[one], self.bound(one))
        elif what == "release" and self.running:
            over = self.running.pop(which % len(self.running))
            self.turns.release(over[0], self.bound(over))
        elif what == "withdraw" and self.waiting:
            gone = self.waiting.pop(which % len(self.waiting))
            self.turns.withdraw(gone[0], self.waiters[gone])
        self.look()

    def granted(self, one: tuple[str, int]) -> None:
        """Look at who has the next turn."""
        before = self.taken
        fewest = min(before[key] for key, _ in self.waiting if self.may_have_one(key))
        assert before[one[0]] == fewest, "the next turn is of the key that has the fewest"
        first = next(each for each in self.waiting if each[0] == one[0])
        assert one == first, "those of one key come in order"
        self.waiting.remove(one)
        self.running.append(one)

    def look(self) -> None:
        """Look at every rule of what is given out, and what is not."""
        left = self.most - len(self.running)
        assert left >= 0, "never more than there are"
        for one in self.running:
            bound = self.bound(one)
            assert bound is None or self.taken[one[0]] <= bound, "no more of a key than each of its turns allows"
        able = {key for key, _ in self.waiting if self.may_have_one(key)}
        for key in able:
            assert not left or (self.shared and self.taken[key] >= SHARE * left), "no turn is left for nothing"

    def bound(self, one: tuple[str, int]) -> int | None:
        """What it was asked for with."""
        return self.bounds[one[1] % len(self.bounds)]

    def may_have_one(self, key: str) -> bool:
        """Whether no bound keeps the key from one more: of those it has, and of the first that waits."""
        first = next(each for each in self.waiting if each[0] == key)
        bounds = [self.bound(each) for each in [*self.running, first] if each[0] == key]
        return all(each is None or self.taken[key] < each for each in bounds)

    @property
    def taken(self) -> Counter[str]:
        """Turns by key."""
        return Counter(key for key, _ in self.running)


@given(
    STEPS,
    st.integers(1, 20),
    st.booleans(),
    st.one_of(st.just([None]), st.lists(st.none() | st.integers(1, 5), min_size=1, max_size=5)),
)
def test_never_more_than_there_are_and_none_left_for_nothing(
    steps: list[tuple[str, str, int]], most: int, shared: bool, bounds: list[int | None]
) -> None:
    """The rules of turns hold after each step, and at the end everybody who waits gets a turn."""
    hall = Hall(most, shared=shared, bounds=bounds)
    for step in steps:
        hall.step(*step)
    while hall.waiting:
        assert hall.running, "somebody waits, and nobody has a turn"
        hall.step("release", "", 0)


@given(STEPS, st.integers(4, 20))
def test_who_has_none_never_finds_all_taken_by_one(steps: list[tuple[str, str, int]], most: int) -> None:
    """The reserve: whatever one key asks for, a part is left; one that comes then gets a turn at once."""
    hall = Hall(most, shared=True)
    for what, _, which in steps:
        hall.step(what, "greedy", which)
    assert len(hall.running) <= -(-most * SHARE // (SHARE + 1))
    hall.step("ask", "peer", 0)
    assert hall.taken["peer"] == 1
    # The control: where nothing is shared, one key may have every turn.
    alone = Hall(most, shared=False)
    for _ in range(most + 1):
        alone.step("ask", "greedy", 0)
    assert (len(alone.running), len(alone.waiting)) == (most, 1)


@given(STEPS, st.integers(1, 16), st.lists(st.integers(0, 10**6), min_size=6, max_size=6), st.booleans())
def test_nobody_starves(steps: list[tuple[str, str, int]], most: int, ends: list[int], shared: bool) -> None:
    """Who has no turn waits for no more ends than there are keys, however many calls the others make at once."""
    hall = Hall(most, shared=shared)
    for step in steps:
        hall.step(*step)
    for key in "abcde":
        for _ in range(most):
            hall.step("ask", key, 0)
    hall.step("ask", "peer", 0)
    for end in ends:
        if not hall.taken["peer"]:
            over = hall.running[end % len(hall.running)][0]
            hall.step("release", "", end)
            hall.step("ask", over, 0)
    assert hall.taken["peer"]


def test_many_who_wait_cost_little() -> None:
    """Keys are compared with each other, once for each turn that ends: thousands may wait."""
    turns: Any = FairLimiter(16, shared=True)
    turns._within_bounds = compared = Mock(wraps=turns._within_bounds)
    served: list[int] = []
    for number in range(3000):
        turns.ask(f"key{number}", partial(served.append, number))
    assert served == list(range(16))
    assert compared.call_count == 16
    for number in range(16):
        turns.release(f"key{number}")
        assert len(served) == number + 17
        compared.reset_mock()
    turns.release("key16")
    assert compared.call_count == 3000 - 32
