"""Running one command of somebody else's sandbox under a clock, with an end to its output and to its memory.

Nothing here may know what is run.
"""

import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import anyio
import anyio.abc
import psutil

FLOOD_BYTES = 8 * 2**20  # of output that reach the caller: a hundred times what any profile of ours keeps
FLOOD_RSS = 800 * 2**20
"""Of the caller's side, where it is a library that keeps all output for itself; idle ones take 60 MiB."""
LOOK_SECONDS = 0.2  # between two looks at the caller's memory: a program prints a few hundred MiB in it
DRAIN_SECONDS = 0.5  # for the last output of a command that has ended
GONE_SECONDS = 3.0  # for processes to disappear after a call; removing a container takes a tenth of it


@dataclass(slots=True)
class Ran:
    """What came of a command."""

    ended: Literal["ended", "running", "flood"] = "running"
    code: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    seconds: float = 0.0
    total: int = 0


async def run(
    argv: Sequence[str],
    *,
    seconds: float,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    complete: Callable[[bytes], bool] = lambda _: False,
    keeps: bool = True,
) -> Ran:
    """Run a command until it ends, floods, or its seconds are up; then nothing of its session is left."""
    ran = Ran()
    began = anyio.current_time()
    process = await anyio.open_process(argv, env=env, cwd=cwd, start_new_session=True)
    try:
        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as tasks:
                readers = [anyio.Event(), anyio.Event()]
                for name, stream, read in zip(
                    ("stdout", "stderr"), (process.stdout, process.stderr), readers, strict=True
                ):
                    tasks.start_soon(
                        partial(_keep, stream, ran, name, scope=tasks.cancel_scope, complete=complete, done=read)
                    )
                if keeps:
                    tasks.start_soon(_look, process.pid, ran, tasks.cancel_scope)
                if process.stdin is not None:
                    # A program that ends without reading is one of the things that can be seen here.
                    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                        if stdin:
                            await process.stdin.send(stdin)
                        else:
                            await process.stdin.aclose()
                ran.code = await process.wait()
                ran.seconds = anyio.current_time() - began
                # What outlives it may hold the pipes; what it printed itself is there by now.
                with anyio.move_on_after(DRAIN_SECONDS):
                    for read in readers:
                        await read.wait()
                if ran.ended == "running":
                    ran.ended = "ended"
                tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.aclose()
    ran.seconds = ran.seconds or anyio.current_time() - began
    return ran


async def _keep(
    stream: anyio.abc.ByteReceiveStream | None,
    ran: Ran,
    name: str,
    *,
    scope: anyio.CancelScope,
    complete: Callable[[bytes], bool],
    done: anyio.Event,
) -> None:
    if stream is None:
        raise TypeError("a command needs pipes")
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        async for chunk in stream:
            ran.total += len(chunk)
            setattr(ran, name, (getattr(ran, name) + chunk)[-FLOOD_BYTES:])
            if ran.total > FLOOD_BYTES:
                ran.ended = "flood"
                scope.cancel()
            if name == "stdout" and complete(ran.stdout):
                ran.ended = "ended"
                scope.cancel()
    done.set()


async def _look(pid: int, ran: Ran, scope: anyio.CancelScope) -> None:
    while True:
        with suppress(psutil.Error):
            if psutil.Process(pid).memory_info().rss > FLOOD_RSS:
                ran.ended = "flood"
                scope.cancel()
        await anyio.sleep(LOOK_SECONDS)


def named(name: str) -> tuple[str, ...]:
    """Processes of this host that call themselves so (prctl(2), PR_SET_NAME: a fork inherits it); zombies are none."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == name:
                state = re.search(r"^State:\s+(\w)", (entry / "status").read_text(), re.MULTILINE)
                found += [] if state and state[1] == "Z" else [entry.name]
        except OSError:
            continue  # it has ended
    return tuple(found)


async def left(name: str) -> tuple[str, ...]:
    """Processes of this name that are there although a call is over; they are then ended."""
    with anyio.move_on_after(GONE_SECONDS):
        while named(name):  # noqa: ASYNC110 - only /proc tells
            await anyio.sleep(0.02)
        return ()
    found = named(name)
    for pid in found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(int(pid), signal.SIGKILL)
    return tuple(f"process {pid}" for pid in found)
