"""How much processor time a program has used, all its processes together.

RLIMIT_CPU bounds each process for itself, so a program that forks could use its limit many times over.
"""

from __future__ import annotations

import os

_TICKS = os.sysconf("SC_CLK_TCK")
_UTIME = 11
"""Index of ``utime`` after the command's closing bracket in /proc/PID/stat; stime, cutime and cstime follow it."""


def processor_seconds() -> float:
    """Time of every other process in this pid namespace and of all that were reaped, by us or by their parents.

    What a parent that ignores SIGCHLD does not count is not in it: wall time and the processor quota bound that.
    """
    own = os.times()
    total = own.children_user + own.children_system
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            total += _of(name)
    return total


def _of(pid: str) -> float:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            line = file.read()
    except OSError:
        return 0.0  # it has just ended, and is counted as a reaped one next time
    # The command may hold spaces and brackets: only what follows the last bracket is in columns, proc_pid_stat(5).
    fields = line.rpartition(")")[2].split()
    return sum(int(field) for field in fields[_UTIME : _UTIME + 4]) / _TICKS
