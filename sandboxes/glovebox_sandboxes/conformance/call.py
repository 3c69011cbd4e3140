"""A call case: one claim about a whole call, from its arguments to its result, its records and its artifacts.

The format of ``calls/*.toml``, beside that of ``case``, which is about a sandbox alone. In texts of a case
``{{host NAME}}`` stands for what is planted on the host under that name (see ``host``), and ``{{artifact NAME}}`` for
the address of a file that the call before it gave back; ``{{canary even}}`` and ``{{canary odd}}`` are the letters of a
canary's marker, by turns. Patterns are regular expressions that must match the whole of
a field and some part of a text. Nothing here may import a driver or do I/O beyond reading its own files.
"""

from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from glovebox_sandboxes.conformance.case import Claim, Strict, read_all

_Pattern = Annotated[str, Field(max_length=1000)]


class Call(Strict):
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
    workspace: Literal["planted", "gone"] = "planted"
    """``gone``: a directory that does not exist, so that no sandbox can be set up."""
    cancel: _Pattern = ""
    """The call is cancelled as soon as what it printed matches this."""
    stop: _Pattern = ""
    """An operator stops the call as soon as what it printed matches this."""

    refused: str = ""
    """The rule that refuses it."""
    invalid: _Pattern = ""
    """What is said of its arguments."""
    unavailable: _Pattern = ""
    """Why there was no sandbox, as the caller is told."""
    profile_error: _Pattern = ""
    """What is said of its profile; nothing is served."""
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

    @property
    def denied(self) -> bool:
        """Whether it must not come to a sandbox."""
        return bool(self.refused or self.invalid or self.unavailable or self.profile_error)


class CallCase(Claim, Call):
    """One claim about every call."""

    before: Call | None = None
    """A call made earlier; of its own fields only those that ask are looked at."""
    control: Call | None = None
    """The same call where the guard does not apply: it gets through. What it leaves out of what is asked is as in the
    case. Without one, the case is about what is told and not about something that is stopped."""

    @model_validator(mode="after")
    def _controlled(self) -> "CallCase":
        if self.denied and self.control is None:
            raise ValueError("a case that is denied needs a control that is not")
        if self.control is not None and self.control.denied:
            raise ValueError("the control must get through")
        return self

    def as_control(self) -> Call:
        """The call of the control, with what it leaves out filled in."""
        if self.control is None:
            raise ValueError(f"{self.id} has no control")
        asked = {name: getattr(self, name) for name in _ASKED if name not in self.control.model_fields_set}
        if "raw" in self.control.model_fields_set or "arguments" in self.control.model_fields_set:
            asked = {name: value for name, value in asked.items() if name not in ("raw", "arguments")}
        return self.control.model_copy(update=asked)


_ASKED = ("tool", "arguments", "raw", "profile", "profiled", "policy", "caller", "workspace", "cancel", "stop")

_SHIPPED = resources.files(__package__).joinpath("calls")


def load(folder: Traversable | None = None) -> tuple[CallCase, ...]:
    """Every call case, in the order of the files' names; raises as ``case.load`` does."""
    return read_all(folder or _SHIPPED, CallCase)
