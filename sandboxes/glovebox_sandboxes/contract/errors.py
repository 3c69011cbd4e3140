"""The two shapes of a failure: a refusal, for the caller, and a diagnosis, for the operator.

A program that fails inside a sandbox is not an error: that is an ``Outcome``.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A reason why something is not allowed, and the alternative. No host paths, no secrets."""

    rule: str
    """Id of the rule that decided, e.g. ``limits.wall_seconds``."""
    reason: str
    hint: str

    def __str__(self) -> str:
        return f"{self.reason} {self.hint}".strip()


class RefusedError(Exception):
    """The policy refused. The model may choose differently; nothing was started, or what was started is gone."""

    def __init__(self, rule: str, reason: str, hint: str) -> None:
        """Set rule, reason, and hint: a ``Refusal``."""
        super().__init__(f"{reason} {hint}")
        self.rule = rule
        self.reason = reason
        self.hint = hint

    @property
    def refusal(self) -> Refusal:
        """Return the same as data."""
        return Refusal(rule=self.rule, reason=self.reason, hint=self.hint)


class DiagnosedError(Exception):
    """Base of errors that a person can fix; the message has all three parts."""

    def __init__(self, what: str, reason: str, fix: str) -> None:
        """Set the attempt or problem and its object, the reason, and the command or setting that fixes it."""
        super().__init__(f"{what}: {reason}. {fix}")
        self.what = what
        self.reason = reason
        self.fix = fix


class MisnamedError(DiagnosedError):
    """A name in a command or setting is missing, taken, or not usable so, as an environment whose file is wrong."""


class UnsupportedSpecError(DiagnosedError):
    """A driver cannot enforce one part of a spec on this host, so nothing was started. ``what`` is the spec's field."""


class SandboxError(DiagnosedError):
    """A sandbox could not be started, proved, or kept alive; the caller's program never looks like this."""
