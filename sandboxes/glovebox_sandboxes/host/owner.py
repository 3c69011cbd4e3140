"""Mark containers and control groups with their server, tell whether that server still lives, and remove its groups.

A killed server cannot clean up. Its running containers end by themselves (their input closes); one created but not
started stays, and the next server on this machine removes it. Never another machine's: only a process that sees the
same kernel and the same process ids judges a mark. Also the janitor's program, with groups as arguments: must import
nothing of ours.
"""

import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PREFIX = "glovebox-"
"""Prefix of server groups on v2, which lie among those of others."""
_MARK_PARTS = 5
_TRIES = 400
"""Passes over a server's groups, five milliseconds apart: killed processes leave them with a delay."""

_STARTED = 19
"""Index of ``starttime`` after the command's closing bracket in /proc/PID/stat, see proc_pid_stat(5), field 22."""


def new_mark(nonce: str = "") -> str:
    """Return a mark of this process: the label's value, and part of a group's name.

    Boot, pid namespace, pid, start in clock ticks after boot, and what tells the drivers of one process apart.
    """
    own = os.getpid()
    return f"{_boot()}:{_pid_namespace()}:{own}:{_started(own) or 0}:{nonce or secrets.token_hex(4)}"


def server_id() -> str:
    """Return a name of this process, which no other since boot has."""
    return f"g{os.getpid()}-{_started(os.getpid()) or 0}"


def is_orphan(mark: str) -> bool:
    """Return whether the server named by a mark is certainly gone; False for a mark that we cannot judge."""
    # Numbers of at most 20 digits: a kernel's 64 bits. More is no valid mark.
    parts = re.fullmatch(r"([^:]*):([^:]*):([0-9]{1,20}):([0-9]{1,20}):[^:]*", mark)
    if parts is None or parts.group(1, 2) != (_boot(), _pid_namespace()):
        return False
    return _started(int(parts[3])) != int(parts[4])


def is_of_another_boot(mark: str) -> bool:
    """Return whether a mark is of another boot: on a file that this machine alone writes, its server is then gone."""
    parts = mark.split(":")
    return len(parts) == _MARK_PARTS and parts[0] != _boot()


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    # "pid:[4026531836]": only the number, the label's separator is the colon.
    return str(Path("/proc/self/ns/pid").readlink())[5:-1]


def _started(pid: int) -> int | None:
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command may hold spaces and brackets: only what follows the last bracket is in columns.
    return int(line.rpartition(")")[2].split()[_STARTED])


def reap(parents: Iterable[Path]) -> None:
    """Remove groups of servers killed together with their janitor, or before they had one. Blocking.

    Args:
        parents: where the calling server makes its groups. Those of others are beside them, named after their owner's
            mark. If a server cannot be judged from here, as in another container, its groups stay.
    """
    for parent in parents:
        for other in parent.parent.iterdir():
            if is_orphan(other.name.removeprefix(PREFIX)):
                remove_all(str(other))


def kill_all(group: str, *, spared: int | None = None) -> set[int]:
    """Send SIGKILL to every process in one group except a spared one, and return them; none if the group is gone."""
    try:
        with open(f"{group}/cgroup.procs") as file:  # noqa: PTH123 - one path of a dozen per call
            listed = file.read().split()
    except OSError:
        return set()
    # 0 is a process outside of our pid namespace, and to kill(2) our own process group. Ourselves: v1 lists a whole
    # process while one of its threads is in the group, as the thread is that starts a sandbox there.
    killed = {int(pid) for pid in listed} - {0, os.getpid(), spared}
    for pid in killed:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return killed


def remove_all(parent: str) -> None:
    """Remove a server's group and those in it, with their processes. Blocking."""
    for _ in range(_TRIES):
        try:
            for group in [each.path for each in os.scandir(parent) if each.is_dir()]:
                kill_all(group)
                with suppress(OSError):
                    os.rmdir(group)  # noqa: PTH106 - a path of os.scandir
            os.rmdir(parent)  # noqa: PTH106 - as above
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.005)  # killed processes leave their group a moment later
        else:
            return


if __name__ == "__main__":
    sys.stdin.buffer.read()
    for each in sys.argv[1:]:
        remove_all(each)
