"""The patches of CONTRIBUTING.md, each applied in a copy of the repository and tested there."""

import os
import re
import shutil
import subprocess  # noqa: TID251 - runs pytest and ruff on our own page
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.repo.files import ROOT, committed
from tests.repo.pages import blocks

_SECTION = re.compile(r"^## (Add an? [a-z ]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"^\+\+\+ b/(.+)$", re.MULTILINE)
_APPLY = re.compile(r"^git apply (examples/contributing/[a-z-]+\.patch)\n", re.MULTILINE)
FOLDER = "examples/contributing/"
EXAMPLES = {
    title: text for title, text in _SECTION.findall((ROOT / "CONTRIBUTING.md").read_text()) if "\ngit apply " in text
}
PYTHONPATH = ("", "server", "sandboxes", "profiles")
#: For some tests on a busy machine; they take five by themselves.
TIMEOUT_SECONDS = 240


def run(copy: Path, *arguments: str) -> None:
    """Run a program in the copy, which is imported from there; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(copy / part) for part in PYTHONPATH)}
    done = subprocess.run(arguments, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}{done.stderr}"


def git_apply(patch: str, copy: Path, *options: str) -> str:
    """Apply a patch, as a reader of the page would; return what git says against it."""
    command = ["git", "apply", *options]
    return subprocess.run(command, cwd=copy, input=patch, capture_output=True, text=True, check=False).stderr


def patched(patch: str, copy: Path) -> list[str]:
    """Apply a patch unless it has been applied; return its files."""
    if git_apply(patch, copy, "--reverse", "--check"):
        problem = git_apply(patch, copy)
        assert not problem, problem
    return _FILE.findall(patch)


def typed(text: str) -> tuple[str, str]:
    """Return the patch that a section applies, and the commands that it then gives."""
    (block,) = [block.text for block in blocks("CONTRIBUTING.md", text) if block.tag == "sh"]
    (patch,) = _APPLY.findall(block)
    return patch, _APPLY.sub("", block)


def test_there_are_examples_of_each_kind() -> None:
    """The control: none is passed over since its heading or its block changed, and every patch is used and linked."""
    assert list(EXAMPLES) == ["Add a tool", "Add a guard", "Add an attack", "Add an audit event"]
    patches = [typed(text)[0] for text in EXAMPLES.values()]
    assert sorted(patches) == [name for name in committed() if name.startswith(FOLDER)]
    assert [patch for patch, text in zip(patches, EXAMPLES.values(), strict=True) if f"]({patch})" not in text] == []


def test_a_guard_is_its_folder_and_one_line_elsewhere() -> None:
    """Of the product: no file beside the registry is touched, and that by one line."""
    parts = re.split(r"^diff --git ", (ROOT / FOLDER / "guard.patch").read_text(), flags=re.MULTILINE)
    (registry,) = [part for part in parts if "new file" not in part and part]
    assert registry.startswith("a/server/glovebox_server/guards/registry.py ")
    assert len(re.findall(r"^[+-](?![+-])", registry, re.MULTILINE)) == 1


@pytest.mark.parametrize(("context", "fits"), [("b", True), ("c", False)])
def test_a_patch_that_does_not_fit_fails(context: str, fits: bool, tmp_path: Path) -> None:
    """One that fits is the control: it is applied once, and found applied."""
    (tmp_path / "file").write_text("a\nb\na\n")
    patch = f"--- a/file\n+++ b/file\n@@ -2,2 +2,3 @@\n {context}\n+new\n a\n"
    for _ in range(2):
        with nullcontext() if fits else pytest.raises(AssertionError, match="patch does not apply"):
            assert patched(patch, tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == ("a\nb\nnew\na\n" if fits else "a\nb\na\n")


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_SECONDS)
@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_works_as_shown(title: str, tmp_path: Path) -> None:
    """Its patch applies, the linter is content, and the tests that it names pass."""
    for name in committed():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    run(tmp_path, "git", "init", "-q")  # what tests of the repository ask
    patch, tests = typed(EXAMPLES[title])
    # It may have been applied before: in a clone whose owner follows it, these tests are part of ``make check``.
    touched = [name for name in patched((ROOT / patch).read_text(), tmp_path) if name.endswith(".py")]
    for check in (("check",), ("format", "--check")):
        if touched:
            run(tmp_path, sys.executable, "-m", "ruff", *check, "-q", "--no-cache", *touched)
    assert "pytest" in tests
    run(tmp_path, "sh", "-c", tests.replace(".venv/bin/python", sys.executable))
