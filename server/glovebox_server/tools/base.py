"""The base of tools: a tool is a typed name for one job. No I/O, no MCP; ``mcp.server`` serves them.

The value that a job returns was made next to untrusted bytes, so its shape is checked.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.contract.outcome import Job, Outcome
from glovebox_sandboxes.contract.pictures import share
from glovebox_server.calls import Content, Text

Grant = Literal["network", "workspace"]
"""A capability that a profile can withhold."""
_HOSTS = ("inputs", "timeout_seconds")
"""Arguments with the same meaning in every tool; the host handles them, not the guest."""


class JobValue(BaseModel):
    """Base of the values of jobs: unknown fields and wrong types are errors. Each field has a default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, defer_build=True)


class Arguments(JobValue):
    """Base of all argument models."""


class Isolation(BaseModel):
    """The isolation of a call, as verified."""

    driver: str
    level: str
    verified: bool = Field(description="measured from inside and outside before the job and equal to the plan")
    differences: tuple[str, ...] = ()


class ToolFailure(BaseModel):
    """The failure of a call that was allowed."""

    kind: str = Field(description="exception of the program, or rule of the tool")
    message: str
    line: int | None = Field(default=None, description="of the program")


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRemainder:
    """Remainder of one bounded quantity, in the units of policies, beside what running calls may still take."""

    budget: str
    what: Annotated[str, Field(description="calls, failures, seconds, bytes, connections or artifacts")]
    per: str
    every: str
    tool: Annotated[str | None, Field(description="whose calls alone are counted")]
    left: float
    of: float
    refills: Annotated[str | None, Field(description="when; null where it does not within the run")]


class ToolResult(BaseModel, defer_build=True):
    """The common fields of every tool's structured result."""

    call_id: str
    refused: Refusal | None = None
    error: ToolFailure | None = None
    isolation: Isolation | None = None
    profile_digest: str = ""
    elapsed_ms: float = 0.0
    budget: tuple[BudgetRemainder, ...] | None = None
    redacted: Mapping[str, int] | None = None
    invisible: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """A tool's reading of an outcome: the specific fields of its result model, and the content."""

    fields: Mapping[str, Any]
    content: tuple[Content, ...]
    failed: bool


