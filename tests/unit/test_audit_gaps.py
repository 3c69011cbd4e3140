"""What lies in a recorded gap is no record, however much it looks like one: it meets no claim and is nobody's call."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.fixtures import segments
from tests.fixtures.audit_logs import decided, finished, log_lines

from glovebox_audit import chain, read
from glovebox_audit.bundle import evidence
from glovebox_audit.bundle.evidence import prove
from glovebox_audit.chain import GENESIS, EvidenceError, Head, Record, draft
from glovebox_audit.events import Event, GapRecorded, ServerStopped
from glovebox_audit.file import LogFile
from glovebox_audit.place import AuditError
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME
from glovebox_audit.verify import verify


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
        if sealed:
            assert file.seal() == 1
        else:
            with pytest.raises(AuditError, match="a record in it was changed, so it is not sealed"):
                file.seal()
    file.close()


def test_bytes_behind_the_last_record_are_not_sealed(directory: Path) -> None:
    """As when what a gap accounts for was moved behind it: the chain is whole, and the segment is not."""
    with (directory / LOG_NAME).open("ab") as log:
        log.write(b"{torn\n")
    file = LogFile(directory, "s_2", segments.rotation(10**9))
    *kept, torn, gap = log_lines(directory)
    for lines, sealed in (([*kept, gap, torn], False), ([*kept, torn, gap], True)):
        (directory / LOG_NAME).write_bytes(b"".join(lines))
        if sealed:
            assert file.seal() == 1
        else:
            with pytest.raises(AuditError, match="so it is not sealed"):
                file.seal()
    file.close()


def test_a_gap_of_many_lines_is_one_gap(directory: Path) -> None:
    with (directory / LOG_NAME).open("ab") as log:
        log.write(b"{\n" * 300)
    LogFile(directory, "s_2").close()
    report = verify(directory)
    assert (report.ok, report.gaps, report.omitted) == (True, 1, 0)
