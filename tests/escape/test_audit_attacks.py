"""Attacks on the audit log with real processes, real kills and a real full disk (M13, M14)."""

import errno
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from tests.fixtures.audit_logs import decided, fill, finished, log_lines, written

from glovebox_audit import chain
from glovebox_audit.chain import Record
from glovebox_audit.events import ServerStopped
from glovebox_audit.log import AuditLog
from glovebox_audit.place import AuditError
from glovebox_audit.segments.files import LOG_NAME
from glovebox_audit.verify import verify

ROOT = Path(__file__).parents[2]

#: Half a line can only be left by a kill between two parts of one write; the writer does that to itself at this number.
NEVER = -1


@asynccontextmanager
async def writer(directory: Path, server: str, count: int, tear: int = NEVER) -> AsyncIterator[Process]:
    """Run a process that appends ``count`` records and prints an acknowledgement for each."""
    command = [sys.executable, "-m", "tests.fixtures.audit_logs", str(directory), server, str(count), str(tear)]
    async with await anyio.open_process(command, cwd=ROOT, stderr=None) as process:
        yield process


async def acknowledgements(process: Process) -> list[str]:
    """Read every ``SEQ:HASH`` until the process ends."""
    assert process.stdout is not None
    text = b"".join([part async for part in process.stdout]).decode()
    # The last one may be cut by the kill; a whole one ends with a line feed.
    return text.split("\n")[:-1]


async def test_several_servers_append_to_one_chain_and_lose_nothing(tmp_path: Path) -> None:
    """Four processes at once: one chain, every acknowledged record in it, none twice."""
    directory, each = tmp_path / "audit", 50
    acknowledged: list[str] = []

    async def run(number: int) -> None:
        async with writer(directory, f"s_{number}", each) as process:
            acknowledged.extend(await acknowledgements(process))
            assert await process.wait() == 0

    async with anyio.create_task_group() as group:
        for number in range(4):
            group.start_soon(run, number)
    report = verify(directory)
    # These calls never end: a server that starts when another has gone says so of that one's, each once.
    lost = sum(chain.parse(line).kind == "call.lost" for line in log_lines(directory))
    assert (report.ok, report.records - lost, report.gaps) == (True, 4 * each, 0)
    assert lost % each == 0
    assert len(acknowledged) == 4 * each
    assert set(acknowledged) <= written(log_lines(directory))


async def test_a_killed_server_loses_no_acknowledged_record(tmp_path: Path) -> None:
    """SIGKILL at four different moments, while a second server goes on: the chain stays whole, no promise is broken."""
    directory = tmp_path / "audit"
    acknowledged: list[str] = []
    async with AuditLog.open(directory, "s_survivor") as log:
        for kill in range(4):
            async with writer(directory, f"s_{kill}", 100_000) as process:
                assert process.stdout is not None
                stream = BufferedByteReceiveStream(process.stdout)
                for _ in range(1 + 20 * kill):
                    acknowledged.append((await stream.receive_until(b"\n", 200)).decode())
                    await log.append(ServerStopped(reason="done"))
                process.send_signal(signal.SIGKILL)
                await process.wait()
            record = await log.append(ServerStopped(reason="done"))
            acknowledged.append(f"{record.seq}:{record.hash}")
    report = verify(directory)
    assert report.ok
    assert set(acknowledged) <= written(log_lines(directory))


async def test_a_line_torn_by_a_kill_becomes_a_recorded_gap(tmp_path: Path) -> None:
    """A real process dies in the middle of its write, twice; before the next start verify names the torn line."""
    directory = tmp_path / "audit"
    acknowledged: list[str] = []
    for crash in range(2):
        async with writer(directory, f"s_{crash}", 10, tear=3) as process:
            acknowledged.extend(await acknowledgements(process))
            assert await process.wait() == -signal.SIGKILL
        torn = verify(directory)
        assert [problem.kind for problem in torn.problems] == ["torn"]
        assert torn.problems[0].line == len(log_lines(directory))
        assert torn.gaps == crash
    fill(directory, 1)
    report = verify(directory)
    # Of each writer three records, the gap, and that its three calls are lost.
    assert (report.ok, report.gaps, report.records) == (True, 2, 2 * 7 + 1)
    assert len(acknowledged) == 6
    assert set(acknowledged) <= written(log_lines(directory))


async def test_control_a_log_that_just_goes_on_after_a_crash_is_damaged(tmp_path: Path) -> None:
    """Without recovery the next record lands on the torn line, and both are lost."""
    directory = tmp_path / "audit"
    async with writer(directory, "s_1", 10, tear=3) as process:
        await process.wait()
    with (directory / LOG_NAME).open("ab") as handle:
        handle.write(chain.parse(log_lines(directory)[0]).line)
    report = verify(directory)
    assert [(problem.line, problem.kind) for problem in report.problems] == [(4, "foreign")]
    assert report.records == 3


