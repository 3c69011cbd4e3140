"""Every call gets one end in the log, also where its own could not be written or its server was killed."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fixtures.audit_logs import decided, finished, log_lines

from glovebox_audit import chain, file, log, writers
from glovebox_audit.chain import Record, draft
from glovebox_audit.event import Event
from glovebox_audit.events import ReceiptSigned, SandboxStarted, ServerStopped
from glovebox_audit.file import LogFile
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_audit.receipts.statement import of_call
from glovebox_audit.verify import verify

FULL = "Its last record could not be written: No space left on device."
GONE = "Its server was gone before it could record an end."


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "audit"


def records(directory: Path) -> list[Record]:
    return [chain.parse(line) for line in log_lines(directory)]


def kinds(directory: Path) -> list[tuple[str, str | None]]:
    return [(record.kind, record.call_id) for record in records(directory)]


def lost(directory: Path) -> list[str | None]:
    return [call for kind, call in kinds(directory) if kind == "call.lost"]


def receipt(call: str) -> ReceiptSigned:
    return ReceiptSigned(call_id=call, digest="sha256:0", key="sha256:1", envelope={})


def started(call: str) -> SandboxStarted:
    return SandboxStarted(
        call_id=call, sandbox_id="s", driver="d", level="namespaces", plan_digest="", measured={}, verified=True
    )


def write(directory: Path, *events: Event, server: str = "s_dead") -> None:
    """Let a server write these and go, as one that was killed would."""
    opened = LogFile(directory, server)
    for event in events:
        opened.commit([draft(event)])
    opened.close()


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No write takes effect meanwhile."""

    def refuse(_: int, __: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        yield


async def test_the_next_write_says_that_a_call_is_lost(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right before what comes next, once, with all that is known; while the disk is full it waits."""
    async with AuditLog.open(directory, "s_1") as audit:
        first = await audit.append(decided())
        await audit.append(started("c_1"))
        with full_disk(monkeypatch):
            with pytest.raises(AuditError):
                await audit.append(finished())
            audit.lose("c_1", FULL)
            with pytest.raises(AuditError):
                await audit.append(ServerStopped(reason="done"))
        assert len(log_lines(directory)) == 2
        async with audit.subscribe(principal="local:0") as stream:
            await audit.append(ServerStopped(reason="done"))
            told = await stream.receive()
        await audit.append(ServerStopped(reason="done"))
    assert [kind for kind, _ in kinds(directory)] == [
        "call.decided", "sandbox.started", "call.lost", "server.stopped", "server.stopped",
    ]  # fmt: skip
    assert isinstance(told, Record)
    assert (told.kind, told.call_id) == ("call.lost", "c_1")
    assert told.data == {
        "cause": "log", "reason": FULL, "run_by": "s_1", "decided": first.time, "last": "sandbox.started",
        "tool": "run_python", "principal": "local:0",
    }  # fmt: skip
    assert verify(directory).ok
    assert of_call(directory, "c_1") is None


async def test_an_end_that_is_there_after_all_is_the_only_one(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write whose sync failed and that could not be cut off again is in the log: the call is not lost."""

    def refuse(*_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with AuditLog.open(directory, "s_1") as audit:
        await audit.append(decided())
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", refuse)
            patch.setattr(os, "ftruncate", refuse)
            with pytest.raises(AuditError):
                await audit.append(finished())
        audit.lose("c_1", FULL)
        await audit.append(ServerStopped(reason="done"))
    assert [kind for kind, _ in kinds(directory)] == ["call.decided", "call.finished", "server.stopped"]
    assert verify(directory).ok


async def test_a_disk_that_stays_full_is_for_the_next_server(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server could not write before its end is written at the next start; a limit loses nothing either."""
    monkeypatch.setattr(log, "MAX_LOST", 1)
    async with AuditLog.open(directory, "s_1") as audit:
        for call in ("c_1", "c_2"):
            await audit.append(decided(call))
            audit.lose(call, FULL)
            audit.lose("c_beyond", FULL)  # it never began, and there is no room for it
    assert lost(directory) == ["c_1"]
    async with AuditLog.open(directory, "s_2"):
        pass
    assert lost(directory) == ["c_1", "c_2"]
    assert verify(directory).ok


def test_a_start_ends_the_calls_of_servers_that_are_gone(directory: Path) -> None:
    denied, named = (
        replace(decided("c_denied"), effect="deny"),
        replace(decided("c_2", "token:bob"), client="editor 2.0"),
    )
    write(directory, decided("c_1"), named, started("c_2"), decided("c_3"), finished("c_3"), denied)
    write(directory, decided("c_4"), server="s_too")
    before = records(directory)
    assert lost(directory) == ["c_1", "c_2"]  # found by s_too
    LogFile(directory, "s_new").close()
    LogFile(directory, "s_newer").close()
    found = [record for record in records(directory) if record.kind == "call.lost"]
    assert [record.call_id for record in found] == ["c_1", "c_2", "c_4"]
    assert found[1].data == {
        "cause": "server", "reason": GONE, "run_by": "s_dead", "decided": before[1].time, "last": "sandbox.started",
        "tool": "run_python", "principal": "token:bob", "client": "editor 2.0",
    }  # fmt: skip
    assert (found[1].server, found[2].server) == ("s_too", "s_new")
    assert verify(directory).ok
    assert list((directory / writers.DIRECTORY).iterdir()) == []


def test_a_call_of_a_server_that_lives_is_not_lost(directory: Path) -> None:
    """However many start beside it; once it is gone it is (control)."""
    living = LogFile(directory, "s_living")
    living.commit([draft(decided())])
    LogFile(directory, "s_2").close()
    assert lost(directory) == []
    living.commit([draft(started("c_1"))])
    living.close()
    LogFile(directory, "s_3").close()
    assert lost(directory) == ["c_1"]


def test_two_living_servers_of_one_name_are_refused(directory: Path) -> None:
    """Their records could not be told apart; one after the other is fine (control)."""
    first = LogFile(directory, "s_1")
    with pytest.raises(AuditError, match="another process writes to it as s_1"):
        LogFile(directory, "s_1")
    first.close()
    LogFile(directory, "s_1").close()


def test_a_start_that_fails_midway_is_finished_by_the_next(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More calls than one write takes: none is told of twice, none is forgotten."""
    monkeypatch.setattr(file, "_MAX_LOST_AT_ONCE", 2)
    calls = [f"c_{number}" for number in range(5)]
    write(directory, *(decided(call) for call in calls))
    written = os.write

    def second_fails(descriptor: int, content: bytes) -> int:
        if b"c_2" in content:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return written(descriptor, content)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", second_fails)
        with pytest.raises(AuditError, match="No space left"):
            LogFile(directory, "s_2")
    assert lost(directory) == ["c_0", "c_1"]
    LogFile(directory, "s_3").close()
    assert lost(directory) == calls
    assert verify(directory).ok


def _lie(path: Path) -> None:
    head = chain.parse_head(path.read_bytes())
    path.write_bytes(chain.encode_head(chain.Head(seq=head.seq, hash="0" * 64, size=head.size + 7)))


@pytest.mark.parametrize(
    ("change", "most"),
    [(Path.stat, 3), (lambda path: path.write_bytes(b"{}"), 43), (lambda path: path.write_bytes(b""), 43), (_lie, 43)],
    ids=["whole", "bad", "empty", "lie"],
)
def test_a_start_reads_only_what_may_hold_open_calls(
    directory: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object], most: int
) -> None:
    """From the record that the server's file names, if the log has it; a file that lies or is damaged costs time."""
    monkeypatch.setattr(writers, "STEP_BYTES", 1)
    done = [event for number in range(20) for event in (decided(f"c_{number}"), finished(f"c_{number}"))]
    write(directory, *done, decided("c_open"), ServerStopped(reason="done"))
    (path,) = (directory / writers.DIRECTORY).iterdir()
    change(path)
    parse, parsed = chain.parse, 0

    def counted(line: bytes) -> Record:
        nonlocal parsed
        parsed += b"s_dead" in line
        return parse(line)

    monkeypatch.setattr(chain, "parse", counted)
    opened = LogFile(directory, "s_new")
    assert parsed <= most + 2  # one for the tail, one for what begins the file
    opened.close()
    assert lost(directory) == ["c_open"]


def test_a_start_after_a_good_end_reads_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual case costs nothing, however long the log."""
    write(directory, decided("c_1"), finished("c_1"))
    monkeypatch.setattr(writers, "under_way", None)
    LogFile(directory, "s_new").close()
    assert lost(directory) == []


def test_a_server_that_ends_while_another_starts_costs_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file may go between being listed and being opened: it is not made again, and nothing is read for it."""
    ending = LogFile(directory, "s_1")
    listed = os.listdir

    def last_look(place: int) -> list[str]:
        names = listed(place)
        ending.close()
        monkeypatch.setattr(os, "listdir", listed)
        return names

    monkeypatch.setattr(os, "listdir", last_look)
    monkeypatch.setattr(writers, "under_way", None)
    LogFile(directory, "s_2").close()
    assert list((directory / writers.DIRECTORY).iterdir()) == []


@pytest.mark.parametrize("fails", ["head.json", "the writer's file"])
async def test_a_place_that_is_not_noted_invents_no_loss(
    directory: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The records are on the disk: whatever fails after that, no call gets a second end."""
    monkeypatch.setattr(writers, "STEP_BYTES", 1)
    pwrite, seen = os.pwrite, 0

    def refused(descriptor: int, content: bytes, offset: int) -> int:
        nonlocal seen
        seen += 1
        if (seen % 2 == 1) == (fails == "head.json"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pwrite(descriptor, content, offset)

    async with AuditLog.open(directory, "s_1") as audit:
        await audit.append(decided())
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", refused)
            with pytest.raises(AuditError) if fails == "head.json" else nullcontext():
                await audit.append(finished())
        audit.lose("c_1", FULL)
        await audit.append(ServerStopped(reason="done"))
    assert lost(directory) == []
    assert verify(directory).ok


def test_what_is_no_file_of_a_server_is_not_touched(directory: Path) -> None:
    """A stray file stays; a link in a server's place is refused, as everywhere in the log."""
    write(directory, decided())
    place = directory / writers.DIRECTORY
    (place / "notes").write_text("")
    LogFile(directory, "s_2").close()
    assert [path.name for path in place.iterdir()] == ["notes"]
    (place / "s_9.json").symlink_to(directory / "audit.jsonl")
    with pytest.raises(AuditError, match="it is a symbolic link"):
        LogFile(directory, "s_3")
    (place / "s_9.json").unlink()
    place.chmod(0o755)
    with pytest.raises(AuditError, match="is open to other users"):
        LogFile(directory, "s_3")


@pytest.mark.parametrize(
    ("events", "line", "words"),
    [
        ((decided(), finished(), finished()), 3, "call c_1 is not under way here"),
        ((decided(), finished(), receipt("c_1"), receipt("c_1")), 4, "not right after the end of call c_1"),
        ((decided(), receipt("c_1")), 2, "not right after the end of call c_1"),
        ((decided(), finished(), started("c_1")), 3, "call c_1 is not under way here"),
        ((finished(),), 1, "it never began"),
        ((decided(), decided()), 2, "call c_1 begins a second time"),
    ],
)
def test_verify_finds_a_record_unfit_for_its_call(
    directory: Path, events: tuple[Event, ...], line: int, words: str
) -> None:
    """A second end above all, as a server with a fault would write it: the chain alone is whole."""
    write(directory, *events)
    (problem,) = verify(directory).problems
    assert (problem.line, problem.kind) == (line, "call")
    assert words in problem.detail


@pytest.mark.parametrize("more", [(finished(), receipt("c_1")), (receipt("c_1"),)])
def test_verify_finds_that_a_lost_call_ended_too_or_has_a_receipt(directory: Path, more: tuple[Event, ...]) -> None:
    """Nothing is known of it that could be signed."""
    write(directory, decided())
    write(directory, *more)
    found = [(problem.line, problem.kind) for problem in verify(directory).problems]
    assert found == [(3, "call"), (4, "call")][: len(more)]


def test_verify_has_no_complaint_about_whole_lives(directory: Path) -> None:
    """The control: ended with a receipt or lost, interleaved, or still under way."""
    write(
        directory, decided("c_1"), decided("c_2"), started("c_2"), finished("c_1"), receipt("c_1"), finished("c_2"),
        receipt("c_2"), decided("c_3"),
    )  # fmt: skip
    living = LogFile(directory, "s_living")
    living.commit([draft(decided("c_4"))])
    assert verify(directory).ok
    living.close()


def test_verify_stays_small_and_accuses_nobody_it_forgot(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "MAX_UNDER_WAY", 2)
    living = LogFile(directory, "s_living")
    for number in range(4):
        living.commit([draft(decided(f"c_{number}"))])
    living.commit([draft(finished("c_0"))])
    assert verify(directory).ok
    living.close()
