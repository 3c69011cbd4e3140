"""``list_workspace_files``: the files of the workspace, listed inside a sandbox."""

from typing import Annotated, Literal

from pydantic import Field

from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_server.calls import Text
from glovebox_server.tools.base import Arguments, Tool, ToolAnswer, ToolResult
from glovebox_server.tools.values import JobValue, failed, heading, read

MAX_PATTERN = 1000
MAX_ENTRIES = 1000
"""Entries in one answer: with paths of usual length about what a message holds."""


class ListArguments(Arguments):
    """Arguments of ``list_workspace_files``."""

    pattern: Annotated[str, Field(max_length=MAX_PATTERN, description="folder or glob: *.csv, src/**/*.{py,md}")] = ""
    limit: Annotated[int, Field(ge=1, le=MAX_ENTRIES)] = 500
    include_ignored: bool = False


class ListedEntry(JobValue):
    """One file, folder or symlink."""

    path: str
    type: Literal["file", "directory", "symlink", "special"]
    bytes: int | None
    """Of a file; of a closed folder, all files below, None if time ran out."""
    modified: str | None
    """RFC 3339, UTC; None for a folder."""
    files: int | None = None
    """Files below a folder that an overview leaves closed, else None."""


class FileListing(JobValue):
    """The value of the job."""

    entries: list[ListedEntry] = Field(default_factory=list)
    total: int = 0
    """Matching entries, shown or not."""
    scanned: int = 0
    passed_over: list[str] = Field(default_factory=list)
    """Folders of tools that were skipped; a pattern that names one enters it."""
    ignored: int = 0
    """Entries that .gitignore excludes, a folder as one; a pattern that names one includes it."""
    truncated: str | None = None


class ListResult(FileListing, ToolResult):
    """Result of ``list_workspace_files``."""


def _answer(outcome: Outcome) -> ToolAnswer:
    value = read(outcome, FileListing)
    if isinstance(value, Refusal):
        return failed(value)
    first = heading(f"found: {value.total}", value.passed_over, value.ignored, value.truncated)
    lines = [first, *map(_line, value.entries)]
    return ToolAnswer(fields=value.model_dump(mode="json"), content=(Text(text="\n".join(lines)),), failed=False)


def _line(entry: ListedEntry) -> str:
    mark = {"directory": "/", "symlink": " (symlink)", "special": " (special)"}.get(entry.type, "")
    size = "" if entry.bytes is None else f"  {entry.bytes}"
    if entry.files is not None:
        size = f"  ({entry.files} files){size}"
    return f"{entry.path}{mark}{size}  {entry.modified or ''}".rstrip()


TOOL = Tool(
    name="list_workspace_files",
    title="List workspace files",
    description="List folders, and files with size and date; large folders are summed up. "
    "Ignored files, .git, node_modules, __pycache__, .venv only if named.",
    arguments=ListArguments,
    result=ListResult,
    kind="list",
    answer=_answer,
    needs=("workspace",),
)
