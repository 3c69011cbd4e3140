"""One call in the chain of guards. A field here exists for each thing that a guard may do to a call.

Must never be imported here: a guard.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from glovebox_audit.events import CallFinished, Input
from glovebox_profiles.egress.targets import EgressTarget
from glovebox_profiles.model import Profile
from glovebox_sandboxes.contract.base import Plan
from glovebox_sandboxes.contract.errors import Refusal, RefusedError
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_sandboxes.contract.spec import SandboxSpec
from glovebox_sandboxes.session import connection
from glovebox_sandboxes.session.connection import Serve
from glovebox_server.artifacts.names import CallNames
from glovebox_server.artifacts.record import ArtifactStoreError
from glovebox_server.artifacts.store import ArtifactReader, ArtifactStore
from glovebox_server.calls import CallResult, Decision, Delivered, Listener, ToolCall
from glovebox_server.core.rights import Rights, RightsOf
from glovebox_server.receipts.recorder import CallRecorder
from glovebox_server.tools.base import Tool, ToolAnswer

MAX_INPUT_BYTES = 32 * 1024 * 1024
"""Bytes of all inputs of one call: they are in a tmpfs of the sandbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The open input artifacts of one call."""

    readers: tuple[ArtifactReader, ...] = ()
    unreadable: ArtifactStoreError | None = None

    @property
    def listed(self) -> tuple[Input, ...]:
        """Return their records for the log. A program gets exactly these: see ``ArtifactReader.chunks``."""
        found = (reader.artifact for reader in self.readers)
        return tuple(Input(name=each.name, uri=each.uri, sha256=each.sha256, bytes=each.bytes) for each in found)

    def contents(self) -> list[connection.Input]:
        """Return name and content of each; raise ``ArtifactStoreError`` if the disk failed under one."""
        if self.unreadable is not None:
            raise self.unreadable
        return [(reader.artifact.name, reader.chunks()) for reader in self.readers]


async def open_inputs(store: ArtifactStore, call: ToolCall, opened: AsyncExitStack) -> Inputs:
    """Open a call's inputs until ``opened`` ends; only a program that is started learns that the disk failed.

    Raises RefusedError: one is unknown to its principal, two share a name, or all are too large together.
    """
    names = CallNames()
    readers: list[ArtifactReader] = []
    room = MAX_INPUT_BYTES
    for uri in call.arguments["inputs"]:
        try:
            reader = await opened.enter_async_context(store.open(uri, call.principal))
        except ArtifactStoreError as problem:
            return Inputs(unreadable=problem)
        room -= reader.artifact.bytes
        if room < 0:
            reason = f"The inputs of one call may hold {MAX_INPUT_BYTES} bytes together, and these hold more."
            raise RefusedError("files.inputs", reason, "Name fewer or smaller artifacts.")
        names.add(reader.artifact.name)
        readers.append(reader)
    return Inputs(readers=tuple(readers))


Decide = Callable[[Rights], Decision]
"""Decides a call under these rights. Pure, except for objections of guards."""
Objection = Callable[[ToolCall], Refusal | None]
"""Returns a refusal, regardless of role and profile."""
Show = Callable[[str], None]


class Observer(Protocol):
    """An observer of raw output before masking, live and complete. Changes nothing; may stop the call."""

    @property
    def is_complete(self) -> bool:
        """Return whether all live output was passed on."""

    def printed(self, show: Show) -> Callable[[bytes], None]:
        """Return a function that observes raw live output and passes it on to ``show``."""

    async def ended(self, outcome: Outcome) -> None:
        """Observe the raw outcome."""


Transform = Callable[[Outcome, bool], Awaitable[Outcome]]
"""Changes an outcome; the flag is True if the program ended normally and all live output was shown."""


@dataclass(slots=True, kw_only=True)
class Ran:
    """The outcome of a call that ran, before its last record is written."""

    outcome: Outcome
    delivered: Delivered
    answer: ToolAnswer
    plan: Plan | None = None
    """Plan of its sandbox; None if the host did its work."""
    scans: Sequence[Any] | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    """Recorded with the measurements of the sandbox."""
    recorded: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Attempt:
    """The state of a call in one turn; a call that waited for a person starts another."""

    request: ToolCall
    rights: Rights
    decision: Decision
    escalation: Any = None
    """The lift that it needs, for the guard that asks about it; rights and profile include it."""
    profile: Profile = field(init=False)
    """In effect for it; a call without one is denied."""
    inputs: Inputs | None = None
    """Its input artifacts, open; None if it names none."""
    is_recorded: bool = False
    records: CallRecorder = field(init=False)
    """Writes its other records, once the decision is on record."""
    changes: str = ""
    folder: str = ""
    perform: Callable[["Call"], Awaitable[Ran]] | None = None
    """Does its work on the host, shielded; None if it runs in a sandbox."""
    spec: SandboxSpec | None = None
    reveal: list[str] = field(default_factory=list)
    """Workspace paths that it sees despite names of secret files."""
    environment: Mapping[str, str] = field(default_factory=dict)
    serve: Serve | None = None
    refused_targets: Sequence[EgressTarget] = ()
    wrap_live: list[Callable[[Show], Show]] = field(default_factory=list)
    """Each wraps the one added before it; the first wraps the listener."""
    around_program: list[AbstractAsyncContextManager[Any]] = field(default_factory=list)
    """Entered before its program starts, left when it has ended. One may end the program, and must raise then."""
    on_ran: list[Callable[[Ran], Awaitable[None]]] = field(default_factory=list)
    """Awaited when it has run, in reverse order, before its last record."""
    on_result: list[Callable[[CallResult], Awaitable[CallResult]]] = field(default_factory=list)
    """Extend its result once that is on record, in reverse order."""
    observers: list[Observer] = field(default_factory=list)
    transforms: list[Transform] = field(default_factory=list)
    inspect_file: Callable[[], Callable[[bytes], None] | None] = lambda: None
    """Called for each file that leaves the sandbox; the result gets name and pieces, in another thread."""
    mask_name: Callable[[str], str] = str
    """Masks a file's name; if that changes it, the file is refused."""
    redacted: Counter[str] = field(default_factory=Counter)
    withheld: Refusal | None = None
    on_started: list[Callable[[], None]] = field(default_factory=list)
    on_connect: list[Callable[[str], Awaitable[Refusal | None]]] = field(default_factory=list)
    """Count a connection to a host, or refuse it."""
    max_connections: list[int] = field(default_factory=list)
    on_traffic: list[Callable[[Any], None]] = field(default_factory=list)
    placeholders: Mapping[str, str] = field(default_factory=dict)
    """Placeholder tokens for its program, by credential name."""
    finished: CallFinished | None = None


