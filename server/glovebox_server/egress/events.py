"""Events of egress, for the sandbox and for the audit log: frozen records, no I/O."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from glovebox_profiles.egress import EgressDecision, EgressTarget
from glovebox_sandboxes.contract.errors import Refusal

_UNDECIDED = EgressDecision(effect="deny", rule="egress.undecided", reason="Nothing was decided.", hint="")


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressAttempt:
    """One connection about to be made or refused: the matter of one audit record."""

    kind: Literal["request", "connect"]
    decision: EgressDecision = _UNDECIDED
    target: EgressTarget | None = None
    """None when what was asked could not be read."""
    asked: str
    """The URL or authority as the sandbox wrote it: hostile, and perhaps with a secret in it. For a digest alone."""
    addresses: tuple[str, ...] = ()
    """Every address the name resolved to, in the order of dialling; empty when nothing was resolved."""
    hop: int = 0
    """How many redirects led here."""
    credential: str | None = None
    """Name of the credential that the broker adds to it."""
    strayed: str | None = None
    """Name of a credential whose placeholder stands in the request where the key is not to stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressAnswer:
    """What came of one attempt that was allowed: the matter of another audit record."""

    attempt: EgressAttempt
    status: int | None
    """None of a tunnel, which nobody looks into."""
    type: str | None
    """The media type that the server says, without parameters; None where it says none that is one."""
    bytes: int = 0
    """Of the decoded body, as the sandbox got it; of a redirect that is followed it gets none."""
    complete: bool = True


OnAnswer = Callable[[EgressAnswer], None]
"""Told of each answer when it is over."""


OnDecision = Callable[[EgressAttempt], Awaitable[None]]
"""Awaited once per attempt before anything is dialled; when it raises, nothing is, and the exception passes through."""


OnConnection = Callable[[str], Awaitable[Refusal | None]]
"""Awaited before a connection to a host; it may say why there is none just now."""


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
