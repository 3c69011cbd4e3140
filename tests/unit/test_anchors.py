"""Anchors that a server keeps at intervals: a log that was put back with its head is found by them."""

import json
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner
from tests.fixtures import segments
from tests.fixtures.audit_logs import decided, fill

from glovebox_audit import read
from glovebox_audit.chain import Head
from glovebox_audit.log import AuditLog
from glovebox_audit.segments import anchors
from glovebox_audit.verify import verify
from glovebox_server.app import opened
from glovebox_server.cli.main import main
from glovebox_server.exits import FAILED, OK, USAGE
from glovebox_server.settings import Settings


async def until(path: Path, lines: int) -> list[Head]:
    with anyio.fail_after(20):
        while True:
            content = path.read_bytes() if path.exists() else b""
            if content.count(b"\n") >= lines:
                return anchors.read(content)
            await anyio.sleep(0.01)


@pytest.mark.parametrize("kind", ["file", "exec"])
async def test_the_end_of_the_chain_is_kept_where_the_log_grew(tmp_path: Path, kind: str) -> None:
    """By a file or a program: one line for each interval with new records, none for one without."""
    place = tmp_path / "anchors"
    where = f"file:{place}" if kind == "file" else f"exec:sh -c 'cat >> {place}'"
    async with AuditLog.open(tmp_path / "audit", "s_1") as log, anyio.create_task_group() as tasks:
        await log.append(decided("c_1"))
        tasks.start_soon(anchors.follow, lambda: log.head, where, 0.02)
        first = await until(place, 1)
        await anyio.sleep(0.2)
        assert await until(place, 1) == first
        await log.append(decided("c_2"))
        kept = await until(place, 2)
        tasks.cancel_scope.cancel()
    assert [(each.seq, each.hash) for each in kept] == [
        (each.seq, each.hash) for line in read.tail(tmp_path / "audit", 2) if (each := line.record)
    ]


async def test_what_cannot_be_kept_is_said_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that is missing, a program that fails or hangs; once it can be kept, it is (the control)."""
    monkeypatch.setattr(anchors, "PROGRAM_SECONDS", 0.2)
    head = Head(seq=1, hash="a" * 64)
    for where, reason in (
        (f"file:{tmp_path}/none/anchors", "No such file"),
        (f"file:{tmp_path}", "Is a directory"),
        ("exec:false", "false ended with status 1"),
        ("exec:/none", "No such file"),
        ("exec:sleep 60", "sleep did not end within 0.2 seconds"),
    ):
        with pytest.raises(OSError, match=reason):
            await anchors.keep(head, where)
    place = tmp_path / "later" / "anchors"
    with caplog.at_level(logging.WARNING):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anchors.follow, lambda: head, f"file:{place}", 0.02)
            for _ in range(2000):
                if "was not kept" in caplog.text:
                    break
                await anyio.sleep(0.01)
            assert "No such file" in caplog.text
            place.parent.mkdir()
            assert await until(place, 1) == [head]
            tasks.cancel_scope.cancel()


async def test_nobody_waits_for_a_program_that_cannot_be_ended_and_it_stays_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As sudo starts one, for another user: what to do is said, and once it is gone the next is started (control)."""

    def refused(*_: int) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(anchors, "PROGRAM_SECONDS", 0.3)
    monkeypatch.setattr(anchors, "_ENDED_SECONDS", 0.1)
    started, place = tmp_path / "started", tmp_path / "anchors"
    heads = iter(Head(seq=seq, hash="a" * 64) for seq in range(1, 10_000))
    script = tmp_path / "keep"
    script.write_text(f"echo $$ >> {started}\n[ -e {tmp_path}/mended ] || exec sleep 60\ncat >> {place}\n")
    kill = os.kill
    with caplog.at_level(logging.WARNING), anyio.fail_after(30), monkeypatch.context() as patched:
        patched.setattr(os, "killpg", refused)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anchors.follow, lambda: next(heads), f"exec:sh {script}", 0.01)
            for _ in range(2000):
                if "cannot be ended" in caplog.text:
                    break
                await anyio.sleep(0.01)
            await anyio.sleep(0.5)
            assert "timeout 20" in caplog.text
            [itself] = started.read_text().split()
            (tmp_path / "mended").touch()
            kill(int(itself), signal.SIGKILL)
            assert (await until(place, 1))[0].seq > 1
            tasks.cancel_scope.cancel()


