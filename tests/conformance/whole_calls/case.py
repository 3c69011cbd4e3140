"""A call case: one claim about a whole call, from its arguments to its result, its records and its artifacts.

The format of ``cases/*.toml``. Calls may come before it, and somebody may do something after each. What governs the
calls of a case is the case's alone, and so is its clock, which goes on for days only where it says so. In texts
``{{host NAME}}`` stands for what is planted under that name (``conformance.host``), ``{{artifact NAME}}`` for the
address of a file that an earlier call gave back, ``{{canary}}`` for a canary's marker, and ``{{canary even}}`` and
``{{canary odd}}`` for its letters by turns. A pattern is a regular expression that must match the whole of a field or
some part of a text. Nothing here may import a driver or do I/O beyond reading its own files.
"""

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from glovebox_sandboxes.conformance.case import ClaimCase, Strict, read_all

_Pattern = Annotated[str, Field(max_length=1000)]


Step = Literal[
    "allow", "allow run", "allow other", "allow own", "allow second", "deny", "revoke",
    "stop run", "stop principal", "stop tool", "stop all", "resume",
    "later", "restart",
    "promote", "apply", "roll back", "edit", "link",
]  # fmt: skip
"""What happens after a call. An operator answers the question that the call put (``allow other``: as if something else
had been shown; ``allow own``: as the caller; ``allow second``: another operator does), stops what the call names, or
lifts every stop; eight days pass; the server starts anew. An operator promotes the call's files into a folder
that holds a copy of ``data.csv``, applies its patch there, or puts that back; meanwhile somebody edits that file, or
puts a link in place of the folder ``plots``."""

FOLDER_STEPS: Final = ("promote", "apply", "roll back", "edit", "link")
"""Those that are about the folder that is promoted into."""


class TrialCall(Strict):
    """What is asked for, and what must come of it."""

    tool: str = "run_python"
    arguments: dict[str, Any] = Field(default_factory=dict)
    raw: str | None = None
    """Instead of the arguments: JSON as a client might send it."""
    profile: dict[str, str] = Field(default_factory=dict)
    """Section of the trial's profile → lines of TOML in its place; ``""`` is what stands before the first section."""
    profiled: bool = True
    """Whether there is a profile for the tool."""
    policy: str = ""
    """TOML of a policy, without its examples: what a role leaves of the profile. Empty: there is none."""
    caller: Literal["one", "another"] = "one"
    run: Literal["one", "another"] = "one"
    """Which piece of work of its caller's it belongs to."""
    times: int = Field(default=1, ge=1, le=64)
    """How often it is made, one after the other; each must come to the same."""
    token: Literal[
        "", "good", "none", "forged", "revoked", "expired",
        "issued", "issued for another", "issued long ago", "signed by another", "unsigned",
    ] = ""  # fmt: skip
    """It comes over HTTP, with such a token of its caller's; empty: to the broker itself. From ``issued`` on it is an
    access token of an authorization server that the proof runs; see ``issuing``."""
    handle: str = ""
    """What it says over HTTP of its run; ``{{handle NAME}}`` is what an earlier call of that caller was given."""
    at_once: bool = False
    """They are made all at one time."""
    workspace: Literal["planted", "gone"] = "planted"
    """``gone``: a directory that does not exist, so that no sandbox can be set up."""
    echoes: bool = False
    """Behind its gate is a server of the proof's own that hands back what it is sent; see ``echoing``."""
    locked: Literal["", "same", "changed", "signed", "unsigned"] = ""
    """Its profile is locked first; ``changed``: and has another limit since; the last two: and a signature of the lock
    is required."""
    shown: Literal["", "whole", "byte", "less", "kept", "put back"] = ""
    """What is made of its records afterwards: a bundle, with a byte changed, or without one record; the log, or the log
    put back to an earlier state with its head, and an anchor that was kept elsewhere."""
    cancel: _Pattern = ""
    """The call is cancelled as soon as what it printed matches this."""
    stop: _Pattern = ""
    """An operator stops the call as soon as what it printed matches this."""
    then: Annotated[tuple[Step, ...], Field(strict=False)] = ()
    """What happens after it."""

    refused: str = ""
    """The rule that refuses it."""
    invalid: _Pattern = ""
    """What is said of its arguments."""
    unavailable: _Pattern = ""
    """Why there was no sandbox, as the caller is told."""
    profile_error: _Pattern = ""
    """What is said of its profile; nothing is served."""
    status: int = 0
    """The HTTP status of an answer that is no result."""
    counted: dict[str, int] | None = None
    """Rule → how many requests it refused before they became calls, all of them in one record."""
    failed: bool | None = None
    """Whether the result says that the call failed."""
    result: dict[str, _Pattern] = Field(default_factory=dict)
    """Field of the structured result, with dots → its text, or its JSON."""
    text: _Pattern = ""
    """Of the text that a model reads."""
    artifacts: dict[str, _Pattern] | None = None
    """Names and contents of all files that can be fetched afterwards, by this caller and nobody else."""
    audit: _Pattern = ""
    """Kinds of all its records in order, with spaces between."""
    records: dict[str, _Pattern] = Field(default_factory=dict)
    """``KIND/FIELD`` of a record → its text, or its JSON; of several records of that kind, one."""
    verified: _Pattern = ""
    """What whoever verifies that is told."""
    promotions: str = ""
    """What came of each step that is about the folder: ``done``, or the rule that refused it, with spaces between."""
    folder: dict[str, _Pattern] | None = None
    """Names and contents of all that lies in it then; of a link, ``a link``."""
    through: int | None = None
    """Of those made at one time, so many get through; all else is asked of the others."""
    waits: float = 0.0
    """Seconds that pass at least before it is decided."""

    @property
    def denied(self) -> bool:
        """Whether it must not come to a result of its sandbox."""
        return bool(self.refused or self.invalid or self.unavailable or self.profile_error or self.status)


