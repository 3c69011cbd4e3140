"""The examples of CONTRIBUTING.md, each made in a copy of the repository and tested there."""

import os
import re
import shutil
import subprocess  # noqa: TID251 - runs git and pytest on our own page
import sys
from pathlib import Path

import pytest
from tests.repo.files import ROOT, committed
from tests.repo.pages import blocks

_EXAMPLE = re.compile(r"^## (An? [a-z ]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_NEW = re.compile(r"^`([^`]+)`, new:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = {
    title: text for title, text in _EXAMPLE.findall((ROOT / "CONTRIBUTING.md").read_text()) if "```diff" in text
}
PYTHONPATH = ("", "server", "sandboxes", "profiles")
#: For some tests on a busy machine; they take five by themselves.
TIMEOUT_SECONDS = 240


def run(copy: Path, *arguments: str, given: str | None = None) -> None:
    """Run a program in the copy, which is imported from there; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(copy / part) for part in PYTHONPATH)}
    done = subprocess.run(
        arguments, cwd=copy, env=environment, input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}{done.stderr}"


def made(text: str, copy: Path) -> list[str]:
    """Make the change that an example shows, its new files and its patches; returns the Python files it touches."""
    touched = []
    for name, content in _NEW.findall(text):
        assert not (copy / name).exists(), f"{name} is there already"
        (copy / name).write_text(content)
        touched.append(name)
    for block in blocks("CONTRIBUTING.md", text):
        if block.tag == "diff":
            run(copy, "git", "apply", "--unidiff-zero", given=block.text)
            touched += re.findall(r"^\+\+\+ b/(.*)$", block.text, re.MULTILINE)
    return [name for name in touched if name.endswith(".py")]


def test_there_are_examples_of_each_kind() -> None:
    """The control: none is passed over since its heading or its blocks changed."""
    assert list(EXAMPLES) == ["A tool", "An attack", "An audit event"]


@pytest.mark.timeout(TIMEOUT_SECONDS)
@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_works_as_shown(title: str, tmp_path: Path) -> None:
    """Its patch applies, the linter is content, and the tests that it names pass."""
    for name in committed():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    run(tmp_path, "git", "init", "-q")  # what tests of the repository ask, and where the patches belong
    touched = made(EXAMPLES[title], tmp_path)
    for check in (("check",), ("format", "--check")):
        if touched:
            run(tmp_path, sys.executable, "-m", "ruff", *check, "-q", "--no-cache", *touched)
    (tests,) = [block.text for block in blocks("CONTRIBUTING.md", EXAMPLES[title]) if block.tag == "sh"]
    run(tmp_path, "sh", "-c", tests.replace(".venv/bin/python", sys.executable))
