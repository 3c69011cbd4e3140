"""The states of a question and their transitions. Pure: no I/O, no clock."""

from collections.abc import Mapping
from typing import Final, Literal

State = Literal["pending", "allowed", "denied", "expired", "used", "withdrawn"]
"""Where a question stands: nobody has decided yet; a yes that is good; a no, which holds until its time is over; its
time is over; a yes that a call has used; taken back."""
Step = Literal["allow", "deny", "expire", "use", "use_in_run", "withdraw"]
"""What can happen to a question: enough principals said yes; one said no, an operator also after a yes; its time came;
a call ran on it, once or as one of its run; its caller took it back before an answer, or an operator after it."""

TRANSITIONS: Final[Mapping[tuple[State, Step], State]] = {
    ("pending", "allow"): "allowed",
    ("pending", "deny"): "denied",
    ("pending", "expire"): "expired",
    ("pending", "withdraw"): "withdrawn",
    ("allowed", "deny"): "denied",
    ("allowed", "use"): "used",
    ("allowed", "use_in_run"): "allowed",
    ("allowed", "expire"): "expired",
    ("allowed", "withdraw"): "withdrawn",
    ("denied", "expire"): "expired",
}
"""Every transition. A used approval is never valid again, and a denial becomes no approval."""


def after(state: State, step: Step) -> State | None:
    """Return the state that a step leads to; None if it is impossible."""
    return TRANSITIONS.get((state, step))
