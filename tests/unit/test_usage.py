"""What a call has spent: told as exactly as the kernel counts it, and not at all where it does not."""

import errno
import os
import re
from pathlib import Path
from typing import Any, cast

import anyio.lowlevel
import pytest

from glovebox_sandboxes.contract.base import SandboxStats
from glovebox_sandboxes.contract.errors import SandboxError
from glovebox_sandboxes.host.cgroup import Cgroup, Hierarchy, detect
from glovebox_sandboxes.plural import counted
from glovebox_sandboxes.session import run as running
from glovebox_sandboxes.session.connection import GuestOutcome

TOLD = GuestOutcome.model_validate(
    {"stopped": "", "status": 0, "wall_ms": 1.0, "cpu_ms": 12.345678, "memory_peak_bytes": 1, "skipped": []}
)


class Counted:
    """A sandbox of whose group the kernel has counted this so far."""

    def __init__(self, *seconds: float | None) -> None:
        self._seconds = list(seconds)

    def cpu_seconds(self) -> float | None:
        """The next reading; the last one again and again."""
        return self._seconds.pop(0) if len(self._seconds) > 1 else self._seconds[0]


class Told:
    """A guest's connection that keeps what it is told."""

    def __init__(self) -> None:
        self.stopped: list[str] = []

    def stop(self, reason: str) -> None:
        """Keep the reason."""
        self.stopped.append(reason)


def watch(sandbox: Counted, link: Told, most: float = 2) -> running.ProcessorMeter:
    """A watch over these."""
    return running.ProcessorMeter(cast("Any", sandbox), cast("Any", link), most)


@pytest.mark.parametrize(
    ("before", "told", "after", "found"),
    [
        (0.5, TOLD, 9.0, (8500.0, "group")),
        (None, TOLD, None, (12.346, "guest")),
        (0.0, None, 1.23456789, (1234.568, "group")),
        (0.0, None, 0.0, (0.0, "group")),
        (None, None, None, (None, "none")),
        (0.5, None, None, (0.0, "group")),  # as far as it was seen: the group was gone
    ],
)
async def test_processor_time_is_the_kernels_or_the_guests_or_unknown(
    before: float | None, told: GuestOutcome | None, after: float | None, found: tuple[float | None, str]
) -> None:
    """What the sandbox has used before its job is not the job's; without a count it says null, never 0."""
    with watch(Counted(before), Told()) as processor:
        assert processor.spent(told, SandboxStats(cpu_seconds=after)) == found


@pytest.mark.parametrize(("seconds", "stopped"), [((1.0, 2.9, 3.1, 9.0), ["processor"]), ((1.0, 2.9, 3.0), [])])
async def test_what_the_group_counts_ends_the_program_once(
    seconds: tuple[float, ...], stopped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """I13: past its limit the guest is told to end it; the control stays at it. What was used before does not count."""
    monkeypatch.setattr(running, "LOOK_SECONDS", 0.0)
    link = Told()
    with watch(Counted(*seconds), link):
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
    assert link.stopped == stopped


def test_processor_time_is_counted_where_cpuacct_has_a_hierarchy_of_its_own(tmp_path: Path) -> None:
    """A host of v1 may mount it apart from ``cpu``; the control mounts them as one. All groups together weigh 1/8."""
    for apart in (True, False):
        root = tmp_path / str(apart)
        for controller in ("memory", "pids", "cpu", *["cpuacct"] * apart):
            (root / controller / "glovebox").mkdir(parents=True)
            (root / controller / "cgroup.procs").touch()
        if not apart:
            (root / "cpuacct").symlink_to("cpu")
        (shares := root / "cpu/glovebox/cpu.shares").touch()
        hierarchy = detect("server", root)
        assert hierarchy is not None
        assert (len(hierarchy.parents), shares.read_text()) == (3 + apart, "128")
        group = Cgroup(hierarchy, "s1", {})
        (root / "cpuacct" / "glovebox" / "server" / "s1" / "cpuacct.usage").write_text("1500000000\n")
        assert group.cpu_seconds() == 1.5
        assert set(group.read_back(None)) == {"in its control group"}


def test_on_v2_all_sandboxes_together_weigh_an_eighth_of_a_group(tmp_path: Path) -> None:
    """What stands beside their parent, such as the server's, comes first."""
    (tmp_path / "cgroup.controllers").touch()
    (parent := tmp_path / "glovebox-server").mkdir()
    for group in (tmp_path, parent):
        (group / "cgroup.subtree_control").write_text("memory pids cpu")
    (parent / "cpu.weight").touch()
    assert detect("server", tmp_path) == Hierarchy(version=2, parents=(parent,))
    assert (parent / "cpu.weight").read_text() == "12"


@pytest.mark.parametrize(
    ("version", "file", "content", "seconds"),
    [
        (2, "cpu.stat", "usage_usec 1500000\nuser_usec 1\nsystem_usec 2\n", 1.5),
        (1, "cpuacct.usage", "2500000000\n", 2.5),
        (1, "cpu.stat", "nr_periods 5\nnr_throttled 0\nthrottled_time 0\n", None),
        (1, "", "", None),
    ],
)
def test_a_control_group_tells_processor_time_where_it_counts_it(
    version: int, file: str, content: str, seconds: float | None, tmp_path: Path
) -> None:
    """Always on v2; on v1 where the two controllers share a hierarchy."""
    group = Cgroup(Hierarchy(version=version, parents=(tmp_path,)), "s1", {})
    if file:
        (tmp_path / "s1" / file).write_text(content)
    (tmp_path / "s1" / "memory.events").write_text("oom_kill 0\n")
    assert group.stats() == SandboxStats(cpu_seconds=seconds)


async def test_a_count_that_cannot_be_read_for_a_while_is_watched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the server has no descriptor left for a moment: the limit holds after it."""

    class Unread(Counted):
        def cpu_seconds(self) -> float | None:
            found = super().cpu_seconds()
            if found == -1:
                raise SandboxError("Reading cpu.stat", "Too many open files", "")
            return found

    monkeypatch.setattr(running, "LOOK_SECONDS", 0.0)
    link = Told()
    with watch(Unread(1.0, -1.0, -1.0, 4.0), link):
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
    assert link.stopped == ["processor"]


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENODEV, errno.EACCES, errno.EIO, errno.EMFILE])
def test_only_what_is_not_there_counts_as_missing(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that cannot be read is no count of nothing: a limit would go unnoticed, and the record misstate."""
    group = Cgroup(Hierarchy(version=2, parents=(tmp_path,)), "s1", {})

    def refuse(path: str, flags: int, **_: object) -> int:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "open", refuse)
    if number in (errno.ENOENT, errno.ENODEV):
        assert group.cpu_seconds() is None
        assert group.stats() is None
    else:
        for reading in (group.cpu_seconds, group.stats):
            with pytest.raises(SandboxError, match=re.escape(os.strerror(number))):
                reading()


def test_one_is_counted_as_one() -> None:
    """Of numbers with and without a fraction."""
    assert [counted(number, "second") for number in (0, 1, 1.0, 1.5, 2, 1_000_000)] == [
        "0 seconds",
        "1 second",
        "1 second",
        "1.5 seconds",
        "2 seconds",
        "1000000 seconds",
    ]