def half_written(descriptor: int, content: bytes, write: Callable[[int, bytes], int] = os.write) -> int:
    """What ``os.write`` does on a disk that gets full."""
    return write(descriptor, content[: len(content) // 2])


async def test_a_line_that_a_full_disk_cut_short_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was not kept, which was said; the next goes on behind it, and both kept ones are read back."""
    place, heads = tmp_path / "anchors", [Head(seq=seq, hash=f"{seq}a" * 32) for seq in (1, 2, 3)]
    await anchors.keep(heads[0], f"file:{place}")
    for _ in range(2):
        with monkeypatch.context() as full:
            full.setattr(os, "write", half_written)
            with pytest.raises(OSError, match="took a part of it"):
                await anchors.keep(heads[1], f"file:{place}")
    assert anchors.read(place.read_bytes()) == heads[:1]
    assert "Line 2 of the anchors is truncated" in caplog.text
    await anchors.keep(heads[2], f"file:{place}")
    assert anchors.read(place.read_bytes()) == [heads[0], heads[2]]


def test_an_anchor_may_be_cut_anywhere_and_nothing_else_may_stand_there() -> None:
    """Each place of a line; what no server writes is refused by its line (the control)."""
    first, second, third = (f"2026-11-22T10:00:0{seq}Z {seq}:{f'{seq}b' * 32}\n".encode() for seq in (1, 2, 3))
    for cut in range(len(second) - 1):
        assert [each.seq for each in anchors.read(first + second[:cut])] == [1], cut
        assert [each.seq for each in anchors.read(first + second[:cut] + third)] == [1, 3], cut
    assert [each.seq for each in anchors.read(first + second[:-1])] == [1, 2]
    for wrong in (second[:30] + b"\n", second[:30] + b"x", second[:30] + b"x " + third, second[:30] + b"\n" + third):
        with pytest.raises(ValueError, match="line 2 is no anchor"):
            anchors.read(first + wrong)
    with pytest.raises(ValueError, match="there is no anchor in it"):
        anchors.read(second[:30])


def test_a_command_that_is_no_words_is_refused_at_the_start(tmp_path: Path) -> None:
    """By the name of the setting, not when the first anchor is kept; with its quote closed it is taken (control)."""
    (tmp_path / "state").mkdir(mode=0o700)
    fill(tmp_path / "state" / "audit", 2)
    words = ["audit", "head", "--state-dir", str(tmp_path / "state")]
    for command, status in (("exec:sh -c 'cat", USAGE), ("exec:cat \\", USAGE), ("exec:sh -c 'cat'", OK)):
        told = CliRunner(env={"GLOVEBOX_AUDIT_ANCHOR": command}).invoke(main, words)
        assert told.exit_code == status, told.output
        assert ("GLOVEBOX_AUDIT_ANCHOR: its command cannot be split" in told.output) == (status == USAGE)


def test_a_log_that_was_put_back_is_found_by_the_anchors_alone(tmp_path: Path) -> None:
    """With its head put back too it is whole by itself (the control); the first anchor it lacks is named."""
    directory, kept = tmp_path / "state" / "audit", tmp_path / "anchors"
    (tmp_path / "state").mkdir(mode=0o700)
    lines = []
    for number in range(4):
        fill(directory, 2, server=f"s_{number}")
        end = read.head(directory)
        lines.append(f"2026-11-22T10:00:0{number}Z {end.seq}:{end.hash}\n")
        if number == 1:
            shutil.copytree(directory, tmp_path / "earlier")
    kept.write_text("".join(lines))
    words = ["audit", "verify", "--anchors", str(kept), "--state-dir", str(tmp_path / "state")]
    assert CliRunner().invoke(main, words).exit_code == OK
    shutil.rmtree(directory)
    shutil.copytree(tmp_path / "earlier", directory)
    assert verify(directory).ok
    found = CliRunner().invoke(main, [*words, "--json"])
    problems = json.loads(found.stdout)["problems"]
    assert (found.exit_code, {each["kind"] for each in problems}) == (FAILED, {"anchor"})
    assert "records 5 to 6, the last that the anchor knows, are missing" in problems[0]["detail"]
    for wrong, said in (("x\n", "line 1 is no anchor"), ("", "there is no anchor in it"), (lines[0] + "é", "line 2")):
        kept.write_text(wrong)
        told = CliRunner().invoke(main, words)
        assert (told.exit_code, said in told.stderr) == (USAGE, True)


def test_anchors_of_segments_that_retention_removed_are_not_missed(tmp_path: Path) -> None:
    """Those that are left are compared: one with another hash is found."""
    directory = tmp_path / "audit"
    segments.fill(directory, 12)
    known = [Head(seq=each.seq, hash=each.hash) for line in read.tail(directory, 100) if (each := line.record)]
    first = len((directory / "segments" / "000001.jsonl").read_bytes().splitlines())
    assert verify(directory, anchors=known).ok
    (directory / "segments" / "000001.jsonl").unlink()
    kinds = {each.kind for each in verify(directory, anchors=known).problems}
    assert kinds == {"missing"}  # no record says that it was removed; the anchors before it say nothing more
    wrong = Head(seq=first + 3, hash="0" * 64)
    assert {each.kind for each in verify(directory, anchors=[*known, wrong]).problems} == {"missing", "anchor"}


@pytest.mark.parametrize("transport", ["http", "cli"])
async def test_a_server_keeps_them_and_a_single_call_does_not(tmp_path: Path, transport: str) -> None:
    place = tmp_path / "anchors"
    places: dict[str, Any] = {f"{name}_dir": tmp_path / name for name in ("state", "data", "profiles")}
    settings = Settings(**places, audit_anchor=f"file:{place}")
    (tmp_path / "profiles").mkdir()
    async with opened(settings, transport):
        if transport == "http":
            kept = await until(place, 1)
            assert verify(tmp_path / "state" / "audit", anchors=kept).ok
    assert place.exists() == (transport == "http")
