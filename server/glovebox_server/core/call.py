"""One call in the chain of guards, and how it is accepted: its tool, its arguments, and its profile's word on it.

A field here exists for each thing that a guard may do to a call. A decision is pure; its rules are checked in a fixed
order, and the first objection decides. Nothing here can allow what the profile does not.

Must never be imported here: a guard.
"""

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypedDict

from pydantic import ValidationError

from glovebox_audit.event import Effect
from glovebox_audit.events import CallFinished
from glovebox_audit.receipts.parts import Input
from glovebox_profiles.egress.rules import decide_url
from glovebox_profiles.egress.targets import EgressTarget, parse_url
from glovebox_profiles.model import Profile, digest
from glovebox_profiles.order import value_at
from glovebox_sandboxes.contract.base import Plan, SandboxSpec
from glovebox_sandboxes.contract.errors import Refusal, RefusedError
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_sandboxes.plural import counted
from glovebox_sandboxes.session import connection
from glovebox_sandboxes.session.connection import Serve
from glovebox_server.artifacts.names import CallNames
from glovebox_server.artifacts.record import ArtifactStoreError
from glovebox_server.artifacts.store import ArtifactReader, ArtifactStore
from glovebox_server.calls import CallResult, Decision, Delivered, Listener, ToolCall, Trace
from glovebox_server.core.rights import Rights, RightsOf
from glovebox_server.errors import InvalidArgumentsError, UnknownToolError
from glovebox_server.receipts.recorder import CallRecorder
from glovebox_server.tools.base import Grant, Tool, ToolAnswer
from glovebox_server.workspace import NOT_SERVED

MAX_INPUT_BYTES = 32 * 1024 * 1024
"""Bytes of all inputs of one call: they are in a tmpfs of the sandbox."""

#: Problems named in one error; a caller repairs the first few.
MAX_PROBLEMS = 8
#: Characters of a field name in an error: names come from the caller too.
MAX_FIELD = 64


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
    is_started: bool = False
    """True once its program starts, which may send output from then on."""
    on_connect: list[Callable[[str], Awaitable[Refusal | None]]] = field(default_factory=list)
    """Count a connection to a host, or refuse it."""
    max_connections: list[int] = field(default_factory=list)
    traffic: Any = None
    """Counter of its connections' bytes; None without a network."""
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


class Origin(TypedDict, total=False):
    """The origin of a call."""

    call_id: str
    """Call id if a listener waits for its records already; else a new one is made."""
    session: str | None
    run: str | None
    trace: Trace | None


def decide_call(request: ToolCall, tool: Tool, rights: Rights, *, objections: Sequence[Objection] = ()) -> Decision:
    """Decide a call under these rights. Pure, except for objections of guards, which come before the profile."""
    refusal = next((found for objection in objections if (found := objection(request)) is not None), None)
    if refusal is None and rights.role is not None:
        refusal = rights.refusal(tool.name)
    decision = decide(
        tool,
        request.arguments,
        rights.profiles.by_tool.get(tool.name),
        rights.profiles.digests.get(tool.name, ""),
        workspace=rights.workspace is not None,
        objection=refusal,
    )
    if rights.policy_digest:
        return replace(decision, role=rights.role, policy_digest=rights.policy_digest)
    return decision


def find_tool(tools: Mapping[str, Tool], name: str, rights: Rights | None = None) -> Tool:
    """Return the tool of that name; raise ``UnknownToolError``, which lists what these rights show, or else all."""
    if name not in tools:
        raise UnknownToolError(name, tuple(sorted(tools if rights is None else rights.shown(tools))))
    return tools[name]


