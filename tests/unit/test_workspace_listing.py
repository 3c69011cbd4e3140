"""Listing the workspace: what a pattern means, in which order, what is passed over and how bounds are said."""

import os
import re
import time
from pathlib import Path

import pytest
from tests.fixtures.guest_jobs import Workspace, make

from _glovebox_guest.jobs import list as listing
from _glovebox_guest.workspace import matching, tree

FILES = [
    ".git/config", ".hidden", "README.md", "a.csv", "a/b.csv", "a/b/c.csv", "a/b/c.py", "node_modules/x/index.js",
    "src/main.ts", "src/main.tsx", "src/[odd].py", "src/__pycache__/m.pyc", "z.py",
]  # fmt: skip


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace with FILES."""
    made = make(tmp_path / "w", monkeypatch)
    for name in FILES:
        if not name.startswith("a/b.csv"):
            made.write(name, name)
    return made


def paths(workspace: Workspace, **payload: object) -> list[str]:
    """The paths of one listing."""
    return [entry["path"] for entry in workspace.run("list", **payload)["entries"]]


def test_everything_is_listed_but_what_tools_made(workspace: Workspace) -> None:
    """In a sorted tree's order; what is passed over is named; a limit cuts no count; a misspelt folder is missing."""
    value = workspace.run("list")
    assert [entry["path"] for entry in value["entries"]] == [
        ".git", ".hidden", "README.md", "a", "a/b", "a/b/c.csv", "a/b/c.py", "a.csv", "node_modules", "src",
        "src/[odd].py", "src/__pycache__", "src/main.ts", "src/main.tsx", "z.py",
    ]  # fmt: skip
    assert value["passed_over"] == [".git", "__pycache__", "node_modules"]
    assert (value["total"], value["truncated"]) == (15, None)
    value = workspace.run("list", pattern="**", limit=3)
    assert [entry["path"] for entry in value["entries"]] == [".git", ".hidden", "README.md"]
    assert (value["total"], value["truncated"]) == (15, "3 of 15 shown")
    assert workspace.run("list", pattern="*.csv")["scanned"] == len(list(workspace.root.iterdir()))
    assert workspace.rule("list", pattern="scr/*.ts") == "path.missing"
    assert workspace.rule("list", pattern="z.py/*") == "path.missing"


def test_an_entry_has_type_size_and_time(workspace: Workspace) -> None:
    """The time is RFC 3339 in UTC; only files have a size."""
    os.utime(workspace.root / "z.py", (0, 1_000_000_000))
    (workspace.root / "link").symlink_to("z.py")
    found = {entry["path"]: entry for entry in workspace.run("list", pattern="*")["entries"]}
    assert found["z.py"] == {"path": "z.py", "type": "file", "bytes": 4, "modified": "2001-09-09T01:46:40Z"}
    assert (found["a"]["type"], found["a"]["bytes"]) == ("directory", None)
    assert found["link"]["type"] == "symlink"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.csv", ["a.csv"]),
        ("**/*.csv", ["a/b/c.csv", "a.csv"]),
        ("*", [".git", ".hidden", "README.md", "a", "a.csv", "node_modules", "src", "z.py"]),
        ("src", ["src/[odd].py", "src/__pycache__", "src/main.ts", "src/main.tsx"]),
        ("./src/", ["src/[odd].py", "src/__pycache__", "src/main.ts", "src/main.tsx"]),
        ("src/*.ts", ["src/main.ts"]),
        ("src/*.{ts,tsx}", ["src/main.ts", "src/main.tsx"]),
        ("{a,src}/*", ["a/b", "src/[odd].py", "src/__pycache__", "src/main.ts", "src/main.tsx"]),
        ("{a/b,src}/*.py", ["a/b/c.py", "src/[odd].py"]),
        ("a/**", ["a/b", "a/b/c.csv", "a/b/c.py"]),
        ("a/**/c.py", ["a/b/c.py"]),
        ("**/b/**/*.py", ["a/b/c.py"]),
        ("?.py", ["z.py"]),
        ("[x-z].py", ["z.py"]),
        ("[!a]*.csv", []),
        ("src/[[]odd].py", ["src/[odd].py"]),
        ("z.py", ["z.py"]),
        (".git", [".git/config"]),
        ("**/__pycache__/*", ["src/__pycache__/m.pyc"]),
        ("node_modules/**/*.js", ["node_modules/x/index.js"]),
        ("*.nothing", []),
    ],
)
def test_a_pattern_means_what_a_shell_user_expects(workspace: Workspace, pattern: str, expected: list[str]) -> None:
    """Stars stay within a name, two cross folders, a folder means what is below it, a tool's folder if named."""
    assert paths(workspace, pattern=pattern) == expected


