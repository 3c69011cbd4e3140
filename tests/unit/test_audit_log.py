"""The log as a server uses it: durable before it answers, private, shared, and refused rather than lossy."""

import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from tests.fixtures.audit_logs import decided, fill, finished, log_lines, replace_head, replace_lines

from glovebox_audit import chain, file, log, place
from glovebox_audit.chain import Head, Record, draft
from glovebox_audit.events import ServerStarted
from glovebox_audit.file import LogFile
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_audit.segments.files import HEAD_NAME, LOG_NAME
from glovebox_audit.verify import verify


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "audit"


async def test_records_are_chained_in_the_order_of_appending(directory: Path) -> None:
    async with AuditLog.open(directory, "s_1") as audit:
        first = await audit.append(ServerStarted(version="0.1.0", pid=1, transport="stdio"))
        second = await audit.append(decided())
        assert audit.head.seq == 2
        assert audit.head.hash == second.hash
    assert (first.seq, first.prev, first.server) == (1, chain.GENESIS, "s_1")
    assert (second.seq, second.prev, second.call_id) == (2, first.hash, "c_1")
    assert log_lines(directory) == [first.line, second.line]
    assert verify(directory).ok


async def test_a_record_is_on_the_disk_before_append_returns(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is write, fdatasync, head, answer."""
    order: list[str] = []
    write, sync, pwrite = os.write, os.fdatasync, os.pwrite

    def traced_write(descriptor: int, content: bytes) -> int:
        if b"call.decided" in content:
            order.append("write")
        return write(descriptor, content)

    def traced_sync(descriptor: int) -> None:
        order.append("fdatasync")
        sync(descriptor)

    def traced_pwrite(descriptor: int, content: bytes, offset: int) -> int:
        order.append("head")
        return pwrite(descriptor, content, offset)

    async with AuditLog.open(directory, "s_1") as audit:
        monkeypatch.setattr(os, "write", traced_write)
        monkeypatch.setattr(os, "fdatasync", traced_sync)
        monkeypatch.setattr(os, "pwrite", traced_pwrite)
        await audit.append(decided())
        order.append("answer")
    assert order == ["write", "fdatasync", "head", "answer"]


async def test_what_follows_a_record_must_fit_beside_it(directory: Path) -> None:
    """Else neither is written; the control is a kilobyte less."""
    most = chain.MAX_LINE_BYTES - 1024
    async with AuditLog.open(directory, "s_1") as audit:
        with pytest.raises(AuditError, match=f"what follows it takes {most + 1} bytes"):
            await audit.append_all([decided()], lambda _: (lambda *_: draft(finished()), most + 1))
        assert audit.head.seq == 0
        assert len(await audit.append_all([decided()], lambda _: (lambda *_: draft(finished()), most))) == 2


async def test_appends_that_wait_together_share_one_write(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Group commit: a hundred appends at once need a handful of syncs, and none is lost."""
    syncs = 0
    sync = os.fdatasync

    def counted(descriptor: int) -> None:
        nonlocal syncs
        syncs += 1
        sync(descriptor)

    async with AuditLog.open(directory, "s_1") as audit:
        monkeypatch.setattr(os, "fdatasync", counted)
        async with anyio.create_task_group() as group:
            for number in range(100):
                group.start_soon(audit.append, decided(f"c_{number}"))
    report = verify(directory)
    assert (report.ok, report.records) == (True, 100)
    assert syncs < 10


def test_files_are_private(directory: Path) -> None:
    fill(directory, 1)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for name in (LOG_NAME, HEAD_NAME):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600


def refusal(directory: Path) -> AuditError:
    with pytest.raises(AuditError) as caught:
        fill(directory, 1)
    assert str(directory) in caught.value.what
    assert caught.value.fix
    return caught.value


def test_a_linked_directory_is_refused(tmp_path: Path, directory: Path) -> None:
    """Whoever made the link could lead the log elsewhere; the directory behind it is accepted (control)."""
    fill(directory, 1)
    link = tmp_path / "link"
    link.symlink_to(directory)
    assert refusal(link).reason == "it is a symbolic link"
    fill(directory, 1)


@pytest.mark.parametrize("name", [LOG_NAME, HEAD_NAME])
def test_a_link_or_a_fifo_in_a_files_place_is_refused(directory: Path, tmp_path: Path, name: str) -> None:
    """A link would let somebody else choose what is written to; opening a FIFO does not hang."""
    fill(directory, 1)
    (directory / name).rename(tmp_path / "moved")
    (directory / name).symlink_to(tmp_path / "moved")
    assert refusal(directory).reason == "it is a symbolic link"
    (directory / name).unlink()
    (tmp_path / "moved").rename(directory / name)
    fill(directory, 1)
    fill(directory, 1)
    os.link(directory / name, tmp_path / "second")
    assert "is not a file of its own" in refusal(directory).reason
    (directory / name).unlink()
    os.mkfifo(directory / name, 0o600)
    assert "is not a file of its own" in refusal(directory).reason


@pytest.mark.parametrize("name", [".", LOG_NAME, HEAD_NAME])
def test_what_others_may_open_is_refused(directory: Path, name: str) -> None:
    """The fix is a command, and it works."""
    fill(directory, 1)
    path = directory / name
    path.chmod(path.stat().st_mode | 0o040)
    error = refusal(directory)
    assert "is open to other users" in error.reason
    assert error.fix.startswith("Run `chmod go= ")
    path.chmod(path.stat().st_mode & 0o700)
    fill(directory, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", [".", LOG_NAME, HEAD_NAME])
def test_somebody_elses_file_is_refused(directory: Path, name: str) -> None:
    """A log that another user prepared is not ours to trust."""
    fill(directory, 1)
    os.chown(directory / name, 65534, 65534)
    assert "belongs to user 65534" in refusal(directory).reason


async def test_a_server_id_that_is_no_name_is_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="is not a name"):
        async with AuditLog.open(directory, 'x","kind":"'):
            pass


def failing(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("number", "fix"), [(errno.ENOSPC, "Free space"), (errno.EROFS, "writable"), (errno.EIO, "Check the disk")]
)
async def test_a_refused_write_leaves_nothing_and_names_the_fix(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    """Half a line is cut off again, the caller knows, and the next append continues the chain."""
    write = os.write

    def half(descriptor: int, content: bytes) -> int:
        if b"c_refused" not in content:
            raise failing(number)
        return write(descriptor, content[: len(content) // 2])

    async with AuditLog.open(directory, "s_1") as audit:
        await audit.append(decided())
        before = log_lines(directory)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half)
            with pytest.raises(AuditError, match=fix) as caught:
                await audit.append(decided("c_refused"))
        assert "record call.decided" in caught.value.what
        assert log_lines(directory) == before
        await audit.append(decided("c_next"))
    assert verify(directory).ok
    assert b"c_refused" not in (directory / LOG_NAME).read_bytes()


async def test_a_failed_sync_is_a_failed_record(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that may not be on the disk are taken back."""

    def sync(_: int) -> None:
        raise failing(errno.EIO)

    async with AuditLog.open(directory, "s_1") as audit:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", sync)
            with pytest.raises(AuditError, match="Input/output error"):
                await audit.append(decided())
        assert log_lines(directory) == []
        await audit.append(decided())
    assert verify(directory).records == 1


async def test_where_nothing_can_be_cut_off_there_is_a_gap(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An append-only file (`chattr +a`) works too: the half line stays, a gap record accounts for it."""
    write = os.write

    def half(descriptor: int, content: bytes) -> int:
        write(descriptor, content[:10])
        raise failing(errno.EIO)

    def fixed(_: int, __: int) -> None:
        raise failing(errno.EPERM)

    async with AuditLog.open(directory, "s_1") as audit:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", half)
            patch.setattr(os, "ftruncate", fixed)
            with pytest.raises(AuditError):
                await audit.append(decided())
        record = await audit.append(decided())
    report = verify(directory)
    assert (report.ok, report.gaps, record.seq) == (True, 1, 2)
    gap = chain.parse(log_lines(directory)[1])
    assert (gap.kind, gap.data["bytes"]) == ("log.gap", 11)


def test_a_torn_last_line_becomes_a_gap_and_not_a_refusal(directory: Path) -> None:
    """The torn bytes stay in place, counted and digested; without the gap record verify reports them (control)."""
    records = fill(directory, 2)
    with (directory / LOG_NAME).open("ab") as handle:
        handle.write(records[0].line[:50])
    before = verify(directory)
    assert [(problem.line, problem.kind) for problem in before.problems] == [(3, "torn")]
    fill(directory, 1)
    report = verify(directory)
    assert (report.ok, report.gaps, report.records, report.head.seq) == (True, 1, 4, 4)
    assert log_lines(directory)[2] == records[0].line[:50] + b"\n"


def test_a_gap_that_was_torn_itself_is_recorded_again(directory: Path) -> None:
    """A crash during recovery leaves an ended torn line and half a gap record; one gap accounts for both."""
    fill(directory, 2)
    with (directory / LOG_NAME).open("ab") as handle:
        handle.write(b'{"call_id":"c_to\n{"data":{"byt')
    fill(directory, 1)
    report = verify(directory)
    assert (report.ok, report.gaps, report.records) == (True, 1, 4)


def test_a_gap_cannot_stand_for_other_bytes(directory: Path) -> None:
    """Control: the same gap record over changed torn bytes is a problem on their line."""
    fill(directory, 1)
    with (directory / LOG_NAME).open("ab") as handle:
        handle.write(b"half a line")
    fill(directory, 1)
    lines = log_lines(directory)
    assert verify(directory).ok
    lines[1] = lines[1].replace(b"half", b"fake")
    replace_lines(directory, lines)
    assert [(problem.line, problem.kind) for problem in verify(directory).problems] == [(2, "foreign")]


def edit_last(directory: Path, records: list[Record]) -> None:
    replace_lines(directory, [*(record.line for record in records[:-1]), records[-1].line.replace(b"12.5", b"13.5")])


def edit_beyond_head(directory: Path, records: list[Record]) -> None:
    replace_head(directory, chain.encode_head(Head()))
    edit_last(directory, records)


def append_much(directory: Path, records: list[Record]) -> None:
    with (directory / LOG_NAME).open("ab") as handle:
        handle.truncate(file.MAX_TORN_BYTES * 2)


def swap_last(directory: Path, records: list[Record]) -> None:
    other = chain.seal(draft(finished("c_7")), seq=4, time=records[3].time, server="s_test", prev=records[2].hash)
    replace_lines(directory, [*(record.line for record in records[:-1]), other.line])


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (
            lambda path, records: replace_lines(path, [each.line for each in records[:-1]]),
            "records up to 4 are missing",
        ),
        (edit_last, "record 4 was changed"),
        (swap_last, "record 4 was replaced"),
        (lambda path, _: (path / HEAD_NAME).unlink(), "head.json is missing or damaged"),
        (lambda path, _: replace_head(path, b"{}"), "head.json is missing or damaged"),
        (
            lambda path, records: replace_lines(path, [each.line for each in [*records, records[0]]]),
            "record 1 stands where",
        ),
        (edit_beyond_head, "a line after record 3 was edited"),
        (append_much, "after its last record are none of ours"),
    ],
)
def test_a_spoilt_log_is_refused(directory: Path, attack: Callable[[Path, list[Record]], None], reason: str) -> None:
    """Appending would bury the evidence; the same log untouched is continued (control)."""
    records = fill(directory, 4)
    whole = (directory / HEAD_NAME).read_bytes()
    attack(directory, records)
    error = refusal(directory)
    assert reason in error.reason
    assert "keep the directory as evidence" in error.fix
    replace_lines(directory, [record.line for record in records])
    replace_head(directory, whole)
    (directory / HEAD_NAME).chmod(0o600)
    fill(directory, 1)


@pytest.mark.parametrize(
    ("name", "harm", "reason"),
    [
        (LOG_NAME, lambda path: os.truncate(path, 10), "it became shorter"),
        (LOG_NAME, Path.unlink, "removed or replaced"),
        (HEAD_NAME, Path.unlink, "removed or replaced"),
    ],
)
async def test_a_log_cut_or_removed_while_in_use_is_refused(
    directory: Path, name: str, harm: Callable[[Path], None], reason: str
) -> None:
    """Nobody writes into a file without a name and calls it an audit log."""
    async with AuditLog.open(directory, "s_1") as audit:
        await audit.append(decided())
        harm(directory / name)
        with pytest.raises(AuditError, match=f"{reason} while it was in use"):
            await audit.append(decided())


@pytest.mark.parametrize("locked", [True, False])
def test_without_the_lock_the_chain_would_fork(directory: Path, monkeypatch: pytest.MonkeyPatch, locked: bool) -> None:
    """A second writer in the middle of a write is kept out; without the lock (control) the chain forks."""
    monkeypatch.setattr(place, "LOCK_WAIT_SECONDS", 0.01)
    if not locked:
        monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    fill(directory, 2)
    first, second = LogFile(directory, "s_1"), LogFile(directory, "s_2")
    write, errors = os.write, []

    def interrupted(descriptor: int, content: bytes) -> int:
        monkeypatch.setattr(os, "write", write)
        try:
            second.commit([draft(decided("c_second"))])
        except AuditError as error:
            errors.append(error)
        return write(descriptor, content)

    monkeypatch.setattr(os, "write", interrupted)
    first.commit([draft(decided("c_first"))])
    first.close()
    second.close()
    report = verify(directory)
    if locked:
        assert "another process has held its lock" in errors[0].reason
        assert report.ok
    else:
        assert not errors
        assert [(problem.line, problem.kind) for problem in report.problems] == [(4, "forked")]


async def test_cancelling_the_caller_never_halves_a_record(directory: Path) -> None:
    async with AuditLog.open(directory, "s_1") as audit:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await audit.append(decided())
        await audit.append(finished())
    report = verify(directory)
    assert (report.ok, report.records) == (True, 2)


async def test_a_disk_that_never_answers_stops_only_the_log(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The append ends with an error, and so do all later ones: the late write may still land."""
    monkeypatch.setattr(log, "COMMIT_WAIT_SECONDS", 0.01)
    reader, writer = os.pipe()

    def stuck(_: int) -> None:
        os.read(reader, 1)

    async with AuditLog.open(directory, "s_1") as audit:
        monkeypatch.setattr(os, "fdatasync", stuck)
        for _ in range(2):
            with pytest.raises(AuditError, match="the disk did not answer"):
                await audit.append(decided())
        os.write(writer, b"x")
    os.close(reader)
    os.close(writer)


async def test_a_closed_log_takes_nothing(directory: Path) -> None:
    """A call that outlives the server's log fails instead of going unrecorded."""
    async with AuditLog.open(directory, "s_1") as audit:
        pass
    with pytest.raises(AuditError, match="the log was closed"):
        await audit.append(decided())


async def test_too_many_waiting_appends_are_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue has an end, and being behind it is an error, not a loss."""
    monkeypatch.setattr(log, "MAX_WAITING_APPENDS", 5)
    refused: list[AuditError] = []

    async def append(audit: AuditLog, number: int) -> None:
        try:
            await audit.append(decided(f"c_{number}"))
        except AuditError as error:
            refused.append(error)

    async with AuditLog.open(directory, "s_1") as audit, anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(append, audit, number)
    assert refused
    assert {error.reason for error in refused} == {"the disk does not keep up"}
    report = verify(directory)
    assert (report.ok, report.records) == (True, 20 - len(refused))


async def test_a_record_that_is_too_long_is_refused_alone(directory: Path) -> None:
    async with AuditLog.open(directory, "s_1") as audit:
        with pytest.raises(AuditError, match="let the profile keep their digest alone"):
            await audit.append(decided(reason="x" * chain.MAX_LINE_BYTES))
        await audit.append(decided(reason="x" * (chain.MAX_LINE_BYTES - 2048)))
    assert verify(directory).records == 1
