"""Failures of the server itself. ``RefusedError`` is for callers, subclasses of ``DiagnosedError`` for the operator.

``contract.errors`` holds UnsupportedSpecError and SandboxError, ``glovebox_profiles.errors`` ProfileError.
"""

import re
from pathlib import Path

from glovebox_sandboxes.contract.errors import DiagnosedError, Refusal

PLACE = "[host path]"
# From a slash that begins a word to that word's end. In quotes to the closing one: a directory may have spaces.
_QUOTED = re.compile(r"""(?P<quote>['"`])/[^'"`\n]*(?P=quote)""")
_PATH = re.compile(r"""(?<![\w/:.<>])/(?:[^\s'"`,;:()\[\]{}]+)""")


def without_paths(text: str) -> str:
    """Return a sentence of ours with each absolute path replaced, encodable whatever it quotes."""
    encodable = text.encode("utf-8", "replace").decode()
    return _PATH.sub(PLACE, _QUOTED.sub(PLACE, encodable))


_MAX_NAME = 64


class InvalidArgumentsError(Exception):
    """Arguments that do not fit the tool's model: names each field and its bound. Nothing was started."""

    def __init__(self, tool: str, problems: tuple[str, ...], fields: tuple[str, ...] = ()) -> None:
        super().__init__(f"{tool}: " + "; ".join(problems))
        self.tool = tool
        self.problems = problems
        self.fields = fields


class StoreError(DiagnosedError):
    """A store that governs calls cannot be read or written, so these calls are refused: see ``refusal``."""

    @property
    def refusal(self) -> Refusal:
        """Return the refusal that the caller gets."""
        reason = f"What governs this call cannot be kept: {without_paths(self.reason)}."
        return Refusal(rule="store", reason=reason, hint=f"The operator must act. {without_paths(self.fix)}")


class UnknownToolError(Exception):
    """A tool name that does not exist. Nothing was started and nothing is recorded."""

    def __init__(self, name: str, tools: tuple[str, ...]) -> None:
        self.name = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…"
        super().__init__(f"Unknown tool: {self.name}; there are {', '.join(tools)}")
        self.tools = tools


class InternalError(Exception):
    """An unexpected error of a command; its cause is that error."""

    def __init__(self, doing: str, state_dir: Path | None) -> None:
        super().__init__(doing)
        self.doing = doing
        self.state_dir = state_dir


class OutputError(Exception):
    """Standard output is closed; the command that wrote to it ends, and ``run`` says why."""
