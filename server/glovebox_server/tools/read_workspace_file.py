"""``read_workspace_file``: some lines of a text file, or a picture, read inside a sandbox."""

from typing import Annotated

from pydantic import Field

from glovebox_sandboxes.contract.errors import Refusal
from glovebox_sandboxes.contract.outcome import Outcome
from glovebox_server.calls import Text
from glovebox_server.tools.base import Arguments, Tool, ToolAnswer, ToolResult
from glovebox_server.tools.values import JobValue, failed, read

MAX_PATH = 4096
"""Characters: the kernel's PATH_MAX."""
MAX_OFFSET = 1_000_000_000
"""Lines: more than the searched part of a file has."""
MAX_LINES = 10_000
"""Lines in one call; a longer answer is truncated first."""


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
    """Count of lines; None if the file is too large."""
    truncated: str | None = None
    """The missing parts, or how a picture is shown; None if complete."""
    next_offset: int | None = None
    """Offset of the next read; None at the end of the file."""
    encoding: str | None = None
    media_type: str | None = None
    width: int | None = None
    height: int | None = None


class ReadResult(Read, ToolResult):
    """Result of ``read_workspace_file``."""


def _answer(outcome: Outcome) -> ToolAnswer:
    value = read(outcome, Read)
    if isinstance(value, Refusal):
        return failed(value)
    if value.text is None:
        size = "" if value.width is None else f", {value.width} × {value.height} pixels"
        how = f"; {value.truncated}" if value.truncated else ""
        text = f"[{value.path}: {value.media_type}{size}, {value.bytes} bytes{how}]"
    else:
        text = f"[{_heading(value)}]\n{value.text}"
    return ToolAnswer(fields=value.model_dump(), content=(Text(text=text),), failed=False)


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


TOOL = Tool(
    name="read_workspace_file",
    title="Read workspace file",
    description="Read lines of a text file (UTF-8, UTF-16) or see an image (PNG, JPEG, GIF, WebP); no binary data.",
    arguments=ReadArguments,
    result=ReadResult,
    kind="read",
    answer=_answer,
    needs=("workspace",),
    paths=("path",),
)
