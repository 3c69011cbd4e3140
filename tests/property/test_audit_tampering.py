"""Hostile bytes against the log: nothing crashes a reader, and no tampering passes."""

import tempfile
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import given
from tests.fixtures.audit_logs import fill
from tests.fixtures.draws import draws

from glovebox_audit import chain, read
from glovebox_audit.chain import EvidenceError
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME
from glovebox_audit.verify import verify

COUNT = 8


def _written() -> tuple[bytes, bytes]:
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "audit"
        fill(directory, COUNT)
        return (directory / LOG_NAME).read_bytes(), (directory / HEAD_NAME).read_bytes()


LOG, HEAD = _written()
LINES = LOG.splitlines(keepends=True)


def check(log: bytes, head: bytes) -> list[tuple[int | None, str]]:
    """Verify these bytes; return where and what."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / LOG_NAME).write_bytes(log)
        (Path(place) / HEAD_NAME).write_bytes(head)
        report = verify(Path(place))
        read.tail(Path(place), 3)
        list(read.records_of(Path(place), "c_1"))
    assert report.ok is not bool(report.problems)
    return [(problem.line, problem.kind) for problem in report.problems]


def first_difference(log: bytes) -> int:
    """Return the number of the first line that is not the one that was written."""
    pairs = zip(LINES, log.splitlines(keepends=True), strict=False)
    return next((number for number, (a, b) in enumerate(pairs, 1) if a != b), min(COUNT, log.count(b"\n")) + 1)


def test_the_untouched_log_is_whole() -> None:
    """Control for everything below."""
    assert check(LOG, HEAD) == []


@draws(300)
@given(st.integers(0, len(LOG) - 1), st.integers(1, 255))
def test_any_changed_byte_is_found_on_its_line(place: int, change: int) -> None:
    """Every bit of every byte counts."""
    log = LOG[:place] + bytes([LOG[place] ^ change]) + LOG[place + 1 :]
    assert check(log, HEAD)[0][0] == first_difference(log)


@draws(200)
@given(st.integers(0, len(LOG) - 1))
def test_any_cut_is_found_on_its_line(end: int) -> None:
    """From the last line feed to the first byte."""
    assert check(LOG[:end], HEAD)[0][0] == first_difference(LOG[:end])


@draws(200)
@given(st.integers(0, len(LOG)), st.binary(min_size=1, max_size=64))
def test_any_inserted_bytes_are_found_on_their_line(place: int, content: bytes) -> None:
    """Foreign bytes at any place."""
    log = LOG[:place] + content + LOG[place:]
    assert check(log, HEAD)[0][0] == first_difference(log)


@draws(300)
@given(st.lists(st.integers(0, COUNT - 1), max_size=2 * COUNT))
def test_any_other_sequence_of_the_lines_is_found_on_its_line(order: list[int]) -> None:
    """Deleted, repeated, reordered, replayed in any mixture; only the identity passes."""
    log = b"".join(LINES[number] for number in order)
    found = check(log, HEAD)
    if order == list(range(COUNT)):
        assert found == []
    else:
        assert found[0][0] == first_difference(log)


@draws(100)
@given(st.integers(0, len(HEAD) - 1), st.integers(1, 255))
def test_any_changed_byte_of_the_head_is_found(place: int, change: int) -> None:
    """head.json has one form only."""
    assert check(LOG, HEAD[:place] + bytes([HEAD[place] ^ change]) + HEAD[place + 1 :])


@draws(200)
@given(st.binary(max_size=4096), st.binary(max_size=300))
def test_arbitrary_bytes_never_crash_a_reader(log: bytes, head: bytes) -> None:
    """And never pass for a log."""
    assert check(log, head)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters()), inner, max_size=4),
    max_leaves=12,
)


@draws(200)
@given(st.dictionaries(st.text(st.characters()), _JSON, max_size=4))
def test_any_json_can_be_recorded_and_read_back(data: dict[str, object]) -> None:
    """Surrogates, giant numbers and NaN included: what is written is what is read."""
    plain = {str(chain.recordable(key)): chain.recordable(value) for key, value in data.items()}
    item = chain.Draft(kind="call.failed", call_id=None, data=plain, encoded=chain.canonical(data))
    record = chain.seal(item, seq=1, time="2026-11-20T12:00:00.000001Z", server="s_1", prev=chain.GENESIS)
    assert chain.parse(record.line).data == plain


@draws(200)
@given(st.binary(max_size=512) | _JSON.map(lambda value: repr(value).encode("utf-8", "replace")))
def test_any_line_is_a_record_or_not_a_record(line: bytes) -> None:
    """The parser has exactly one way to refuse."""
    try:
        record = chain.parse(line)
    except EvidenceError:
        return
    assert record.line == line
