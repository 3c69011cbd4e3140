"""Backups and restores that are killed, or whose disk fails, between any two steps: the old directory, or the new."""

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from tests.fixtures import states
from tests.fixtures.audit_logs import decided, log_lines
from tests.fixtures.states import Filled, held
from tests.unit.test_backup import kept, kinds, run

from glovebox_audit.verify import verify
from glovebox_server.promotion.folder import TargetFolder
from glovebox_server.upkeep import backup, restore

STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.link", "os.rmdir", "sqlite3.connect", "exchange"}
LAST = 14
"""Steps at the end that are all tried: the exchange is among them."""


def forked(place: Path, work: Callable[[], object], at: int, act: Callable[[], object]) -> tuple[int, int]:
    """Do something in a process of its own, and ``act`` before one step; how that ended, and how many steps it had."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code, count = 7, [0]

        def counted(event: str, told: tuple[object, ...]) -> None:
            if event in STEPS and (event == "exchange" or str(place) in str(told)):
                count[0] += 1
                if count[0] == at:
                    act()

        real = TargetFolder._rename

        def rename(folder: TargetFolder, *given: object) -> None:
            counted("exchange", ())
            real(folder, *given)  # type: ignore[arg-type]
            if act is die:  # what was done does not fail
                counted("exchange", ())

        TargetFolder._rename = rename  # type: ignore[method-assign,assignment]
        sys.addaudithook(counted)
        try:
            work()
            code = 0
        except Exception:  # noqa: BLE001 - whatever it is, the parent looks at what is left
            code = 1
        finally:
            os.write(writer, str(count[0]).encode())
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    return os.waitpid(pid, 0)[1], int(told or 0)


def die() -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    """Find the disk full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def chosen(steps: int, kills: int) -> list[int]:
    """Some of the steps, evenly, and the last ones."""
    return sorted({*range(1, steps, max(1, steps // kills)), *range(max(1, steps - LAST), steps + 1)})


@pytest.mark.parametrize("act", [die, full])
async def test_a_restore_leaves_the_old_directory_or_the_new_one(
    tmp_path: Path, kills: int, act: Callable[[], object]
) -> None:
    """Whole, whichever it is; the next restore works, and what was there before is lost by none of them."""
    filled = await states.fill(tmp_path)
    file = kept(filled)
    states.record(filled.settings, decided("c_since"))
    old = held(filled.state)
    work = partial(restore.restore, filled.settings, file, by="local:0")
    outcomes = set[str]()
    _, steps = forked(tmp_path, work, 0, act)
    assert steps > 100
    for at in chosen(steps, kills):
        _reset(filled, old)
        forked(tmp_path, work, at, act)
        if _has(filled.state, old):
            outcomes.add("old")
            replaced = False
        else:
            assert verify(filled.state / "audit").ok
            assert kinds(filled.state)[-1] == "state.restored"
            outcomes.add("new")
            replaced = True
            assert any(_has(each, old) for each in _beside(filled)), "what was there before"
        states.record(filled.settings, decided("c_more"))  # it can be used
        assert act is full or run(filled.state, "restore", file)[0] == 0
        assert not replaced or any(_has(each, old) for each in _beside(filled)), "what was there before, still"
    assert outcomes == {"old", "new"}


def _has(state: Path, content: dict[str, bytes]) -> bool:
    now = held(state)
    return {name: now.get(name) for name in content} == content


def _beside(filled: Filled) -> list[Path]:
    return [*filled.state.parent.glob("*state.*")]


def _reset(filled: Filled, content: dict[str, bytes]) -> None:
    for each in (filled.state, *_beside(filled)):
        shutil.rmtree(each, ignore_errors=True)
    for name, data in content.items():
        path = filled.state / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o600)
    for each in (filled.state, *(path for path in filled.state.rglob("*") if path.is_dir())):
        each.chmod(0o700)


@pytest.mark.parametrize("act", [die, full])
async def test_a_backup_is_there_whole_or_not_at_all(tmp_path: Path, kills: int, act: Callable[[], object]) -> None:
    """And the directory stays as it was, with nothing locked."""
    filled = await states.fill(tmp_path)
    file, old = tmp_path / "file", held(filled.state)
    work = partial(backup.take, filled.state, file, version="0", with_keys=True)
    _, steps = forked(tmp_path, work, 0, act)
    whole = file.stat().st_size
    file.unlink()
    halves = 0
    for at in chosen(steps, kills):
        forked(tmp_path, work, at, act)
        assert held(filled.state) == old
        if file.exists():
            assert abs(file.stat().st_size - whole) < 1 << 16
            file.unlink()
        for half in tmp_path.glob(".file.*"):
            halves += 1
            half.unlink()
    assert act is die or halves <= 1  # where its removal fails, too
    states.record(filled.settings, decided("c_more"))
    assert log_lines(filled.state / "audit")
