"""Failures of the server itself. ``RefusedError`` is for callers, subclasses of ``DiagnosedError`` for the operator.

``contract.errors`` holds UnsupportedSpecError and SandboxError, ``glovebox_profiles.errors`` ProfileError.
"""

from pathlib import Path

from glovebox_audit.place import AuditError
from glovebox_sandboxes.contract.errors import DiagnosedError, Refusal, RefusedError
from glovebox_server.redaction import without_paths

_MAX_NAME = 64
"""Characters of an unknown name that are repeated to the caller."""

__all__ = [
    "AuditError",
    "InternalError",
    "InvalidArgumentsError",
    "MisnamedError",
    "OutputError",
    "RefusedError",
    "StoreError",
    "UnknownToolError",
]


class InvalidArgumentsError(Exception):
    """Arguments do not fit the tool's model: names each field and its bound. Nothing was started."""

    def __init__(self, tool: str, problems: tuple[str, ...], fields: tuple[str, ...] = ()) -> None:
        """Take the tool's name, one sentence per field that is wrong, and the fields' names."""
        super().__init__(f"{tool}: " + "; ".join(problems))
        self.tool = tool
        self.problems = problems
        self.fields = fields


class MisnamedError(DiagnosedError):
    """What a command names is not there, is taken already, or cannot be used so."""


class StoreError(DiagnosedError):
    """What governs calls cannot be read or written, so calls that it governs are refused: see ``refusal``."""

    @property
    def refusal(self) -> Refusal:
        """What the caller is told."""
        reason = f"What governs this call cannot be kept: {without_paths(self.reason)}."
        return Refusal(rule="store", reason=reason, hint=f"The operator must act. {without_paths(self.fix)}")


class UnknownToolError(Exception):
    """There is no tool of that name. Nothing was started and nothing is recorded."""

    def __init__(self, name: str, tools: tuple[str, ...]) -> None:
        """Take what was asked for, which is shortened, and the names of the tools there are."""
        self.name = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…"
        super().__init__(f"{self.name}: unknown tool; there are {', '.join(tools)}")
        self.tools = tools


class InternalError(Exception):
    """A command ended by an error that has no sentence of ours; its cause is that error."""

    def __init__(self, doing: str, state_dir: Path | None) -> None:
        """Say which command it was, and where it keeps things."""
        super().__init__(doing)
        self.doing = doing
        self.state_dir = state_dir


class OutputError(Exception):
    """Standard output takes no more; whoever wrote to it ends, and ``run`` says why."""