@pytest.mark.parametrize("pattern", ["[z-a]*", "{" + ",".join(map(str, range(100))) + "}", "{a,b}" * 10])
def test_a_pattern_that_means_nothing_or_too_much_is_refused(workspace: Workspace, pattern: str) -> None:
    """A reversed range and more alternatives than the bound."""
    assert workspace.rule("list", pattern=pattern) == "pattern.invalid"


def test_a_large_folder_is_given_as_an_overview(workspace: Workspace) -> None:
    """What fits is shown to the end, small folders first; a closed one says what is in it, and can be scanned."""
    for number in range(40):
        workspace.write(f"data/{number % 4}/{number:02}.bin", b"x" * number)
    value = workspace.run("list", limit=20)
    entries = {entry["path"]: entry for entry in value["entries"]}
    assert list(entries) == sorted(entries, key=lambda path: path.split("/"))
    assert {"a/b/c.csv", "data/3", "src/main.ts"} <= set(entries)
    closed = [entry for entry in value["entries"] if "files" in entry]
    assert [(entry["path"], entry["files"], entry["bytes"]) for entry in closed] == [
        (f"data/{each}", 10, sum(range(each, 40, 4))) for each in range(4)
    ]
    assert value["truncated"] == "20 of 60 shown; 4 folders closed, name one as pattern to look inside"
    assert len(paths(workspace, pattern="data/3", limit=20)) == 10
    assert [entry["files"] for entry in workspace.run("list", pattern="data", limit=4)["entries"]] == [10] * 4


