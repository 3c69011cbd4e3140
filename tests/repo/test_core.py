"""The core stays small enough for one person, and the diagram of its README is that of its table."""

import re
from pathlib import Path

from tests.repo.files import ROOT, python_files

README = ROOT / "server/glovebox_server/core/README.md"
CONTRACTS = ("sandboxes/glovebox_sandboxes/contract/", "profiles/glovebox_profiles/model.py")
MOST_FILES, MOST_LINES = 25, 6_000
ONE_SCREEN = 60
_ROW = re.compile(r"^\| (\w+) \| (\w+) \| (\w+) \|", re.MULTILINE)


def draw(text: str) -> str:
    """Return the diagram of the table of states in a page."""
    rows = [row for row in _ROW.findall(text) if row[0] != "state"]
    ends = {"start": "[*]", "end": "[*]"}
    lines = (f"    {ends.get(state, state)} --> {ends.get(then, then)}: {event}" for state, event, then in rows)
    return "\n".join(("```mermaid", "stateDiagram-v2", *lines, "```"))


def test_the_diagram_is_that_of_the_table() -> None:
    """One that differs is replaced by what ``draw`` returns."""
    text = README.read_text()
    assert draw(text) in text
    assert draw(text.replace("| waiting | turn |", "| waiting | place |")) not in text


def test_the_core_fits_into_one_head() -> None:
    """With the contracts that it needs; and its README onto one screen."""
    core = [text for name, text in python_files("server", "sandboxes", "profiles") if _is_core(name)]
    assert len(core) <= MOST_FILES
    assert sum(len(text.splitlines()) for text in core) <= MOST_LINES
    assert len(README.read_text().splitlines()) <= ONE_SCREEN


def _is_core(name: str) -> bool:
    return "core" in Path(name).parts[:-1] or name.startswith(CONTRACTS)
