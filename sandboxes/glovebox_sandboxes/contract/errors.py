"""Failures of isolation. Each says what was attempted, on what, and what to do next.

A program that fails inside a sandbox is not an error: that is an ``Outcome``.
"""


class UnsupportedSpec(Exception):  # noqa: N818 - the design's term; it names what is wrong, not that something is
    """A driver cannot enforce one part of a spec on this host, so nothing was started."""

    def __init__(self, field: str, reason: str, fix: str) -> None:
        """Name the field of the spec, why it cannot be enforced, and the command or setting that fixes it."""
        super().__init__(f"{field}: {reason}. {fix}")
        self.field = field
        self.reason = reason
        self.fix = fix


class SandboxUnavailable(Exception):  # noqa: N818 - as above
    """A sandbox could not be started, proved, or kept alive; the caller's program never looks like this."""

    def __init__(self, attempted: str, reason: str, fix: str) -> None:
        """Say what was attempted, why it failed, and what the operator can do."""
        super().__init__(f"{attempted}: {reason}. {fix}")
        self.attempted = attempted
        self.reason = reason
        self.fix = fix
