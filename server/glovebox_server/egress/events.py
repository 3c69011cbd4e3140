"""One attempt to connect, and what the sandbox and the records learn of it. Data only, no I/O."""

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
    """An allowed host was not reached, or sent nonsense or too much; the text is one sentence for the caller."""


@dataclass(slots=True, kw_only=True)
class EgressAttempt:
    """One connection on its way through its chain. Everything that a link may touch is a field here.

    The fields up to ``strayed`` go on record. Headers, which may hold a key, are in no representation.
    """

    kind: Literal["request", "connect"]
    asked: str
    """The URL or authority as the sandbox wrote it: hostile, and perhaps with a secret in it. For a digest alone."""
    decision: EgressDecision = _UNDECIDED
    target: EgressTarget | None = None
    """None when what was asked could not be read."""
    addresses: tuple[Address, ...] = ()
    """Every address the name resolved to, in the order of dialling; empty when nothing was resolved."""
    hop: int = 0
    """How many redirects led here."""
    credential: str | None = None
    """Name of the credential that is injected."""
    strayed: str | None = None
    """Name of a credential whose placeholder stands in the request where the key is not to stand."""

    headers: Headers = field(default=(), repr=False)
    """As the sandbox wrote them."""
    body: bytes = field(default=b"", repr=False)
    takes_key: bool = True
    """False once a redirect has led to another server."""
    sent_target: EgressTarget | None = field(default=None, repr=False)
    """What is sent: the target, with a key where one stands in the query."""
    sent_headers: Headers = field(default=(), repr=False)
    dropped: tuple[str, ...] = ()
    """Names of headers that are not sent."""
    deadline: float = math.inf
    """For resolving and connecting; on the event loop's clock."""
    is_recorded: bool = False
    read: "Callable[[EgressAttempt], None] | None" = field(default=None, repr=False)
    """Sets ``target``, or raises ``TargetError``."""
    decide: Decide = decide
    """How the rules are read."""
    on_allowed: "Callable[[EgressAttempt], Awaitable[None]] | None" = field(default=None, repr=False)
    """Awaited once the rules allow it: a tunnel says then where it leads."""
    use: "Callable[[EgressAttempt, ByteStream], Awaitable[None]] | None" = field(default=None, repr=False)
    """Awaited with the connection, which is closed afterwards."""


ConnectNext = Callable[[EgressAttempt], Awaitable[None]]
"""Enters the rest of the chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressAnswer:
    """The end of one attempt that was allowed; it has an audit record of its own."""

    attempt: EgressAttempt
    status: int | None
    """None of a tunnel, which cannot be read."""
    type: str | None
    """The media type that the server says, without parameters; None where it says none that is one."""
    bytes: int = 0
    """Of the decoded body, as the sandbox got it; of a redirect that is followed it gets none."""
    complete: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One redirect that was followed, or that led to a refusal."""

    status: int
    url: str
    """Where the redirect came from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """Status and headers of the final response."""

    status: int
    headers: tuple[tuple[str, str], ...]
    """Lower-case names. Without framing, encoding, cookies and hop-by-hop headers: the body that follows is plain."""
    url: str
    """Canonical URL that answered."""
    hops: tuple[Hop, ...]
    dropped: tuple[str, ...]
    """Names of request headers that were not sent because they are not on the list of harmless ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A piece of the decoded body."""

    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The body is over."""

    truncated: str | None
    """None when it is complete, else one sentence that names what stopped it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Denied:
    """Policy refused the request, a redirect of it, or the tunnel."""

    decision: EgressDecision
    hops: tuple[Hop, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Policy allowed it, the network or the peer did not deliver. Nothing of a response was passed on."""

    reason: str
    hops: tuple[Hop, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A tunnel may carry its ClientHello now; it is dialled once that has been checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """An opened tunnel is over."""

    reason: str | None
    """None when both sides finished, else one sentence."""
    sent: int = 0
    """Bytes from the sandbox to the network."""
    received: int = 0


RequestEvent = ResponseHead | Body | End | Denied | Failed
"""A request ends in ``End``, ``Denied`` or ``Failed``; ``End`` follows one ``ResponseHead`` and some ``Body``."""
TunnelEvent = Opened | Closed | Denied
"""A tunnel ends in ``Denied`` or ``Closed``; an allowed one is ``Opened`` first."""
SendRequestEvent = Callable[[RequestEvent], Awaitable[None]]
SendTunnelEvent = Callable[[TunnelEvent], Awaitable[None]]
