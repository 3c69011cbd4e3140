"""One call on its way through the chain. Everything that a guard may do to a call is a field here.

Must never be imported here: a guard.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
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
from glovebox_server.calls import CallResult, Decision, Delivered, Listener, ToolCall
from glovebox_server.core.inputs import Inputs
from glovebox_server.core.rights import Rights, RightsOf
from glovebox_server.receipts.recorder import CallRecorder
from glovebox_server.tools.base import Tool, ToolAnswer

T = TypeVar("T")

Decide = Callable[[Rights], Decision]
"""Decides a call under these rights. Pure, but for what guards object to."""
Objection = Callable[[ToolCall, Rights], Refusal | None]
"""Refuses a call whatever its profile says."""
Show = Callable[[str], None]
"""Takes live output as text."""


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
    inputs: Inputs | None = None
    """The artifacts that it is given, open; None where it names none."""
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
    around_program: list[AbstractAsyncContextManager[Any]] = field(default_factory=list)
    """Entered before its program starts, left when it has ended; one may end it, and must raise then."""
    on_ran: list[Callable[[Ran], Awaitable[None]]] = field(default_factory=list)
    """Awaited when it has run, the last first, before its last record."""
    on_result: list[Callable[[CallResult], Awaitable[CallResult]]] = field(default_factory=list)
    """Add to its result once that is on record, the last first."""
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
    _parts: dict[type[Any], Any] = field(default_factory=dict)

    def part(self, kind: type[T]) -> T:
        """Return what a guard with several links keeps of this turn, made at first use."""
        if kind not in self._parts:
            self._parts[kind] = kind()
        return cast("T", self._parts[kind])


@dataclass(slots=True, kw_only=True)
class Call:
    """One call, from its acceptance to its result."""

    request: ToolCall
    tool: Tool
    listener: Listener
    rights: Rights
    """The caller's when the call came; those of a turn are its attempt's."""
    objections: Sequence[Objection] = ()
    """Asked before the profile, with each decision; the first refusal counts."""
    delay: float = 0.0
    """Seconds to wait before a turn is asked for."""
    ended_by: Callable[[], tuple[str, str | None]]
    """Asked when it is cancelled: who did it, and the id of the stop."""
    lift: Callable[[Refusal], bool] = lambda _: False
    """Asked by a guard that refuses it in its turn; True where a person may lift that, and the guard tries again."""
    answer: Any = None
    """What came of the wait for a person: of the guard that asked, which is the one that reads it."""
    is_decided: bool = False
    """Whether it has been decided in any turn, so that there is ``now``."""
    now: Attempt = field(init=False)
    """What is known in this turn."""
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Takes what a guard holds until the part of the call is over that the guard stands around."""

    def forget(self) -> None:
        """Drop what refers back to the call: else only the garbage collector would free it, and its output."""
        del self.lift
        if hasattr(self, "now"):
            del self.now


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardLink:
    """One place in a chain."""

    guard: Callable[[Call], Awaitable[None]]
    when: Callable[[Call], bool] | None = None
    """Whether it is entered for this call; None for every call."""


@dataclass(frozen=True, kw_only=True)
class Guards:
    """The guards of a server, by the part of a call that they stand around."""

    rights_of: RightsOf
    objections: Sequence[Objection] = field(init=False, default=())
    around_call: Sequence[GuardLink] = field(init=False, default=())
    """Of a call that was accepted."""
    before_turn: Sequence[GuardLink] = field(init=False, default=())
    """They give a call its turn."""
    deciders: Sequence[Callable[[Call, Decide], None]] = field(init=False, default=())
    """They may change the decision of a turn: ask where it allows, or lift what it denies."""
    around_turn: Sequence[GuardLink] = field(init=False, default=())
    """Of a call that was decided in its turn."""
    on_decided: Sequence[GuardLink] = field(init=False, default=())
    """They look at a decision once it is on record."""
    around_run: Sequence[GuardLink] = field(init=False, default=())
    """Of a call that runs in a sandbox."""
    on_ended: Sequence[Callable[[Call, bool], None]] = field(init=False, default=())
    """They take note of how a call ended that ran, and whether it failed."""


async def enter(links: Sequence[GuardLink], call: Call, stack: AsyncExitStack) -> None:
    """Enter the guards that this call needs, in their order; what they hold goes onto ``stack``.

    A guard ends before the next begins: a coroutine around the call would be resumed with every step of it.
    """
    call.stack = stack
    for link in links:
        if link.when is None or link.when(call):
            await link.guard(call)


class CallDeniedError(Exception):
    """Policy denies the call; its caller reads the refusal as a result, and the decision is recorded."""

    def __init__(self, refusal: Refusal | None = None) -> None:
        """Take the refusal; None where the call's own decision is to deny."""
        super().__init__(str(refusal or ""))
        self.refusal = refusal


class ApprovalRequiredError(Exception):
    """A person has to be asked before the call may run."""

    def __init__(self, wait: Callable[[], Awaitable[Any]]) -> None:
        """Take what waits for the answer, once the call holds nothing."""
        super().__init__()
        self.wait = wait
