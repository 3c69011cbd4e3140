"""A patch is marked by the paths it touches, however it is spelled or flooded; it is never applied."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fixtures.draws import draws
from tests.property.test_workspace_changes import ROOM, write
from tests.unit.test_patch_repositories import run

from _glovebox_guest.files import changes
from glovebox_server.artifacts import names
from glovebox_server.artifacts.diff_form import WorkBudget
from glovebox_server.artifacts.names import MAX_NAMES, patch_risks, reasons

CHANGES = "it changes files when it is applied"


def marks(patch: bytes) -> str:
    """Everything that is said of a patch, but for what is said of each."""
    *said, last = patch_risks(patch, WorkBudget()) or (CHANGES,)
    assert last == CHANGES
    return "\n".join(said)


def ours(*names: str, content: bytes = b"x\n") -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "source"), Path(directory, "target")
        source.mkdir()
        target.mkdir()
        original = changes.WorkspaceCopy(str(source), str(target), max_files=2000, max_bytes=ROOM)
        write(target, dict.fromkeys(names, (content, False)))
        summary, patch = original.compare(ROOM)
        assert summary["skipped"] == []
    return patch


TOUCHED = {
    "editors run tasks": (".vscode/tasks.json", ".devcontainer/devcontainer.json"),
    "the shell runs it": (".envrc", 'a "quoted"/.envrc', "ü ß/.envrc"),
    "test and task runners import it": ("tests/conftest.py",),
    "agents read it": ("CLAUDE.md", "docs/AGENTS.md"),
    "agents start servers": (".cursor/rules/x.mdc", ".cursorrules", ".mcp.json"),
    "build tools": ("web/package.json", "Makefile", "setup.py"),
    "continuous integration": (".github/workflows/ci.yml", ".gitlab-ci.yml"),
    "Python runs lines": ("lib/evil.pth",),
    "Python runs it at start": ("sitecustomize.py",),
    "git runs or obeys": (".githooks/pre-commit",),
    "git runs it as a hook": ("hooks/post-merge", ".pre-commit-config.yaml"),
}


@pytest.mark.parametrize(("name", "why"), [(name, why) for why, names in TOUCHED.items() for name in names])
@pytest.mark.parametrize("content", [b"x\n", b"\0binary", b""])
def test_what_tools_run_or_agents_obey_is_marked_by_path(name: str, why: str, content: bytes) -> None:
    assert why in marks(ours("src/main.txt", name, content=content))


def test_a_flood_of_one_kind_hides_no_other() -> None:
    """A thousand tests' settings, one hook among them: each is said once. The control: source files have none."""
    said = marks(ours(*(f"{number:04}/conftest.py" for number in range(1000)), "zzz/.envrc")).splitlines()
    assert len(said) == 2
    assert said[0].startswith("it touches '0000/conftest.py', '0001/conftest.py', ")
    assert f"and {1000 - MAX_NAMES} more: test and task runners import it" in said[0]
    assert said[1] == "it touches 'zzz/.envrc': the shell runs it on entering"
    assert patch_risks(b"", WorkBudget()) == ()
    assert marks(ours("src/main.py", "README.md", "web/app.js", "data.csv", "HEADER", "docs/commondirs.md")) == ""


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


def _literal(content: bytes) -> str:
    ids = f"{'0' * 40}..{changes._blob(content)}"
    return f"index {ids}\nGIT binary patch\n{changes._literal(content).decode()}"


OBEYED = "agents read it as instructions"
LINK = "it makes a symbolic link or a submodule"
UNREAD = "it cannot be read in full"
TEXT = "@@ -0,0 +1 @@\n+obey me\n"
BINARY = "new file mode 100644\n" + _literal(b"obey me\n")
SUBMODULE = f"@@ -0,0 +1 @@\n+Subproject commit {'1' * 40}\n"
LONG = "b" * 9000
IDS = f"{'1' * 40}..{'2' * 40}"
CHANGED = f"diff --git a/l b/l\nindex {IDS} 100644\n--- a/l\n+++ b/l\n@@ -1 +1 @@\n-a\n+b\n"