def test_sizes_are_looked_up_only_of_what_is_shown(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a closed folder count, those that are not kept by name too; nobody waits for another folder's."""
    for number in range(60):
        workspace.write(f"{number % 10}/{number % 2}/{number:02}.bin", b"x" * number)
    looked: list[str] = []
    size = listing._size

    def look(entry: "os.DirEntry[str]") -> int:
        looked.append(entry.path)
        return size(entry)

    monkeypatch.setattr(listing, "_size", look)
    for limit in (5, 6):
        looked.clear()
        entries = workspace.run("list", limit=limit)["entries"]
        closed = {each["path"]: each["bytes"] for each in entries if "files" in each}
        assert {path: closed[path] for path in ("0", "1", "2")} == {"0": 150, "1": 156, "2": 162}
        assert len(looked) == len(set(looked))
    assert not [path for path in looked if "/9/" in path], "it is not shown"


def test_sizes_end_with_the_time_and_are_told_after_another_bound(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A size that was not looked up is none; a walk that ended at its names still says how large what it saw is."""
    for number in range(40):
        workspace.write(f"data/{number:02}.bin", b"x")
    gathered = listing._gathered

    def slowly(walk: tree.Walk, limit: int) -> listing._ListedTree:
        found = gathered(walk, limit)
        walk._deadline = 0.0
        return found

    with monkeypatch.context() as patch:
        patch.setattr(listing, "_gathered", slowly)
        value = workspace.run("list", limit=8)
    (entry,) = (each for each in value["entries"] if each["path"] == "data")
    assert (entry["files"], entry["bytes"]) == (40, None)
    assert "stopped after 4 seconds" in value["truncated"]
    monkeypatch.setattr(tree, "MAX_ENTRIES", 52)
    (entry,) = (each for each in workspace.run("list", limit=8)["entries"] if each["path"] == "data")
    assert entry["files"] == entry["bytes"] > 0


def test_of_too_many_names_in_one_folder_the_folders_are_shown(workspace: Workspace) -> None:
    """In the order of the tree; and the answer says how many there are."""
    for number in range(30):
        workspace.write(f"{number:02}")
    value = workspace.run("list", limit=6)
    assert [entry["path"] for entry in value["entries"]] == [".git", ".hidden", "00", "a", "node_modules", "src"]
    assert value["truncated"] == "6 of 45 shown; 2 folders closed, name one as pattern to look inside"


def test_what_git_ignores_is_left_out_counted_and_found_when_asked_for(workspace: Workspace) -> None:
    """By an argument, or by name; a folder counts once, and is not scanned."""
    workspace.write(".gitignore", "*.log\nbuild/\n/deep/*\n")
    workspace.write("src/.gitignore", "!keep.log\n")
    for name in ("x.log", "src/keep.log", "build/a.txt", "build/c.log", "src/build/b.txt", "deep/down"):
        workspace.write(name)
    value = workspace.run("list")
    shown = [entry["path"] for entry in value["entries"]]
    assert "src/keep.log" in shown
    assert not {"x.log", "build", "build/a.txt", "src/build", "deep/down"} & set(shown)
    assert value["ignored"] == 4
    every = workspace.run("list", include_ignored=True)
    assert every["ignored"] == 0
    assert {"x.log", "build/a.txt", "build/c.log", "src/build/b.txt", "deep/down"} <= {
        e["path"] for e in every["entries"]
    }
    assert paths(workspace, pattern="build") == ["build/a.txt", "build/c.log"]
    assert paths(workspace, pattern="**/build/*.txt") == ["build/a.txt", "src/build/b.txt"]
    assert paths(workspace, pattern="x.log") == ["x.log"]
    assert paths(workspace, pattern="*.log") == []
    assert workspace.run("list", pattern="*.log")["ignored"] == 1


def test_rules_and_folders_that_cannot_be_read_are_counted(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too large, a link, as which git does not follow them either, or closed; the rest is listed."""
    workspace.write(".gitignore", "z.py\n" * matching.MAX_FILE)
    (workspace.root / "src/.gitignore").symlink_to("../README.md")
    value = workspace.run("list")
    assert value["truncated"] == ".gitignore files not obeyed: 2"
    assert "z.py" in [entry["path"] for entry in value["entries"]]
    scandir = os.scandir

    def scan(path: str) -> object:
        if path.endswith("/a"):
            raise PermissionError
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    value = workspace.run("list")
    assert value["truncated"] == "unreadable folders: 1; .gitignore files not obeyed: 2"
    assert "src/main.ts" in [entry["path"] for entry in value["entries"]]


def test_long_names_fill_an_answer_before_the_limit_does(workspace: Workspace) -> None:
    """Whatever the names, the answer fits a message, and says that it is cut."""
    for number in range(600):
        workspace.write(f"{number:03}" + "é" * 120)
    value = workspace.run("list", limit=1000)
    assert 0 < len(value["entries"]) < 600
    assert value["truncated"] == f"{len(value['entries'])} of {value['total']} shown"


def test_names_that_are_hostile_to_a_terminal_are_escaped(workspace: Workspace) -> None:
    """A line feed, an escape sequence, a bidi mark and bytes that are not UTF-8 appear as escapes."""
    workspace.write("odd/new\nline")
    workspace.write("odd/\x1b[31mred")
    workspace.write("odd/\u202etxt.exe")
    with open(os.fsencode(workspace.root / "odd") + b"/caf\xe9\\", "wb"):  # noqa: PTH123 - bytes
        pass
    assert sorted(paths(workspace, pattern="odd/*")) == [
        "odd/\\u202etxt.exe", "odd/\\x1b[31mred", "odd/caf\\xe9\\\\", "odd/new\\nline",
    ]  # fmt: skip


def test_a_walk_stops_at_its_bounds_and_says_so(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of names, however many there are, and of time: what was found until then is the answer."""
    with monkeypatch.context() as patch:
        patch.setattr(tree, "MAX_ENTRIES", 5)
        value = workspace.run("list")
    assert value["scanned"] == 5
    assert value["truncated"] == "stopped after 5 names"
    monkeypatch.setattr(listing, "MAX_SECONDS", -1.0)
    value = workspace.run("list")
    assert "stopped after -1 seconds" in value["truncated"]
    assert len(value["entries"]) == value["total"] > 0


def test_a_folder_nested_deeper_than_a_path_can_be_does_not_end_the_walk(workspace: Workspace) -> None:
    """Paths longer than PATH_MAX cannot be opened by name: counted as unreadable, the walk goes on."""
    before, here = workspace.run("list")["total"], Path.cwd()
    reached = (4096 - len(str(workspace.root))) // 201 + 1  # PATH_MAX; one is shown that cannot be opened
    os.chdir(workspace.root)
    try:
        for _ in range(30):
            os.mkdir("d" * 200)  # noqa: PTH102 - relative, step by step: no path can name the last one
            os.chdir("d" * 200)
    finally:
        os.chdir(here)
    value = workspace.run("list")
    assert value["truncated"] == f"{len(value['entries'])} of {before + reached} shown; unreadable folders: 1"
    value = workspace.run("list", pattern="**/*.py")
    assert value["truncated"] == "unreadable folders: 1"
    assert value["entries"][-1]["path"] == "z.py"


@pytest.mark.parametrize(
    ("pattern", "path"),
    [("*a" * 30 + "b", "a" * 3000), ("**/a/" * 30 + "b", "a/" * 1000), ("**/*a*/" * 20 + "b", "aa/" * 1000)],
)
def test_matching_takes_no_time_to_speak_of_whatever_the_pattern(pattern: str, path: str) -> None:
    """The control is the same pattern with ordinary groups and stars, which does not end on an input this long."""
    compiled = re.compile(matching.expression(pattern))
    started = time.process_time()
    assert compiled.fullmatch(path) is None
    assert time.process_time() - started < 1.0
    assert compiled.fullmatch(path + "b") is not None
