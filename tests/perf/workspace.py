"""A workspace of 100,000 files, and what a person would type on the host instead of the three tools that read it."""

import shutil
import subprocess  # noqa: TID251 - the host's commands are what is compared with
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import Client
from tests.perf import clients

FILES = 100_000
FOLDERS = 1000  # a hundred files in each: a large repository has a few thousand, most of them smaller
LINES = 12  # of each file, some 500 bytes in all
NEEDLE = "needle in a haystack"
EVERY = 10_000  # files between two that have the needle: few matches, so that searching is what takes the time
SECONDS = 120  # for one command of the host
PICKED = "folder0500/file50.txt"


def build(directory: Path, files: int = FILES) -> None:
    """Write the files; takes some seconds."""
    line = "the quick brown fox jumps over the lazy dog\n"
    for folder in range(FOLDERS):
        (directory / f"folder{folder:04d}").mkdir(mode=0o755)
    for number in range(files):
        path = directory / f"folder{number % FOLDERS:04d}" / f"file{number // FOLDERS:02d}.txt"
        path.write_text(f"{number}\n" + line * LINES + (f"{NEEDLE}\n" if number % EVERY == 0 else ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The same thing asked of a tool and of the host."""

    tool: str
    arguments: Mapping[str, Any]
    command: tuple[str, ...]  # run in the workspace
    key: str  # what shows in the tool's result that all of it was looked at
    expected: Any


def questions(files: int = FILES) -> dict[str, Question]:
    """List, search and read, by row. The commands show what the tools show, and skip nothing either."""
    searcher = ("rg", "--no-ignore", "--hidden", "-n", "-e") if shutil.which("rg") else ("grep", "-rn", "-e")
    return {
        "list": Question(
            tool="list_workspace_files",
            arguments={},
            command=("find", ".", "-printf", r"%P %y %s %T+\n"),
            key="total",
            expected=files + FOLDERS,
        ),
        "search": Question(
            tool="search_workspace",
            arguments={"pattern": NEEDLE},
            command=(*searcher, NEEDLE, "."),
            key="searched",
            expected=files,
        ),
        "read": Question(
            tool="read_workspace_file",
            arguments={"path": PICKED},
            command=("cat", PICKED),
            key="total_lines",
            expected=LINES + 1,
        ),
    }


async def asked(client: Client, question: Question) -> float:
    """Milliseconds of one whole call."""
    began = time.perf_counter()
    found = await clients.answered(client, question.tool, dict(question.arguments), "bubblewrap")
    spent = (time.perf_counter() - began) * 1000
    if found.get(question.key) != question.expected:
        told = f"{question.key} is {found.get(question.key)}, not {question.expected}; {found.get('truncated')}"
        raise RuntimeError(f"{question.tool} did less than the host's command: {told}")
    return spent


def on_host(question: Question, workspace: Path) -> float:
    """Milliseconds of the host's command, its output read."""
    began = time.perf_counter()
    subprocess.run(question.command, cwd=workspace, capture_output=True, check=True, timeout=SECONDS)
    return (time.perf_counter() - began) * 1000
