"""Hostile bytes against a log of several segments: no change passes, and its file and line are named."""

import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import given
from tests.fixtures import segments
from tests.fixtures.draws import draws

from glovebox_audit import read
from glovebox_audit.verify import Problem, verify

Files = dict[str, bytes]


def _written() -> Files:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "audit"
        segments.fill(directory, 6, size=1800)
        parts = ["audit.jsonl", "head.json", *(f"segments/{path.name}" for path in (directory / "segments").iterdir())]
        return {name: (directory / name).read_bytes() for name in sorted(parts)}


FILES = _written()
LOGS = [name for name in FILES if name.endswith(".jsonl")]
IN_ORDER = [*sorted(name for name in LOGS if "/" in name), "audit.jsonl"]


def check(files: Files) -> list[Problem]:
    """Verify these files; return what was found."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        (directory / "segments").mkdir()
        for name, content in files.items():
            (directory / name).write_bytes(content)
        report = verify(directory, keys=segments.KEYS)
        read.tail(directory, 30)
        list(read.records_of(directory, "c_1"))
    assert report.ok is not bool(report.problems)
    return list(report.problems)


def test_the_untouched_log_is_whole() -> None:
    """Control for everything below; there are several segments."""
    assert check(FILES) == []
    assert len(LOGS) > 3


@draws(300)
@given(st.data())
def test_any_changed_byte_is_found_in_its_file_on_its_line(data: st.DataObject) -> None:
    """Seals and first records are records: their bytes count as any."""
    name = data.draw(st.sampled_from(LOGS))
    content = FILES[name]
    place = data.draw(st.integers(0, len(content) - 1))
    changed = content[:place] + bytes([content[place] ^ data.draw(st.integers(1, 255))]) + content[place + 1 :]
    found = check({**FILES, name: changed})
    assert (found[0].file, found[0].line) == (name, content.count(b"\n", 0, place) + 1)


@draws(150)
@given(st.data())
def test_any_cut_is_found_in_its_file(data: st.DataObject) -> None:
    """A sealed segment without its end has no seal, and the next one is chained to what is missing."""
    name = data.draw(st.sampled_from(LOGS))
    end = data.draw(st.integers(0, len(FILES[name]) - 1))
    found = check({**FILES, name: FILES[name][:end]})
    assert found
    assert name in {problem.file for problem in found[:2]}


@draws(150)
@given(st.data())
def test_any_inserted_bytes_are_found_in_their_file(data: st.DataObject) -> None:
    """Behind a seal too."""
    name = data.draw(st.sampled_from(LOGS))
    place = data.draw(st.integers(0, len(FILES[name])))
    content = FILES[name][:place] + data.draw(st.binary(min_size=1, max_size=64)) + FILES[name][place:]
    found = check({**FILES, name: content})
    assert found
    assert found[0].file == name


@draws(100)
@given(st.permutations(IN_ORDER))
def test_any_other_order_of_the_files_is_found(order: list[str]) -> None:
    """A file under another's name."""
    found = check({**FILES, **dict(zip(IN_ORDER, (FILES[name] for name in order), strict=True))})
    assert bool(found) is (order != IN_ORDER)


@draws(60)
@given(st.sets(st.sampled_from(LOGS), min_size=1))
def test_any_missing_files_are_found_by_name(gone: set[str]) -> None:
    """Nothing says that they were removed."""
    if len(gone) == len(LOGS):
        return
    found = check({name: content for name, content in FILES.items() if name not in gone})
    named = {problem.file for problem in found if problem.kind == "missing"}
    assert found
    last = "audit.jsonl" in gone  # then those before it are not known to have been there
    assert named <= gone
    assert named or last


@draws(150)
@given(st.dictionaries(st.sampled_from(LOGS), st.binary(max_size=400), min_size=1))
def test_arbitrary_bytes_never_crash_a_reader(files: Files) -> None:
    """And never pass for a segment."""
    assert check({**FILES, **files})