class ControlCall(TrialCall):
    """A call of a control, where the guard does not apply."""

    before: Annotated[tuple[TrialCall, ...], Field(strict=False)] = ()
    """Calls made earlier, if they are others than in the case."""


class CallCase(ClaimCase, TrialCall):
    """One claim about every call."""

    before: Annotated[tuple[TrialCall, ...], Field(strict=False)] = ()
    """Calls made earlier, in order, each judged by what it says itself. Tool, arguments, profile, policy and workspace
    are those of the case where it says nothing of them."""
    control: ControlCall | None = None
    """The same call where the guard does not apply: it gets through. What it leaves out of what is asked is as in the
    case. Without one, the case is about what is told and not about something that is stopped."""

    @model_validator(mode="after")
    def _controlled(self) -> "CallCase":
        if self.denied and self.control is None:
            raise ValueError("a case that is denied needs a control that is not")
        if self.control is not None and self.control.denied:
            raise ValueError("the control must get through")
        return self

    def tried_on(self, driver: str) -> bool:
        """Return whether it is tried on this driver: on each, but on gVisor only if its own call comes to a sandbox.

        What is refused before that asks no driver, and two others show it.
        """
        sandboxed = not self.denied or self.unavailable or "call.cancelled/by" in self.records
        return driver != "gvisor" or bool(sandboxed)

    def calls(self) -> tuple[TrialCall, ...]:
        """Return every call of the case, its own last."""
        return (*(_filled(each, self, _EARLIER) for each in self.before), self)

    def as_control(self) -> tuple[TrialCall, ...]:
        """Return the calls of the control, with what they leave out filled in, its own last."""
        if self.control is None:
            raise ValueError(f"{self.id} has no control")
        control = _filled(self.control, self, _ASKED)
        before = self.control.before if "before" in self.control.model_fields_set else self.before
        # The earlier calls are those of the case; what differs in the control's policy is so for all of its calls.
        whose = self.model_copy(update={"policy": control.policy})
        return (*(_filled(each, whose, _EARLIER) for each in before), control)


_EARLIER = ("tool", "arguments", "raw", "profile", "profiled", "policy", "workspace", "echoes")
_ASKED = (*_EARLIER, "caller", "run", "token", "handle", "times", "at_once", "cancel", "stop")


def _filled(call: TrialCall, of: TrialCall, names: tuple[str, ...]) -> TrialCall:
    """Return the call with what it leaves out of these as in the other."""
    asked = {name: getattr(of, name) for name in names if name not in call.model_fields_set}
    if call.model_fields_set & {"raw", "arguments"}:
        asked = {name: value for name, value in asked.items() if name not in ("raw", "arguments")}
    return call.model_copy(update=asked)


FOLDER = Path(__file__).parent / "cases"


def load(folder: Path = FOLDER) -> tuple[CallCase, ...]:
    """Return every call case, in the order of the files' names; raises as ``case.load`` does."""
    return read_all(folder, CallCase)
