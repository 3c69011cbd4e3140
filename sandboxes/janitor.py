"""Removes a server's control groups when the server is killed with SIGKILL and cannot do it itself.

Everything else of a sandbox ends with the server: processes by PR_SET_PDEATHSIG, mounts and files with their namespace.
The janitor is a process of its own that waits for its standard input to close, which the kernel does for a dead server.
"""

import os
import sys
from pathlib import Path

import anyio

from sandboxes.process import helper

_PROGRAM = """
import os, sys, time
sys.stdin.buffer.read()
for parent in sys.argv[1:]:
    for _ in range(400):
        try:
            for name in os.listdir(parent):
                group = os.path.join(parent, name)
                if os.path.isdir(group):
                    try:
                        for line in open(os.path.join(group, "cgroup.procs")):
                            os.kill(int(line), 9)
                        os.rmdir(group)
                    except OSError:
                        pass
            os.rmdir(parent)
            break
        except FileNotFoundError:
            break
        except OSError:
            time.sleep(0.005)
"""


class Janitor:
    """One waiting process per server, started with the first sandbox."""

    def __init__(self, parents: tuple[Path, ...]) -> None:
        """Take the directories below which this server makes its groups."""
        self._parents = parents
        self._running: tuple[int, int] | None = None

    def start(self) -> None:
        """Start it, once. Raises OSError."""
        if self._running is None:
            self._running = helper([sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, self._parents)])

    async def stop(self) -> None:
        """Let it do its work now, and wait for it; without a process there is nothing but empty groups."""
        if self._running is None:
            for parent in self._parents:
                _remove(parent)
            return
        (pid, standard_input), self._running = self._running, None
        os.close(standard_input)
        await anyio.to_thread.run_sync(os.waitpid, pid, 0)


def reap(root: Path, living: "frozenset[str]") -> None:
    """Remove groups below ``root`` whose server id is not among the living (a janitor may have been killed too)."""
    for parent in root.iterdir() if root.is_dir() else ():
        if parent.is_dir() and parent.name not in living:
            for group in parent.iterdir():
                if group.is_dir():
                    _remove(group)
            _remove(parent)


def _remove(group: Path) -> None:
    try:
        for line in (group / "cgroup.procs").read_text().split():
            os.kill(int(line), 9)
        group.rmdir()
    except OSError:
        return
