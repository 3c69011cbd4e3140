"""Reads the value that a job returned. It was made next to untrusted bytes, so its shape is checked. No I/O."""

from collections.abc import Iterable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_server.calls import Text
from glovebox_server.tools.base import ToolAnswer

_MOST = 2000
"""Characters of each part of a refusal."""


class JobValue(BaseModel):
    """Base of the values of jobs. Every field has a default: a failed call has none."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _refusal(value: Any) -> Refusal:
    """Return three texts of bounded length as a refusal: strict pydantic takes no dataclass from a dict."""
    if not isinstance(value, dict) or not all(isinstance(part, str) and len(part) <= _MOST for part in value.values()):
        raise ValueError("not a rule, a reason and a hint")
    try:
        return Refusal(**value)
    except TypeError as problem:
        raise ValueError(str(problem)) from None


RefusedError = Annotated[Refusal, PlainValidator(_refusal)]
"""Why the job failed: for the caller to fix, unlike a refusal of policy."""


class _JobFailure(JobValue):
    error: RefusedError


_Model = TypeVar("_Model", bound=JobValue)


def read(outcome: Outcome, model: type[_Model]) -> _Model | Refusal:
    """Return the job's value as ``model`` reads it, or why there is none."""
    if outcome.ended != "exited" or outcome.code != 0:
        reason = outcome.reason or "The job failed inside the sandbox."
        return Refusal(
            rule=f"job.{outcome.ended}", reason=reason[:_MOST], hint="Ask for less, or for something simpler."
        )
    try:
        if isinstance(outcome.value, dict) and "error" in outcome.value:
            return _JobFailure.model_validate(outcome.value).error
        return model.model_validate(outcome.value)
    except ValidationError:
        hint = "Try again. If it persists, the sandbox's runtime does not match this server."
        return Refusal(rule="job.malformed", reason="The sandbox returned no valid result of this tool.", hint=hint)


def heading(found: str, passed_over: Iterable[str], ignored: int, truncated: str | None) -> str:
    """Return the first line of an answer that may be incomplete."""
    skipped = ", ".join(passed_over)
    notes = [found] + [f"not entered: {skipped}"] * bool(skipped)
    notes += [f"ignored by .gitignore: {ignored} (set include_ignored to include them)"] * bool(ignored)
    return f"[{'; '.join(notes + [f'cut: {truncated}'] * bool(truncated))}]"


def failure(refusal: Refusal) -> dict[str, Any]:
    """Return the field ``error`` of a result."""
    return {"kind": refusal.rule, "message": str(refusal), "line": None}


def failed(refusal: Refusal) -> ToolAnswer:
    """Return the answer of a call whose job failed."""
    return ToolAnswer(fields={"error": failure(refusal)}, content=(Text(text=str(refusal)),), failed=True)
