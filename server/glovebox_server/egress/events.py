"""One connection attempt, and what the sandbox and the records learn of it. Data only, no I/O."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from glovebox_profiles.egress.rules import EgressDecision
from glovebox_profiles.egress.targets import Address, EgressTarget
from glovebox_sandboxes.contract.errors import RefusedError

#: One read from a socket: large enough to be quick, small enough that a header flood overshoots its bound by little.
READ_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressLimits:
    """Bounds of one call on the network. Seconds are real time."""

    connections: int = 64
    """Connections of one call, each redirect counted: an index page and its files, not a crawl."""
    concurrent: int = 8
    """Connections open at one time: above the six a browser opens to a host, below what hurts a small server."""
    attempts: int = 256
    """Connections and refusals that get an audit record each; a loop of refused requests must not fill the disk."""
    hops: int = 5
    """Redirects followed for one request. Real chains (http to www to a language to a version) have three."""
    resolve_seconds: float = 10.0
    """Two rounds of the C library's five-second resolver timeout."""
    connect_seconds: float = 10.0
    """TCP and TLS handshake together, per address."""
    dialled_addresses: int = 4
    """Checked addresses tried in turn: two families, one spare each."""
    hello_seconds: float = 10.0
    """Time from a tunnel's opening to a complete TLS ClientHello."""
    idle_seconds: float = 20.0
    """Silence after which a peer is given up."""
    request_seconds: float = 60.0
    """One request with all its redirects and its body, the sandbox's own reading included (slow loris)."""
    tunnel_seconds: float = 300.0
    """One tunnel; calls themselves rarely live longer."""
    tunnel_idle_seconds: float = 60.0
    """Silence in both directions: servers that compute an answer may need half a minute."""
    request_header_bytes: int = 8 * 1024
    """All headers the sandbox adds to one request."""
    request_body_bytes: int = 1024 * 1024
    """A form or a query document, not an upload."""
    header_bytes: int = 32 * 1024
    """Status line and headers of one response: twice what common servers can send."""
    interim_responses: int = 8
    """1xx responses before the final one; each may be as large as a head."""
    body_bytes: int = 32 * 1024 * 1024
    """Decoded body of one response; also bounds the bytes read from the socket for it."""
    ratio: int = 100
    """Decoded bytes per received byte. Text compresses 3 to 20 times, a bomb about 1,000 times."""
    ratio_grace_bytes: int = 1024 * 1024
    """Decoded bytes that are free of the ratio: small repetitive pages are legitimate."""
    tunnel_sent_bytes: int = 16 * 1024 * 1024
    """From the sandbox out. Less than the way in: what leaves is what can be stolen."""
    tunnel_received_bytes: int = 256 * 1024 * 1024
    """From the network in: a large package."""


Headers = Sequence[tuple[str, str]]

_UNDECIDED = EgressDecision(effect="deny", rule="egress.undecided", reason="Nothing was decided.", hint="")


class PeerError(Exception):
    """An allowed host was not reached, or sent invalid or too much data; one sentence for the caller."""


@dataclass(slots=True, kw_only=True)
class EgressAttempt:
    """One connection on its way through its gate. Every value that may change on it is a field.

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
    """The target that is sent, if its key belongs in the query; else it is ``target``."""
    sent_headers: Headers = field(default=(), repr=False)
    dropped: tuple[str, ...] = ()
    deadline: float = math.inf
    """For resolving and connecting; on the event loop's clock."""
    is_recorded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressAnswer:
    """The end of an allowed attempt, with an audit record of its own."""

    attempt: EgressAttempt
    status: int | None = None
    """Missing for a tunnel, which cannot be read."""
    type: str | None = None
    """The response's media type without parameters; None if missing or invalid."""
    bytes: int = 0
    """Of the decoded body, as the sandbox got it; 0 for a redirect that is followed."""
    complete: bool = True


def refusal(refused: RefusedError, hops: Sequence[Mapping[str, Any]] = ()) -> Mapping[str, Any]:
    """Return the body of a RESET that refuses; ``hops``: status and URL of each redirect that led to it."""
    said = {"rule": refused.rule, "reason": refused.reason, "hint": refused.hint}
    return {**said, "hops": hops} if hops else said
