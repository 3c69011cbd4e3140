"""``propose_changes``: puts artifacts into a folder of the operator, after approval of the shown changes.

Only the scan of its files runs in a sandbox: see ``glovebox_server.promotion.proposing``.
"""

from typing import Annotated

from pydantic import Field

from glovebox_server.tools.base import Arguments, JobValue, Tool, ToolResult, telling

MAX_INPUTS = 16


class ProposeArguments(Arguments):
    """Arguments of ``propose_changes``."""

    inputs: Annotated[
        tuple[Annotated[str, Field(max_length=200)], ...],
        Field(min_length=1, max_length=MAX_INPUTS, description="artifact:// URIs of earlier calls"),
    ]
    into: Annotated[str, Field(max_length=4096, description="a folder, by its name in the operator's policy")]
    apply: Annotated[bool, Field(description="apply the one input, a changes.patch")] = False


class AppliedChange(JobValue):
    """The changes made."""

    promotion: str = ""
    digest: str = ""
    files: list[str] = Field(default_factory=list)


class ProposeResult(AppliedChange, ToolResult):
    """Result of ``propose_changes``."""


def _applied(value: AppliedChange) -> str:
    return f"Changed, as it was approved ({value.promotion}): {', '.join(value.files)}"


TOOL = Tool(
    name="propose_changes",
    title="Propose changes",
    description="Ask the operator to put text files that earlier calls made into a folder of theirs, all or none.",
    arguments=ProposeArguments,
    result=ProposeResult,
    kind="",
    answer=telling(AppliedChange, _applied),
)
