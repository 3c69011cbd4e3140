"""Reads the processor time and memory of all processes of a program.

RLIMIT_CPU bounds each process for itself, so a program that forks could use its limit many times over.
"""

from __future__ import annotations

import os
from time import clock_gettime

_TICKS = os.sysconf("SC_CLK_TCK")
_UTIME = 10
"""Index of ``utime`` behind the state in /proc/PID/stat; stime, cutime and cstime follow it."""
_CUTIME = _UTIME + 2
"""Index of the time of reaped children."""
_CMINFLT = 7
"""Index of their page faults: on Linux never 0. gVisor does not count them, and times in steps of 10 ms."""
_CPU_CLOCK = 2


class Spent:
    """Processor time in milliseconds, and the largest resident memory of one process in bytes."""

    __slots__ = ("cpu_ms", "peak_bytes")

    def __init__(self, cpu_ms: float, peak_bytes: int) -> None:
        self.cpu_ms = cpu_ms
        self.peak_bytes = peak_bytes


def reaped(peak_bytes: int) -> Spent:
    """Return the usage of everything reaped; not by ``os.times``, which counts in steps of 10 ms."""
    import resource  # warm already

    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Spent((spent.ru_utime + spent.ru_stime) * 1000, peak_bytes)


def of_one_alone(pid: int) -> Spent | None:
    """Return the usage of a live process and of all we reaped; None if others live or it had children.

    The memory is that since its last exec(2): earlier peaks are in the host's count alone.
    """
    try:
        if {name for name in os.listdir("/proc") if name.isdigit()} != {"1", str(pid)}:
            return None
        fields = _fields(str(pid))
        if fields[_CMINFLT] or any(fields[_CUTIME : _CUTIME + 2]):
            return None
        peak, seconds = _memory_bytes(pid), _clock(pid)
    except (OSError, LookupError, ValueError):
        return None  # it has just ended; or the kernel does not report it
    before = reaped(peak)
    return Spent(before.cpu_ms + seconds * 1000, before.peak_bytes)


def _memory_bytes(pid: int) -> int:
    """Return a process's peak memory. Raises OSError, LookupError or ValueError where the kernel does not report it."""
    # The name on the first line is the program's choice, see proc_pid_status(5): a carriage return begins no line.
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace", newline="\n") as lines:
        sizes = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    # gVisor reports no peak; there the host counts the whole sandbox.
    return int(sizes.get("VmHWM") or sizes["VmRSS"]) * 1024


def clock(pid: int) -> float:
    """Return the seconds of processor time of one process; 0 where the kernel does not report them."""
    try:
        return _clock(pid)
    except OSError:
        return 0.0


def _clock(pid: int) -> float:
    # Its number as clock_getcpuclockid(3) makes it; the columns of /proc/PID/stat count in steps of 10 ms.
    return clock_gettime(~pid << 3 | _CPU_CLOCK)


def processor_seconds() -> float:
    """Return the time of all other processes in this pid namespace and of all reaped ones.

    Children of a parent that ignores SIGCHLD are not counted: wall time and the processor quota bound those.
    """
    own = os.times()
    total = own.children_user + own.children_system
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            total += _of(name)
    return total


def _of(pid: str) -> float:
    try:
        return sum(_fields(pid)[_UTIME : _UTIME + 4]) / _TICKS
    except OSError:
        return 0.0  # it has just ended, and is counted as a reaped one next time


def _fields(pid: str) -> list[int]:
    """Return the columns of /proc/PID/stat behind the state, see proc_pid_stat(5). Raises OSError."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        line = file.read()
    # The command may hold spaces and brackets: only what follows the last bracket is in columns.
    return [int(field) for field in line.rpartition(")")[2].split()[1:]]
