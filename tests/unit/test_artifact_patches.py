"""A patch is marked by the paths it touches, however it is cut, spelled or flooded; it is never applied."""

import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.test_workspace_changes import ROOM, write

from _glovebox_guest.files import changes, overlay
from glovebox_server.artifacts.patches import MAX_NAMES, PatchPaths


def marks(patch: bytes, size: int = 1 << 20) -> str:
    """Everything that is said of a patch, given in pieces of this size."""
    paths = PatchPaths()
    for at in range(0, len(patch), size):
        paths.feed(patch[at : at + size])
    return "\n".join(paths.risks())


def ours(*names: str, content: bytes = b"x\n") -> bytes:
    """The patch of a workspace in which these files were made."""
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "source"), Path(directory, "target")
        source.mkdir()
        target.mkdir()
        original = overlay.copy(str(source), str(target), max_files=2000, max_bytes=ROOM)
        write(target, dict.fromkeys(names, (content, False)))
        summary, patch = changes.compare(original, str(source), str(target), max_files=2000, room=ROOM)
        assert summary["skipped"] == []
    return patch


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (".vscode/tasks.json", "editors run tasks"),
        (".envrc", "the shell runs it"),
        ("tests/conftest.py", "test and task runners import it"),
        ("CLAUDE.md", "agents read it"),
        ("docs/AGENTS.md", "agents read it"),
        (".cursor/rules/x.mdc", "agents start servers"),
        (".cursorrules", "agents start servers"),
        (".mcp.json", "agents start servers"),
        ("web/package.json", "build tools"),
        (".github/workflows/ci.yml", "continuous integration"),
        (".gitlab-ci.yml", "continuous integration"),
        ("Makefile", "build tools"),
        ("lib/evil.pth", "Python runs lines"),
        ("sitecustomize.py", "Python runs it at start"),
        (".githooks/pre-commit", "git runs or obeys"),
        ("hooks/post-merge", "git runs it as a hook"),
        (".pre-commit-config.yaml", "git runs it as a hook"),
        ("setup.py", "build tools"),
        (".devcontainer/devcontainer.json", "editors run tasks"),
        ('a "quoted"/.envrc', "the shell runs it"),
        ("ü ß/.envrc", "the shell runs it"),
    ],
)
@pytest.mark.parametrize("content", [b"x\n", b"\0binary", b""])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_what_tools_run_or_agents_obey_is_marked_by_path(name: str, why: str, content: bytes, size: int) -> None:
    """As hunks, in git's binary form, or as a name alone; in pieces of any size."""
    assert why in marks(ours("src/main.txt", name, content=content), size)


def test_the_control_a_patch_of_source_files_has_no_mark() -> None:
    """Else each patch would be marked, and nobody would look."""
    assert marks(ours("src/main.py", "README.md", "web/app.js", "data.csv", "HEADER", "docs/commondirs.md")) == ""


def test_a_flood_of_one_kind_hides_no_other() -> None:
    """A thousand tests' settings, one hook among them: each reason is said once, with the first few and a number."""
    said = marks(ours(*(f"{number:04}/conftest.py" for number in range(1000)), "zzz/.envrc")).splitlines()
    assert len(said) == 2
    assert said[0].startswith("it touches '0000/conftest.py', '0001/conftest.py', ")
    assert f"and {1000 - MAX_NAMES} more: test and task runners import it" in said[0]
    assert said[1] == "it touches 'zzz/.envrc': the shell runs it on entering"


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        ("--- /dev/null\n+++ b/.envrc\n@@ -0,0 +1 @@\n+x\n", "'.envrc': the shell"),
        ("--- .envrc.orig\n+++ .envrc\t2026-11-20 00:00:00\n", "the shell"),
        ("diff --git a/x b/Makefile\nsimilarity index 100%\nrename from x\nrename to Makefile\n", "'Makefile': build"),
        ("diff --git a/x b/x\ncopy from x\ncopy to .git/hooks/pre-commit\n", "git runs or obeys"),
        ('diff --git "a/\\056envrc" "b/\\056envrc"\nnew file mode 100644\n', "'.envrc': the shell"),
        ("Index: conftest.py\n=====\n", "'conftest.py': test"),
        ("diff --git a/x b/x\r\nnew file mode 120000\r\n", "'x': it makes a symbolic link"),
    ],
)
def test_patches_that_a_program_wrote_itself_are_looked_at_too(patch: str, why: str) -> None:
    """In the spellings that ``git apply`` and ``patch`` take."""
    assert why in marks(patch.encode())


@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
def test_a_line_without_an_end_takes_no_memory_and_hides_nothing_behind_it(size: int) -> None:
    """Only its beginning is looked at, and the next line is a line again."""
    assert marks(b"+++ b/" + b"x" * 100_000 + b"/.envrc\n+++ b/CLAUDE.md\n", size) == (
        "it touches 'CLAUDE.md': agents read it as instructions"
    )


@pytest.mark.parametrize(
    ("line", "more"),
    [
        (b"+++ %06d\n", True),
        (b"+++ b/%06d" + b'"\\' * 500 + b"\n", True),
        (b"diff --git a/%06d" + b"/a" * 500 + b"\n", True),
        (b"\n%06d", False),
    ],
)
def test_a_patch_that_is_made_to_be_slow_costs_seconds_at_most_and_says_so(*, line: bytes, more: bool) -> None:
    """32 MiB of the worst lines; a patch of 20,000 files of ours is looked at to its end (control)."""
    count = 32 * 1024 * 1024 // len(line)
    patch = b"".join(line % (number % 1_000_000) for number in range(count))
    began = time.process_time()
    said = marks(patch, 256 * 1024)
    assert time.process_time() - began < 20
    assert ("not all of its paths were looked at" in said) is more
    names = (f"src/package/module_{number:05}.txt" for number in range(20_000))
    ours = "".join(f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n" for name in names)
    assert marks(ours.encode(), 256 * 1024) == ""


def test_lines_of_files_are_no_paths() -> None:
    """What a hunk adds has a sign in front of it."""
    assert marks(ours("a.txt", content=b"diff --git a/.envrc b/.envrc\nrename to .envrc\nIndex: .envrc\n")) == ""


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.binary(max_size=20), st.sampled_from([b"diff --git ", b"+++ ", b'"a/', b"\\", b"\n"]))),
    st.integers(1, 40),
)
def test_any_bytes_are_taken_and_the_words_are_plain(pieces: list[bytes], size: int) -> None:
    """However they are cut; what is said can be printed anywhere."""
    patch = b"".join(pieces)
    assert marks(patch, size) == marks(patch)
    assert marks(patch).replace("\n", "").isprintable()
