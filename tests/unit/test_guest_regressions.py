"""The guest's jobs, first step and JSON where a shorter form was wrong or slow. Steps are counted, never time."""

import gc
import io
import json
import re
import subprocess  # noqa: TID251 - the guest, as a program
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.repo.files import ROOT

from _glovebox_guest.files import output
from _glovebox_guest.jobs import fetch, search
from _glovebox_guest.jsontext import dumps, loads
from _glovebox_guest.loop import StreamHandler
from _glovebox_guest.web import readable
from _glovebox_guest.workspace import hidden, matching
from glovebox_sandboxes.runtime import guest_tree

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
def test_a_name_is_matched_with_few_folders(
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


def test_paths_without_wildcards_are_looked_up() -> None:
    """Three thousand are no expression; the control has a wildcard. Git's exclude file is not asked of every entry."""
    group = matching._PatternGroup(says=True)
    for number in range(3_000):
        group.add(f"/folder/file{number}")
    assert group._wholes == []
    assert group.matches("file7", "folder/file7")
    assert not group.matches("file7", "other/folder/file7")
    group.add("/folder/*.txt")
    assert len(group._wholes) == 1
    assert [name for name in hidden._ANYWHERE if "/" in name] == []
    assert not matching.Rules(b"# comment\n")
    assert matching.Rules(b"*.pyc\n")


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


START = "import sys; sys.path.insert(0, sys.argv[1]); from _glovebox_guest.main import main; main()"


def test_the_guest_refuses_to_run_anywhere_but_in_its_own_pid_namespace(tmp_path: Path) -> None:
    """It ends a job by killing every process it can see: as anything but process 1 that would be the user's all."""
    guest_tree.write(tmp_path)
    config = json.dumps({"path": [], "hidden": [], "preload": [], "input": "", "output": "", "proxy": False})
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", START, str(tmp_path), config],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == b""
    assert b"process 1 of a pid namespace" in done.stderr


def test_the_guest_starts_without_the_packages_that_take_long() -> None:
    """What it needs of them comes from their C modules; the control: one import brings what is looked for."""
    program = "import sys; sys.path.insert(0, sys.argv[1]); import {}; print(*sorted(sys.modules))"
    slow = {"enum", "re", "json", "socket", "ctypes", "hashlib", "ast", "signal", "typing", "dataclasses", "contextlib"}

    def loaded(what: str) -> set[str]:
        command = [sys.executable, "-I", "-S", "-c", program.format(what), str(ROOT / "sandboxes")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return set(done.stdout.split())

    assert loaded("_glovebox_guest.main, _glovebox_guest.work, _glovebox_guest.zygote") & slow == set()
    assert {"signal", "enum"} <= loaded("signal")
    ran = "_glovebox_guest.program.cell as cell; cell.execute({!r}, {{}})"
    assert "asyncio" not in loaded(ran.format("async def main(): pass\nmain\n1;"))
    assert "asyncio" in loaded(ran.format("async def main(): pass\nawait main()"))


PROGRAM = """
import sys
from _glovebox_guest.jsontext import loads
assert loads('{"a":[1]}') == {"a": [1]}, "control: it reads JSON"
for text in ('', '{', '{"a":1', '{"a" 1}', '{"a":1,}', '[1', '[1,]', '"a', '"\\\\x"', '"\\n"', 'nul', '1 2', 'NaN'):
    try:
        loads(text)
    except ValueError:
        continue
    raise SystemExit(f"{text!r} was read")
# Since Python 3.13 the C scanner itself imports the package, to raise its error.
assert sys.version_info >= (3, 13) or "json" not in sys.modules, "the package came in, so this proves nothing"
"""


def test_what_is_not_json_is_a_value_error_without_the_package_too() -> None:
    """Found by fuzzing: the C scanner alone ends in SystemError, which no reader of the wire expects."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("text", ["1e999", "-1e309", '{"a":[1.5,1e400]}', "9" * 400 + ".0"])
def test_a_number_that_would_be_read_as_infinity_is_refused(text: str) -> None:
    """Found by fuzzing: what was read could not be written again. The standard library reads it (control)."""
    assert "inf" in repr(json.loads(text))
    with pytest.raises(ValueError, match="is too large"):
        loads(text)


@pytest.mark.parametrize("text", ["1.7976931348623157e308", "-0.0", "1e-999", "[0.1,2.50,3e2]"])
def test_numbers_that_a_double_holds_are_read_as_ever(text: str) -> None:
    """The control: the same values, written again as the same."""
    assert repr(loads(text)) == repr(json.loads(text))
    assert repr(loads(dumps(loads(text)).decode())) == repr(loads(text))
