"""Clean up after a server killed with SIGKILL: its control groups, or what a driver names.

With bubblewrap all else ends with the server: processes by PR_SET_PDEATHSIG, mounts and files with their namespace. The
janitor is a process that waits for its standard input to close, which the kernel does for a dead server.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import anyio

from glovebox_sandboxes.host.process import helper

_STOP_SECONDS = 10
"""Longest wait for the janitor on closing; it takes a few ms if everything is gone already."""


class Janitor:
    """A process that cleans up after a killed server; one per server, started with its first sandbox."""

    def __init__(self, program: Path, *arguments: str) -> None:
        """Take its program for when its standard input closes: after ``bye`` by a server that ends properly."""
        self._command = [sys.executable, "-I", "-S", str(program), *arguments]
        self._running: tuple[int, int] | None = None

    def start(self) -> None:
        """Start it, once. Raises OSError."""
        if self._running is None:
            self._running = helper(self._command)

    async def stop(self) -> bool:
        """Let it do its work now, and wait at most 10 s for it; return whether there was one."""
        if self._running is None:
            return False
        (pid, standard_input), self._running = self._running, None
        with suppress(BrokenPipeError):
            os.write(standard_input, b"bye")
        os.close(standard_input)
        with anyio.move_on_after(_STOP_SECONDS, shield=True) as waiting:
            await anyio.to_thread.run_sync(os.waitpid, pid, 0, abandon_on_cancel=True)
        if waiting.cancelled_caught:
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(pid, signal.SIGKILL)  # the thread still waits for it
        return True
