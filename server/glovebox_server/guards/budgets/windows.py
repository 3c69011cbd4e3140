"""Computes the time of budgets, and their windows. Pure.

Within one boot, time passes by the kernel's boot-time clock, whatever happens to the wall clock. After a reboot it
continues from the wall clock or, if that is behind, from the latest time seen. So a clock that is set forward refills
nothing early, and one that is set back keeps nothing spent longer than its window.
"""

import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final, Literal

Every = Literal["minute", "hour", "day", "run"]

LENGTH_MS: Final = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}

RUN_MS: Final = 7 * LENGTH_MS["day"]
"""Time that a run's own budgets are remembered after its last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Readings of this machine's clocks, in milliseconds."""

    wall: int
    """Since 1970."""
    boot: str
    since_boot: int
    """Includes sleep (CLOCK_BOOTTIME, clock_gettime(2)); cannot be set."""


def read_clocks() -> Clocks:
    """Read the clocks."""
    since_boot = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
    return Clocks(wall=time.time_ns() // 1_000_000, boot=_boot(), since_boot=since_boot)


@cache
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def advanced(last: Clocks | None, now: Clocks) -> Clocks:
    """Return the clocks with the time by the rule above for ``wall``, as ``last`` has it; None if none was seen."""
    if last is None:
        return now
    if last.boot == now.boot:
        # Never back, should a container have a boot-time clock of its own (time_namespaces(7)).
        return replace(now, wall=last.wall + max(0, now.since_boot - last.since_boot))
    return replace(now, wall=max(last.wall, now.wall))


def window(every: Every, time: int) -> tuple[int, int]:
    """Return the first millisecond of a time's window, and the first after it; windows begin on the hour in UTC.

    A run's has no end that a call could wait for: it lies ``RUN_MS`` after the call.
    """
    if every == "run":
        return 0, time + RUN_MS
    length = LENGTH_MS[every]
    start = time - time % length
    return start, start + length
