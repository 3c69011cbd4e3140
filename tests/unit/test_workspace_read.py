"""Reading one file of the workspace: which lines, which encodings, what is cut and how that is said."""

import json
import struct
from pathlib import Path

import pytest
from tests.fixtures.guest_jobs import Workspace, make

from _glovebox_guest.jobs import read
from _glovebox_guest.pictures import header
from _glovebox_guest.wording import MAX_ANSWER


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """An empty workspace."""
    return make(tmp_path / "w", monkeypatch)


def test_a_small_file_comes_whole(workspace: Workspace) -> None:
    """With counts and encoding; an empty one has no lines, and behind the end it says how long it is."""
    workspace.write("a.txt", "one\ntwo\nthree")
    assert workspace.run("read", path="a.txt") == {
        "path": "a.txt",
        "bytes": 13,
        "text": "one\ntwo\nthree",
        "first_line": 1,
        "lines": 3,
        "total_lines": 3,
        "truncated": None,
        "next_offset": None,
        "encoding": "utf-8",
    }
    workspace.write("empty")
    value = workspace.run("read", path="empty")
    assert (value["text"], value["lines"], value["total_lines"], value["next_offset"]) == ("", 0, 0, None)
    workspace.write("a.txt", "x\ny")
    value = workspace.run("read", path="a.txt", offset=10)
    assert (value["text"], value["lines"], value["total_lines"], value["next_offset"]) == ("", 0, 2, None)


def test_offset_and_limit_choose_lines_and_say_where_to_go_on(workspace: Workspace) -> None:
    """Reading on at next_offset until there is none gives every line once; also in a file of many blocks."""
    lines = [f"line {number}\n" for number in range(1, 24)]
    workspace.write("a.txt", "".join(lines))
    offset: int | None = 1
    seen: list[str] = []
    while offset is not None:
        value = workspace.run("read", path="a.txt", offset=offset, limit=5)
        assert value["total_lines"] == 23
        seen.append(value["text"])
        offset = value["next_offset"]
    assert seen == ["".join(lines[at : at + 5]) for at in range(0, 23, 5)]
    workspace.write("big.txt", "".join(f"{number}\n" for number in range(1, 200_001)))
    value = workspace.run("read", path="big.txt", offset=123_456, limit=2)
    assert value["text"] == "123456\n123457\n"
    assert value["total_lines"] == 200_000


@pytest.mark.parametrize("character", ["x", "é", "漢", "😀"])
@pytest.mark.parametrize("length", [read.MAX_LINE, read.MAX_LINE + 1, 15_999, 16_000, 16_001, 300_000])
@pytest.mark.parametrize("end", ["", "\n", "\nnext\n"])
def test_a_long_line_is_cut_and_what_is_left_out_counted_exactly(
    workspace: Workspace, character: str, length: int, end: str
) -> None:
    """Counted in characters, wherever the cut falls in the bytes of one."""
    workspace.write("a.txt", "!" + character * (length - 1) + end)
    text = workspace.run("read", path="a.txt")["text"]
    line = text.split("\n")[0]
    rest = text[len(line) :]
    assert rest == end
    if length > read.MAX_LINE:
        shown, _, count = line.partition("… [+")
        assert len(shown) + int(count.removesuffix(" characters]")) == length
        assert set(shown[1:]) == {character}
    else:
        assert line == "!" + character * (length - 1)


@pytest.mark.parametrize(("encoding", "named"), [("utf-8", "utf-8"), ("utf-8-sig", "utf-8-sig"), ("utf-16", "utf-16")])
def test_unicode_encodings_are_recognised(workspace: Workspace, encoding: str, named: str) -> None:
    """UTF-8 with and without a mark and UTF-16 with one; the mark is no part of the text."""
    workspace.write("a.txt", "grüße\nπ\n".encode(encoding))
    value = workspace.run("read", path="a.txt", offset=1)
    assert (value["text"], value["encoding"], value["total_lines"]) == ("grüße\nπ\n", named, 2)


@pytest.mark.parametrize(
    "content",
    [b"\x7fELF\x02\x01\x01\0\0", "naïve\n".encode("latin-1"), b"ok\n\xff\n", b"\xff\xfe\x00\xd8", b"a" * 9000 + b"\0"],
)
def test_what_is_not_unicode_text_is_refused_with_a_way_out(workspace: Workspace, content: bytes) -> None:
    """NUL bytes, Latin-1 and broken UTF-16 are binary; the hint names the tool that can."""
    workspace.write("data.bin", content)
    error = workspace.run("read", path="data.bin")["error"]
    assert error["rule"] == "path.binary"
    assert "run_python" in error["hint"]