async def test_thousands_of_appends_with_a_reader_that_never_reads(tmp_path: Path) -> None:
    """M13: 200 callers, a stuck subscriber: every append is answered and in the log, exactly once."""
    directory = tmp_path / "audit"
    records: list[Record] = []

    async def caller(log: AuditLog, number: int) -> None:
        records.extend([await log.append(decided(f"c_{number}_{call}")) for call in range(10)])

    async with AuditLog.open(directory, "s_1") as log, log.subscribe(), anyio.create_task_group() as group:
        for number in range(200):
            group.start_soon(caller, log, number)
    report = verify(directory)
    assert (report.ok, report.records) == (True, 2_000)
    assert {record.seq for record in records} == set(range(1, 2_001))
    assert len({record.call_id for record in records}) == 2_000


@pytest.fixture
async def small_disk(tmp_path: Path) -> AsyncIterator[Path]:
    """Mount a disk of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() != 0 or (await anyio.run_process(mount, check=False)).returncode != 0:
        pytest.skip("mounting a small disk is not permitted here")
    yield place
    await anyio.run_process(["umount", str(place)])


async def test_a_full_disk_refuses_and_loses_nothing(small_disk: Path) -> None:
    """M13: a record that does not fit is refused with the fix, leaves no half line, and space makes the log go on."""
    directory = small_disk / "audit"
    filler = small_disk / "filler"
    acknowledged: list[Record] = []
    async with AuditLog.open(directory, "s_1") as log:
        filler.write_bytes(b"x" * 32768)
        with pytest.raises(AuditError) as caught:  # noqa: PT012 - which append fails is the disk's choice
            while True:
                acknowledged += [await log.append(decided(f"c_{len(acknowledged)}"))]
        assert caught.value.reason == os.strerror(errno.ENOSPC)
        assert "Free space" in caught.value.fix
        assert log_lines(directory) == [record.line for record in acknowledged]
        with pytest.raises(AuditError):
            await log.append(decided("c_again"))
        filler.unlink()
        acknowledged.append(await log.append(decided("c_after")))
    report = verify(directory)
    assert (report.ok, report.gaps, report.records) == (True, 0, len(acknowledged))


@pytest.mark.parametrize("freed", ["while it runs", "after its end", "after it was killed"])
async def test_a_call_whose_last_record_meets_a_full_disk_is_lost_and_recorded(small_disk: Path, freed: str) -> None:
    """M13: once there is room, by the next record or the next start; a call that could say its end is not (control)."""
    directory, filler = small_disk / "audit", small_disk / "filler"
    async with AuditLog.open(directory, "s_1") as log:
        await log.append(decided("c_ended"))
        await log.append(finished("c_ended"))
        await log.append(decided("c_cut"))
        filler.write_bytes(b"x" * 16384)
        with pytest.raises(AuditError):  # noqa: PT012 - which append fails is the disk's choice
            while True:
                await log.append(ServerStopped(reason="done"))
        with filler.open("ab", buffering=0) as file, suppress(OSError):
            while file.write(b"x" * 4096):
                pass
        with pytest.raises(AuditError, match="No space left"):
            await log.append(replace(finished("c_cut"), kept={"stdout": "x" * 4096}))
        if freed != "after it was killed":  # else nobody is there any more to say so
            log.lose("c_cut", "Its last record could not be written.")
        if freed == "while it runs":
            filler.unlink()
            await log.append(ServerStopped(reason="done"))
    filler.unlink(missing_ok=True)
    async with AuditLog.open(directory, "s_2"):
        pass
    lost = [record for record in map(chain.parse, log_lines(directory)) if record.kind == "call.lost"]
    assert [(record.call_id, record.data["run_by"]) for record in lost] == [("c_cut", "s_1")]
    assert lost[0].server == ("s_1" if freed == "while it runs" else "s_2")
    assert verify(directory).ok


async def test_control_a_plain_append_on_a_full_disk_leaves_half_a_line(small_disk: Path) -> None:
    """What happens to a log that only writes: the last line is cut and everything after it is damaged."""
    path = small_disk / "plain.jsonl"
    line = decided().reason.encode() * 30 + b"\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012 - which write fails is the disk's choice
        while True:
            os.write(descriptor, line)
    os.close(descriptor)
    assert not path.read_bytes().endswith(b"\n")


async def test_a_directory_that_cannot_be_made_is_refused() -> None:
    """The server does not start, and says what to do; nobody, root included, can make anything in /proc."""
    with pytest.raises(AuditError, match="Make the directory and its files writable"):
        async with AuditLog.open(Path("/proc/self/audit"), "s_1"):
            pass
