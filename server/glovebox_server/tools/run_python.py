"""``run_python``: a short Python program in a sandbox of its own."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from glovebox_sandboxes.contract.outcome import Outcome, SkippedFile, Usage
from glovebox_server.artifacts.names import quoted
from glovebox_server.calls import Link, Text
from glovebox_server.tools.base import Arguments, Tool, ToolAnswer, ToolResult

MAX_CODE = 256 * 1024
"""Characters of one program: more than a model writes, less than one message of the wire."""
MAX_INPUTS = 16
MAX_FIGURES = 10_000
"""Bound of the reported number: a figure takes some 100 kB, so a profile's memory holds far fewer."""
MAX_SKIPPED = 3
"""Files listed that were not collected for one reason; the rest are counted."""

_INSTEAD: Mapping[str, str] = {
    "timed_out": "Do less in one call.",
    "out_of_memory": "Load less at a time: only the columns and rows you need, or one part after another.",
    "limit": "Do less in one call and print less. Write long output to a file in /output.",
}
"""Advice after a program was stopped, by how it ended."""


class RunPythonArguments(Arguments):
    """Arguments of ``run_python``."""

    code: Annotated[str, Field(min_length=1, max_length=MAX_CODE)]
    inputs: Annotated[
        tuple[Annotated[str, Field(max_length=200)], ...],
        Field(max_length=MAX_INPUTS, description="artifact:// URIs of earlier calls, to appear in /input"),
    ] = ()
    timeout_seconds: Annotated[float | None, Field(gt=0, description="to stop it sooner")] = None


class OutputStream(BaseModel):
    """One output stream of the program."""

    text: str
    dropped_bytes: int = 0


class Findings(BaseModel):
    """The findings of a scan of one file."""

    name: str
    uri: str
    findings: tuple[str, ...]
    more: int
    not_scanned: str | None


class WorkspaceChanges(BaseModel):
    """Changes of the program in its copy of the workspace."""

    created: tuple[str, ...]
    changed: tuple[str, ...]
    deleted: tuple[str, ...]
    patch_uri: str | None


class RunPythonResult(ToolResult):
    """Result of ``run_python``."""

    ended: Literal["exited", "signalled", "timed_out", "out_of_memory", "limit"] | None = None
    exit_code: int | None = None
    stdout: OutputStream | None = None
    stderr: OutputStream | None = None
    value: str | None = None
    truncated: str | None = None
    """The part of the output that is here, and where all of it is; None if it is complete."""
    images: tuple[Link, ...] = ()
    artifacts: tuple[Link, ...] = ()
    findings: tuple[Findings, ...] = ()
    changes: WorkspaceChanges | None = None
    hidden: int = 0
    notes: tuple[str, ...] = ()
    usage: Usage | None = None


def _answer(outcome: Outcome) -> ToolAnswer:
    value = outcome.value if isinstance(outcome.value, dict) else {}
    last = value["value"] if isinstance(value.get("value"), str) else None
    notes = _notes(outcome, value)
    failed = outcome.ended != "exited" or outcome.code != 0
    fields = {
        "ended": outcome.ended,
        "exit_code": outcome.code,
        **{
            name: {"text": stream.text, "dropped_bytes": stream.dropped_bytes}
            for name, stream in (("stdout", outcome.stdout), ("stderr", outcome.stderr))
        },
        "value": last,
        "error": _error(value.get("error")),
        "notes": notes,
        "usage": asdict(outcome.usage),
    }
    texts = _texts(outcome, last, notes, failed=failed)
    return ToolAnswer(fields=fields, content=tuple(Text(text=text) for text in texts), failed=failed)


def _texts(outcome: Outcome, last: str | None, notes: list[str], *, failed: bool) -> list[str]:
    """Return the texts of a result; a failure's reason is first, as some clients show one block."""
    stdout, stderr = outcome.stdout.text, outcome.stderr.text
    errors = [f"[stderr]\n{stderr}"] if stderr else []
    value = [] if last is None else [f"[value]\n{last}"]
    remarks = [f"[{note}]" for note in notes]
    if not failed:
        return [*([stdout] if stdout else []), *errors, *value, *remarks]
    status = "" if outcome.code is None else f" {outcome.code}"
    ended = f"[ended: {outcome.ended}{status}]"
    # The reason is the first note.
    why = [f"{ended}\n{remarks.pop(0)}", *errors] if outcome.reason else [*errors, ended]
    return [*why, *([f"[stdout]\n{stdout}"] if stdout else []), *value, *remarks]


def _notes(outcome: Outcome, value: Mapping[str, Any]) -> list[str]:
    notes = [f"{outcome.reason} {_INSTEAD.get(outcome.ended, '')}".rstrip()] if outcome.reason else []
    notes += _not_collected(outcome.skipped)
    notes += [f"{problem[:1].upper()}{problem[1:]}." for problem in dict.fromkeys(outcome.problems)]
    if value.get("truncated") is True:
        notes.append("The value of the last expression was truncated. End with a part of it.")
    for name, stream in (("output", outcome.stdout), ("standard error", outcome.stderr)):
        if "\ufffd" in stream.text:
            notes.append(
                f"Bytes of {name} that are not UTF-8 are shown as \ufffd. Write binary data to a file in /output."
            )
    omitted = _count(value.get("figures_omitted"), MAX_FIGURES)
    if omitted is not None:
        notes.append(f"{omitted} more open figures are not shown. Close those you do not need.")
    if outcome.changes is not None:
        counts = outcome.changes.counts
        summary = ", ".join(f"{counts.get(kind, 0)} {kind}" for kind in ("created", "changed", "deleted"))
        notes.append(f"Workspace: {summary}; the files on the host are unchanged.")
    return notes


def _not_collected(skipped: Iterable[SkippedFile]) -> list[str]:
    notes = []
    for reason, group in groupby(skipped, key=lambda each: each.reason):
        names = [quoted(each.name) for each in group]
        more = f" and {len(names) - MAX_SKIPPED} more" if len(names) > MAX_SKIPPED else ""
        notes.append(f"{', '.join(names[:MAX_SKIPPED])}{more}: not collected, {reason}")
    return notes


def _error(error: Any) -> dict[str, Any] | None:
    """Read the error that the program's process reported; untrusted, so bounded."""
    if not isinstance(error, dict):
        return None
    return {
        "kind": str(error.get("type", ""))[:200],
        "message": str(error.get("message", ""))[:2000],
        "line": _count(error.get("line"), MAX_CODE),
    }


def _count(value: Any, most: int) -> int | None:
    """Return a number from the program's process if it is within bounds; a bool is none."""
    return value if type(value) is int and 0 < value <= most else None


TOOL = Tool(
    name="run_python",
    title="Run Python",
    description=(
        "Run a Python 3 program ({packages}) in a fresh sandbox. The last expression's value and open matplotlib "
        "figures come back. No packages can be installed; no state is kept between calls."
    ),
    arguments=RunPythonArguments,
    result=RunPythonResult,
    kind="python",
    answer=_answer,
    delivers=True,
    silent="[No output.]",
)
