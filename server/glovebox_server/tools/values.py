"""Reading what a job of ours handed back. It was made next to a stranger's bytes, so its shape is checked. No I/O."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_server.broker.calls import Text
from glovebox_server.tools.base import Answer

_Words = Annotated[str, Field(max_length=2000)]


class Value(BaseModel):
    """Base of the values of jobs. Every field has a default: where a call fails there are none."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Problem(Value):
    """Why the job could not do what was asked: the caller's to put right, unlike a refusal of policy."""

    rule: _Words
    reason: _Words
    hint: _Words

    def failure(self) -> dict[str, Any]:
        """The problem as callers see it."""
        return {"kind": self.rule, "message": f"{self.reason} {self.hint}".strip(), "line": None}


class _Failure(Value):
    error: Problem


_Model = TypeVar("_Model", bound=Value)


def taken(outcome: Outcome, model: type[_Model]) -> _Model | Problem:
    """Return the job's value as ``model`` reads it, or what kept it from having one."""
    if outcome.ended != "exited" or outcome.code != 0:
        reason = outcome.reason or "The job failed inside the sandbox."
        return Problem(
            rule=f"job.{outcome.ended}", reason=reason[:2000], hint="Ask for less, or for something simpler."
        )
    try:
        if isinstance(outcome.value, dict) and "error" in outcome.value:
            return _Failure.model_validate(outcome.value).error
        return model.model_validate(outcome.value)
    except ValidationError:
        hint = "Try again; if it stays so, the sandbox's runtime is not the one that belongs to this server."
        return Problem(
            rule="job.malformed", reason="What came out of the sandbox is not this tool's answer.", hint=hint
        )


def failed(problem: Problem) -> Answer:
    """Return the answer of a call whose job could not do it."""
    failure = problem.failure()
    return Answer(fields={"error": failure}, content=(Text(text=failure["message"]),), failed=True)
