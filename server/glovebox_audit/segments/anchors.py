"""Keep the end of the chain elsewhere at intervals: append it to a file, or pipe it to a program.

Only such lines reveal a log and a ``head.json`` that were both put back to an earlier state. A failure is logged and
tried again at the next interval: no call waits for it.
"""

import logging
import os
import re
import shlex
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
from anyio.abc import Process

from glovebox_audit import chain
from glovebox_audit.chain import Head
from glovebox_audit.segments.files import anchor

PROGRAM_SECONDS: Final = 30.0
"""Seconds a program may take: it may speak to another host."""

_ENDED_SECONDS: Final = 1.0
"""Seconds until a killed program is gone; one that sudo started as another user cannot be killed."""

MAX_BYTES: Final = 32 << 20
"""Longest file that is read back: an anchor a minute for eight months."""

_LINE = re.compile(rb"(?:[0-9a-fTZ: -]*[0-9-]{10}T[0-9:]{8}Z |\S{1,40} )?([0-9]{1,16}:[0-9a-f]{64})")
"""An anchor, maybe after parts of others that met a full disk and were then tried again."""

_PART = re.compile(rb"[0-9a-fTZ: -]+")

_log = logging.getLogger(__name__)


async def follow(head: Callable[[], Head], where: str, seconds: float) -> None:
    """Keep an anchor now, and then every ``seconds`` if the log grew, until cancelled.

    ``where`` is ``file:`` and a path, or ``exec:`` and a command.
    """
    kept = 0
    left: list[Process] = []
    while True:
        now = head()
        # One program at a time: at most one process cannot be ended, however long the server runs.
        if now.seq > kept and all(process.returncode is not None for process in left):
            left.clear()
            try:
                await keep(now, where, left)
                kept = now.seq
            except OSError as problem:
                _log.warning("The anchor %s was not kept: %s", anchor(now), problem)
        await anyio.sleep(seconds)


async def keep(end: Head, where: str, left: list[Process] | None = None) -> None:
    """Keep one anchor; raises OSError, with a sentence, if it was not kept.

    ``left`` gets the process of a program that exceeded its time and could not be ended.
    """
    line = f"{datetime.now(UTC).strftime('%Y-%m-%dT%H:%M:%SZ')} {anchor(end)}\n".encode()
    kind, _, place = where.partition(":")
    if kind == "file":
        await anyio.to_thread.run_sync(_append, Path(place), line)
    else:
        await give(shlex.split(place), line, [] if left is None else left)


def _append(path: Path, line: bytes) -> None:
    # Non-blocking, so that a FIFO in its place holds nothing up.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        if os.write(descriptor, line) < len(line):
            raise OSError(f"{path} took a part of it")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def give(argv: list[str], line: bytes, left: list[Process]) -> None:
    """Run a program that reads a line; raises OSError, with a sentence, unless it ends in time with status 0.

    None is run while one in ``left`` has not ended.
    """
    if any(process.returncode is None for process in left):
        raise OSError("the program that was run before has not ended")
    left.clear()
    async with own_session(argv, stdout=-3) as process:
        with anyio.move_on_after(PROGRAM_SECONDS):
            if process.stdin is not None:
                with suppress(anyio.BrokenResourceError):
                    await process.stdin.send(line)
                await process.stdin.aclose()
            if status := await process.wait():
                raise OSError(f"{argv[0]} ended with status {status}")
            return
    if process.returncode is None:
        left.append(process)
        raise OSError(
            f"{argv[0]} did not end within {PROGRAM_SECONDS:g} seconds and cannot be ended, as process {process.pid} "
            "is another user's: no other is started before it ends. Have it end itself: sudo -u USER timeout 20 PROGRAM"
        )
    raise OSError(f"{argv[0]} did not end within {PROGRAM_SECONDS:g} seconds")


@asynccontextmanager
async def own_session(argv: list[str], *, stdin: int = -1, stdout: int = -1) -> AsyncIterator[Process]:
    """Run a program in a session of its own, so that its children end with it, at the end of the block.

    Its streams are pipes (-1) or discarded (-3), as standard error is. One that sudo runs as another user cannot be
    ended: its ``returncode`` stays None. Raises OSError if it cannot be started.
    """
    with anyio.CancelScope(shield=True):
        process = await anyio.open_process(argv, stdin=stdin, stdout=stdout, stderr=-3, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with anyio.move_on_after(_ENDED_SECONDS, shield=True):
            await process.wait()
            await process.aclose()


def read(content: bytes) -> list[Head]:
    """Parse anchors: lines of ``SEQ:HASH``, each maybe after a word such as the time.

    A truncated last line is skipped with a warning: its writer reported that it was not kept.

    Raises:
        ValueError: they are too many, none, or a line is something else; names it.
    """
    if len(content) > MAX_BYTES:
        raise ValueError(f"longer than {MAX_BYTES} bytes: give its end")
    found: list[Head] = []
    lines = content.splitlines()
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None:
            if number == len(lines) and not content.endswith(b"\n") and _PART.fullmatch(line):
                _log.warning("Line %d of the anchors is truncated, as by a full disk: it is passed over.", number)
                break
            raise ValueError(f"line {number} is no anchor: it is SEQ:HASH, as `glovebox audit head` prints it")
        found.append(chain.parse_anchor(match[1].decode()))
    if not found:
        raise ValueError("there is no anchor in it")
    return found
