"""Failures of the server itself. One level deep: no tree.

``contract.errors`` holds UnsupportedSpec and SandboxUnavailable, ``errors`` holds ProfileError.
"""

_MAX_NAME = 64
"""Characters of an unknown name that are repeated to the caller."""


class Refused(Exception):  # noqa: N818 - the design's term
    """Policy said no. The model may choose differently; nothing was started, or what was started is gone."""

    def __init__(self, rule: str, reason: str, hint: str) -> None:
        """Name the rule, say why, and what would be allowed or how to ask. No host paths, no secrets."""
        super().__init__(f"{reason} {hint}")
        self.rule = rule
        self.reason = reason
        self.hint = hint


class InvalidArguments(Exception):  # noqa: N818 - the protocol's term
    """Arguments do not fit the tool's model: names each field and its bound. Nothing was started."""

    def __init__(self, tool: str, problems: tuple[str, ...]) -> None:
        """Take the tool's name and one sentence per field that is wrong."""
        super().__init__(f"{tool}: " + "; ".join(problems))
        self.tool = tool
        self.problems = problems


class AuditUnavailable(Exception):  # noqa: N818 - the design's term
    """A record could not be made durable, so the effect it announces does not happen."""

    def __init__(self, attempted: str, reason: str, fix: str) -> None:
        """Say what was to be recorded, why it failed, and what the operator can do."""
        super().__init__(f"{attempted}: {reason}. {fix}")
        self.attempted = attempted
        self.reason = reason
        self.fix = fix


class UnknownTool(Exception):  # noqa: N818 - the protocol's term
    """There is no tool of that name. Nothing was started and nothing is recorded."""

    def __init__(self, name: str, tools: tuple[str, ...]) -> None:
        """Take what was asked for, which is shortened, and the names of the tools there are."""
        self.name = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…"
        super().__init__(f"{self.name}: unknown tool; there are {', '.join(tools)}")
        self.tools = tools
