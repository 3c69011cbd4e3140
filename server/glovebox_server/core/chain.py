"""A chain of guards: each is entered around all that come after it. Nothing here knows any of them.

A link whose guard has nothing to do with a call is skipped, so its code is not entered.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from glovebox_server.core.call import Call

R = TypeVar("R")

Next = Callable[[Call], Awaitable[R]]
"""Enters the rest of the chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardLink(Generic[R]):
    """One place in a chain."""

    guard: Callable[[Call, Next[R]], Awaitable[R]]
    when: Callable[[Call], bool] | None = None
    """Whether it is entered for this call; None for every call."""


def enter(links: Sequence[GuardLink[R]], innermost: Next[R], call: Call, start: int = 0) -> Awaitable[R]:
    """Return the rest of the chain from ``start`` on, to be awaited: the links that this call needs.

    No coroutine: each would be resumed with every step of the call.
    """
    for number in range(start, len(links)):
        link = links[number]
        if link.when is None or link.when(call):
            return link.guard(call, partial(enter, links, innermost, start=number + 1))
    return innermost(call)
