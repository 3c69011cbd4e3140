"""``search_workspace``: lines of text files that match a pattern, searched inside a sandbox."""

from typing import Annotated

from pydantic import Field

from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_server.calls import Text
from glovebox_server.tools.base import Arguments, Tool, ToolAnswer, ToolResult
from glovebox_server.tools.list_workspace_files import MAX_PATTERN
from glovebox_server.tools.values import JobValue, failed, heading, read

MAX_MATCHES = 1000
MAX_CONTEXT = 5


class SearchArguments(Arguments):
    """Arguments of ``search_workspace``."""

    pattern: Annotated[str, Field(min_length=1, max_length=MAX_PATTERN, description="Python regex, within one line")]
    literal: Annotated[bool, Field(description="plain text, no regex")] = False
    path: Annotated[str, Field(max_length=MAX_PATTERN, description="file, folder or glob")] = "**"
    ignore_case: bool = False
    context: Annotated[int, Field(ge=0, le=MAX_CONTEXT, description="lines around")] = 0
    limit: Annotated[int, Field(ge=1, le=MAX_MATCHES)] = 100
    include_ignored: bool = False


class Match(JobValue):
    """One matching line, truncated around the match. A line is in one match only, and never also as context."""

    path: str
    line: int
    text: str
    before: list[str] = Field(default_factory=list)
    after: list[str] = Field(default_factory=list)


class SearchMatches(JobValue):
    """The value of the job."""

    matches: list[Match] = Field(default_factory=list)
    searched: int = 0
    binary: int = 0
    passed_over: list[str] = Field(default_factory=list)
    """Folders of tools that were skipped; a path that names one enters it."""
    ignored: int = 0
    """Files and folders that .gitignore excludes; a path that names one includes it."""
    truncated: str | None = None
    """The files not searched, or matches not shown; None if complete."""


class SearchResult(SearchMatches, ToolResult):
    """Result of ``search_workspace``."""


def _answer(outcome: Outcome) -> ToolAnswer:
    value = read(outcome, SearchMatches)
    if isinstance(value, Refusal):
        return failed(value)
    found = f"matches: {len(value.matches)}; text files searched: {value.searched}; binary files: {value.binary}"
    lines = [heading(found, value.passed_over, value.ignored, value.truncated)]
    path = None
    for match in value.matches:
        if match.path != path:
            path = match.path
            lines.append(path)
        lines += _lines(match)
    return ToolAnswer(fields=value.model_dump(mode="json"), content=(Text(text="\n".join(lines)),), failed=False)


def _lines(match: Match) -> list[str]:
    """Return a match and its context with line numbers; a colon marks the match, as in grep."""
    first = match.line - len(match.before)
    around = [f"  {number}- {text}" for number, text in enumerate(match.before, first)]
    around.append(f"  {match.line}: {match.text}")
    return around + [f"  {number}- {text}" for number, text in enumerate(match.after, match.line + 1)]


TOOL = Tool(
    name="search_workspace",
    title="Search workspace",
    description="Find lines of text files by regex; no binary or ignored files, files over 8 MiB or folders of tools.",
    arguments=SearchArguments,
    result=SearchResult,
    kind="search",
    answer=_answer,
    needs=("workspace",),
)