MAX_OUTPUT: Final = 16 * 1024
"""UTF-8 bytes of output in ``content``, and again in ``structuredContent``: about 5,000 tokens each."""
PACKAGES = "{packages}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One typed MCP tool."""

    name: str
    title: str
    description: str
    """Written for a model, within a token budget; ``mcp.catalogue`` fills in ``PACKAGES`` and adds what is granted."""
    arguments: type[Arguments]
    result: type[ToolResult]
    kind: str
    """Module in ``_glovebox_guest.jobs``; empty if nothing runs, as it ``proposes``."""
    answer: Callable[[Outcome], ToolAnswer]
    """Converts an outcome for the caller. Everything in an outcome is untrusted text."""
    needs: tuple[Grant, ...] = ()
    """Grants without which every call is refused before anything starts."""
    request: Callable[[Mapping[str, Any]], tuple[str, str]] | None = None
    """Returns method and URL of its request, which the profile's rules must allow; None if it makes none."""
    delivers: bool = False
    """True if its result has the fields ``artifacts``, ``images``, ``changes`` and ``notes``."""
    paths: tuple[str, ...] = ()
    silent: str = ""

    imports: bool = field(init=False)
    """True if it runs programs, which import packages."""
    proposes: bool = field(init=False)
    """True if the host does its work: changes of files, after approval."""

    def __post_init__(self) -> None:
        """Derive what each call asks."""
        object.__setattr__(self, "imports", PACKAGES in self.description)
        object.__setattr__(self, "proposes", not self.kind)

    @property
    def open_world(self) -> bool:
        """Return MCP's ``openWorldHint``: whether it reaches beyond the workspace."""
        return "network" in self.needs

    def job(self, arguments: Mapping[str, Any], reveal: Sequence[str] = (), *, root: Path | None = None) -> Job:
        """Return the guest's job for validated arguments, except those that the host handles.

        It shows the workspace paths in ``reveal`` despite their names. ``root`` is the workspace on the host, if the
        caller knows it: absolute paths in it become relative.
        """
        payload = {name: value for name, value in arguments.items() if name not in _HOSTS}
        for name in self.paths:
            path = PurePosixPath(payload[name])
            # Lexical: no lookup on the host. The guest refuses paths that leave the workspace with ``..``.
            if root is not None and path.is_relative_to(root):
                payload[name] = str(path.relative_to(root))
        if reveal and "workspace" in self.needs:
            payload["reveal"] = list(reveal)
        return Job(
            kind=self.kind,
            payload=payload,
            wall_seconds=arguments.get("timeout_seconds"),
            inputs=tuple(arguments.get("inputs", ())),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """An excerpt of one text: three quarters of its bytes are from the start, one quarter from the end."""

    text: str
    shown: int
    whole: bytes


def cut_output(outcome: Outcome) -> tuple[Outcome, Mapping[str, Excerpt]]:
    """Return the outcome with at most ``MAX_OUTPUT`` bytes of output, shared by need, and the excerpts by name."""
    value = outcome.value if isinstance(outcome.value, dict) else {}
    texts = {"stdout": outcome.stdout.text, "stderr": outcome.stderr.text, "value": value.get("value")}
    whole = {name: text.encode("utf-8", "replace") for name, text in texts.items() if isinstance(text, str)}
    sizes = [len(data) for data in whole.values()]
    if sum(sizes) <= MAX_OUTPUT:
        return outcome, {}
    room = share(sizes, MAX_OUTPUT)
    excerpts = {name: _excerpt(data, room) for name, data in whole.items() if len(data) > room}
    kept = {name: excerpt.text for name, excerpt in excerpts.items()}
    cut = replace(
        outcome,
        stdout=replace(outcome.stdout, text=kept.get("stdout", outcome.stdout.text)),
        stderr=replace(outcome.stderr, text=kept.get("stderr", outcome.stderr.text)),
        value={**value, "value": kept["value"]} if "value" in kept else outcome.value,
    )
    return cut, excerpts


def _excerpt(data: bytes, room: int) -> Excerpt:
    tail_bytes = room // 4
    # A partial character at an edge is dropped.
    head, tail = (
        part.decode("utf-8", "ignore") for part in (data[: room - tail_bytes], data[len(data) - tail_bytes :])
    )
    shown = len(head.encode()) + len(tail.encode())
    return Excerpt(text=f"{head}\n[… {len(data) - shown} bytes left out …]\n{tail}", shown=shown, whole=data)


_MOST = 2000
"""Characters of each part of a refusal."""


def _refusal(value: Any) -> Refusal:
    """Return three texts of bounded length as a refusal: strict pydantic takes no dataclass from a dict."""
    if not isinstance(value, dict) or not all(isinstance(part, str) and len(part) <= _MOST for part in value.values()):
        raise ValueError("not a rule, a reason and a hint")
    try:
        return Refusal(**value)
    except TypeError as problem:
        raise ValueError(str(problem)) from None


JobFailure = Annotated[Refusal, PlainValidator(_refusal)]
"""Why the job failed: for the caller to fix, unlike a refusal of policy."""


class _Failed(JobValue):
    error: JobFailure


_Model = TypeVar("_Model", bound=JobValue)


def read(outcome: Outcome, model: type[_Model]) -> _Model | Refusal:
    """Return the job's value as ``model`` reads it, or why there is none."""
    if outcome.ended != "exited" or outcome.code != 0:
        reason = outcome.reason or "The job failed inside the sandbox."
        return Refusal(
            rule=f"job.{outcome.ended}", reason=reason[:_MOST], hint="Ask for less, or for something simpler."
        )
    try:
        if isinstance(outcome.value, dict) and "error" in outcome.value:
            return _Failed.model_validate(outcome.value).error
        return model.model_validate(outcome.value)
    except ValidationError:
        hint = "Try again. If it persists, the sandbox's runtime does not match this server."
        return Refusal(rule="job.malformed", reason="The sandbox returned no valid result of this tool.", hint=hint)


def heading(found: str, passed_over: Iterable[str], ignored: int, truncated: str | None) -> str:
    """Return the first line of an answer that may be incomplete."""
    skipped = ", ".join(passed_over)
    notes = [found] + [f"not entered: {skipped}"] * bool(skipped)
    notes += [f"ignored by .gitignore: {ignored} (set include_ignored to include them)"] * bool(ignored)
    return f"[{'; '.join(notes + [f'cut: {truncated}'] * bool(truncated))}]"


def failed(refusal: Refusal, **fields: Any) -> ToolAnswer:
    """Return the answer of a call whose job failed."""
    fields["error"] = {"kind": refusal.rule, "message": str(refusal), "line": None}
    return ToolAnswer(fields=fields, content=(Text(text=str(refusal)),), failed=True)


def telling(model: type[_Model], text: Callable[[_Model], str]) -> Callable[[Outcome], ToolAnswer]:
    """Return the reading of a job's value as ``model``, which ``text`` puts in words."""

    def answer(outcome: Outcome) -> ToolAnswer:
        value = read(outcome, model)
        if isinstance(value, Refusal):
            return failed(value)
        return ToolAnswer(fields=value.model_dump(mode="json"), content=(Text(text=text(value)),), failed=False)

    return answer
