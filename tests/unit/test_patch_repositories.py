"""No patch of ours brings a repository of git's with it: git itself applies each, looks at every folder, runs nothing.

The control is the same attack as a patch that git made: then ``git status`` runs the attacker's program.
"""

import os
import subprocess  # noqa: TID251 - git itself is the judge
from collections.abc import Mapping
from pathlib import Path

import pytest

from _glovebox_guest.files import changes, git

CONFIG = """[core]
	repositoryformatversion = 0
	bare = false
	worktree = .
	fsmonitor = "touch {ran}; false"
"""
COMMON = "[core]\n\trepositoryformatversion = 1\n[extensions]\n\tworktreeConfig = true\n"
REPOSITORY = {"HEAD": "ref: refs/heads/main\n", "config": CONFIG, "objects/keep": "", "refs/keep": ""}
PLACES = ("", "docs", "docs/deep", "other")


def run(*words: str, cwd: Path, given: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run git in a folder, without anybody's settings."""
    own = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(["git", *words], cwd=cwd, input=given, env=own, capture_output=True, check=False)


def write(root: Path, files: Mapping[str, str], ran: Path) -> None:
    """Make these files below ``root``."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("{ran}", str(ran)))


def patched(
    tmp_path: Path, before: Mapping[str, str], after: Mapping[str, str], *, gone: tuple[str, ...] = ()
) -> tuple[Path, list[str], dict[str, str]]:
    """The workspace after ``git apply``, the paths in the patch, and what is in none, with the reason."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    write(source, before, tmp_path / "ran")
    original = changes.WorkspaceCopy(str(source), str(target), max_files=1000, max_bytes=1 << 20)
    for name in gone:
        (target / name).unlink()
    write(target, after, tmp_path / "ran")
    summary, patch = original.compare(1 << 20)
    if patch:
        done = run("apply", "--whitespace=nowarn", "-", cwd=source, given=patch)
        assert done.returncode == 0, done.stderr
    names = [line.split()[2].decode()[2:] for line in patch.splitlines() if line.startswith(b"diff --git ")]
    skipped = summary["skipped"]
    assert isinstance(skipped, list)
    return source, names, {each["name"]: each["reason"] for each in skipped}


def looked_at(root: Path) -> None:
    """What a person's shell or editor does in every folder."""
    for place in PLACES:
        if (root / place).is_dir():
            run("status", cwd=root / place)


def below(folder: str, files: Mapping[str, str]) -> dict[str, str]:
    """The same files in a folder."""
    return {f"{folder}/{name}": text for name, text in files.items()}


def test_the_control_git_runs_what_an_embedded_repository_names(tmp_path: Path) -> None:
    """The attack, with a patch that git made of the same files: it applies, and ``git status`` runs the program."""
    target = tmp_path / "target"
    (tmp_path / "empty").mkdir()
    write(target, below("docs", REPOSITORY), tmp_path / "ran")
    made = run("diff", "--no-index", "--binary", "empty", "target", cwd=tmp_path).stdout
    (tmp_path / "applied").mkdir()
    done = run("apply", "-p2", "-", cwd=tmp_path / "applied", given=made)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
    looked_at(tmp_path / "applied")
    assert (tmp_path / "ran").exists()


ATTACKS = [
    pytest.param({}, below("docs", REPOSITORY), id="whole"),
    pytest.param({}, REPOSITORY, id="the root"),
    pytest.param({}, below("docs/deep", REPOSITORY), id="deep"),
    pytest.param(below("docs", {"HEAD": REPOSITORY["HEAD"]}), below("docs", REPOSITORY), id="the rest of one"),
    pytest.param(
        below("docs", {name: text for name, text in REPOSITORY.items() if name != "HEAD"}),
        below("docs", {"HEAD": REPOSITORY["HEAD"]}),
        id="its HEAD",
    ),
    pytest.param(
        below("docs", {**REPOSITORY, "config": "[core]\n"}), below("docs", {"config": CONFIG}), id="its config"
    ),
    pytest.param(
        below("other", {"objects/keep": "", "refs/keep": "", "config": COMMON}),
        below(
            "docs",
            {"HEAD": REPOSITORY["HEAD"], "commondir": "../other\n", "config.worktree": CONFIG.replace("= 0", "= 1")},
        ),
        id="commondir",
    ),
]
BESIDE = {"beside/good.txt": "good\n"}


@pytest.mark.parametrize(("before", "after"), ATTACKS)
def test_a_repository_does_not_come_out_nor_is_one_made_whole(
    before: dict[str, str], after: dict[str, str], tmp_path: Path
) -> None:
    """Counting what lay there before; each file is named with the reason, and one beside it comes out."""
    root, names, skipped = patched(tmp_path, before, after | BESIDE)
    at_root = "HEAD" in after
    assert names == ([] if at_root else [*BESIDE])
    changed = {name for name in after if after[name] != before.get(name)} | ({*BESIDE} if at_root else set())
    assert {name for name, reason in skipped.items() if reason.startswith("not in the patch: git ")} == changed
    looked_at(root)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("before", "after"), ATTACKS)