@dataclass(slots=True, kw_only=True)
class Call:
    """One call, from its acceptance to its result."""

    request: ToolCall
    tool: Tool
    listener: Listener
    rights: Rights
    """The caller's on arrival; those of a turn are its attempt's."""
    objections: Sequence[Objection] = ()
    """Checked before the profile, at each decision; the first refusal counts."""
    delay: float = 0.0
    ended_by: Callable[[], tuple[str, str | None]]
    """Called on cancellation: returns the origin and the id of the stop."""
    lift: Callable[[Refusal], bool] = lambda _: False
    """Called by a guard that refuses it in its turn; True if a person may lift that, and the guard tries again."""
    answer: Any = None
    """Answer of a person, read only by the guard that asked."""
    is_decided: bool = False
    """True once any turn decided it, so that ``now`` exists."""
    now: Attempt = field(init=False)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    """Holds resources of a guard until the part of the call that it surrounds is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardLink:
    """A guard's place in the chain."""

    guard: Callable[[Call], Awaitable[None]]
    when: Callable[[Call], bool] | None = None
    """Selects the calls that it is entered for; None for every call."""


@dataclass(frozen=True, kw_only=True)
class Guards:
    """The guards of a server, by the part of a call that they surround."""

    rights_of: RightsOf
    objections: Sequence[Objection] = field(init=False, default=())
    around_call: Sequence[GuardLink] = field(init=False, default=())
    before_turn: Sequence[GuardLink] = field(init=False, default=())
    deciders: Sequence[Callable[[Call, Decide], None]] = field(init=False, default=())
    """May change the decision of a turn: ask where it allows, or lift what it denies."""
    around_turn: Sequence[GuardLink] = field(init=False, default=())
    on_decided: Sequence[GuardLink] = field(init=False, default=())
    around_run: Sequence[GuardLink] = field(init=False, default=())
    on_ended: Sequence[Callable[[Call, bool], None]] = field(init=False, default=())
    """Called when a call that ran ended, with whether it failed."""


class CallDeniedError(Exception):
    """A denial by policy; the caller gets the refusal as a result, and the decision is recorded."""

    def __init__(self, refusal: Refusal | None = None) -> None:
        """Take the refusal; None if the call's own decision is to deny."""
        super().__init__(str(refusal or ""))
        self.refusal = refusal


class ApprovalRequiredError(Exception):
    """A request for approval before the call may run."""

    def __init__(self, wait: Callable[[], Awaitable[Any]]) -> None:
        """Take the function that waits for the answer, once the call holds nothing."""
        super().__init__()
        self.wait = wait
