"""M14: what verify says about each kind of tampering, and that a plain log would say nothing."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fixtures.audit_logs import decided, fill, finished, log_lines, replace_head, replace_lines

from glovebox_audit import chain, read
from glovebox_audit.chain import Head, draft
from glovebox_audit.place import AuditError
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME
from glovebox_audit.verify import MAX_PROBLEMS, verify

Lines = list[bytes]


def rewritten(lines: Lines, first: int) -> Lines:
    """Change record ``first`` (from 0) and make all hashes after it right again, as an attacker with the code would."""
    records = [chain.parse(line) for line in lines]
    prev, result = records[first].prev, lines[:first]
    for record in records[first:]:
        call = record.call_id or "c_0"
        begins = record.kind == "call.decided"
        item = draft(decided(call, reason="rewritten") if begins else replace(finished(call), elapsed_ms=99.5))
        forged = chain.seal(item, seq=record.seq, time=record.time, server=record.server, prev=prev)
        prev = forged.hash
        result.append(forged.line)
    return result


TAMPERING: dict[str, tuple[Callable[[Lines], Lines], list[tuple[int, str]]]] = {
    "edit a value": (lambda x: [*x[:3], x[3].replace(b"12.5", b"99.5"), *x[4:]], [(4, "edited")]),
    "edit the last value": (lambda x: [*x[:9], x[9].replace(b"12.5", b"99.5")], [(10, "edited")]),
    "edit and fix its hash": (lambda x: [*x[:3], rewritten(x[:4], 3)[-1], *x[4:]], [(4, "edited")]),
    "edit the last and fix its hash": (lambda x: [*x[:9], rewritten(x, 9)[-1]], [(10, "head")]),
    "edit and fix all hashes": (lambda x: rewritten(x, 3), [(10, "head")]),
    "break a line": (lambda x: [*x[:3], b"{" + x[3], *x[4:]], [(4, "foreign")]),
    "reformat a line": (lambda x: [*x[:3], x[3].replace(b",", b", ", 1), *x[4:]], [(4, "foreign")]),
    "empty a line": (lambda x: [*x[:3], b"\n", *x[4:]], [(4, "foreign")]),
    "join two lines": (lambda x: [*x[:3], x[3].rstrip(), *x[4:]], [(4, "foreign"), (5, "deleted")]),
    "delete a line": (lambda x: [*x[:3], *x[4:]], [(4, "deleted")]),
    "delete the first": (lambda x: x[1:], [(1, "deleted")]),
    "delete two places": (lambda x: [*x[:2], *x[4:7], *x[8:]], [(3, "deleted"), (6, "deleted")]),
    "swap two lines": (lambda x: [*x[:3], x[4], x[3], *x[5:]], [(4, "reordered")]),
    "move a line back": (lambda x: [*x[:1], *x[2:6], x[1], *x[6:]], [(2, "reordered")]),
    "move a line forward": (lambda x: [x[0], x[8], *x[1:8], x[9]], [(2, "reordered")]),
    "copy a line": (lambda x: [*x[:4], x[3], *x[4:]], [(5, "repeated")]),
    "replay an old line": (lambda x: [*x, x[2]], [(11, "repeated")]),
    "insert a foreign line": (lambda x: [*x[:3], b"hello\n", *x[3:]], [(4, "foreign")]),
    "insert a forged record": (lambda x: [*x[:3], rewritten(x, 3)[3], *x[3:]], [(5, "forked")]),
    "cut the last": (lambda x: x[:9], [(10, "truncated")]),
    "cut to nothing": (lambda _: [], [(1, "truncated")]),
    "cut in mid-line": (lambda x: [*x[:9], x[9][:40]], [(10, "torn")]),
    "cut the last line feed": (lambda x: [*x[:9], x[9][:-1]], [(10, "torn")]),
    "append bytes": (lambda x: [*x, b"\0\xff"], [(11, "torn")]),
    "change the first link": (lambda x: [x[0].replace(chain.GENESIS.encode(), b"1" * 64), *x[1:]], [(1, "edited")]),
}


@pytest.mark.parametrize("name", TAMPERING)
def test_tampering_is_named_with_its_line(tmp_path: Path, name: str) -> None:
    """M14: delete, edit, reorder, truncate, replay, insert: found, on the right line, once."""
    fill(tmp_path / "audit", 10)
    assert verify(tmp_path / "audit").ok
    attack, expected = TAMPERING[name]
    before = log_lines(tmp_path / "audit")
    after = attack(before)
    assert after != before
    replace_lines(tmp_path / "audit", after)
    report = verify(tmp_path / "audit")
    assert not report.ok
    assert [(problem.line, problem.kind) for problem in report.problems] == expected


#: Without canonical form, chain and head, JSON lines can only say that each line is JSON with the expected keys.
NO_JSON = ("break", "empty", "join", "insert a foreign", "cut in", "append")
KEEPS_JSON = [name for name in TAMPERING if not name.startswith(NO_JSON)]


@pytest.mark.parametrize("name", KEEPS_JSON)
def test_control_a_log_without_a_chain_notices_nothing(tmp_path: Path, name: str) -> None:
    """The same tampering passes the check a plain JSON-lines log allows."""
    fill(tmp_path / "audit", 10)
    for line in TAMPERING[name][0](log_lines(tmp_path / "audit")):
        assert json.loads(line).keys() >= {"seq", "time", "kind", "data"}


def test_putting_back_an_older_state_needs_an_anchor(tmp_path: Path) -> None:
    """Roll-back of log and head together is invisible (control) except to an anchor kept elsewhere."""
    directory = tmp_path / "audit"
    fill(directory, 4)
    old_log, old_head = (directory / LOG_NAME).read_bytes(), (directory / HEAD_NAME).read_bytes()
    fill(directory, 2)
    anchor = read.head(directory)
    (directory / LOG_NAME).write_bytes(old_log)
    (directory / HEAD_NAME).write_bytes(old_head)
    assert verify(directory).ok
    report = verify(directory, anchor)
    assert [(problem.line, problem.kind) for problem in report.problems] == [(5, "anchor")]


def test_a_log_rewritten_with_its_head_needs_an_anchor(tmp_path: Path) -> None:
    """The chain holds no secret: whoever may write both files can forge both (control), but not the anchor."""
    directory = tmp_path / "audit"
    fill(directory, 4)
    anchor = read.head(directory)
    forged = rewritten(log_lines(directory), 1)
    replace_lines(directory, forged)
    last = chain.parse(forged[-1])
    replace_head(directory, chain.encode_head(Head(seq=4, hash=last.hash, size=len(b"".join(forged)))))
    assert verify(directory).ok
    report = verify(directory, anchor)
    assert [(problem.line, problem.kind) for problem in report.problems] == [(4, "anchor")]


def test_an_old_anchor_still_holds_for_a_longer_log(tmp_path: Path) -> None:
    directory = tmp_path / "audit"
    fill(directory, 2)
    anchor = read.head(directory)
    fill(directory, 2)
    assert verify(directory, anchor).ok
    assert verify(directory, Head()).ok
    assert not verify(directory, Head(hash="1" * 64)).ok


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        (None, "head.json is missing"),
        (b"", "head.json is damaged"),
        (chain.encode_head(Head(seq=0, hash="1" * 64)), "head.json describes no log"),
        (chain.encode_head(Head(size=5)), "head.json has the wrong size"),
    ],
)
def test_a_head_that_says_nothing_is_a_problem(tmp_path: Path, content: bytes | None, detail: str) -> None:
    directory = tmp_path / "audit"
    fill(directory, 1)
    (directory / HEAD_NAME).unlink()
    if content is not None:
        replace_head(directory, content)
    report = verify(directory)
    assert [(problem.line, problem.kind) for problem in report.problems] == [(None, "head")]
    assert detail in report.problems[0].detail


def test_a_head_that_lags_behind_is_normal(tmp_path: Path) -> None:
    """After a power cut head.json may be older than the log, never newer."""
    directory = tmp_path / "audit"
    fill(directory, 2)
    old = (directory / HEAD_NAME).read_bytes()
    fill(directory, 2)
    replace_head(directory, old)
    assert verify(directory).ok
    fill(directory, 1)
    assert verify(directory).records == 5


def test_the_report_is_bounded(tmp_path: Path) -> None:
    directory = tmp_path / "audit"
    fill(directory, 1)
    replace_lines(directory, [b"\n"] * (MAX_PROBLEMS + 50))
    report = verify(directory)
    assert (len(report.problems), report.omitted) == (MAX_PROBLEMS, 50)


def test_an_endless_line_is_read_in_bounded_memory(tmp_path: Path) -> None:
    directory = tmp_path / "audit"
    fill(directory, 1)
    with (directory / LOG_NAME).open("ab") as handle:
        handle.truncate(chain.MAX_LINE_BYTES * 5)
    report = verify(directory)
    assert [(problem.line, problem.kind) for problem in report.problems] == [(2, "foreign")]


def test_no_log_is_an_error_and_not_a_whole_log(tmp_path: Path) -> None:
    """An empty directory proves nothing."""
    with pytest.raises(AuditError, match="No such file or directory"):
        verify(tmp_path)
    (tmp_path / LOG_NAME).mkdir()
    with pytest.raises(AuditError, match="not a regular file"):
        verify(tmp_path)


@pytest.fixture
def crashed(tmp_path: Path) -> tuple[Path, Head, int]:
    """A log with a gap in it, an anchor taken after it and kept elsewhere, and the line the bytes of the crash are."""
    directory = tmp_path / "audit"
    fill(directory, 4)
    with (directory / LOG_NAME).open("ab") as log:
        log.write(b'{"torn')
    fill(directory, 4)
    report = verify(directory)
    assert (report.ok, report.gaps) == (True, 1)
    return directory, report.head, log_lines(directory).index(b'{"torn\n')


def keep_head_in_step(directory: Path, head: Head) -> None:
    """Make head.json fit a log of another size, as whoever may write the one may write the other."""
    size = sum(map(len, log_lines(directory)))
    replace_head(directory, chain.encode_head(Head(seq=head.seq, hash=head.hash, size=size)))


@pytest.mark.parametrize("before", [True, False])
def test_a_record_forged_into_a_gap_is_found(crashed: tuple[Path, Head, int], *, before: bool) -> None:
    """What a gap accounts for is what the crash left, and nothing that was put beside it later."""
    directory, anchor, torn = crashed
    lines = log_lines(directory)
    old = chain.parse(lines[1])
    item = draft(decided("c_forged", principal="token:somebody"))
    forged = chain.seal(item, seq=old.seq, time=old.time, server=old.server, prev=old.prev)
    place = torn + (not before)
    replace_lines(directory, [*lines[:place], forged.line, *lines[place:]])
    keep_head_in_step(directory, anchor)
    found = {(problem.line, problem.kind) for problem in verify(directory, anchor).problems}
    assert (place + 1, "repeated") in found


def test_a_gap_without_its_bytes_is_found(crashed: tuple[Path, Head, int]) -> None:
    """The bytes of a crash are evidence, and taking them away is a change like any other."""
    directory, anchor, torn = crashed
    lines = log_lines(directory)
    replace_lines(directory, [*lines[:torn], *lines[torn + 1 :]])
    keep_head_in_step(directory, anchor)
    assert [(each.line, each.kind) for each in verify(directory, anchor).problems] == [(torn + 1, "deleted")]
