"""M14: what verify says about each kind of tampering, where a plain log says nothing; and what a recorded gap hides."""

import errno
import fcntl
import hashlib
import json
import os
import select
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures import segments
from tests.fixtures.audit_logs import decided, fill, finished, log_lines, replace_head, replace_lines, verify

from glovebox_audit import chain, read
from glovebox_audit import verify as verifying
from glovebox_audit.bundle import evidence
from glovebox_audit.bundle.evidence import prove
from glovebox_audit.chain import GENESIS, EvidenceError, Head, Record, draft
from glovebox_audit.event import Event
from glovebox_audit.events import GapRecorded, ServerStopped
from glovebox_audit.file import LogFile
from glovebox_audit.place import AuditError
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME
from glovebox_audit.verify import MAX_PROBLEMS

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
    """Without a head a cut end cannot be told, so its absence is reported."""
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


def chained(events: Sequence[Event], seq: int = 1, prev: str = GENESIS) -> list[Record]:
    """A chain of somebody's own making."""
    made: list[Record] = []
    for place, event in enumerate(events):
        prev = made[-1].hash if made else prev
        time = "2026-01-01T00:00:00.000000Z"
        made.append(chain.seal(draft(event), seq=seq + place, time=time, server="s_1", prev=prev))
    return made


def ghosts() -> bytes:
    """Rubbish, and behind it a call that never was."""
    return b"{torn\n" + b"".join(each.line for each in chained([decided("c_ghost"), finished("c_ghost")], 2, "a" * 64))


def rewrite(directory: Path, events: Sequence[Event], hidden: bytes) -> Head:
    """Put another log in the place of this one, with these bytes in a gap at its end; the new end."""
    made = chained(events)
    gap = GapRecorded(bytes=len(hidden), digest="sha256:" + hashlib.sha256(hidden).hexdigest())
    (last,) = chained([gap], made[-1].seq + 1, made[-1].hash)
    content = b"".join(each.line for each in made) + hidden + last.line
    (directory / LOG_NAME).write_bytes(content)
    return Head(seq=last.seq, hash=last.hash, size=len(content))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    segments.fill(tmp_path / "audit", 3, size=10**9)
    return tmp_path / "audit"


def test_an_anchor_is_not_met_by_a_line_in_a_gap(directory: Path) -> None:
    """A log rewritten with both files keeps the anchored record where it is none; without it all is well (control)."""
    anchor, hidden = read.head(directory), log_lines(directory)[-1]
    head = rewrite(directory, [decided(f"c_{each}") for each in range(9)], b"{torn\n" + hidden)
    (directory / HEAD_NAME).write_bytes(chain.encode_head(head))
    assert [(each.kind, each.seq) for each in verify(directory, anchor).problems] == [("anchor", 6)]
    assert verify(directory).ok


def test_the_head_is_not_met_by_a_line_in_a_gap(directory: Path) -> None:
    """Only ``audit.jsonl`` is rewritten, and the last record stands in a gap where it stood: head.json is of no use."""
    lines, size = log_lines(directory), read.head(directory).size
    events = [ServerStopped(reason="test")] * 7
    room = size - len(lines[-1]) - sum(len(each.line) for each in chained(events))
    hidden = b"{" + b" " * (room - 2) + b"\n" + lines[-1]
    head = rewrite(directory, events, hidden)
    assert (directory / LOG_NAME).read_bytes()[:size].endswith(lines[-1])
    assert [(each.kind, each.seq) for each in verify(directory).problems] == [("head", 6)]
    (directory / HEAD_NAME).write_bytes(chain.encode_head(head))
    assert verify(directory).ok