@pytest.mark.parametrize(
    ("patch", "made", "why"),
    [
        (f"diff --git a/CLAUDE.md b/CLAUDE.md\n{BINARY}", "CLAUDE.md", OBEYED),
        (f"diff --git a\t/CLAUDE.md b\t/CLAUDE.md\n{BINARY}", "CLAUDE.md", OBEYED),
        (f'diff --git "a\t/CLAUDE.md" "b\t/CLAUDE.md"\n{BINARY}', "CLAUDE.md", OBEYED),
        (f'diff --git "a\\011/CLAUDE.md" "b\\011/CLAUDE.md"\n{BINARY}', "CLAUDE.md", OBEYED),
        (f'diff --git "a/\\103LAUDE.md" "b/\\103LAUDE.md" \n{BINARY}', "CLAUDE.md", OBEYED),
        (f"diff --git old/CLAUDE.md n/CLAUDE.md\n{BINARY}", "CLAUDE.md", OBEYED),
        ("diff --git a/n b/n\nsimilarity index 100%\nrename old n\nrename new CLAUDE.md\n", "CLAUDE.md", OBEYED),
        ("diff --git a/n b/n\nsimilarity index 100%\nrename from n\nrename to \t/CLAUDE.md\n", "\t/CLAUDE.md", OBEYED),
        (f"--- /dev/null\n+++ b/CLAUDE.md 2026-11-20 00:00:00 +0000\n{TEXT}", "CLAUDE.md", OBEYED),
        (f"--- /dev/null\n+++ {LONG}/CLAUDE.md\t{'x' * 600_000}\n{TEXT}", "CLAUDE.md", UNREAD),
        (f"diff --git {LONG}/CLAUDE.md {LONG}/CLAUDE.md\n{BINARY}", "CLAUDE.md", UNREAD),
        *(
            (f"diff --git a/l b/l\nnew file mode {mode}\n--- /dev/null\n+++ b/l\n{TEXT}", "l", LINK)
            for mode in ("120000", "0120000", "00120000", " 120000")
        ),
        (f"diff --git a/s b/s\nnew file mode 0160000\n--- /dev/null\n+++ b/s\n{SUBMODULE}", "s", LINK),
        (f"diff --git a/m.so b/m.so\n{BINARY}", "m.so", "'m.so': it is compiled code"),
        (f"diff --git a/m.pyc b/m.pyc\n{BINARY}", "m.pyc", "'m.pyc': it is compiled code"),
        ("diff --git a/n b/n\nold mode 100644\nnew mode 100755\n", "n", "'n': it may be run as a program"),
    ],
)  # fmt: skip
def test_what_git_makes_of_an_odd_spelling_is_marked(*, tmp_path: Path, patch: str, made: str, why: str) -> None:
    """The program itself makes the file (control), and the patch says what it is, or that it cannot be read."""
    run("init", "-q", ".", cwd=tmp_path)
    (tmp_path / "n").write_text("obey me\n")
    applied = run("apply", "-", cwd=tmp_path, given=patch.encode())
    assert applied.returncode == 0, applied.stderr
    assert os.path.lexists(tmp_path / made)
    assert why in marks(patch.encode())


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        ("  --- /dev/null\n  +++ b/CLAUDE.md\n", OBEYED),
        ("*** a/CLAUDE.md\n--- x\n***************\n", OBEYED),
        ("--- a/\\8\n+++ b/CLAUDE.md\n", OBEYED),
        ("Content-Transfer-Encoding: base64\n", UNREAD),
        ('Content-Type: text/plain; charset="utf-7"\n', UNREAD),
        (CHANGED.replace("100644", "120000"), UNREAD),
    ],
)
def test_what_only_other_programs_take_apart_is_marked_too(patch: str, why: str) -> None:
    """patch(1) takes indented and context patches, ``git am`` encoded ones; git's own form has no mark (control)."""
    assert why in marks(patch.encode())
    assert marks(CHANGED.encode()) == ""


