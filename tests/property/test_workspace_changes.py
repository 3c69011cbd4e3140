"""The patch of a changed workspace, held to git: git applies it, and then both trees are the same."""

import os
import shutil
import subprocess  # noqa: TID251 - git itself is the judge
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fixtures.draws import draws

from _glovebox_guest.files import changes

ROOM = 1 << 20
_NAMES = st.sampled_from(["a", "b c", "d/e", 'q"x', "d/f\\g", "ü/ß", "z.bin", "-n", "a.orig"])
_TEXTS = st.lists(st.sampled_from([b"a\n", b"b\n", b"\n", b"\r\n", b"c\x0cd\n"]), max_size=25).map(b"".join)
_ENDLESS = st.builds(lambda text: text + b"no end", _TEXTS)
_CONTENTS = st.one_of(_TEXTS, _ENDLESS, st.binary())
_TREES = st.dictionaries(_NAMES, st.tuples(_CONTENTS, st.booleans()), max_size=6)
Tree = Mapping[str, tuple[bytes, bool]]


def write(root: Path, tree: Tree) -> None:
    """Make these files below ``root``."""
    for name, (content, runs) in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755 if runs else 0o644)


def read(root: Path) -> Tree:
    """What is there."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): (path.read_bytes(), bool(path.stat().st_mode & 0o100)) for path in files}


def require_applied(before: Tree, after: Tree) -> None:
    """Have git apply the patch of these changes."""
    with tempfile.TemporaryDirectory() as directory:
        source, target = Path(directory, "source"), Path(directory, "target")
        source.mkdir()
        target.mkdir()
        write(source, before)
        original = changes.WorkspaceCopy(str(source), str(target), max_files=100, max_bytes=ROOM)
        assert read(target) == before
        for name in before.keys() - after.keys():
            (target / name).unlink()
        write(target, after)
        summary, patch = original.compare(ROOM)
        assert summary["skipped"] == []
        assert bool(patch) == (before != after)
        if patch:
            git = [shutil.which("git") or "git", "apply", "--whitespace=nowarn", "-"]
            done = subprocess.run(git, input=patch, cwd=source, capture_output=True, check=False)
            assert done.returncode == 0, (done.stderr, patch)
        assert read(source) == after


@draws(60)
@given(_TREES, _TREES)
def test_git_applies_every_patch_and_gets_what_the_program_left(before: Tree, after: Tree) -> None:
    """Texts with and without a last line feed, bytes, modes, strange names; created, changed and deleted."""
    require_applied(before, after)


@draws(30)
@given(_TREES, _TREES)
def test_git_applies_files_that_are_replaced_as_a_whole(before: Tree, after: Tree) -> None:
    """As they are where the search for short hunks would take too many steps."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(changes, "_STEPS", -1)
        require_applied(before, after)


def test_a_patch_has_no_more_bytes_than_there_is_room_for(tmp_path: Path) -> None:
    """What does not fit is named; what does is there. The control is the same change with room."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    original = changes.WorkspaceCopy(str(source), str(target), max_files=10, max_bytes=ROOM)
    (target / "large").write_bytes(os.urandom(5000))
    (target / "small").write_text("x\n")
    for room, created in ((1000, ["small"]), (ROOM, ["large", "small"])):
        summary, patch = original.compare(room)
        assert summary["created"] == created
        assert len(patch) <= room


def test_what_the_host_changed_meanwhile_is_not_undone(tmp_path: Path) -> None:
    """A file only the host changed is in no patch; one that both changed is named. The control: neither did."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    write(source, {"host": (b"1\n", False), "both": (b"1\n", False), "program": (b"1\n", False)})
    original = changes.WorkspaceCopy(str(source), str(target), max_files=10, max_bytes=ROOM)
    for name in ("host", "both"):
        (source / name).write_text("2\n")
    for name in ("both", "program"):
        (target / name).write_text("3\n")
    summary, _ = original.compare(ROOM)
    assert summary["changed"] == ["program"]
    assert summary["skipped"] == [{"name": "both", "reason": "not in the patch: the original was changed meanwhile"}]


def test_two_files_of_one_repeated_line_take_bounded_work(tmp_path: Path) -> None:
    """A diff bomb: many equal lines, in many places; every file is still compared, without the shortest hunks."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    write(source, {f"{n}": (b"a\n" * 100_000 + b"b\n" + b"a\n" * 50_000, False) for n in range(4)})
    original = changes.WorkspaceCopy(str(source), str(target), max_files=10, max_bytes=ROOM * 4)
    write(target, {f"{n}": (b"c\n" + b"a\n" * 90_000 + b"d\n" + b"a\n" * 60_000, False) for n in range(4)})
    summary, patch = original.compare(8 * ROOM)
    assert summary["counts"] == {"created": 0, "changed": 4, "deleted": 0}
    assert patch


def test_what_changes_its_kind_is_left_behind_and_named_and_the_rest_applies(tmp_path: Path) -> None:
    """A file or a link becomes a folder, a folder a file; git takes the patch whole. Control: a plain change."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    write(source, {"m": (b"x\n", False), "d/kept": (b"x\n", False), "n": (b"x\n", False)})
    (source / "l").symlink_to("/etc")
    (source / "d" / "link").symlink_to("/etc")
    original = changes.WorkspaceCopy(str(source), str(target), max_files=10, max_bytes=ROOM)
    for name in ("m", "l"):
        (target / name).unlink()
        (target / name / "sub").mkdir(parents=True)
        (target / name / "sub" / "in").write_text("z\n")
    shutil.rmtree(target / "d")
    (target / "d").write_text("z\n")
    (target / "Before").write_text("1\n")
    (target / "n").unlink()
    summary, patch = original.compare(ROOM)
    assert summary["created"] == ["Before"]
    assert summary["deleted"] == ["d/kept", "n"]
    skipped = summary["skipped"]
    assert isinstance(skipped, list)
    assert {each["name"]: each["reason"].partition(": ")[2] for each in skipped} == {
        "m": "a folder stands in the place of a file",
        "l": "a symbolic link",
        "d": "it stands in the place of a folder",
        "d/link": "a symbolic link",
        "m/sub/in": "its folder stands in the place of a file or a link",
        "l/sub/in": "its folder stands in the place of a file or a link",
    }
    git = [shutil.which("git") or "git", "apply", "--whitespace=nowarn", "-"]
    done = subprocess.run(git, input=patch, cwd=source, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert read(source) == {"Before": (b"1\n", False), "m": (b"x\n", False)}
