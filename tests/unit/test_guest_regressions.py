"""The guest's jobs where a shorter form was wrong or slow. Steps are counted, never time. No sandbox."""

import gc
import io
import re
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from _glovebox_guest.files import output
from _glovebox_guest.jobs import fetch, search
from _glovebox_guest.loop import StreamHandler
from _glovebox_guest.web import readable
from _glovebox_guest.workspace import hidden, matching

PAYLOAD = {"method": "GET", "url": "https://a.example/", "max_chars": 100}


class Answering:
    """A loop whose first step answers a request: some bytes, then an end, or a reset with this body."""

    wire = SimpleNamespace(end=bytes, reset=bytes)

    def __init__(self, reset: dict[str, Any] | None) -> None:
        self._reset = reset

    def open(self, _kind: str, _meta: object, handler: StreamHandler, *, duplex: bool) -> int:
        assert duplex
        self._handler = handler
        return 1

    def send(self, _data: bytes) -> None:
        """Send nothing."""

    def step(self, _deadline: float) -> None:
        self._handler.on_accept({"status": 200})
        self._handler.on_data(b"half a page")
        if self._reset is None:
            self._handler.on_end()
        else:
            self._handler.on_reset(self._reset)


@pytest.mark.parametrize(
    ("reset", "error", "truncated"),
    [
        (None, None, None),
        ({}, {}, None),
        ({"rule": "egress.failed"}, {"rule": "egress.failed"}, None),
        ({"truncated": "too much"}, None, "too much"),
    ],
    ids=["whole", "no reason", "refused", "cut"],
)
def test_only_an_end_makes_an_answer_whole(reset: dict[str, Any] | None, error: object, truncated: object) -> None:
    """A reset without a reason, as of a host that breaks off, is an error; the control is an end."""
    loop: Any = Answering(reset)
    answer = fetch.ask(loop, PAYLOAD, time.monotonic() + 60)
    assert (answer["error"], answer["truncated"]) == (error, truncated)


class Counting:
    """A pattern that counts its searches."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern, self.searches = pattern, 0

    def search(self, *given: Any) -> re.Match[str] | None:
        self.searches += 1
        return self._pattern.search(*given)


@pytest.mark.parametrize("context", [0, 2])
def test_lines_that_cannot_match_are_not_searched_one_by_one(context: int) -> None:
    """A file of 10,000 lines with two matches takes a few searches, and finds what a search by line finds."""
    text = "\n".join("needle" if number in (5_000, 5_002) else f"line {number}" for number in range(10_000))
    one: Any = search._Search({"pattern": "needle", "context": context})
    one._pattern = counted = Counting(one._pattern)
    found = list(one._matches("a", text))
    assert [match["line"] for match in found] == [5_001, 5_003]
    assert counted.searches <= 10
    one._by_line = True
    assert list(one._matches("a", text)) == found
    assert counted.searches > 10_000


@pytest.mark.parametrize(
    ("name", "above", "secret"),
    [
        ("credentials", "{deep}/.aws", True),
        ("hosts.yml", "{deep}/.config/gh", True),
        ("config", ".git/{deep}", True),
        ("config", "{deep}/.git/modules/x", True),
        ("id_rsa~", "{deep}", True),
        ("credentials", "{deep}", False),
        ("config", "{deep}", False),
    ],
)
def test_a_name_is_matched_with_few_of_its_folders(
    name: str, above: str, *, secret: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However deep it lies, the verdict is the same, and the text that is matched is short."""
    matched: list[str] = []

    def fullmatch(pattern: str, text: str, flags: re.RegexFlag) -> re.Match[str] | None:
        matched.append(text)
        return re.compile(pattern, flags).fullmatch(text)

    monkeypatch.setattr(re, "fullmatch", fullmatch)
    for depth in (1, 500):
        kind = hidden.kind_of(name, above.format(deep="/".join(["f"] * depth)))
        assert (kind is not None) == secret
    assert max(map(len, matched)) < 60


def test_no_listed_name_has_folders_that_are_left_out() -> None:
    """Before ``/**/`` stands one folder: its name is looked up among those above."""
    assert [name for name in hidden._ANYWHERE if "/" in name] == []


def test_paths_without_wildcards_are_looked_up() -> None:
    """Three thousand of them become no expression; the control is one with a wildcard."""
    group = matching._PatternGroup(says=True)
    for number in range(3_000):
        group.add(f"/folder/file{number}")
    assert group._wholes == []
    assert group.matches("file7", "folder/file7")
    assert not group.matches("file7", "other/folder/file7")
    group.add("/folder/*.txt")
    assert len(group._wholes) == 1


def test_a_folder_in_place_of_a_file_leaves_no_descriptor(tmp_path: Path) -> None:
    """It is refused as what it is; the control is a file, whose descriptor is open until it is closed."""
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(IsADirectoryError):
        output.opened(str(tmp_path))
    assert len([*Path("/proc/self/fd").iterdir()]) == before
    (tmp_path / "a").touch()
    with output.opened(str(tmp_path / "a")):
        assert len([*Path("/proc/self/fd").iterdir()]) == before + 1


def test_the_order_in_which_files_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text is flushed before a file in Python, which may write a trailer into it, and again after."""
    from _glovebox_guest.jobs import python  # noqa: PLC0415 - imports much

    class Trailing(io.TextIOBase):
        """A file written in Python."""

    text, own = (tmp_path / "a").open("w"), Trailing()
    monkeypatch.setattr(gc, "get_objects", lambda: [own, text, text.buffer])
    assert python._left_open() == [(text, "flush"), (own, "close"), (text, "flush"), (text.buffer, "flush")]
    text.close()


def test_a_name_that_a_tag_repeats_is_held_once() -> None:
    """One at a time: a list of all matches held half a gibibyte of a page of 5 MiB."""
    tracemalloc.start()
    try:
        assert readable.attributes("b " * 50_000) == {"b": ""}
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_rules_of_comments_alone_are_no_rules() -> None:
    """Git's own exclude file: it is not asked of every entry."""
    assert not matching.Rules(b"# comment\n")
    assert matching.Rules(b"*.pyc\n")