def test_a_line_without_an_end_hides_nothing_behind_it() -> None:
    """Only its beginning is looked at, which is said, and the next line is a line again."""
    assert marks(b"+++ b/" + b"x" * 100_000 + b"/.envrc\n+++ b/CLAUDE.md\n").splitlines() == [
        "it touches 'CLAUDE.md': agents read it as instructions", "it cannot be read in full: look at what it makes",
    ]  # fmt: skip
    assert marks(CHANGED.encode().replace(b"+b\n", b"+" * 100_000 + b"\n")) == ""


class Counted:
    """Counts the line ends and characters that something is asked to look at, and asks."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self._real, self.lines, self.size = real, 0, 0

    def __call__(self, text: Any) -> Any:
        self.size += len(text)
        self.lines += text.count(b"\n") if isinstance(text, bytes) else 0
        return self._real(text)

    finditer = __call__


@pytest.mark.long
@pytest.mark.parametrize(
    "line",
    [
        b"\n", b"X\n", b"\n%06d", b"- X" * 400 + b"\n", b"+++ %06d\n", b"+++ b/%06d" + b'"\\' * 500 + b"\n",
        b"diff --git a/%06d" + b"/a" * 500 + b"\n", b"@@ -1 +1 @@ %06d\n-\n+\n",
        b"diff --git a/%06d b/%06d\nold mode 100644\nnew mode 100755\n",
    ],
)  # fmt: skip
def test_all_patches_of_a_call_are_charged_by_byte_and_line(monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    """However many files a call makes of the worst lines, the same is looked at; each beyond it says so."""
    times, count = line.count(b"%"), 8 * 1024 * 1024 // len(line)
    patch = b"".join(line % ((number % 1_000_000,) * times) for number in range(count))
    scanned, looked_up = Counted(names._LINE.finditer), Counted(reasons)
    monkeypatch.setattr(names, "_LINE", scanned)
    monkeypatch.setattr(names, "reasons", looked_up)
    budget = WorkBudget()
    for _ in range(8):
        said = patch_risks(patch, budget)
    assert "it was not read in full: not all of its paths were looked at" in said
    assert scanned.lines < 1 << 22
    assert looked_up.size < 3 << 20


@pytest.mark.long
@pytest.mark.parametrize("line", [b"new mode 1\n", b"--- " + b"a " * 540 + b"\n", b"--- " + b"\\ " * 540 + b"\n"])
def test_a_line_is_charged_though_it_names_nothing_new(line: bytes) -> None:
    """Taking it apart costs as much as looking a name up; the control is a thousandth of it."""
    count = 8 * 1024 * 1024 // len(line)
    assert "it was not read in full: not all of its paths were looked at" in patch_risks(line * count, WorkBudget())
    assert UNREAD in "\n".join(patch_risks(line * (count // 1000), WorkBudget()))


def test_twenty_thousand_files_of_ours_are_read_in_full() -> None:
    """Control of the bound above, as is a large text of long lines."""
    names = (f"src/package/module_{number:05}.txt" for number in range(20_000))
    ours = "".join(CHANGED.replace("a/l", f"a/{name}").replace("b/l", f"b/{name}") for name in names)
    assert marks(ours.encode()) == ""
    text = CHANGED.replace("+1 @@", "+1,400001 @@") + f"+{'x' * 79}\n" * 400_000
    assert marks(text.encode()) == ""


def test_lines_of_files_are_no_paths_and_names_in_quotes_are_bytes() -> None:
    """What a hunk adds has a sign before it; characters that stand for others are not lost among escapes."""
    assert marks(ours("a.txt", content=b"diff --git a/.envrc b/.envrc\nrename to .envrc\nIndex: .envrc\n")) == ""
    name = '\\"/\uff2dakefile"'
    assert "build tools" in marks(CHANGED.replace("a/l", f'"a/{name}').replace("b/l", f'"b/{name}').encode())


def _whole(head: str, content: str = "@@ -0,0 +1 @@\n+x\n") -> str:
    return f"diff --git a/n b/n\n{head}{content}"


OURS = f"new file mode 100644\nindex {'0' * 40}..{'1' * 40}\n--- /dev/null\n+++ b/n\n"
AS_IT_IS = f"index {IDS} 100644\n--- a/n\n+++ b/n\n"


@pytest.mark.parametrize(
    "patch",
    [
        _whole(OURS),
        _whole(OURS, "@@ -0,0 +1,2 @@\n+x\n+--- /dev/null\n\\ No newline at end of file\n") + CHANGED,
        _whole(AS_IT_IS, "@@ -1,2 +1,2 @@\n-a\n+b\n c\n@@ -9 +9,0 @@\n-z\n"),
        _whole("old mode 100644\nnew mode 100644\n" + AS_IT_IS.replace(" 100644", ""), "@@ -1 +1 @@\n-a\n+b\n"),
        _whole(
            f"deleted file mode 100644\nindex {'1' * 40}..{'0' * 40}\n--- a/n\n+++ /dev/null\n", "@@ -1 +0,0 @@\n-x\n"
        ),
        _whole(f"new file mode 100644\nindex {'0' * 40}..{'1' * 40}\n", ""),
        _whole("new file mode 100644\n" + _literal(b"obey me\n"), "") + CHANGED,
        CHANGED.replace("a/l", "a/my file").replace("b/l\n@", "b/my file\t\n@").replace("b/l", "b/my file")
        .replace("--- a/my file", "--- a/my file\t"),
        CHANGED.replace("a/l", "a/köln").replace("b/l", "b/köln"),
        CHANGED.replace("a/l", '"a/k\\"ln"').replace("b/l", '"b/k\\"ln"'),
        "",
    ],
)  # fmt: skip
def test_what_an_overlay_writes_can_be_read_in_full(patch: str) -> None:
    """In every part of its form: control of the refusals below."""
    assert marks(patch.encode()) == ""


@pytest.mark.parametrize(
    "patch",
    [
        "--- /dev/null\n+++ b/Makefile\0junk\n" + TEXT,
        "diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to conftest.py\0j\n",
        "diff --git a/Makefile b/Documentation.txt\n--- /dev/null\n+++ /dev/null\n" + TEXT,
        "diff --git a/Makefile b/Documentation.txt\nnew file mode 100644\n--- /dev/null\n" + TEXT,
        "--- a/n\n+++ b/n\n@@ -1 +1 @@\n-real.txt\n\\ No newline at end\n+/bin/sh\n\\ No newline at end\n",
        _whole(AS_IT_IS.replace(" 100644", "")),
        _whole(AS_IT_IS.replace("a/n", "a/m")),
        _whole(AS_IT_IS.replace("b/n", "b/m")),
        _whole(OURS.replace("b/n", "b/n\r")),
        _whole(OURS.replace("b/n", "b/n\t2026-11-20")),
        _whole(OURS.replace("100644", "0100644")),
        _whole(OURS.replace("/dev/null", "a/n")),
        _whole(OURS + "index 1..2\n"),
        _whole(OURS.replace("index", "x")),
        _whole(OURS.replace("0" * 40, "3" * 40)),
        _whole(OURS.replace("0" * 40, "0" * 7)),
        _whole(OURS.replace("100644", "120000")),
        _whole(AS_IT_IS.replace("2" * 40, "0" * 40)),
        CHANGED.replace("a/l", '"a/k\\303\\266ln"').replace("b/l", '"b/k\\303\\266ln"'),
        _whole(f"index {IDS} 100644\nBinary files a/n and b/n differ\n", ""),
        _whole("new file mode 100644\n" + _literal(b"obey me\n") + _literal(b"").partition("patch\n")[2], ""),
        _whole(OURS, ""),
        _whole(OURS, "@@ -0,0 +1,2 @@\n+x\n"),
        _whole(OURS, "@@ -0,0 +1 @@\n+x\n+y\n"),
        _whole(OURS, "@@ -0,0 +1 @@\n+x\n--- /dev/null\n+++ b/Makefile\n@@ -0,0 +1 @@\n+x\n"),
        _whole(OURS, "@@ -0,0 +1 @@\n+x\nrename to Makefile\n"),
        _whole(OURS, "@@ -0,0 +1 @@\n+x"),
        _whole(OURS, "@@ -0,0 +0,0 @@\n"),
        _whole(f"index {IDS}\n"),
        _whole(""),
        "\n" + CHANGED,
        "From: a\n\n" + CHANGED,
        CHANGED + "-- \n2.39.5\n",
        CHANGED.replace("a/l", "a/./l").replace("b/l", "b/./l"),
        CHANGED.replace("a/l", "a/l ").replace("b/l", "b/l "),
        CHANGED.replace("a/l", '"a/l\\000x"').replace("b/l", '"b/l\\000x"'),
        CHANGED.replace("a/l", "c/l").replace("b/l", "w/l"),
        "literal 3\n" + CHANGED,
        _whole("new file mode 100644\n" + _literal(b"obey me\n").rstrip("\n") + "\n", ""),
        _whole("new file mode 100644\n" + _literal(b"obey me\n").replace("literal", "+++ b/Makefile\nliteral"), ""),
    ],
)  # fmt: skip
def test_what_readers_may_read_differently_cannot_be_read_in_full(patch: str) -> None:
    """Found by attacks, and the nearest neighbours of what git writes: whatever is not that is marked, not imitated."""
    assert UNREAD in marks(patch.encode())


@pytest.mark.parametrize("how", ["copy", "rename"])
def test_a_copy_says_whose_it_is_and_not_what(tmp_path: Path, how: str) -> None:
    """A link or a program comes without a mode: no overlay writes such a patch, and it is marked as a whole."""
    silent = f"diff --git a/n b/m\nsimilarity index 100%\n{how} from n\n{how} to m\n"
    assert UNREAD in marks(silent.encode())
    (tmp_path / "n").symlink_to("x")
    assert run("apply", "-", cwd=tmp_path, given=silent.encode()).returncode == 0
    assert (tmp_path / "m").is_symlink()


def test_a_patch_of_ours_changes_no_link_that_lies_there_meanwhile(tmp_path: Path) -> None:
    """It says what kind each file was; without that git changes where the link leads (control)."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    (source / "n").write_text("real.txt")
    original = changes.WorkspaceCopy(str(source), str(target), max_files=9, max_bytes=ROOM)
    (target / "n").write_text("/bin/sh")
    _, patch = original.compare(ROOM)
    assert marks(patch) == ""
    (source / "n").unlink()
    (source / "n").symlink_to("real.txt")
    assert b"wrong type" in run("apply", "-", cwd=source, given=patch).stderr
    silent = patch.replace(b" 100644\n", b"\n")
    assert UNREAD in marks(silent)
    assert run("apply", "-", cwd=source, given=silent).returncode == 0
    assert str((source / "n").readlink()) == "/bin/sh"


@draws(200)
@example([CHANGED.encode(), b"\\\n"])
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=20),
            st.sampled_from([b"diff --git ", b"+++ ", b'"a/', b"\\", b"\n", CHANGED.encode(), b"@@ -1 +1 @@\n-\n+\n"]),
        )
    )
)
def test_any_bytes_are_taken_and_the_words_are_plain(pieces: list[bytes]) -> None:
    assert marks(b"".join(pieces)).replace("\n", "").isprintable()
