"""The records one call consists of: its caller, its request, its decision. Frozen data, no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from glovebox_audit.event import Effect
from glovebox_sandboxes.contract.outcome import SkippedFile

if TYPE_CHECKING:  # it imports Principal
    from glovebox_server.guards.approvals.question import ApprovalAnswer, Question


Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A caller. Its artifacts and resources are invisible to every other."""

    id: str
    """Stable: ``local:<uid>`` over stdio and on the command line, ``token:<name>`` or ``oauth:<issuer>#<subject>``."""
    transport: Literal["stdio", "http", "sse", "cli"]
    client: str | None = None
    """Self-reported name of the client: for the record only, never a ground for a decision."""
    workflow: str | None = None
    """Name that the operator bound to the token or the server; no caller chooses it."""
    user: str | None = None
    """Person behind the caller, as the token's claims say; for the record only."""
    roles: tuple[str, ...] = ()
    """Roles of the token; else ``policy.toml`` gives the principal its role."""
    scopes: tuple[str, ...] = ()
    """Scopes of an access token; the policy in effect at the decision says what they grant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The position of a call in its caller's own tracing, for the record only (W3C Trace Context)."""

    parent: str
    state: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A validated request to run one tool."""

    id: str
    """``c_`` and 26 lower-case characters: unique, sortable by time."""
    principal: Principal
    session: str | None
    tool: str
    arguments: Mapping[str, Any]
    """Validated by the tool's argument model; JSON-compatible."""
    received: datetime
    run: str | None = None
    """The work it belongs to: one connection, one session, or the run that a handle of the server names."""
    trace: Trace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A lifted denial, for one call or for a run."""

    approval: str
    what: Literal["host", "tool", "budget"]
    target: str
    """``https://host:443``, the tool, or the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The policy's decision about one call, before anything starts."""

    effect: Effect
    rule: str
    """Id of the rule that decided, e.g. ``limits.wall_seconds``."""
    reason: str
    hint: str
    """The nearest allowed call, or how to ask."""
    profile_digest: str
    """``sha256:…`` of the profile in effect; empty without one."""
    recorded: str = ""
    """The reason for the log, where the caller's repeats arguments, which may hold a secret."""
    role: str | None = None
    policy_digest: str | None = None
    grants: tuple["Grant", ...] = ()
    approved_by: tuple[str, ...] = ()
    approval: str | None = None


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
    """An artifact that the caller can read later."""

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
    """The result of a call. ``structured`` and ``content`` are each complete: some clients drop one of them."""

    structured: Mapping[str, Any]
    content: tuple[Content, ...]
    failed: bool
    """The program failed, or policy refused the call: MCP's ``isError``."""
    meta: Mapping[str, Any]
    """Call id, profile digest, isolation reached, head of the audit chain. No secrets: the model may read it."""
    beside: int = 0
    """Bytes of output in artifacts instead of here; charged as if they were here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """A call's artifacts and pictures, beside the program's own words."""

    artifacts: tuple[Link, ...]
    figures: tuple[Link, ...]
    """Pictures that the job returned; they are artifacts too."""
    shown: tuple[Image, ...]
    """Previews of the figures, and of pictures among the files."""
    notes: tuple[str, ...] = ()
    """For each shown image that is not the picture itself: its kind, and the address of the picture."""
    skipped: tuple[SkippedFile, ...]
    whole: Mapping[str, str] = field(default_factory=dict)
    """Addresses of output that is truncated in the result, by name. They come first in ``artifacts``."""


NOTHING = Delivered(artifacts=(), figures=(), shown=(), skipped=())


class Listener:
    """Receives events while a call runs; itself it ignores progress and output, and cannot ask.

    Implementations bound what they take: a slow listener must not slow the call.
    """

    def progress(self, message: str) -> None:
        """Take one sentence of what is happening now (also every few seconds as a sign of life)."""

    def printed(self, text: str) -> None:
        """Take what the program has just written to standard output."""

    def ended_by(self) -> str:
        """Return who cancelled the call: ``client``, ``stream closed``, ``token removed`` or ``server stopping``."""
        return "client"

    def waits(self) -> float:
        """Return the seconds its caller waits for an answer; True for as long as any client does.

        False where it gets no progress and could not show what it waits for: the result says to call again.
        """
        return 0

    async def ask(self, question: "Question") -> "ApprovalAnswer | None":
        """Ask the person at the client, and wait for the answer; None if this client cannot be asked."""
        del question
        return None
