"""The base of tools: a tool is a typed name for one job. No I/O, no MCP; ``mcp.server`` shows tools to clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.contract.outcome import Job, Outcome
from glovebox_sandboxes.contract.pictures import share
from glovebox_server.calls import Content

Grant = Literal["network", "workspace"]
"""Something a profile can withhold."""
_HOSTS = ("inputs", "timeout_seconds")
"""Arguments of these names mean the same in every tool, and the guest does not get them."""


class Arguments(BaseModel):
    """Base of all argument models: unknown fields and wrong types are errors, never guesses."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Isolation(BaseModel):
    """The isolation a call really got."""

    driver: str
    level: str
    verified: bool = Field(description="measured from inside and outside before the job and equal to the plan")
    differences: tuple[str, ...] = ()


class ToolFailure(BaseModel):
    """Why a call that was allowed has no good result."""

    kind: str = Field(description="exception of the program, or rule of the tool")
    message: str
    line: int | None = Field(default=None, description="of the program")


class BudgetLeft(BaseModel):
    """What is left of one budget, where that is little."""

    budget: str
    what: str = Field(description="calls, failures, seconds, bytes, connections or artifacts")
    per: str
    every: str
    tool: str | None = Field(description="whose calls alone are counted")
    left: float
    of: float
    refills: str | None = Field(description="when; null where it does not within the run")


class ToolResult(BaseModel):
    """What every tool's structured result carries."""

    call_id: str
    refused: Refusal | None = None
    error: ToolFailure | None = None
    isolation: Isolation | None = None
    profile_digest: str = ""
    elapsed_ms: float = 0.0
    budget: tuple[BudgetLeft, ...] | None = None
    redacted: Mapping[str, int] | None = None
    invisible: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolAnswer:
    """A tool's reading of an outcome: the fields of its result model beside the common ones, and the content."""

    fields: Mapping[str, Any]
    content: tuple[Content, ...]
    failed: bool


MAX_OUTPUT: Final = 16 * 1024
"""Bytes of UTF-8 of a program's output in ``content``, and again in ``structuredContent``: about 5,000 tokens each."""
PACKAGES = "{packages}"
"""In a description: what its programs can import."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One typed MCP tool."""

    name: str
    title: str
    description: str
    """Written for a model: what it does, what comes back. Counted in the token budget. ``PACKAGES`` stands for what its
    programs can import; ``mcp.catalogue`` adds what its profile grants."""
    arguments: type[Arguments]
    result: type[ToolResult]
    kind: str
    """The guest's job: the name of a module in ``_glovebox_guest.jobs``; empty where nothing runs: it ``proposes``."""
    answer: Callable[[Outcome], ToolAnswer]
    """Outcome to what the caller sees. Everything in an outcome is untrusted text."""
    needs: tuple[Grant, ...] = ()
    """What its profile must grant, or every call is refused before anything starts."""
    request: Callable[[Mapping[str, Any]], tuple[str, str]] | None = None
    """Method and URL of the request it makes, which the profile's rules must allow; None for a tool without one."""
    delivers: bool = False
    """Whether its result has the fields ``artifacts``, ``images``, ``changes`` and ``notes``."""
    paths: tuple[str, ...] = ()
    """Arguments that are a path of the workspace."""
    silent: str = ""
    """What the caller reads where a call has no content at all."""

    @property
    def imports(self) -> bool:
        """Return whether it runs programs, which import packages."""
        return PACKAGES in self.description

    @property
    def proposes(self) -> bool:
        """Return whether the host does its work: changes of files, after approval."""
        return not self.kind

    @property
    def open_world(self) -> bool:
        """MCP's ``openWorldHint``: whether it reaches beyond the workspace."""
        return "network" in self.needs

    def job(self, arguments: Mapping[str, Any], reveal: Sequence[str] = (), *, root: Path | None = None) -> Job:
        """Validated arguments to the guest's job: it gets all of them but what the host sees to.

        Args:
            arguments: of the call.
            reveal: paths of the workspace that a job which reads it for its caller shows, however they are named.
            root: the workspace on the host, for a caller that knows it: its absolute paths are made relative.
        """
        payload = {name: value for name, value in arguments.items() if name not in _HOSTS}
        for name in self.paths:
            path = PurePosixPath(payload[name])
            # Lexical: nothing is looked up on the host. The guest refuses what then leads out with ``..``.
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
    """The first three quarters and the last quarter of the bytes that a result holds of one text."""

    text: str
    shown: int
    """Bytes of the whole that are in it."""
    whole: bytes


def cut_output(outcome: Outcome) -> tuple[Outcome, Mapping[str, Excerpt]]:
    """Return the outcome with at most ``MAX_OUTPUT`` bytes of output, and what was cut of it by name.

    Short texts leave the others what they do not need.
    """
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
    # Half a character at an edge is left out.
    head, tail = (
        part.decode("utf-8", "ignore") for part in (data[: room - tail_bytes], data[len(data) - tail_bytes :])
    )
    shown = len(head.encode()) + len(tail.encode())
    return Excerpt(text=f"{head}\n[… {len(data) - shown} bytes left out …]\n{tail}", shown=shown, whole=data)
