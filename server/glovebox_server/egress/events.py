"""One connection attempt, and what the sandbox and the records learn of it. Data only, no I/O."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from anyio.abc import ByteStream

from glovebox_profiles.egress import EgressDecision, EgressRule, EgressTarget, decide
from glovebox_profiles.egress.targets import Address

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
    """Sets ``target``, or raises ``TargetError``."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A redirect that was followed, or that led to a refusal."""

    status: int
    url: str
    """The URL that redirected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """Status and headers of the final response."""

    status: int
    headers: tuple[tuple[str, str], ...]
    """Lower-case names. Without framing, encoding, cookies and hop-by-hop headers: the body that follows is plain."""
    url: str
    hops: tuple[Hop, ...]
    dropped: tuple[str, ...]
    """Names of request headers that were not sent because they are not on the list of harmless ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A piece of the decoded body."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The end of the body."""

    truncated: str | None
    """One sentence that names what stopped it, if anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """Policy refused the request, a redirect of it, or the tunnel."""

    decision: EgressDecision
    hops: tuple[Hop, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Policy allowed it, but the network or the peer failed. No part of a response was passed on."""

    reason: str
    hops: tuple[Hop, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A tunnel may now send its ClientHello; it is dialled once that has been checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The end of an opened tunnel."""

    reason: str | None
    """One sentence, unless both sides finished."""
    sent: int = 0
    received: int = 0


RequestEvent = ResponseHead | Body | End | Denied | Failed
"""A request ends in ``End``, ``Denied`` or ``Failed``; ``End`` follows one ``ResponseHead`` and any ``Body``."""
TunnelEvent = Opened | Closed | Denied
"""A tunnel ends in ``Denied`` or ``Closed``; an allowed one is ``Opened`` first."""
SendRequestEvent = Callable[[RequestEvent], Awaitable[None]]
SendTunnelEvent = Callable[[TunnelEvent], Awaitable[None]]
