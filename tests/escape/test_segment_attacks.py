"""Kills, crowds and a full disk while the audit log rotates: no acknowledged record is lost, and there is one chain."""

import errno
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.fixtures import segments
from tests.fixtures.audit_logs import decided, finished, written

from glovebox_audit import chain
from glovebox_audit.chain import Record, draft
from glovebox_audit.file import LogFile
from glovebox_audit.place import AuditError, LogDirectory
from glovebox_audit.verify import verify

#: More steps than recording four calls and two rotations takes.
LAST_STEP = 75


def number_of(anchor: str) -> int:
    """The number of a record."""
    return int(anchor.partition(":")[0])


def in_child(act: Callable[[Callable[[str], None]], None]) -> tuple[int, list[str]]:
    """Run this in a process of its own: how it ended, and what it acknowledged before."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            told = os.fdopen(writing, "w", buffering=1)
            act(lambda text: print(text, file=told))
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read().split("\n")[:-1]
    return os.waitpid(pid, 0)[1], said


def record_calls(directory: Path, tell: Callable[[str], None], step: int, *, torn: bool, keep: int | None) -> None:
    """Record four calls into small segments, and die at a step."""
    server = "s_killed"
    file = LogFile(directory, server, segments.rotation(1500, bytes=keep))
    segments.die_at(step, torn=torn)
    for number in range(4):
        for event in (decided(f"c_{server}_{number}"), finished(f"c_{server}_{number}")):
            (record,) = file.commit([draft(event)])
            tell(f"{record.seq}:{record.hash}")
    file.close()


@pytest.mark.parametrize("keep", [None, 4000], ids=["kept", "removed"])
@pytest.mark.parametrize("torn", [False, True], ids=["before", "in the middle"])
def test_a_kill_at_any_step_of_a_rotation_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bool, keep: int | None
) -> None:
    """SIGKILL before each system call of two rotations, and in the middle of each write; the next start goes on.

    Without and with removals.
    """
    monkeypatch.setattr("glovebox_audit.segments.rotation.YOUNGEST_SECONDS", 0.0)
    for name in ("fsync", "fdatasync"):  # a kill takes nothing from the kernel, and the steps stay
        monkeypatch.setattr(os, name, lambda _: None)
    killed = rotated = removed = 0
    for step in range(1, LAST_STEP):
        directory = tmp_path / f"{step}"
        segments.fill(directory, 3, size=1500)
        act = partial(record_calls, directory, step=step, torn=torn, keep=keep)
        status, told = in_child(act)
        if status != signal.SIGKILL:
            break  # there is no such step
        killed += 1
        # Whoever verifies before the next start sees at most the line that the kill tore.
        assert {problem.kind for problem in verify(directory, keys=segments.KEYS).problems} <= {"torn"}
        held = written(segments.all_lines(directory))
        segments.fill(directory, 1, server="s_next", size=1500, first=90)
        report = verify(directory, keys=segments.KEYS)
        assert report.problems == (), step
        assert report.gaps <= 1
        oldest = min(number_of(each) for each in held)
        assert oldest == 1 or keep
        assert {each for each in told if number_of(each) >= oldest} <= held
        left = [record for record in map(chain.parse, _records(directory)) if record.call_id]
        ends = [record.call_id for record in left if record.kind in {"call.finished", "call.lost"}]
        assert len(ends) == len(set(ends))
        rotated = max(rotated, report.segments)
        removed = max(removed, report.removed)
    assert killed > (10 if torn else 50)
    assert rotated > 2
    assert bool(removed) is bool(keep)


def _records(directory: Path) -> list[bytes]:
    """Lines that are records."""
    return [line for line in segments.all_lines(directory) if line.startswith(b"{") and line.endswith(b"}\n")]


def test_control_a_rotation_that_began_the_next_file_under_its_name_leaves_half_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it not made under another name first, a kill in its first write would leave a file nobody can go on with."""
    monkeypatch.setattr("glovebox_audit.segments.files.NEXT_NAME", "audit.jsonl")
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _: None)
    rename = LogDirectory.rename
    monkeypatch.setattr(LogDirectory, "rename", lambda place, old, new: old != new and rename(place, old, new))
    for step in range(1, LAST_STEP):
        directory = tmp_path / f"{step}"
        segments.fill(directory, 3, size=1500)
        in_child(partial(record_calls, directory, step=step, torn=True, keep=None))
        try:
            segments.fill(directory, 1, server="s_next", size=1500, first=90)
            broken = not verify(directory).ok
        except AuditError:
            broken = True
        if broken:
            return
    pytest.fail("No kill did harm.")


