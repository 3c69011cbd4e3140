"""The one table of failures of a call, for MCP, the command line and the proof: class, sentence, exit code."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Literal, NamedTuple

from glovebox_audit.place import AuditError
from glovebox_sandboxes.contract.errors import RefusedError, SandboxError, UnsupportedSpecError
from glovebox_server.artifacts.record import ArtifactStoreError
from glovebox_server.errors import InvalidArgumentsError, StoreError, UnknownToolError, without_paths
from glovebox_server.exits import REFUSED, UNAVAILABLE, USAGE

_COMMAND = re.compile(r"`glovebox (?=[a-z])")
Class = Literal["unknown tool", "invalid", "refused", "unavailable"]


class Failure(NamedTuple):
    """The caller's sentence and exit code for one kind of exception."""

    classed: Class
    exit_code: int
    words: str

    def sentence(self, error: Exception, call_id: str) -> str:
        """Return what the caller reads, without paths of this host."""
        return self.words.format(error=error, call_id=call_id, told=without_paths(str(error)))


_KINDS: dict[type[Exception], str] = {
    SandboxError: "Sandbox", UnsupportedSpecError: "Sandbox", AuditError: "Audit", StoreError: "Store",
    ArtifactStoreError: "Artifacts",
}  # fmt: skip
FAILURES: dict[type[Exception], Failure] = {
    UnknownToolError: Failure("unknown tool", USAGE, "{error}"),
    InvalidArgumentsError: Failure("invalid", USAGE, "Invalid arguments, nothing was started. {error}"),
    RefusedError: Failure("refused", REFUSED, "Refused by {error.rule}: {error}"),
    **{
        kind: Failure("unavailable", UNAVAILABLE, f"{what} unavailable (call {{call_id}}): {{told}}")
        for kind, what in _KINDS.items()
    },
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
    try:
        found = launcher.is_file()
    except PermissionError:  # another user's installation, run through sudo
        found = True
    return [str(launcher)] if found else [sys.executable, "-I", "-m", "glovebox_server"]


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
