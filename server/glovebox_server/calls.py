"""The records one call is made of: who calls, what is asked, what was decided. Frozen data, no I/O."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol

from glovebox_audit.chain import ID_DIGITS, ID_TIME_DIGITS
from glovebox_audit.events.calls import Effect
from glovebox_sandboxes.contract.outcome import SkippedFile

if TYPE_CHECKING:  # it names a principal
    from glovebox_server.guards.approvals.question import ApprovalAnswer, Question

#: Of milliseconds: a clock shows more, and means nothing by it.
_DIGITS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who calls. Artifacts and resources belong to a principal and are invisible to every other."""

    id: str
    """Stable: ``local:<uid>`` over stdio and on the command line, ``token:<name>`` or ``oauth:<issuer>#<subject>``."""
    transport: Literal["stdio", "http", "sse", "cli"]
    client: str | None = None
    """What the client calls itself: self-reported, for the record only, never a ground for a decision."""
    workflow: str | None = None
    """What the work belongs to: a name the operator bound to the token or the server; no caller chooses it."""
    user: str | None = None
    """The person behind it, as the token's claims name them; for the record only."""
    roles: tuple[str, ...] = ()
    """Roles that the token carries; else ``policy.toml`` says which one the principal has."""
    scopes: tuple[str, ...] = ()
    """Of an access token: what they stand for is said by the policy in force when a call is decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Where a call stands in its caller's own tracing, for the record only (W3C Trace Context)."""

    parent: str
    state: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One validated request to run one tool."""

    id: str
    """``c_`` and 26 lower-case characters: unique, sortable by time."""
    principal: Principal
    session: str | None
    tool: str
    arguments: Mapping[str, Any]
    """Already validated by the tool's argument model; JSON-compatible."""
    received: datetime
    run: str | None = None
    """The piece of work it belongs to: one connection, one session, or what a handle of the server's names."""
    trace: Trace | None = None


def whose(principal: Principal, run: str | None) -> dict[str, str]:
    """What every record, result and refusal says of whose a call is."""
    said = {"principal": principal.id, "client": principal.client, "run": run, "workflow": principal.workflow}
    return {name: value for name, value in said.items() if value is not None}


def elapsed_ms(call: ToolCall) -> float:
    """Milliseconds since a call's turn came."""
    return round((datetime.now(UTC) - call.received).total_seconds() * 1000, _DIGITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A denial that somebody lifted, for one call or for a run."""

    approval: str
    """Id of the question that was answered with yes."""
    what: Literal["host", "tool", "budget"]
    """What kind of denial."""
    target: str
    """What exactly: ``https://host:443``, the tool, the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What policy says about one call, before anything starts."""

    effect: Effect
    rule: str
    """Id of the rule that decided, e.g. ``limits.wall_seconds``."""
    reason: str
    """One sentence for the caller."""
    hint: str
    """What would be allowed, or how to ask."""
    profile_digest: str
    """``sha256:…`` of the profile that was in force; empty when there is none."""
    recorded: str = ""
    """The reason for the log, where the caller's repeats what the call asked for: that may hold a secret."""
    role: str | None = None
    """The caller's role, where there is a policy."""
    policy_digest: str | None = None
    """``sha256:…`` of the policy in force, where there is one."""
    reaches: tuple[str, ...] | None = None
    """Hosts with ports that it may reach, where those are fewer than its profile's: a redirect leads to no other."""
    grants: tuple["Grant", ...] = ()
    """What was lifted for it beyond the policy."""
    approved_by: tuple[str, ...] = ()
    """Who said yes to it, or to what was lifted for it."""
    approval: str | None = None
    """Id of the question that somebody answered with yes, where one was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A block of text for the model."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A picture for the model."""

    data: bytes
    media_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """An artifact the caller can read later."""

    uri: str
    name: str
    media_type: str
    bytes: int
    sha256: str
    risks: tuple[str, ...] = ()
    """Why it must not be opened or promoted unseen, one sentence each."""


Content = Text | Image | Link


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What a call gives back. ``structured`` and ``content`` each tell everything: some clients drop one of them."""

    structured: Mapping[str, Any]
    """Fits the tool's result model; JSON-compatible."""
    content: tuple[Content, ...]
    failed: bool
    """The program did not end well, or policy refused the call: MCP's ``isError``."""
    meta: Mapping[str, Any]
    """Call id, profile digest, isolation reached, head of the audit chain. No secrets: it may reach the model."""
    beside: int = 0
    """Bytes of output that are in artifacts instead of here. They are charged as if they were here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What a call's caller gets beside the program's own words."""

    artifacts: tuple[Link, ...]
    figures: tuple[Link, ...]
    """Pictures the job returned, which are artifacts too."""
    shown: tuple[Image, ...]
    """What clients are shown of them, and of pictures among the files."""
    notes: tuple[str, ...] = ()
    """Where that is not the picture itself: what it is, and where the picture is."""
    skipped: tuple[SkippedFile, ...]
    whole: Mapping[str, str] = field(default_factory=dict)
    """Addresses of output that is cut in the result, by name. They are among ``artifacts``, first."""


NOTHING = Delivered(artifacts=(), figures=(), shown=(), skipped=())
"""Of a call of which nothing is given back."""


class Listener(Protocol):
    """What a caller may hear while its call runs. A slow listener must not slow the call: implementations bound it."""

    def progress(self, message: str) -> None:
        """One sentence of what is happening now (also every few seconds as a sign of life)."""

    def printed(self, text: str) -> None:
        """What the program has just written to standard output."""

    def ended_by(self) -> str:
        """Asked when the call is cancelled: ``client``, ``stream closed``, ``token removed`` or ``server stopping``."""

    def waits(self) -> float:
        """Seconds its caller waits for somebody's answer; True for as long as any client does.

        False where it hears no progress, so that it would not know what it waits for: it is told to call again.
        """

    async def ask(self, question: "Question") -> "ApprovalAnswer | None":
        """Ask the person at the client, and wait for the answer; None where this client cannot be asked."""


_RANDOM_DIGITS = 16


def new_call_id() -> str:
    """Return a new id of a call."""
    return new_id("c")


def new_id(kind: str) -> str:
    """Return the kind, ``_``, ten characters of Unix time in milliseconds and sixteen (80 bits) of randomness."""
    now = _encode(time.time_ns() // 1_000_000, ID_TIME_DIGITS)
    return f"{kind}_{now}{_encode(secrets.randbits(5 * _RANDOM_DIGITS), _RANDOM_DIGITS)}"


def _encode(number: int, digits: int) -> str:
    return "".join(ID_DIGITS[(number >> (5 * place)) & 31] for place in reversed(range(digits)))
