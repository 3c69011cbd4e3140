"""The base of tools: a tool is a typed name for one job. No I/O, no MCP; ``mcp.server`` shows tools to clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.contract.outcome import Job, Outcome
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


class Failure(BaseModel):
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


class Result(BaseModel):
    """What every tool's structured result carries."""

    call_id: str
    refused: Refusal | None = None
    error: Failure | None = None
    isolation: Isolation | None = None
    profile_digest: str = ""
    elapsed_ms: float = 0.0
    budget: tuple[BudgetLeft, ...] | None = None
    redacted: Mapping[str, int] | None = None
    invisible: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A tool's reading of an outcome: the fields of its result model beside the common ones, and the content."""

    fields: Mapping[str, Any]
    content: tuple[Content, ...]
    failed: bool


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
    result: type[Result]
    kind: str
    """The guest's job: the name of a module in ``_glovebox_guest.jobs``; empty where nothing runs: it ``proposes``."""
    answer: Callable[[Outcome], Answer]
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
        """Whether it runs programs, which import packages."""
        return PACKAGES in self.description

    @property
    def proposes(self) -> bool:
        """Whether its work is the host's: files put into a folder of the operator's, once somebody said yes."""
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