def test_what_fits_no_answer_is_cut_at_a_line_and_goes_on_there(workspace: Workspace) -> None:
    """The text stays within its budget as JSON, even where every character takes six bytes of it."""
    lines = ["\x01" * 100 + "\n"] * 1000
    workspace.write("a.txt", "".join(lines))
    value = workspace.run("read", path="a.txt")
    assert len(json.dumps(value["text"])) <= 100 * 1024
    assert MAX_ANSWER - 101 < len(value["text"]) <= MAX_ANSWER
    assert value["text"] == "".join(lines[: value["lines"]])
    assert value["next_offset"] == value["lines"] + 1
    assert value["total_lines"] == 1000
    assert value["truncated"] == f"{value['lines']} lines of 1000"


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack("!II", 640, 480) + b"\x08\x06\0\0\0rest"


@pytest.mark.parametrize(
    ("name", "content", "media_type", "width"),
    [
        ("a.png", PNG, "image/png", 640),
        ("a.gif", b"GIF89a" + struct.pack("<HH", 320, 200) + b"rest", "image/gif", 320),
        ("a.jpg", b"\xff\xd8\xff\xc0\0\x11\x08" + struct.pack("!HH", 20, 30) + b"rest", "image/jpeg", 30),
        ("a.webp", b"RIFF\0\0\0\0WEBPVP8X\0\0\0\0\0\0\0\0\x09\0\0\x04\0\0", "image/webp", 10),
        ("lies.txt", PNG, "image/png", 640),
    ],
)
def test_pictures_come_as_pictures(
    workspace: Workspace, name: str, content: bytes, media_type: str, width: int
) -> None:
    """Known by their first bytes, not by their name."""
    workspace.write(name, content)
    collected = workspace.collect("read", path=name)
    assert collected.blobs == [(media_type, content)]
    assert (collected.values[0]["media_type"], collected.values[0]["width"]) == (media_type, width)


@pytest.mark.parametrize(
    "content",
    [
        PNG + bytes(header.MAX_BYTES),
        PNG.replace(struct.pack("!I", 640), struct.pack("!I", header.MAX_EDGE + 1)),
        b"\xff\xd8\xff\xe0rest",
        b"RIFF\0\0\0\0WEBPVP8 ",
    ],
    ids=["bytes", "edge", "no size", "no size either"],
)
def test_a_picture_that_clients_would_not_take_is_never_sent_as_it_is(workspace: Workspace, content: bytes) -> None:
    """Here is no library that could make a smaller copy, so it says so; the control is the picture above."""
    workspace.write("a.png", content)
    collected = workspace.collect("read", path="a.png")
    assert collected.blobs == []
    assert collected.values[0]["error"]["rule"] == "path.picture"
    assert "no library for pictures" in collected.values[0]["error"]["reason"]


def test_what_is_huge_is_not_read_to_its_end(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture is refused; counting lines stops at the bound: an unbounded count is None, not a guess."""
    with workspace.write("huge.png", PNG).open("r+b") as file:
        file.truncate(read.MAX_PICTURE + 1)
    collected = workspace.collect("read", path="huge.png")
    assert collected.values[0]["error"]["rule"] == "path.too_large"
    assert collected.blobs == []
    monkeypatch.setattr(read, "MAX_SCAN", 1_000_000)
    with workspace.write("giant.txt", "first\n" * 100_000).open("r+b") as file:
        file.truncate(1 << 40)
    value = workspace.run("read", path="giant.txt", limit=1)
    assert (value["text"], value["total_lines"], value["next_offset"]) == ("first\n", None, 2)
    assert workspace.rule("read", path="giant.txt", offset=200_000) == "path.too_large"


def test_a_file_that_may_not_be_read_says_so(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permission denied is unreadable, without a path of the host in the reason."""
    workspace.write("locked", "x")

    def denied(*_args: object, **_kwargs: object) -> int:
        raise PermissionError(13, "Permission denied", "/host/path")

    monkeypatch.setattr("os.open", denied)
    error = workspace.run("read", path="locked")["error"]
    assert error["rule"] == "path.unreadable"
    assert error["reason"] == "locked: cannot be read (permission denied)."
