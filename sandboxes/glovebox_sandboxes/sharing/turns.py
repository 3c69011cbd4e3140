"""Who gets the next turn, of those that wait for one. Keys are opaque: whoever is to pay for what it takes.

Rule 1: never more than ``most`` turns at one time. Rule 2: the next turn is of the key that has the fewest; of several,
of the one that has waited longest since its last. Rule 3: where keys share, one takes a turn only while it has fewer
than ``SHARE`` times as many as are left. Rule 4: those of one key come in order; one that names a bound has its turn
only where its key then has no more turns than that, and as long as it has it the key gets no more. Rule 5: no turn is
left that rules 3 and 4 give to somebody who waits.

Rule 3 is the dynamic threshold of shared-memory switches (Choudhury and Hahne, 1998, doi:10.1109/90.664262): one
that is alone keeps away from a part, without a word about who else there may be, and each one that comes gets most of
what is left. No I/O, no clock and no event loop here.
"""

from collections import Counter, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

SHARE = 3
"""Alone, a key gets three turns of four: of 16, twelve keep two or more processors busy, and four are there at once for
others. Beside it a second gets three of those, a third one, and from then on each waits for a turn that ends."""

Waiter = TypeVar("Waiter")


class Turns(Generic[Waiter]):
    """The turns that are taken, and those who wait for one."""

    def __init__(self, most: int, *, shared: bool) -> None:
        """Take the bounds.

        Args:
            most: turns at one time.
            shared: whether there is more than one key: where there is one, nothing is kept for others.
        """
        self._left = most
        self._shared = shared
        self._taken: Counter[str] = Counter()
        self._bounds: dict[str, list[int]] = {}
        """Of the turns that each key has, those that were named."""
        self._waiting: dict[str, deque[tuple[Waiter, int | None]]] = {}
        """In the order in which keys are served, of those that have equally many turns; each with its bound."""

    def ask(self, key: str, waiter: Waiter, bound: int | None = None) -> None:
        """Have somebody wait; ``granted`` says whether it is their turn at once.

        Args:
            key: whose turn it will be.
            waiter: who waits.
            bound: turns that the key may have while this is one of them; None for any number.
        """
        self._waiting.setdefault(key, deque()).append((waiter, bound))

    def granted(self) -> Iterator[Waiter]:
        """Give out the turns that can be given, each to the one who is next."""
        while self._left and (able := [key for key in self._waiting if self._within_bounds(key)]):
            key = min(able, key=self._taken.__getitem__)
            if not may_take(self._taken[key], self._left, shared=self._shared):
                return
            waiters = self._waiting.pop(key)
            waiter, bound = waiters.popleft()
            if waiters:
                self._waiting[key] = waiters
            if bound is not None:
                self._bounds.setdefault(key, []).append(bound)
            self._taken[key] += 1
            self._left -= 1
            yield waiter

    def release(self, key: str, bound: int | None = None) -> None:
        """End a turn that was asked for with this bound."""
        self._left += 1
        self._taken[key] -= 1
        if not self._taken[key]:
            del self._taken[key]
        if bound is not None:
            self._bounds[key].remove(bound)
            if not self._bounds[key]:
                del self._bounds[key]

    def withdraw(self, key: str, waiter: Waiter) -> None:
        """Have somebody wait no longer who has no turn yet; whoever came after may have one then."""
        left = deque(each for each in self._waiting[key] if each[0] != waiter)
        if left:
            self._waiting[key] = left
        else:
            del self._waiting[key]

    def _within_bounds(self, key: str) -> bool:
        bound, named = self._waiting[key][0][1], self._bounds.get(key, ())
        return all(self._taken[key] < each for each in (named if bound is None else (*named, bound)))


def may_take(taken: int, left: int, *, shared: bool) -> bool:
    """Whether one who has so many may take one more of those that are left: rule 3."""
    return taken < SHARE * left if shared else left > 0
