"""What ``.gitignore`` leaves out is what git itself leaves out, and no file of rules keeps anybody waiting."""

import os
import shutil
import subprocess  # noqa: TID251 - git is what is compared with
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fixtures.draws import draws

from _glovebox_guest.workspace import matching, paths
from _glovebox_guest.workspace.tree import Walk

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is what is compared with")
_CLEAN = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull, "HOME": "/"}

pieces = st.sampled_from(
    ["a", "b", "ab", ".x", "*", "**", "***", "?", "/", "/**/", "**/", "/**", "*/", "[ab]", "[!a]", "[^b-]", "[a-b]",
     "[]a]", "[a", "[[:alpha:]]", "[[:bad:]]", "[[:digit:]x]", "[\\]]", "[b-a]", "\\a", "\\*", "\\", "!", "#", " ",
     "\\ ", "-", "é", "\\/", "[/a]"]
)  # fmt: skip
lines = st.builds(lambda sign, parts, end: sign + "".join(parts) + end,
                  st.sampled_from(["", "", "", "!", "/"]), st.lists(pieces, max_size=5),
                  st.sampled_from(["", "", "/", " ", "\r"]))  # fmt: skip
files = st.lists(lines, max_size=5).map("\n".join)
names = st.sampled_from(["a", "b", "ab", "aa", "ba", ".x", "a.x", "-", "x1", "é", "aé", "a b", "*", "#a", "!b", "a]"])
trees = st.lists(st.lists(names, min_size=1, max_size=4).map("/".join), max_size=12)
rules = st.dictionaries(st.sampled_from(["", "a/", "b/", "a/b/", "a/a/"]), files, min_size=1, max_size=3)


def _made(root: Path, tree: list[str], told: Mapping[str, str]) -> None:
    for folder, content in told.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / ".gitignore").write_bytes(content.encode())
    for path in tree:
        try:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
        except OSError:
            continue  # what is a file already is no folder


def _of_git(root: Path) -> list[str]:
    listed = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
    return sorted(os.fsdecode(subprocess.check_output(listed, cwd=root, env=_CLEAN)).split("\0")[:-1])


def _of_ours(root: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "ROOT", str(root))
        walk = Walk("**", 60.0, {})
        found = sorted(path for path, entry in walk if entry.is_file())
        assert walk.answer({}, [])["truncated"] is None
        return found


@needs_git
@given(tree=trees, told=rules, excluded=files)
@example(tree=["foo/bar", "foo/x/bar", "foox/y/bar"], told={"": "foo**/bar"}, excluded="")
@example(tree=["a/b", "a/ab/b", "b/a"], told={"": "a/*\n!a/b", "a/": "!ab/"}, excluded="*\n!*/")
@example(tree=["a b", "a"], told={"": "\ufeffa\\ \r\n"}, excluded="")
@draws(150)
def test_what_is_left_out_is_what_git_leaves_out(tree: list[str], told: dict[str, str], excluded: str) -> None:
    """Nested files, negation, folders, what stands in ``.git/info/exclude``, and every oddity of its patterns."""
    with tempfile.TemporaryDirectory() as parent:
        root = Path(parent)
        _made(root, tree, told)
        for folder in ("objects", "refs", "info"):  # a repository, for which no program has to be started
            (root / ".git" / folder).mkdir(parents=True)
        (root / ".git/HEAD").write_text("ref: refs/heads/main\n")
        (root / ".git/info/exclude").write_bytes(excluded.encode())
        assert _of_ours(root) == _of_git(root)


@given(content=st.binary(max_size=400), name=st.text(max_size=8), folder=st.booleans())
@draws(300)
def test_any_bytes_are_rules_or_nothing(content: bytes, name: str, folder: bool) -> None:
    """Nothing that lies in a workspace ends a walk."""
    try:
        called = matching.as_bytes(name)
    except UnicodeEncodeError:
        return  # no file can be called so
    assert matching.Rules(content).verdict(called, f"a/{called}", folder=folder) in (True, False, None)


@pytest.mark.long
@pytest.mark.parametrize(
    "pattern",
    ["*a" * 2000 + "b", "**/" + "*a*/" * 500 + "b", "/**/a" * 500 + "b", "a/" + "*a**a" * 500, "**/a*a*a*b/**/*c*/d",
     "[!b]" * 1000 + "c", "[" * 4000, "\\" * 4001, "***/" * 900],
)  # fmt: skip
@pytest.mark.parametrize("path", ["a" * 4000, "a/" * 2000 + "a", "aa/" * 1300 + "ab"])
def test_matching_takes_no_time_to_speak_of_whatever_the_pattern(pattern: str, path: str) -> None:
    """Ten such patterns on ten of the longest paths; with ordinary groups one alone would not end."""
    rules = matching.Rules("\n".join([pattern] * 10).encode())
    rules.verdict(path.rpartition("/")[2], path, folder=False)


def test_a_file_of_rules_costs_seconds_at_most(tmp_path: Path) -> None:
    """As many and as large ones as are read, of what takes longest to compile; the next is counted and not obeyed."""
    reader = matching.RuleReader()
    line = "[!a][!b]*c/[!d]\n"
    for number in range(5):
        place = tmp_path / str(number)
        place.write_text(f"{number}\n" + line * ((matching.MAX_FILE - 100) // len(line)))
        found = reader.read(str(place))
        assert found is None or found.verdict("x", "a/x", folder=False) is None
    assert reader.unread == 1
    (tmp_path / "large").write_text("a\n" * matching.MAX_FILE)
    (tmp_path / "link").symlink_to("0")
    assert reader.read(str(tmp_path / "large")) is reader.read(str(tmp_path / "link")) is None
    assert reader.read(str(tmp_path / "missing")) is None
    assert reader.unread == 3
