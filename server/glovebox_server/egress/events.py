"""One connection attempt, and what the sandbox and the records learn of it. Data only, no I/O."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from anyio.abc import ByteStream

from glovebox_profiles.egress.rules import EgressDecision, EgressRule, decide
from glovebox_profiles.egress.targets import Address, EgressTarget

Headers = Sequence[tuple[str, str]]
Decide = Callable[[EgressTarget, Sequence[EgressRule]], EgressDecision]

_UNDECIDED = EgressDecision(effect="deny", rule="egress.undecided", reason="Nothing was decided.", hint="")


class PeerError(Exception):
    """An allowed host was not reached, or sent invalid or too much data; one sentence for the caller."""


@dataclass(slots=True, kw_only=True)
class EgressAttempt:
    """One connection on its way through its chain. Every value that a link may change is a field.

    The fields up to ``strayed`` are recorded. Headers, which may hold a key, are in no representation.
    """

    kind: Literal["request", "connect"]
    asked: str
    """The URL or authority as the sandbox wrote it: hostile, perhaps with a secret. Only its digest is recorded."""
    decision: EgressDecision = _UNDECIDED
    target: EgressTarget | None = None
    """Missing if ``asked`` could not be parsed."""
    addresses: tuple[Address, ...] = ()
    """Every address of the name, in the order of dialling; empty if none was resolved."""
    hop: int = 0
    credential: str | None = None
    strayed: str | None = None
    """Name of a credential whose placeholder stands where its key must not be sent."""

    headers: Headers = field(default=(), repr=False)
    body: bytes = field(default=b"", repr=False)
    takes_key: bool = True
    """False after a redirect to another server."""
    sent_target: EgressTarget | None = field(default=None, repr=False)
    """The target that is sent, with the key if it belongs in the query."""
    sent_headers: Headers = field(default=(), repr=False)
    dropped: tuple[str, ...] = ()
    deadline: float = math.inf
    """For resolving and connecting; on the event loop's clock."""
    is_recorded: bool = False
    read: "Callable[[EgressAttempt], None] | None" = field(default=None, repr=False)
    """Sets ``target``, or raises ``RefusedError``."""
    decide: Decide = decide
    on_allowed: "Callable[[EgressAttempt], Awaitable[None]] | None" = field(default=None, repr=False)
    """Awaited once the rules allow it: a tunnel then says where it leads."""
    use: "Callable[[EgressAttempt, ByteStream], Awaitable[None]] | None" = field(default=None, repr=False)
    """Awaited with the connection, which is closed afterwards."""


ConnectNext = Callable[[EgressAttempt], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressAnswer:
    """The end of an allowed attempt, with an audit record of its own."""

    attempt: EgressAttempt
    status: int | None
    """Missing for a tunnel, which cannot be read."""
    type: str | None
    """The response's media type without parameters; None if missing or invalid."""
    bytes: int = 0
    """Of the decoded body, as the sandbox got it; 0 for a redirect that is followed."""
    complete: bool = True


def refusal(rule: str, reason: str, hint: str, hops: Sequence[Mapping[str, Any]] = ()) -> Mapping[str, Any]:
    """Return the body of a RESET that refuses; ``hops``: status and URL of each redirect that led to it."""
    return {"rule": rule, "reason": reason, "hint": hint} | ({"hops": hops} if hops else {})
