"""One call on its way through the chain. Everything that a guard may do to a call is a field here.

Must never be imported here: a guard.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from glovebox_audit.events import CallFinished
from glovebox_profiles.egress import EgressTarget
from glovebox_profiles.model import Profile
from glovebox_sandboxes.contract.base import Plan
from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_sandboxes.contract.spec import SandboxSpec
from glovebox_sandboxes.session.connection import Serve
from glovebox_server.calls import Decision, Delivered, Listener, ToolCall
from glovebox_server.core.inputs import Inputs
from glovebox_server.core.rights import Rights
from glovebox_server.receipts.recorder import CallRecorder
from glovebox_server.tools.base import Tool, ToolAnswer

T = TypeVar("T")

Decide = Callable[[Rights], tuple[Decision, Rights]]
"""Decides a call under these rights. Returns the rights that the decision rests on: a lift widens them."""
Show = Callable[[str], None]
"""Takes live output as text."""
Program = Callable[[], Awaitable[Outcome]]
"""Runs the program of a call."""


class Observer(Protocol):
    """Sees raw output before anything is masked, live and complete. Changes nothing; may have the call stopped."""

    @property
    def is_complete(self) -> bool:
        """Return whether live output was passed on to its end."""

    def printed(self, show: Show) -> Callable[[bytes], None]:
        """Return what looks at raw live output, and passes it on to ``show``."""

    async def ended(self, outcome: Outcome) -> None:
        """Look at the raw outcome."""


Transform = Callable[[Outcome, bool], Awaitable[Outcome]]
"""Changes an outcome; the flag says whether the program ended normally and all live output was shown."""


@dataclass(slots=True, kw_only=True)
class Ran:
    """What came of a call that ran, before its last record is written."""

    outcome: Outcome
    delivered: Delivered
    answer: ToolAnswer
    plan: Plan | None = None
    """Of its sandbox; None where the host did its work."""
    scans: Sequence[Any] | None = None
    """What scanning found in its files."""
    usage: dict[str, Any] = field(default_factory=dict)
    """For the record, beside what the sandbox measured."""
    recorded: dict[str, Any] = field(default_factory=dict)
    """Fields of the last record that few calls have."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """What is known of a call in one turn; a call that waited for a person begins anew with another."""

    rights: Rights
    decision: Decision
    profile: Profile = field(init=False)
    """In force for it; a call without one is denied."""
    inputs: Inputs = field(default_factory=Inputs)
    is_recorded: bool = False
    """Whether its decision is on record."""
    records: CallRecorder = field(init=False)
    """Writes its other records, once the decision is on record."""
    changes: str = ""
    """What it would change on the host, as a person is to be shown it."""
    folder: str = ""
    """Path of the folder that it would change; for the operator alone."""
    perform: Callable[["Call"], Awaitable[Ran]] | None = None
    """Does its work on the host, shielded; None for a call that runs in a sandbox."""
    spec: SandboxSpec | None = None
    """Of its sandbox; guards only add masks."""
    reveal: list[str] = field(default_factory=list)
    """Paths of the workspace that it sees though they are named as secrets are."""
    environment: Mapping[str, str] = field(default_factory=dict)
    serve: Serve | None = None
    """Serves its connections; None where it has no network."""
    refused_targets: Sequence[EgressTarget] = ()
    """Hosts that no rule names, and its program tried to reach."""
    wrap_live: list[Callable[[Show], Show]] = field(default_factory=list)
    """Each stands before the one that was added before it; the first before the listener."""
    wrap_program: list[Callable[[Program], Program]] = field(default_factory=list)
    observers: list[Observer] = field(default_factory=list)
    transforms: list[Transform] = field(default_factory=list)
    inspect_file: Callable[[], Callable[[bytes], None] | None] = lambda: None
    """Called for each file that leaves the sandbox; what it returns takes name and pieces, in another thread."""
    mask_name: Callable[[str], str] = str
    """Masks a file's name; a file whose name it changes is refused."""
    redacted: Counter[str] = field(default_factory=Counter)
    """Secrets that were masked, by kind."""
    withheld: Refusal | None = None
    """Why nothing of its output is given back."""
    on_started: list[Callable[[], None]] = field(default_factory=list)
    """The program is about to run."""
    on_connect: list[Callable[[str], Awaitable[Refusal | None]]] = field(default_factory=list)
    """Count one connection to a host, or refuse it."""
    max_connections: list[int] = field(default_factory=list)
    """Bounds beside the profile's own."""
    on_traffic: list[Callable[[Any], None]] = field(default_factory=list)
    """Take where the bytes of its connections are counted."""
    placeholders: Mapping[str, str] = field(default_factory=dict)
    """What its program finds in place of keys, by the credential's name."""
    finished: CallFinished | None = None
    """Its last record, once it is written."""


@dataclass(slots=True, kw_only=True)
class Call:
    """One call, from its acceptance to its result."""

    request: ToolCall
    tool: Tool
    listener: Listener
    rights: Rights
    """The caller's when the call came; those of a turn are its attempt's."""
    decide: Decide
    """Guards may wrap it, to ask where it allows, or to lift what it denies."""
    objections: list[Callable[[ToolCall, Rights], Refusal | None]] = field(default_factory=lambda: [_object_by_role])
    """Asked before the profile, with each decision; the first refusal counts."""
    delay: float = 0.0
    """Seconds to wait before a turn is asked for."""
    on_decided: list[Callable[["Call"], Awaitable[None]]] = field(default_factory=list)
    """Awaited once its decision is on record."""
    on_question: list[Callable[["Call"], Awaitable[None]]] = field(default_factory=list)
    """Awaited once a person is to be asked about it."""
    ended_by: Callable[[], tuple[str, str | None]]
    """Asked when it is cancelled: who did it, and the id of the stop."""
    is_decided: bool = False
    """Whether it has been decided in any turn, so that there is ``now``."""
    now: Attempt = field(init=False)
    """What is known in this turn."""
    _parts: dict[type[Any], Any] = field(default_factory=dict)

    def forget(self) -> None:
        """Drop what refers back to the call: else only the garbage collector would free it, and its output."""
        del self.decide
        if hasattr(self, "now"):
            del self.now

    def part(self, kind: type[T]) -> T:
        """Return what a guard with two links keeps of this call, made at first use."""
        if kind not in self._parts:
            self._parts[kind] = kind()
        return cast("T", self._parts[kind])


def _object_by_role(request: ToolCall, rights: Rights) -> Refusal | None:
    return rights.refusal(request.tool)


class CallDeniedError(Exception):
    """Policy denies the call; its caller reads the refusal as a result, and the decision is recorded."""

    def __init__(self, refusal: Refusal | None = None) -> None:
        """Take the refusal; None where the call's own decision is to deny."""
        super().__init__(str(refusal or ""))
        self.refusal = refusal


class ApprovalRequiredError(Exception):
    """A person has to be asked before the call may run."""

    def __init__(self, question: Any) -> None:
        """Take what is to be asked: of the guard that asks, which is the one that reads it."""
        super().__init__()
        self.question = question
