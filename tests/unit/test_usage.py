"""What a call has spent: told as exactly as the kernel counts it, and not at all where it does not."""

from pathlib import Path

import pytest

from glovebox_sandboxes.contract.base import SandboxStats
from glovebox_sandboxes.host.cgroup import Cgroup, Hierarchy
from glovebox_sandboxes.plural import counted
from glovebox_sandboxes.session import run as running
from glovebox_sandboxes.session.connection import GuestOutcome

TOLD = {"stopped": "", "status": 0, "wall_ms": 1.0, "cpu_ms": 12.345678, "memory_peak_bytes": 1, "skipped": []}


@pytest.mark.parametrize(
    ("told", "seconds", "found"),
    [
        (GuestOutcome.model_validate(TOLD), 9.0, 12.346),
        (GuestOutcome.model_validate(TOLD), None, 12.346),
        (None, 1.23456789, 1234.568),
        (None, 0.0, 0.0),
        (None, None, None),
    ],
)
def test_processor_time_is_the_guests_or_the_kernels_or_unknown(
    told: GuestOutcome | None, seconds: float | None, found: float | None
) -> None:
    """A call that the host had to end has not used nothing: without a count it says null, never 0."""
    assert running._processor_ms(told, SandboxStats(cpu_seconds=seconds)) == found


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
