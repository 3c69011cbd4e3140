"""Reading: the last lines, one call, what comes next; foreign bytes are shown as such."""

from contextlib import aclosing
from pathlib import Path

import anyio
import pytest
from tests.fixtures.audit_logs import decided, fill, log_lines

from glovebox_audit import chain, read, subscription
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME


def seqs(lines: list[read.LogLine]) -> list[int | None]:
    return [None if line.record is None else line.record.seq for line in lines]


@pytest.mark.parametrize("block", [1, 7, 600, 1 << 16])
def test_tail_is_the_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(read, "_BLOCK_BYTES", block)
    fill(tmp_path / "empty", 0)
    assert read.tail(tmp_path / "empty", 10) == []
    fill(tmp_path, 5)
    for count in range(8):
        assert seqs(read.tail(tmp_path, count)) == list(range(1, 6))[5 - min(count, 5) :]
    with (tmp_path / LOG_NAME).open("ab") as handle:
        handle.write(b"half")
    assert seqs(read.tail(tmp_path, 2)) == [5, None]
    assert seqs(read.tail(tmp_path, 9)) == [1, 2, 3, 4, 5, None]


def test_one_call_is_found_among_others_and_rubbish(tmp_path: Path) -> None:
    """Records that merely mention the id belong to another call."""
    directory = tmp_path / "audit"
    fill(directory, 6)
    with (directory / LOG_NAME).open("ab") as handle:
        handle.write(b"c_1 rubbish\n")
    fill(directory, 1)
    found = [(record.seq, record.kind) for record in read.records_of(directory, "c_1")]
    assert found == [(3, "call.decided"), (4, "call.finished")]
    assert list(read.records_of(directory, "c_none")) == []


async def test_follow_sees_what_any_process_appends(tmp_path: Path) -> None:
    directory = tmp_path / "audit"
    fill(directory, 4)
    async with AuditLog.open(directory, "s_2") as log, aclosing(subscription.follow(directory, 2)) as lines:
        assert [(await anext(lines)).raw for _ in range(2)] == log_lines(directory)[2:]
        async with anyio.create_task_group() as group:
            group.start_soon(log.append, decided("c_new"))
            line = await anext(lines)
        assert line.record is not None
        assert line.record.call_id == "c_new"


async def test_follow_says_when_the_log_became_shorter(tmp_path: Path) -> None:
    """A reader does not wait for ever for bytes that were cut off."""
    directory = tmp_path / "audit"
    fill(directory, 2)
    async with aclosing(subscription.follow(directory, 1)) as lines:
        await anext(lines)
        (directory / LOG_NAME).write_bytes(b"")
        with pytest.raises(AuditError, match="it became shorter"):
            await anext(lines)


def test_a_line_beyond_the_bound_is_read_in_parts(tmp_path: Path) -> None:
    """Parts share a line number and are never taken for records."""
    directory = tmp_path / "audit"
    records = fill(directory, 1)
    (directory / LOG_NAME).write_bytes(b"x" * chain.MAX_LINE_BYTES + records[0].line + records[0].line)
    found = read.tail(directory, 10)
    assert [(line.number, line.record is None) for line in found] == [(1, True), (1, True), (2, False)]


def test_the_head_is_read_or_its_absence_is_said(tmp_path: Path) -> None:
    """`glovebox audit head` never invents an anchor."""
    directory = tmp_path / "audit"
    record = fill(directory, 1)[0]
    assert (read.head(directory).seq, read.head(directory).hash) == (1, record.hash)
    (directory / HEAD_NAME).unlink()
    with pytest.raises(AuditError, match="missing or damaged"):
        read.head(directory)