def test_the_control_without_the_guard_each_of_them_runs_a_program(
    before: dict[str, str], after: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same patches, as they came out before: git applies them, and ``git status`` runs what their config names."""
    monkeypatch.setattr(git, "why_not", lambda *_: "")
    root, names, _ = patched(tmp_path, before, after | BESIDE)
    assert {*after} & {*names}
    looked_at(root)
    assert (tmp_path / "ran").exists()


def test_what_was_taken_away_in_the_copy_still_lies_on_the_host(tmp_path: Path) -> None:
    """A program removes empty folders, which no patch can say, so that they do not count: they do."""
    (tmp_path / "source/docs/objects").mkdir(parents=True)
    (tmp_path / "source/docs/refs").mkdir()
    (tmp_path / "target").mkdir()
    source, target = tmp_path / "source", tmp_path / "target"
    original = changes.WorkspaceCopy(str(source), str(target), max_files=100, max_bytes=1 << 20)
    (target / "docs/objects").rmdir()
    (target / "docs/refs").rmdir()
    write(target, {"docs/HEAD": REPOSITORY["HEAD"], "docs/config": CONFIG}, tmp_path / "ran")
    summary, patch = original.compare(1 << 20)
    assert not patch
    assert "takes its folder for a repository" in str(summary["skipped"])


@pytest.mark.parametrize(
    "name",
    [
        ".git/config", ".GIT/config", "a/.Git/config", ".git", ".git./config", ".git /config", "git~1/config",
        "GIT~1/config", ".git::$INDEX_ALLOCATION/config", "a\\.git\\config", ".gıt/config", ".g\u200cit/config",
        "\uff0egit/config", ".gi\ufe0ft/config", ".gitmodules", "a/.gitModules", "GITMOD~1", "gi7eba~2", ".hg/hgrc",
        "a/.svn/entries", ".jj/repo",
    ],
)  # fmt: skip
def test_what_git_obeys_by_name_is_known_in_every_spelling(name: str) -> None:
    """Whoever applies the patch may have a file system without case, or Windows, or macOS."""
    assert git.why_not(name, {}) == "git runs or obeys what lies there"


@pytest.mark.parametrize(
    "name",
    ["git/config", "a.git.txt", "gitignore", ".gitignore", "legit/x", "hg", "a~1", "HEAD.md", "head/x", "d/objects/x"],
)
def test_the_control_other_names_are_not_refused(name: str) -> None:
    """Only what git would obey: a folder called head is none of git's."""
    assert git.why_not(name, git.layout([name, "d/refs/y", "d/config"])) == ""


@pytest.mark.parametrize("name", ["HEAD", "d/head", "d/Head. ", "d\\HEAD", "\uff28EAD", "d/commondir", "COMMON~1"])
def test_the_file_that_makes_a_repository_is_never_brought(name: str) -> None:
    """Whatever lies beside it: the rest may come with another patch."""
    assert "repository" in git.why_not(name, {})


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("d/objects/x", ["d/HEAD"]),
        ("D/Refs/x", ["d/head"]),
        ("d/objects", ["d/commondir"]),
        ("d/config", ["d/HEAD", "d/objects", "d/refs"]),
        ("d/hooks/pre-commit", ["d/head", "D/OBJECTS", "d/Refs."]),
        ("d/deep/config.worktree", ["d\\HEAD", "d/commondir"]),
        ("anything", ["HEAD", "objects", "refs"]),
    ],
)
def test_where_that_file_lies_the_rest_is_not_brought(name: str, there: list[str]) -> None:
    """And nothing at all where a repository lies, however it is spelled; elsewhere it is (control)."""
    assert "repository" in git.why_not(name, git.layout(there))
    assert git.why_not(f"other/{name}", git.layout([each for each in there if "/" in each or "\\" in each])) == ""


def test_two_patches_that_do_not_know_of_each_other_make_none_together(tmp_path: Path) -> None:
    """Of two calls on one workspace, applied one after the other: one brings HEAD and config, one the rest."""
    root = tmp_path / "applied"
    root.mkdir()
    first = {"docs/HEAD": REPOSITORY["HEAD"], "docs/config": CONFIG, "one.txt": "1\n"}
    second = {"docs/objects/keep": "", "docs/refs/keep": "", "two.txt": "2\n"}
    for number, files in enumerate((first, second)):
        place = tmp_path / str(number)
        place.mkdir()
        made, _, _ = patched(place, {}, files)
        for path in made.rglob("*"):  # as if both had been applied here
            target = root / path.relative_to(made)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            else:
                target.write_text(path.read_text().replace(str(place), str(tmp_path)))
    assert (root / "one.txt").exists()
    assert (root / "two.txt").exists()
    looked_at(root)
    assert not (tmp_path / "ran").exists()
    (root / "docs/HEAD").write_text(REPOSITORY["HEAD"])  # the control: this alone was missing
    looked_at(root)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", [".gitattributes", "a/.GITATTRIBUTES", "gitatt~1", "GI7D29~4"])
def test_no_patch_carries_what_has_git_hand_files_to_programs(name: str) -> None:
    """Attributes name drivers, which git's config maps to programs; the control is an ordinary name."""
    assert "git runs or obeys" in git.why_not(name, {})
    assert git.why_not("attributes.txt", {}) == ""