def test_what_lies_in_a_gap_is_shown_as_no_record(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Glovebox itself recorded the gap; looked at line by line, the call is there (the control)."""
    with (directory / LOG_NAME).open("ab") as log:
        log.write(ghosts())
    LogFile(directory, "s_2").close()
    assert verify(directory).gaps == 1
    assert list(read.records_of(directory, "c_ghost")) == []
    assert [line.record.kind if line.record else "" for line in read.tail(directory, 4)] == ["", "", "", "log.gap"]
    assert str(read.tail(directory, 2)[0].error) == "it lies in a recorded gap"
    monkeypatch.setattr(read, "in_gap", lambda *_: False)
    assert [each.kind for each in read.records_of(directory, "c_ghost")] == ["call.decided", "call.finished"]


def test_a_call_in_a_gap_is_not_lost(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start looks for calls of killed servers: what never was a call gets no end; it would (the control)."""
    for expected in (0, 1):
        killed = LogFile(directory, f"s_killed{expected}")
        (ghost,) = chained([decided("c_ghost")], 2, "a" * 64)
        item, server = draft(decided("c_ghost")), f"s_killed{expected}"
        made = chain.seal(item, seq=2, time=json.loads(ghost.line)["time"], server=server, prev="a" * 64)
        with (directory / LOG_NAME).open("ab") as log:
            log.write(b"{torn\n" + made.line)
        killed.commit([draft(decided(f"c_real{expected}"))])
        killed._writer.close(remove=False)
        if expected:
            monkeypatch.setattr(read, "gaps_in", lambda *_: [])
        LogFile(directory, f"s_next{expected}").close()
        found = [json.loads(line).get("call_id") for line in log_lines(directory) if b'"kind":"call.lost"' in line]
        assert found.count("c_ghost") == expected
        assert f"c_real{expected}" in found


def test_what_looks_like_the_record_of_a_gap_hides_nothing(directory: Path) -> None:
    """One that lies in a gap, one that is not chained to what is before its bytes, one before which nothing is torn."""
    lines = log_lines(directory)
    second = chain.parse(lines[1])
    covered = b"".join(lines[2:])
    gap = GapRecorded(bytes=len(covered), digest="sha256:" + hashlib.sha256(covered).hexdigest())
    (fork,) = chained([gap], 3, second.hash)
    (loose,) = chained([gap], 3, "b" * 64)
    for raw in (fork.line, loose.line):
        (directory / LOG_NAME).write_bytes(b"".join(lines) + raw)
        assert len(list(read.records_of(directory, "c_2"))) == 2
        assert not verify(directory).ok
    (directory / LOG_NAME).write_bytes(b"".join(lines) + b"{torn\n" + fork.line)
    LogFile(directory, "s_2").close()
    assert len(list(read.records_of(directory, "c_2"))) == 2
    assert verify(directory).gaps == 1


def test_a_seal_replayed_into_a_gap_accuses_nobody(tmp_path: Path) -> None:
    """It is what a crash left, like any other bytes; out of a gap it is a finding (the control)."""
    directory = tmp_path / "audit"
    segments.fill(directory, 6)
    seal = log_lines_of(directory, 1)[-1]
    with (directory / LOG_NAME).open("ab") as log:
        log.write(b"{torn\n" + seal)
    segments.fill(directory, 1, first=50, size=10**9)
    assert verify(directory, keys=segments.KEYS).problems == ()
    with (directory / LOG_NAME).open("ab") as log:
        log.write(seal)
    assert [each.kind for each in verify(directory, keys=segments.KEYS).problems] == ["repeated"]


def log_lines_of(directory: Path, number: int) -> list[bytes]:
    return (directory / "segments" / f"{number:06}.jsonl").read_bytes().splitlines(keepends=True)


def proof_of(directory: Path, call: str) -> bytes:
    return prove(directory, "call", call, lambda: ({}, {}))


def seal_after_a_gap(directory: Path) -> bytes:
    """Let Glovebox record a gap with a call in it that never was, go on, and seal; the content of the segment."""
    with (directory / LOG_NAME).open("ab") as log:
        log.write(ghosts())
    segments.fill(directory, 1, first=50, size=10**9)
    file = LogFile(directory, "s_3", segments.rotation(10**9))
    assert file.seal() == 1
    file.close()
    return (directory / "segments" / "000001.jsonl").read_bytes()


def test_a_call_in_a_gap_cannot_be_proved(directory: Path) -> None:
    """Not by the command, and by no other path: the root that is signed has no leaf of it. Its neighbours can."""
    content = seal_after_a_gap(directory)
    assert verify(directory, keys=segments.KEYS).ok
    with pytest.raises(EvidenceError, match="no record of call c_ghost"):
        proof_of(directory, "c_ghost")
    assert json.loads(content.splitlines()[-1])["data"]["lines"] == len(content.splitlines()) - 4
    for call in ("c_0", "c_50"):
        assert len(evidence.read(proof_of(directory, call), segments.KEYS).records) == 2


@pytest.mark.parametrize("place", [0, 3, 5])
def test_a_record_that_was_changed_is_not_sealed(directory: Path, place: int) -> None:
    """A seal is not signed over what never was in the chain; over what was, it is (the control)."""
    kept, path = log_lines(directory), directory / LOG_NAME
    changed = kept[place].replace(b'"tool":"run_', b'"tool":"ran_').replace(b'"exit_code":0', b'"exit_code":1')
    file = LogFile(directory, "s_2", segments.rotation(10**9))
    for content, sealed in ((changed, False), (kept[place], True)):
        with path.open("r+b") as log:
            log.write(b"".join([*kept[:place], content, *kept[place + 1 :]]))
        refusal = pytest.raises(AuditError, match="a record in it was changed, so it is not sealed")
        with nullcontext() if sealed else refusal:
            assert file.seal() == 1
    file.close()


@pytest.mark.parametrize("moved", [True, False])
def test_a_seal_is_of_what_was_written(directory: Path, moved: bool) -> None:
    """What a gap accounts for was moved behind it once it was hashed: the chain is whole, and the seal fits no more."""
    with (directory / LOG_NAME).open("ab") as log:
        log.write(b"{torn\n")
    file = LogFile(directory, "s_2", segments.rotation(10**9))
    file.commit([draft(decided("c_1"))])
    *kept, torn, gap, last = log_lines(directory)
    (directory / LOG_NAME).write_bytes(b"".join([*kept, *((gap, torn) if moved else (torn, gap)), last]))
    assert file.seal() == 1
    file.close()
    assert verify(directory, keys=segments.KEYS).ok is not moved


def test_a_gap_of_many_lines_is_one_gap(directory: Path) -> None:
    with (directory / LOG_NAME).open("ab") as log:
        log.write(b"{\n" * 300)
    LogFile(directory, "s_2").close()
    report = verify(directory)
    assert (report.ok, report.gaps, report.omitted) == (True, 1, 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pytest's workers have threads
def test_a_large_log_is_verified_by_processes_that_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is interrupted, if they are killed, and if none can be made; a small log has none (the control)."""
    fill(tmp_path, 40)
    expected, made, fork = verifying.verify(tmp_path), list[int](), os.fork
    assert (expected.ok, expected.records, verifying._processes(verifying.SPREAD_BYTES - 1)) == (True, 40, 1)

    def noted(then: Callable[[], object]) -> int:
        if (child := fork()) == 0:
            then()
        made.append(child)
        return child

    def pause() -> None:  # the second one, which nothing is read from
        if len(made) > 2:
            signal.pause()

    def refused() -> int:
        raise BlockingIOError(errno.EAGAIN, "no process")

    monkeypatch.setattr(verifying, "PIECE_BYTES", 600)
    monkeypatch.setattr(verifying, "_processes", lambda _: 2)
    for each in (refused, partial(noted, lambda: os.kill(os.getpid(), signal.SIGKILL))):
        monkeypatch.setattr(os, "fork", each)
        assert verifying.verify(tmp_path) == expected
    monkeypatch.setattr(os, "fork", partial(noted, pause))
    with (tmp_path / LOG_NAME).open("rb") as log:
        lines = verifying._lines(log, expected.head.size)
        assert next(lines).number == 1
        lines.close()
    assert len(made) == 4
    assert not [child for child in made if Path(f"/proc/{child}").exists()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_processes_that_verify_end_when_theirs_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait to be read, which nobody does any more: none of them may keep the other end of a pipe open."""
    fill(tmp_path, 200)
    told, tell = os.pipe()

    def pipe(*, duplex: bool) -> tuple[Connection, Connection]:
        reader, writer = Pipe(duplex)
        fcntl.fcntl(writer.fileno(), fcntl.F_SETPIPE_SZ, 4096)
        return reader, writer

    monkeypatch.setattr(verifying, "Pipe", pipe)
    monkeypatch.setattr(verifying, "_processes", lambda _: 2)
    if (parent := os.fork()) == 0:
        with (tmp_path / LOG_NAME).open("rb") as log:
            lines: Any = verifying._lines(log, read.head(tmp_path).size)
            next(lines)
            os.write(tell, json.dumps(lines.gi_frame.f_locals["children"]).encode())
            signal.pause()
    pidfds = [os.pidfd_open(child) for child in json.loads(os.read(told, 100))]
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    ended = [bool(select.select([each], [], [], 10)[0]) for each in pidfds]
    for each in pidfds:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(each, signal.SIGKILL)
    for each in (*pidfds, told, tell):
        os.close(each)
    assert ended == [True, True]