def validate_arguments(tool: Tool, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``raw`` as the tool's argument model reads it, defaults filled in, JSON-compatible.

    Values are not converted: text that looks like JSON stays text, ``"5"`` is not 5. Raises InvalidArgumentsError:
    lists each field that is unknown, missing, of the wrong type or out of bounds.
    """
    try:
        # Through JSON: only there, strict models read an array as a tuple. Lone surrogates stay escaped.
        text = json.dumps(dict(raw))
        return tool.arguments.model_validate_json(text).model_dump(mode="json", exclude_unset=False)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[:MAX_PROBLEMS]
        problems = tuple(_sentence(tool, item["type"], _field(item["loc"]), item["msg"]) for item in details)
        fields = tuple(dict.fromkeys(_field(item["loc"]) for item in details))
        raise InvalidArgumentsError(tool.name, problems, fields) from None
    except (TypeError, ValueError, RecursionError):
        raise InvalidArgumentsError(tool.name, ("arguments: must be one JSON object of ordinary depth",)) from None


def _sentence(tool: Tool, kind: str, field: str, message: str) -> str:
    if kind == "extra_forbidden":
        return f"{field}: unknown argument; this tool takes {', '.join(tool.arguments.model_fields)}"
    return f"{field}: required and missing" if kind == "missing" else f"{field}: {message[:1].lower()}{message[1:]}"


def _field(location: tuple[int | str, ...]) -> str:
    parts = (str(part).encode("ascii", "backslashreplace").decode() for part in location)
    return ".".join(part if len(part) <= MAX_FIELD else f"{part[:MAX_FIELD]}…" for part in parts) or "arguments"


_GRANTED_BY: Mapping[Grant, str] = {"network": "network.mode", "workspace": "files.workspace"}
"""Profile keys whose value ``none`` withholds a grant."""
_NO_OBJECTION = Refusal(rule="allow", reason="The profile allows it.", hint="")
_Verdict = tuple[Effect, Refusal, str]


def decide(
    tool: Tool,
    arguments: Mapping[str, Any],
    profile: Profile | None,
    profile_digest: str = "",
    *,
    workspace: bool = True,
    objection: Refusal | None = None,
) -> Decision:
    """Decide one call by its objection, or else its profile in effect; without a profile it is denied."""
    found = _objections(tool, arguments, profile, workspace=workspace)
    allowed: _Verdict = ("allow", _NO_OBJECTION, "")
    effect, refusal, recorded = next(found, allowed) if objection is None else ("deny", objection, "")
    return Decision(
        effect=effect,
        rule=refusal.rule,
        reason=refusal.reason,
        hint=refusal.hint,
        profile_digest=profile_digest or (digest(profile) if profile and objection is None else ""),
        recorded=recorded,
    )


def _objections(
    tool: Tool, arguments: Mapping[str, Any], profile: Profile | None, *, workspace: bool
) -> Iterator[_Verdict]:
    """Yield from each rule that denies or asks, in their order."""
    if profile is None:
        reason = f"There is no profile for {tool.name}, so it may do nothing."
        yield _deny("profile.missing", reason, "The operator can add one to the profile directory.")
        return
    wall, timeout = profile.limits.wall_seconds, arguments.get("timeout_seconds")
    if timeout is not None and timeout > wall:
        reason = f"timeout_seconds is {timeout:g}, and this tool's calls may take {counted(wall, 'second')}."
        yield _deny("limits.wall_seconds", reason, f"Ask for at most {wall:g}, or leave timeout_seconds out.")
    if arguments.get("inputs") and not profile.files.inputs:
        yield _deny("files.inputs", "This tool's profile takes no artifacts as inputs.", "Call it without inputs.")
    for grant in tool.needs:
        if value_at(profile, _GRANTED_BY[grant]) == "none":
            reason = f"This tool's profile grants no {grant}."
            yield _deny(_GRANTED_BY[grant], reason, "The operator can grant it.")
    if "workspace" in tool.needs and not workspace:
        yield "deny", NOT_SERVED, ""
    if tool.request is not None:
        method, url = tool.request(arguments)
        egress = decide_url(method, url, profile.network.allow)
        if egress.effect == "deny":
            recorded = f"No rule allows what was asked of {_place(method, url)} ({egress.rule})."
            yield _deny("network.allow", egress.reason, egress.hint, recorded)
    if profile.approval == "ask":
        reason = "This tool's profile wants a person to approve each call."
        yield "ask", Refusal(rule="approval.ask", reason=reason, hint="Ask the user, then call again."), ""


def _place(method: str, url: str) -> str:
    try:
        target = parse_url(method, url)
    except RefusedError:
        return "an address that cannot be read"
    return f"{target.host} port {target.port}"


def _deny(rule: str, reason: str, hint: str, recorded: str = "") -> _Verdict:
    return "deny", Refusal(rule=rule, reason=reason, hint=hint), recorded


def deny(decision: Decision, refusal: Refusal) -> Decision:
    """Return the decision, denied for this reason."""
    return replace(decision, effect="deny", rule=refusal.rule, reason=refusal.reason, hint=refusal.hint, recorded="")
