"""Searching the workspace: what counts as a line, what is passed over, and how bounds are said."""

import json
import os
from pathlib import Path

import pytest
from tests.fixtures.guest_jobs import Workspace, make

from _glovebox_guest.jobs import search
from _glovebox_guest.wording import MAX_ANSWER


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A small project."""
    made = make(tmp_path / "w", monkeypatch)
    made.write("a.py", "import os\n\ndef main():\n    return os\n")
    made.write("src/b.py", "def helper():\n    pass\n")
    made.write("notes.txt", "define main\nMAIN\n")
    made.write(".git/config", "main\n")
    return made


def hits(workspace: Workspace, pattern: str, **payload: object) -> list[tuple[str, int]]:
    """Where a pattern was found."""
    return [(match["path"], match["line"]) for match in workspace.run("search", pattern=pattern, **payload)["matches"]]


def test_a_match_has_path_line_and_text(workspace: Workspace) -> None:
    """And the answer says how much was searched."""
    value = workspace.run("search", pattern=r"def \w+\(")
    assert value == {
        "matches": [
            {"path": "a.py", "line": 3, "text": "def main():"},
            {"path": "src/b.py", "line": 1, "text": "def helper():"},
        ],
        "searched": 3,
        "binary": 0,
        "passed_over": [".git"],
        "ignored": 0,
        "truncated": None,
    }


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"pattern": "main"}, [("a.py", 3), ("notes.txt", 1)]),
        ({"pattern": "main", "ignore_case": True}, [("a.py", 3), ("notes.txt", 1), ("notes.txt", 2)]),
        ({"pattern": "main", "path": "*.py"}, [("a.py", 3)]),
        ({"pattern": "def", "path": "src"}, [("src/b.py", 1)]),
        ({"pattern": "def", "path": "src/b.py"}, [("src/b.py", 1)]),
        ({"pattern": "main", "path": ".git"}, [(".git/config", 1)]),
        ({"pattern": "main():", "literal": True}, [("a.py", 3)]),
        ({"pattern": "main():"}, []),
        ({"pattern": "^$"}, [("a.py", 2)]),
        ({"pattern": "^MAIN$"}, [("notes.txt", 2)]),
        ({"pattern": r"\AMAIN\Z"}, [("notes.txt", 2)]),
        ({"pattern": "(?<=def )main"}, [("a.py", 3)]),
        ({"pattern": r"os(?!\s)"}, [("a.py", 1), ("a.py", 4)]),
        ({"pattern": r"os\s"}, []),
        ({"pattern": "import[^x]*return"}, []),
        ({"pattern": r"[^m]*+main$"}, [("notes.txt", 1)]),
    ],
)
def test_patterns_match_within_one_line(
    workspace: Workspace, payload: dict[str, object], expected: list[tuple[str, int]]
) -> None:
    """Anchors, look-arounds and negated sets see one line and never the line feed."""
    assert hits(workspace, **payload) == expected  # type: ignore[arg-type]


def test_what_git_ignores_is_not_searched_unless_asked_for(workspace: Workspace) -> None:
    """By an argument or by name; what was left out is counted."""
    workspace.write(".gitignore", "notes.txt\nsrc/\n")
    assert hits(workspace, "def") == [("a.py", 3)]
    assert workspace.run("search", pattern="def")["ignored"] == 2
    assert hits(workspace, "def", include_ignored=True) == [("a.py", 3), ("notes.txt", 1), ("src/b.py", 1)]
    assert hits(workspace, "def", path="src") == [("src/b.py", 1)]


def test_characters_are_searched_in_every_script_and_encoding(workspace: Workspace) -> None:
    """Not bytes; CR LF ends a line, undecodable bytes are replaced, a NUL is binary unless a mark says UTF-16."""
    workspace.write("dos.txt", "one\r\ntwo\r\n")
    assert workspace.run("search", pattern="^two$", path="dos.txt")["matches"] == [
        {"path": "dos.txt", "line": 2, "text": "two"}
    ]
    workspace.write("u.txt", "straße ÉTÉ\n")
    assert hits(workspace, r"^\w+ .t.$", path="u.txt", ignore_case=True) == [("u.txt", 1)]
    assert hits(workspace, "[éè]t", path="u.txt", ignore_case=True) == [("u.txt", 1)]
    workspace.write("d/wide.txt", "needle\n".encode("utf-16"))
    workspace.write("d/latin.txt", b"caf\xe9 needle\n")
    workspace.write("d/data.bin", b"\0needle\n")
    value = workspace.run("search", pattern="needle", path="d")
    assert [match["path"] for match in value["matches"]] == ["d/latin.txt", "d/wide.txt"]
    assert (value["searched"], value["binary"]) == (2, 1)


def test_context_lines_stand_before_and_after(workspace: Workspace) -> None:
    """As many as asked for, fewer at the ends of the file."""
    workspace.write("c.txt", "1\n2\nx\n4\n5\n6\nx")
    assert workspace.run("search", pattern="x", path="c.txt", context=2)["matches"] == [
        {"path": "c.txt", "line": 3, "text": "x", "before": ["1", "2"], "after": ["4", "5"]},
        {"path": "c.txt", "line": 7, "text": "x", "before": ["6"], "after": []},
    ]


def test_context_that_overlaps_is_shown_once(workspace: Workspace) -> None:
    """Each line stands in the answer once, in order, be it a match or beside several; the control has none beside."""
    lines = ["x 1", "x 2", "3", "x 4", "5", "6", "7", "x 8", "9", "10", "11", "12", "13", "x 14"]
    workspace.write("c.txt", "\n".join(lines))
    for context, left_out in ((0, {3, 5, 6, 7, 9, 10, 11, 12, 13}), (1, {6, 10, 11, 12}), (2, {11}), (5, set())):
        matches = workspace.run("search", pattern="x", path="c.txt", context=context)["matches"]
        shown = [
            text for match in matches for text in (*match.get("before", ()), match["text"], *match.get("after", ()))
        ]
        assert shown == [line for number, line in enumerate(lines, 1) if number not in left_out]
        for match in matches:
            assert match["line"] - len(match.get("before", ())) >= 1
            assert lines[match["line"] - 1] == match["text"]


def test_a_long_line_is_cut_around_its_match(workspace: Workspace) -> None:
    """What matched is among the characters that are shown."""
    workspace.write("min.js", "a" * 10_000 + "needle" + "b" * 10_000)
    text = workspace.run("search", pattern="needle", path="min.js")["matches"][0]["text"]
    assert "aneedleb" in text
    assert (text[0], text[-1], len(text)) == ("…", "…", search.MAX_SHOWN + 2)


def test_an_answer_ends_at_the_limit_or_at_what_fits_a_message(workspace: Workspace) -> None:
    """The first matches in the order of the tree, and the answer says that it is cut."""
    workspace.write("many.txt", "x\n" * 50)
    value = workspace.run("search", pattern="x", path="many.txt", limit=7)
    assert len(value["matches"]) == 7
    assert value["truncated"] == "stopped at 7 matches"
    assert workspace.run("search", pattern="x", path="many.txt", limit=50)["truncated"] is None
    workspace.write("long.txt", ("\x02" * 399 + "x\n") * 2000)
    value = workspace.run("search", pattern="x", path="long.txt", limit=1000, context=5)
    assert len(json.dumps(value["matches"])) <= 100 * 1024
    texts = [text for match in value["matches"] for text in (*match["before"], match["text"], *match["after"])]
    assert MAX_ANSWER * 3 // 4 < sum(len(text.encode()) for text in texts) <= MAX_ANSWER
    assert "as much as fits" in value["truncated"]


def test_what_is_not_searched_is_said(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files over the bound, those after the time is over; no matches do not mean nowhere searched."""
    workspace.write("l/ok.txt", "needle\n".ljust(search.MAX_FILE))
    workspace.write("l/large.txt", "needle\n".ljust(search.MAX_FILE + 1))
    value = workspace.run("search", pattern="needle", path="l", literal=True)
    assert [match["path"] for match in value["matches"]] == ["l/ok.txt"]
    assert value["truncated"] == f"not searched: files over {search.MAX_FILE} bytes, 1"
    assert workspace.rule("search", pattern="x", path="nowhere") == "path.missing"
    monkeypatch.setattr(search, "MAX_SECONDS", -1.0)
    value = workspace.run("search", pattern="def")
    assert value["searched"] == 1
    assert value["truncated"] == "stopped after -1 seconds"


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a(b", "missing ), unterminated subpattern at position 1"),
        ("*", "nothing to repeat at position 0"),
        ("[z-a]", "bad character range z-a at position 1"),
        ("a{99999999999}", "the repetition number is too large"),
        ("(" * 5000 + ")" * 5000, "maximum recursion depth exceeded"),
    ],
)
def test_an_invalid_pattern_is_refused_with_its_position(workspace: Workspace, pattern: str, reason: str) -> None:
    """And with the way to search for it as text."""
    error = workspace.run("search", pattern=pattern)["error"]
    assert error["rule"] == "pattern.invalid"
    assert reason in error["reason"]
    assert "literal" in error["hint"]


@pytest.mark.timeout(10)  # one that waited would wait for ever
def test_what_took_the_place_of_a_file_is_neither_followed_nor_waited_for(tmp_path: Path) -> None:
    """Another process of the host may change the workspace between the look at a name and its opening."""
    (tmp_path / "file").write_text("content")
    assert search._content(str(tmp_path / "file")) == b"content"
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="symbolic links"):
        search._content(str(tmp_path / "link"))
    os.mkfifo(tmp_path / "pipe")
    assert search._content(str(tmp_path / "pipe")) == b""
