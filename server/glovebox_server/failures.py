"""The one table of failures of a call, for MCP, the command line and the proof: class, sentence, exit code."""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from glovebox_sandboxes.contract.errors import SandboxError, UnsupportedSpecError
from glovebox_server.artifacts.record import ArtifactStoreError
from glovebox_server.errors import (
    AuditError,
    InvalidArgumentsError,
    RefusedError,
    StoreError,
    UnknownToolError,
    without_paths,
)
from glovebox_server.exits import REFUSED, UNAVAILABLE, USAGE

_COMMAND = re.compile(r"`glovebox (?=[a-z])")

Class = Literal["unknown tool", "invalid", "refused", "unavailable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The caller's sentence and exit code for one kind of exception."""

    classed: Class
    exit_code: int
    sentence: Callable[[Exception, str], str]
    """From the exception and the call's id to what the caller reads, without paths of this host."""


def _unavailable(what: str) -> Failure:
    return Failure(
        classed="unavailable",
        exit_code=UNAVAILABLE,
        sentence=lambda error, call_id: f"{what} unavailable (call {call_id}): {without_paths(str(error))}",
    )


FAILURES: dict[type[Exception], Failure] = {
    UnknownToolError: Failure(
        classed="unknown tool",
        exit_code=USAGE,
        sentence=lambda error, _: (
            f"Unknown tool: {getattr(error, 'name', '')}; there are {', '.join(getattr(error, 'tools', ()))}"
        ),
    ),
    InvalidArgumentsError: Failure(
        classed="invalid", exit_code=USAGE, sentence=lambda error, _: f"Invalid arguments, nothing was started. {error}"
    ),
    RefusedError: Failure(
        classed="refused",
        exit_code=REFUSED,
        sentence=lambda error, _: f"Refused by {getattr(error, 'rule', '')}: {error}",
    ),
    SandboxError: _unavailable("Sandbox"),
    UnsupportedSpecError: _unavailable("Sandbox"),
    AuditError: _unavailable("Audit"),
    StoreError: _unavailable("Store"),
    ArtifactStoreError: _unavailable("Artifacts"),
}


def failure_of(error: BaseException) -> Failure | None:
    """Return the failure of an error; None for an internal one."""
    return FAILURES.get(type(error))  # type: ignore[arg-type]  # a class that is no Exception's is in no table


def foreseen(error: Exception) -> bool:
    """Return whether an error is one of ours, whose sentence may be shown."""
    return failure_of(error) is not None


def own_command() -> list[str]:
    """Return the absolute command: desktop applications start servers elsewhere, with another PATH."""
    launcher = Path(sys.executable).with_name("glovebox")
    return [str(launcher)] if launcher.is_file() else [sys.executable, "-I", "-m", "glovebox_server"]


def with_own_command(sentence: str) -> str:
    """Return a sentence of ours whose commands run this installation, even if it is not on PATH.

    uv runs what ``uvx`` and bundles start from its cache, and puts that on the PATH of the process alone.
    """
    launcher = Path(own_command()[0])
    places = [place for place in os.environ.get("PATH", "").split(os.pathsep) if place != str(launcher.parent)]
    known = shutil.which("glovebox", path=os.pathsep.join(places))
    if known is not None and Path(known).resolve() == launcher.resolve():
        return sentence
    command = f"`{shlex.join(own_command())} "
    return _COMMAND.sub(lambda _: command, sentence)
