"""The states of a question and their transitions. Pure: no I/O, no clock."""

from collections.abc import Mapping
from typing import Final, Literal

State = Literal["pending", "allowed", "denied", "expired", "used", "withdrawn"]
"""In order: undecided; a valid approval; a denial, until it expires; out of time; a used approval; taken back."""
Step = Literal["allow", "deny", "expire", "use", "use_in_run", "withdraw"]
"""Steps. ``deny``: an operator also after an approval. ``use``, ``use_in_run``: a call ran on it, once or as one of its
run. ``withdraw``: by its caller before an answer, or by an operator after it. ``allow``: the quorum approved.
"""

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
