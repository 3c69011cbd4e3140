"""Keep the index of a growing log current. Run as a module it does so once, and gives way to all other processes."""

import os
import sqlite3
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL  # noqa: TID251 - of the standard library's names for no output

import anyio

from glovebox_audit import read
from glovebox_audit.chain import Head
from glovebox_audit.place import AuditError
from glovebox_audit.query import index
from glovebox_audit.segments.rotation import SEGMENT_BYTES

_SECONDS = 60.0
"""Between two looks. What the log grows by until then, a query indexes in less than half a second."""


async def follow(head: Callable[[], Head], directory: Path) -> None:
    """Have the index of the log in ``directory`` updated after each ``SEGMENT_BYTES`` until cancelled."""
    known = 0
    while True:
        if head().size - known >= SEGMENT_BYTES:
            known = head().size
            command = [sys.executable, "-I", "-m", __name__, str(directory)]
            with suppress(OSError):  # it is made when it is asked for
                await anyio.run_process(command, check=False, stdout=DEVNULL, stderr=DEVNULL, env={})
        await anyio.sleep(_SECONDS)


def main(directory: Path) -> None:
    """Update the index, unless it cannot be kept."""
    os.nice(19)

    def look(connection: sqlite3.Connection) -> None:
        with read.opened(directory) as log:
            index.update(connection, log, lambda *_: None)

    with suppress(OSError, AuditError, *index.DAMAGED):
        index.kept(directory, lambda _: None, look)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
