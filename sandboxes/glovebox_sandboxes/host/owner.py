"""Mark containers and control groups with their server, and tell whether that server still lives.

A killed server cannot clean up. Its running containers end by themselves (their input closes); one created but not
started stays, and the next server on this machine removes it. Never another machine's: only a process that sees the
same kernel and the same process ids judges a mark. Must import nothing of ours.
"""

import os
import secrets
from dataclasses import dataclass, fields
from pathlib import Path

_STARTED = 19
"""Index of ``starttime`` after the command's closing bracket in /proc/PID/stat, see proc_pid_stat(5), field 22."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOwner:
    """One driver of one server process, distinct from every other that had or will have its number."""

    boot: str
    pid_namespace: str
    pid: int
    started: int
    """Clock ticks after boot."""
    nonce: str
    """Tells the drivers of one process apart."""

    def mark(self) -> str:
        """Return the label's value, and part of a group's name."""
        return f"{self.boot}:{self.pid_namespace}:{self.pid}:{self.started}:{self.nonce}"


def new_owner() -> ServerOwner:
    """Return an owner in the calling process."""
    return ServerOwner(
        boot=_boot(),
        pid_namespace=_pid_namespace(),
        pid=os.getpid(),
        started=_started(os.getpid()) or 0,
        nonce=secrets.token_hex(4),
    )


def is_orphan(mark: str) -> bool:
    """Return whether the server named by a mark is certainly gone; False for a mark that we cannot judge."""
    parts = mark.split(":")
    if len(parts) != len(fields(ServerOwner)):
        return False
    boot, namespace, pid, started, _ = parts
    if (boot, namespace) != (_boot(), _pid_namespace()) or not (_is_number(pid) and _is_number(started)):
        return False
    return _started(int(pid)) != int(started)


def is_of_another_boot(mark: str) -> bool:
    """Return whether a mark is of another boot: on a file that this machine alone writes, its server is then gone."""
    parts = mark.split(":")
    return len(parts) == len(fields(ServerOwner)) and parts[0] != _boot()


def _is_number(text: str) -> bool:
    # At most 20 digits: a kernel's 64 bits. More is no valid mark.
    return text.isascii() and text.isdigit() and len(text) <= 20  # noqa: PLR2004 - explained above


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
