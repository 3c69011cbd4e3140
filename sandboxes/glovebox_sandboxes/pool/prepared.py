"""A sandbox that is prepared ahead of its call: its state, and waiting for the next one.

``Refill.keep`` takes it from PREPARING to GONE; the states and what leads from one to the next are in ``state``.
"""

import anyio

from glovebox_sandboxes.pool.state import Event, State, after
from glovebox_sandboxes.session.run import AttestedSandbox


class PreparedSandbox:
    """One sandbox that is prepared ahead of its call, used by that call alone, and gone after it."""

    attested: AttestedSandbox
    """Once it is READY."""
    fingerprint: tuple[object, ...]
    """What its mounts led to when it was started; once it is READY."""

    def __init__(self) -> None:
        self.state = State.PREPARING
        self._watch = anyio.CancelScope()
        # Made before a call comes, and derived: each is set as soon as the state is at its key, or past it.
        self._reached = {state: anyio.Event() for state in (State.LEASED, State.ENDING, State.GONE)}

    def advance(self, event: Event) -> None:
        """Let an event happen to it, and wake whoever waits for the state that it leads to.

        Raises:
            RuntimeError: it cannot happen in this state.
        """
        self.state = after(self.state, event)
        for state, reached in self._reached.items():
            if state <= self.state:
                reached.set()

    async def reached(self, state: State) -> None:
        """Return when it is LEASED, ENDING or GONE, or past that."""
        if self.state < state:
            await self._reached[state].wait()

    @property
    def awaited(self) -> bool:
        """Whether somebody waits until it is GONE."""
        return self._reached[State.GONE].statistics().tasks_waiting > 0

    async def watch(self) -> bool:
        """Listen to it while it is READY; returns whether that was called off, and not its own doing."""
        with self._watch:
            await self.attested.link.quiet()
        return self._watch.cancelled_caught

    def claim(self) -> None:
        """Have it granted to a call, unless it breaks in the same moment: await ``reached(LEASED)`` and look."""
        self._watch.cancel()

    def discard(self) -> None:
        """Have it removed although it is READY."""
        self.advance(Event.DISCARDED)
        self._watch.cancel()

    def give_back(self) -> None:
        """Say that the call that claimed or was granted it is over."""
        self.advance(Event.RETURNED)

    async def abandon(self) -> None:
        """Give it back and return when it is gone; that is then not deferred for other calls."""
        self.give_back()
        with anyio.CancelScope(shield=True):
            await self.reached(State.GONE)
