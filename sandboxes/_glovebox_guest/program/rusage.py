"""Reads the processor time and memory of all processes of a program.

RLIMIT_CPU bounds each process for itself, so a program that forks could use its limit many times over.
"""

from __future__ import annotations

import os
from time import clock_gettime

from _glovebox_guest.measure import lines, status

_TICKS = os.sysconf("SC_CLK_TCK")
_UTIME = 10
"""Index of ``utime`` behind the state in /proc/PID/stat; stime, cutime and cstime follow it."""
_CUTIME = _UTIME + 2
"""Index of the time of reaped children."""
_CMINFLT = 7
"""Index of their page faults: on Linux never 0. gVisor does not count them, and times in steps of 10 ms."""
_CPU_CLOCK = 2


def reaped() -> float:
    """Return the milliseconds of everything reaped; not by ``os.times``, which counts in steps of 10 ms."""
    import resource  # warm already

    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (spent.ru_utime + spent.ru_stime) * 1000


def of_one_alone(pid: int) -> tuple[float, int] | None:
    """Return milliseconds and peak bytes of a live process and of all we reaped; None if others live or were its own.

    The memory is that since its last exec(2): earlier peaks are in the host's count alone.
    """
    try:
        if {name for name in os.listdir("/proc") if name.isdigit()} != {"1", str(pid)}:
            return None
        fields = _fields(str(pid))
        seconds = clock(pid)
        if not seconds or fields[_CMINFLT] or any(fields[_CUTIME : _CUTIME + 2]):
            return None
        return reaped() + seconds * 1000, _memory_bytes(pid)
    except (OSError, LookupError, ValueError):
        return None  # it has just ended; or the kernel does not report it


def _memory_bytes(pid: int) -> int:
    """Return a process's peak memory. Raises OSError, LookupError or ValueError where the kernel does not report it."""
    sizes = status(lines(f"/proc/{pid}/status"))
    # gVisor reports no peak; there the host counts the whole sandbox.
    return int((sizes.get("VmHWM") or sizes["VmRSS"]).split()[0]) * 1024


def clock(pid: int) -> float:
    """Return the seconds of processor time of one process; 0 where the kernel does not report them."""
    # Its number as clock_getcpuclockid(3) makes it; the columns of /proc/PID/stat count in steps of 10 ms.
    try:
        return clock_gettime(~pid << 3 | _CPU_CLOCK)
    except OSError:
        return 0.0


def processor_seconds() -> float:
    """Return the time of all other processes in this pid namespace and of all reaped ones.

    Children of a parent that ignores SIGCHLD are not counted: wall time and the processor quota bound those.
    """
    total = reaped() / 1000
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                total += sum(_fields(name)[_UTIME : _UTIME + 4]) / _TICKS
            except OSError:
                continue  # it has just ended, and is counted as a reaped one next time
    return total


def _fields(pid: str) -> list[int]:
    """Return the columns of /proc/PID/stat behind the state, see proc_pid_stat(5). Raises OSError."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        line = file.read()
    # The command may hold spaces and brackets: only what follows the last bracket is in columns.
    return [int(field) for field in line.rpartition(")")[2].split()[1:]]
