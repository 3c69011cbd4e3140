"""Whatever names and bytes a workspace holds, the jobs answer: one value, bounded, JSON, nothing from outside."""

import fnmatch
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.fixtures.draws import draws
from tests.fixtures.guest_jobs import Workspace, make

from _glovebox_guest.jobs import read, search
from _glovebox_guest.workspace import helper, matching, paths

names = st.binary(min_size=1, max_size=30).filter(
    lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b"..")
)
trees = st.dictionaries(st.lists(names, min_size=1, max_size=3).map(tuple), st.binary(max_size=200), max_size=8)
PATHS = st.text(st.sampled_from("ab./*?[]{},!-\\\0\n\udcff^é"), max_size=12) | st.text(max_size=12)


@contextmanager
def workspace(tree: dict[tuple[bytes, ...], bytes] | None = None) -> Iterator[Workspace]:
    """A workspace with these files; a name that is both file and folder is what came first."""
    with tempfile.TemporaryDirectory() as parent, pytest.MonkeyPatch.context() as patch:
        made = make(Path(parent) / "w", patch)
        for parts, content in (tree or {}).items():
            path = os.path.join(os.fsencode(made.root), *parts)  # noqa: PTH118 - bytes
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120 - bytes
                with open(path, "xb") as file:  # noqa: PTH123 - bytes
                    file.write(content)
            except OSError:
                continue
        yield made


def sound(value: Any) -> None:
    """A value can be sent: JSON without lone surrogates, smaller than a message; errors have their parts."""
    encoded = json.dumps(value)
    assert len(encoded) < 900 * 1024
    json.dumps(value, ensure_ascii=False).encode()
    if "error" in value:
        assert set(value["error"]) == {"rule", "reason", "hint"}
        assert "\n" not in value["error"]["reason"]


@given(tree=trees)
@draws(60)
def test_every_file_of_any_name_is_listed_once_and_in_order(tree: dict[tuple[bytes, ...], bytes]) -> None:
    """The listing is os.walk's, escaped, whatever bytes the names are made of."""
    with workspace(tree) as made:
        value = made.run("list", limit=1000)
        sound(value)
        walked = [
            os.fsdecode(os.path.relpath(os.path.join(folder, name), made.root))  # noqa: PTH118
            for folder, folders, files in os.walk(made.root)
            for name in folders + files
        ]
        assert sorted(entry["path"] for entry in value["entries"]) == sorted(map(paths.display_name, walked))
        assert value["total"] == len(walked)
        assert all(entry["path"].isprintable() for entry in value["entries"])
        assert made.run("list", limit=1000) == value


@given(tree=trees)
@draws(60)
def test_any_file_can_be_searched(tree: dict[tuple[bytes, ...], bytes]) -> None:
    """Every line matches a pattern that matches everything, and none a pattern that matches nothing."""
    with workspace(tree) as made:
        value = made.run("search", pattern="", context=2, limit=1000)
        sound(value)
        assert all(not re.search("[\n]", match["text"]) for match in value["matches"])
        assert made.run("search", pattern="(?!)")["matches"] == []


lettered = st.text(st.sampled_from("aé漢\ufffd\ud800\0\r. "), max_size=4)


@given(
    pattern=lettered,
    fold=st.booleans(),
    content=st.lists(
        st.text(st.sampled_from("aé漢\ufffd\0\r\n. ")).flatmap(
            lambda text: st.sampled_from([text.encode(each) for each in ("utf-8", "utf-8-sig", "utf-16")])
        )
        | st.binary(max_size=20)
    ).map(b"".join),
)
@example(pattern="é", fold=False, content=b"\xff\xfe\xe9\0")
@example(pattern="\ufffd", fold=False, content=b"\xff")
@draws(500)
def test_a_text_is_found_where_the_pattern_of_it_is(pattern: str, fold: bool, content: bytes) -> None:
    """A text is looked for in bytes first; as a pattern of the same meaning it is not."""
    with workspace({(b"f",): content}) as made:
        found = made.run("search", pattern=pattern, literal=True, ignore_case=fold)
        assert found == made.run("search", pattern=f"(?:{re.escape(pattern)})", ignore_case=fold)


regexes = st.lists(
    st.sampled_from(["a", "b", "ab", "é", ".", "a+", "b*", "a{2}", "(ab)", "(?:b|é)", "(?i:a)", "^", "$", r"\b", r"\w",
                     "[ab]", "(a)?", "(?=b)", "(?!a)", "(?>ab)", "a++", "|", r"\ufffd", r"\r", r"\n", r"\x61"]),
    max_size=6,
).map("".join)  # fmt: skip


@given(
    pattern=regexes, fold=st.booleans(),
    content=st.lists(
        st.sampled_from([b"a", b"b", b"A", "é".encode(), b"\r", b"\n", b"\r\n", b"\xff", b" "])
    ).map(b"".join),
)  # fmt: skip
@draws(500)
def test_no_line_is_lost_by_looking_for_a_text_first(pattern: str, fold: bool, content: bytes) -> None:
    """A text that every match holds is looked for in bytes; without that the answer is the same."""
    with workspace({(b"f",): content, (b"g",): content.decode("latin-1").encode("utf-16")}) as made:
        found = made.run("search", pattern=pattern, ignore_case=fold)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search, "needle", lambda _: "")
            assert found == made.run("search", pattern=pattern, ignore_case=fold)