def test_several_processes_rotate_one_log(tmp_path: Path) -> None:
    """Four at once, each into segments of a few calls: every acknowledged record is in one chain, once."""
    directory = tmp_path / "audit"
    pids, pipes = [], []
    for number in range(4):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                file = LogFile(directory, f"s_{number}", segments.rotation())
                told = os.fdopen(writing, "w")
                for call in range(50):
                    (record,) = file.commit([draft(decided(f"c_{number}_{call}"))])
                    (end,) = file.commit([draft(finished(f"c_{number}_{call}"))])
                    told.write(f"{record.seq}:{record.hash}\n{end.seq}:{end.hash}\n")
                told.close()
                file.close()
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        pids.append(pid)
        pipes.append(os.fdopen(reading))
    acknowledged: list[str] = []
    for pipe in pipes:
        with pipe:
            acknowledged += [line.strip() for line in pipe]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 4
    report = verify(directory, keys=segments.KEYS)
    assert report.problems == ()
    assert report.segments > 20
    assert len(set(acknowledged)) == 400
    assert set(acknowledged) <= written(segments.all_lines(directory))


def test_an_idle_process_finds_its_way_over_segments_that_were_sealed_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the file of the first segment, which is gone since; its next record is right behind the newest."""
    monkeypatch.setattr("glovebox_audit.segments.rotation.YOUNGEST_SECONDS", 0.0)
    directory = tmp_path / "audit"
    idle = LogFile(directory, "s_idle", segments.rotation())
    idle.commit([draft(decided("c_idle"))])
    idle.commit([draft(finished("c_idle"))])
    segments.fill(directory, 12, bytes=4000)
    assert verify(directory).removed > 0
    idle.commit([draft(decided("c_again"))])
    idle.commit([draft(finished("c_again"))])
    idle.close()
    assert verify(directory, keys=segments.KEYS).problems == ()


def test_a_file_removed_by_hand_is_still_noticed(tmp_path: Path) -> None:
    """The control: a file without a seal that is gone is a log that was tampered with."""
    directory = tmp_path / "audit"
    idle = LogFile(directory, "s_idle", segments.rotation())
    idle.commit([draft(decided("c_idle"))])
    (directory / "audit.jsonl").unlink()
    with pytest.raises(AuditError, match="its files were removed or replaced"):
        idle.commit([draft(finished("c_idle"))])
    idle.close()


@pytest.mark.parametrize("step", range(1, 12))
def test_a_disk_that_fills_at_any_write_of_a_rotation_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Each call is recorded or refused, and once there is room the log goes on in one chain."""
    monkeypatch.setattr("glovebox_audit.file._AGAIN_BYTES", 500)
    directory = tmp_path / "audit"
    file = LogFile(directory, "s_1", segments.rotation(1500))
    made: list[Record] = []
    refused: set[str] = set()
    writes, real = 0, os.write

    def full(descriptor: int, content: bytes) -> int:
        nonlocal writes
        writes += 1
        if step <= writes < step + 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, content)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for number in range(12):
            try:
                made += file.commit([draft(decided(f"c_{number}"))])
                made += file.commit([draft(finished(f"c_{number}"))])
            except AuditError as problem:
                refused.add(problem.reason)
    file.close()
    LogFile(directory, "s_2").close()
    assert writes > step + 3
    assert refused <= {os.strerror(errno.ENOSPC)}
    report = verify(directory, keys=segments.KEYS)
    assert report.problems == ()
    assert {f"{each.seq}:{each.hash}" for each in made} <= written(segments.all_lines(directory))
    assert report.segments > 1
