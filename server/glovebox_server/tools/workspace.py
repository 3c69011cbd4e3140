"""Tools of the workspace, whose files are listed, read and searched inside a sandbox."""

from itertools import groupby
from typing import Annotated, Literal

from pydantic import Field

from glovebox_server.tools.base import Arguments, JobValue, Tool, ToolResult, heading, telling

MAX_PATTERN = 1000
MAX_ENTRIES = 1000
"""Entries in one answer: with paths of usual length about what a message holds."""


MAX_PATH = 4096
"""Characters: the kernel's PATH_MAX."""
MAX_OFFSET = 1_000_000_000
"""Lines: more than the searched part of a file has."""
MAX_LINES = 10_000
"""Lines in one call; a longer answer is truncated first."""
MAX_MATCHES = 1000
MAX_CONTEXT = 5


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
    scanned: int = 0
    passed_over: list[str] = Field(default_factory=list)
    """Folders of tools that were skipped; a pattern that names one enters it."""
    ignored: int = 0
    """Entries that .gitignore excludes, a folder as one; a pattern that names one includes it."""
    truncated: str | None = None


class ListResult(FileListing, ToolResult):
    """Result of ``list_workspace_files``."""


def _listed(value: FileListing) -> str:
    first = heading(f"found: {value.total}", value.passed_over, value.ignored, value.truncated)
    return "\n".join([first, *map(_line, value.entries)])


def _line(entry: ListedEntry) -> str:
    mark = {"directory": "/", "symlink": " (symlink)", "special": " (special)"}.get(entry.type, "")
    size = "" if entry.bytes is None else f"  {entry.bytes}"
    if entry.files is not None:
        size = f"  ({entry.files} files){size}"
    return f"{entry.path}{mark}{size}  {entry.modified or ''}".rstrip()


class ReadArguments(Arguments):
    """Arguments of ``read_workspace_file``."""

    path: Annotated[str, Field(max_length=MAX_PATH)]
    offset: Annotated[int, Field(ge=1, le=MAX_OFFSET, description="first line")] = 1
    limit: Annotated[int, Field(ge=1, le=MAX_LINES)] = 2000


class Read(JobValue):
    """The value of the job. A text has the fields from ``text`` on, a picture those from ``media_type`` on."""

    path: str = ""
    bytes: int = 0
    text: str | None = None
    first_line: int | None = None
    lines: int | None = None
    total_lines: int | None = None
    truncated: str | None = None
    next_offset: int | None = None
    encoding: str | None = None
    media_type: str | None = None
    width: int | None = None
    height: int | None = None


class ReadResult(Read, ToolResult):
    """Result of ``read_workspace_file``."""


def _shown(value: Read) -> str:
    if value.text is not None:
        return f"[{_heading(value)}]\n{value.text}"
    size = "" if value.width is None else f", {value.width} × {value.height} pixels"
    how = f"; {value.truncated}" if value.truncated else ""
    return f"[{value.path}: {value.media_type}{size}, {value.bytes} bytes{how}]"


def _heading(value: Read) -> str:
    first = value.first_line or 1
    last = first + (value.lines or 0) - 1
    total = "" if value.total_lines is None else f" of {value.total_lines}"
    lines = f"lines {first} to {last}{total}" if value.lines else f"no lines from {first} on{total}"
    parts = [f"{value.path}: {lines}", f"{value.bytes} bytes", value.encoding or ""]
    if value.truncated:
        parts.append(f"cut: {value.truncated}")
    if value.next_offset:
        parts.append(f"next offset {value.next_offset}")
    return ", ".join(parts)


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
    ignored: int = 0
    truncated: str | None = None


class SearchResult(SearchMatches, ToolResult):
    """Result of ``search_workspace``."""


def _found(value: SearchMatches) -> str:
    found = f"matches: {len(value.matches)}; text files searched: {value.searched}; binary files: {value.binary}"
    lines = [heading(found, value.passed_over, value.ignored, value.truncated)]
    for path, matches in groupby(value.matches, key=lambda match: match.path):
        lines.append(path)
        for match in matches:
            lines += _lines(match)
    return "\n".join(lines)


def _lines(match: Match) -> list[str]:
    """Return a match and its context with line numbers; a colon marks the match, as in grep."""
    first = match.line - len(match.before)
    around = [f"  {number}- {text}" for number, text in enumerate(match.before, first)]
    around.append(f"  {match.line}: {match.text}")
    return around + [f"  {number}- {text}" for number, text in enumerate(match.after, match.line + 1)]


LIST = Tool(
    name="list_workspace_files",
    title="List workspace files",
    description="List folders, and files with size and date; large folders are summed up. "
    "Ignored files, .git, node_modules, __pycache__, .venv only if named.",
    arguments=ListArguments,
    result=ListResult,
    kind="list",
    answer=telling(FileListing, _listed),
    needs=("workspace",),
)
READ = Tool(
    name="read_workspace_file",
    title="Read workspace file",
    description="Read lines of a text file (UTF-8, UTF-16) or see an image (PNG, JPEG, GIF, WebP); no binary data.",
    arguments=ReadArguments,
    result=ReadResult,
    kind="read",
    answer=telling(Read, _shown),
    needs=("workspace",),
    paths=("path",),
)
SEARCH = Tool(
    name="search_workspace",
    title="Search workspace",
    description="Find lines of text files by regex; no binary or ignored files, files over 8 MiB or folders of tools.",
    arguments=SearchArguments,
    result=SearchResult,
    kind="search",
    answer=telling(SearchMatches, _found),
    needs=("workspace",),
)
