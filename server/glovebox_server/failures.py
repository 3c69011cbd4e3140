"""The one table of what a call can end in instead of a result: its class, what the caller reads, the exit code.

MCP, the command line and the proof on a host take their answers from here. Pure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from glovebox_sandboxes.contract.errors import SandboxUnavailable, UnsupportedSpec
from glovebox_server.artifacts.record import ArtifactsUnavailable
from glovebox_server.errors import AuditUnavailable, InvalidArguments, Refused, StoreUnusable, UnknownTool
from glovebox_server.exits import REFUSED, UNAVAILABLE, USAGE
from glovebox_server.redaction import without_paths

Class = Literal["unknown tool", "invalid", "refused", "unavailable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What is said of one kind of exception."""

    classed: Class
    exit_code: int
    sentence: Callable[[Exception, str], str]
    """From the exception and the call's id to what the caller reads: nothing of where things are on this host."""


def _unavailable(what: str) -> Failure:
    return Failure(
        classed="unavailable",
        exit_code=UNAVAILABLE,
        sentence=lambda error, call_id: f"{what} unavailable (call {call_id}): {without_paths(str(error))}",
    )


FAILURES: dict[type[Exception], Failure] = {
    UnknownTool: Failure(
        classed="unknown tool",
        exit_code=USAGE,
        sentence=lambda error, _: (
            f"Unknown tool: {getattr(error, 'name', '')}; there are {', '.join(getattr(error, 'tools', ()))}"
        ),
    ),
    InvalidArguments: Failure(
        classed="invalid",
        exit_code=USAGE,
        sentence=lambda error, _: f"Invalid arguments, nothing was started. {error}",
    ),
    Refused: Failure(
        classed="refused",
        exit_code=REFUSED,
        sentence=lambda error, _: f"Refused by {getattr(error, 'rule', '')}: {error}",
    ),
    SandboxUnavailable: _unavailable("Sandbox"),
    UnsupportedSpec: _unavailable("Sandbox"),
    AuditUnavailable: _unavailable("Audit"),
    StoreUnusable: _unavailable("Store"),
    ArtifactsUnavailable: _unavailable("Artifacts"),
}


def failure_of(error: BaseException) -> Failure | None:
    """What is said of this one; None for what nobody foresaw."""
    return FAILURES.get(type(error))  # type: ignore[arg-type]  # a class that is no Exception's is in no table


def foreseen(error: Exception) -> bool:
    """Whether it is one of ours, whose sentence may be told."""
    return failure_of(error) is not None
