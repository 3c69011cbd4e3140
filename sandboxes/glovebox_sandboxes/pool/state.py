"""The states of a prepared sandbox, what leads from one to the next, and how many are wanted.

::

    PREPARING ──ATTESTED──▶ READY ──GRANTED──▶ LEASED
        │                     │                   │
        └─────────────────────┴──▶ ENDING ◀───────┘
                                     └──CLOSED──▶ GONE

Rule 1: a sandbox never goes back, and may end at any time. Rule 2: what the table does not name raises. Rule 3: each
event is sent from one place: ATTESTED, FAILED and CLOSED from ``Refill.keep``, GRANTED and BROKE from
``ReadyQueue.offer``, RETURNED and DISCARDED from ``PreparedSandbox``.

No I/O, no clock and no event loop here: times are arguments.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, auto

MOST_READY = 16
"""In one queue: as many as calls run at one time, so a full turn of them finds its sandboxes ready."""
MEMORY_SHARE = 8
"""At most one part in so many of the memory the host has left is given to ready sandboxes, for each queue."""
REVIEW_SECONDS = 10.0
"""Between two reviews of demand, memory and age; the demand peak falls by one at each."""
IDLE_SECONDS = 600.0
"""A queue nobody leases from is cleared: a pause for thought keeps it, a night does not."""
RENEW_SECONDS = 1800.0
"""A source is started anew after this: what its forks share (addresses, hash seed) is shared no longer than that."""
RETRY_SECONDS = (1.0, 30.0)
"""A source that failed is tried again when it is next wanted: first after the one, in the end after the other."""


class State(IntEnum):
    """Where a prepared sandbox is in its life; in the order in which it gets there."""

    PREPARING = auto()
    """It is being started and attested, or waits for its turn to be."""
    READY = auto()
    """It is attested, and watched until a call gets it."""
    LEASED = auto()
    """A call has it."""
    ENDING = auto()
    """Nobody gets it any more; it is being removed, or waits for its turn to be."""
    GONE = auto()
    """Nothing is left of it."""


class Event(Enum):
    """What can happen to a prepared sandbox."""

    ATTESTED = auto()
    """Its guest is ready, and it is what was planned."""
    GRANTED = auto()
    """The call that claimed it, or was first among the waiters, gets it."""
    RETURNED = auto()
    """Its call is over, or was cancelled before it got what it had claimed."""
    BROKE = auto()
    """It ended while it was ready, or spoke unasked."""
    DISCARDED = auto()
    """It is stale, or more than is wanted, or its source is being closed."""
    FAILED = auto()
    """It could not be prepared or watched, or the task that holds it was cancelled."""
    CLOSED = auto()
    """It has been removed."""


# A call returns what it was granted whatever became of it meanwhile, as when the server is stopped under it.
TRANSITIONS: Mapping[State, Mapping[Event, State]] = {
    State.PREPARING: {
        Event.ATTESTED: State.READY,
        Event.FAILED: State.ENDING,
    },
    State.READY: {
        Event.GRANTED: State.LEASED,
        Event.RETURNED: State.ENDING,
        Event.BROKE: State.ENDING,
        Event.DISCARDED: State.ENDING,
        Event.FAILED: State.ENDING,
    },
    State.LEASED: {
        Event.RETURNED: State.ENDING,
        Event.FAILED: State.ENDING,
    },
    State.ENDING: {
        Event.RETURNED: State.ENDING,
        Event.FAILED: State.ENDING,
        Event.CLOSED: State.GONE,
    },
    State.GONE: {
        Event.RETURNED: State.GONE,
    },
}


def after(state: State, event: Event) -> State:
    """The state that an event leads to.

    Raises:
        RuntimeError: it leads nowhere from there: an error in the pool, never in what a sandbox did.
    """
    try:
        return TRANSITIONS[state][event]
    except KeyError:
        raise RuntimeError(f"{event.name} cannot happen to a sandbox that is {state.name}") from None


@dataclass(slots=True, kw_only=True)
class Demand:
    """How many sandboxes of one plan calls need at one time, and how many are therefore to be ready."""

    used_at: float
    """When a call last began or ended."""
    capacity: int = MOST_READY
    """The most that may be ready; follows the memory of the host."""
    in_use: int = 0
    """Calls under way."""
    peak: int = 0
    """The most calls under way at one time, lately."""

    @property
    def wanted(self) -> int:
        """How many are to be ready: as many as calls were under way at one time lately, and one for the next."""
        return min(self.peak + 1, self.capacity)

    def begin(self, now: float) -> None:
        """Count a call."""
        self.used_at = now
        self.in_use += 1
        self.peak = min(max(self.peak, self.in_use), MOST_READY)

    def end(self, now: float) -> None:
        """A call that was counted is over."""
        self.used_at = now
        self.in_use -= 1

    def missing(self, *, ready: int, preparing: int, waiters: int) -> int:
        """How many more to prepare now: one while calls run, which it would slow down, and the rest after them."""
        wanted = min(self.wanted, 1) if self.in_use else self.wanted
        return wanted + waiters - ready - preparing

    def review(self, capacity: int) -> bool:
        """Let the peak fall and the capacity follow; returns whether the capacity has come to be what limits."""
        self.peak = max(self.in_use, self.peak - 1)
        before, self.capacity = self.capacity, capacity
        return capacity < min(before, self.peak + 1)


def capacity_of(available_bytes: int, bytes_each: int) -> int:
    """How many may be ready with so much memory left on the host."""
    return min(MOST_READY, available_bytes // MEMORY_SHARE // bytes_each)


def expired(now: float, *, used_at: float, opened_at: float) -> bool:
    """Whether a source is to be closed, for want of use or for its age."""
    return now - used_at >= IDLE_SECONDS or now - opened_at >= RENEW_SECONDS


@dataclass(slots=True)
class Backoff:
    """When a source that failed may be tried again."""

    delay: float = 0.0
    """None where it did not fail the last time."""
    not_before: float = 0.0

    @property
    def failing(self) -> bool:
        """Whether it failed and has prepared nothing since."""
        return self.delay > 0

    def fail(self, now: float) -> None:
        """Wait twice as long as the last time."""
        first, last = RETRY_SECONDS
        self.delay = min(max(first, self.delay * 2), last)
        self.not_before = now + self.delay