@given(
    tree=st.dictionaries(
        st.tuples(st.integers(0, 40).map(lambda number: b"%02d" % number)),
        st.lists(st.sampled_from([b"needle\n", b"x\n", b"\0"]), max_size=4).map(b"".join), max_size=30,
    ),
    limit=st.integers(1, 12), own=st.integers(1, 3), given_=st.integers(1, 8), ends=st.booleans(),
)  # fmt: skip
@draws(60)
def test_two_processes_find_what_one_does(
    tree: dict[tuple[bytes, ...], bytes], limit: int, own: int, given_: int, ends: bool
) -> None:
    """In the same order, with the same counts and the same end; also where the second dies, or cannot be had."""
    with workspace(tree) as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(helper, "ALONE", 2)
        patch.setattr(helper, "_OWN", own)
        patch.setattr(helper, "_MOST", given_)
        patch.setattr(os, "sched_getaffinity", lambda _: {0})
        alone = made.run("search", pattern="needle", limit=limit)
        patch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
        assert made.run("search", pattern="needle", limit=limit) == alone
        process, batch = os.getpid(), search._Search.batch

        def dying(*arguments: Any) -> Any:
            if os.getpid() != process:
                os._exit(9)
            return batch(*arguments)

        patch.setattr(search._Search, "batch", dying)
        if not ends:
            patch.setattr(os, "fork", lambda: (_ for _ in ()).throw(BlockingIOError()))
        assert made.run("search", pattern="needle", limit=limit) == alone


@given(
    content=st.binary(max_size=3000) | st.text(max_size=1000).map(str.encode),
    offset=st.integers(1, 20),
    limit=st.integers(1, 20),
)
@example(content=b"\xc0", offset=1, limit=1)
@draws(150)
def test_any_bytes_can_be_read_or_are_refused(content: bytes, offset: int, limit: int) -> None:
    """Text comes back as exactly the lines asked for; anything else is an answer too, never an exception."""
    with workspace({(b"f",): content}) as made:
        value = made.run("read", path="f", offset=offset, limit=limit)
        sound(value)
        if value.get("encoding") == "utf-8":
            lines = content.split(b"\n")
            expected = b"\n".join(lines[offset - 1 : offset - 1 + limit])
            assert value["text"].removesuffix("\n").encode() == expected.removesuffix(b"\n")
            assert value["total_lines"] == len(lines) - (lines[-1] == b"")


@given(
    lengths=st.lists(st.integers(0, 9000), max_size=12), character=st.sampled_from("xé漢😀"), small=st.integers(1, 40)
)
@draws(60)
def test_reading_on_gives_every_line_exactly_once(lengths: list[int], character: str, small: int) -> None:
    """With long lines cut and their rest counted, the counts add up to the file."""
    content = "".join(character * length + "\n" for length in lengths)
    with workspace({(b"f",): content.encode()}) as made:
        offset: int | None = 1
        found: list[str] = []
        while offset is not None:
            value = made.run("read", path="f", offset=offset, limit=small)
            found += value["text"].split("\n")[:-1]
            offset = value["next_offset"]
    counted = []
    for line in found:
        kept, _, rest = line.partition("… [+")
        counted.append(len(kept) + int(rest.removesuffix(" characters]") or 0))
        assert len(kept) <= read.MAX_LINE
    assert counted == lengths


@given(path=PATHS)
@example(path="[\udcff-?")
@draws(300)
def test_any_path_or_pattern_gets_an_answer_from_inside(path: str) -> None:
    """Beside the workspace is a file every escape would find; no answer holds any of it."""
    with workspace({(b"a",): b"inside\n", (b"b", b"a"): b"inside\n"}) as made:
        (made.root.parent / "a").write_text("FOREIGN")
        (made.root / "up").symlink_to("..")
        for value in (
            made.run("read", path=path),
            made.run("read", path=f"up/{path}"),
            made.run("list", pattern=path),
            made.run("search", pattern="FOREIGN", path=path),
            made.run("search", pattern=path, path="a"),
        ):
            sound(value)
            assert "FOREIGN" not in json.dumps(value)


parts = st.text(st.sampled_from("ab*?"), min_size=1, max_size=6).filter(lambda part: "**" not in part)
plain = st.text(st.sampled_from("ab"), min_size=1, max_size=8)


@given(pattern=parts, name=plain)
@draws(500)
def test_a_pattern_within_a_name_is_fnmatchs(pattern: str, name: str) -> None:
    """The standard library's translation is the oracle."""
    ours = re.compile(matching.expression(pattern)).fullmatch(name) is not None
    assert ours == fnmatch.fnmatchcase(name, pattern)


def _matches(pattern: list[str], path: list[str]) -> bool:
    """The meaning of a pattern, as simply as it can be said."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        least = 1 if len(pattern) == 1 else 0  # at the end it is what is below, not the folder itself
        return any(_matches(pattern[1:], path[count:]) for count in range(least, len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(pattern[1:], path[1:])


@given(pattern=st.lists(parts | st.just("**"), min_size=1, max_size=5), path=st.lists(plain, min_size=1, max_size=5))
@draws(500)
def test_a_pattern_across_folders_means_what_its_definition_says(pattern: list[str], path: list[str]) -> None:
    """Including that atomic groups, which keep it linear, lose no match."""
    pattern = [part for at, part in enumerate(pattern) if part != "**" or pattern[at - 1 : at] != ["**"]]
    ours = re.compile(matching.expression("/".join(pattern))).fullmatch("/".join(path)) is not None
    assert ours == _matches(pattern, path)


@given(pattern=st.text(max_size=20), name=st.text(max_size=10))
@draws(300)
def test_any_pattern_compiles_or_says_why(pattern: str, name: str) -> None:
    """No pattern raises anything but ValueError or re.error, which are the caller's to hear."""
    try:
        alternatives = matching.alternatives(pattern)
        compiled = [re.compile(matching.expression(each)) for each in alternatives]
    except (ValueError, re.error):
        return
    for each in compiled:
        each.fullmatch(name)
