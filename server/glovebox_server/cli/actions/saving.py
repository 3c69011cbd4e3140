"""Putting an artifact where its owner wants it: a new file, or standard output. A disk's failure is one sentence.

Only the command line uses it; must not be imported by anything that serves clients.
"""

import codecs
import errno
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio

from glovebox_audit.printable import LAYOUT, printable
from glovebox_sandboxes.contract.errors import DiagnosedError

_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""What another name on the same disk would not change."""


class CannotSave(DiagnosedError):  # noqa: N818 - until its area merges it
    """An artifact could not be written; nothing of it is left."""

    def __init__(self, place: Path, error: OSError, fix: str) -> None:
        """Say where, why, and what to do."""
        super().__init__(f"{place} cannot be written", error.strerror or str(error), fix)


class NameTaken(CannotSave):
    """There is something of this name, which stays as it is."""


async def save(chunks: AsyncIterator[bytes], output: Path | None) -> None:
    """Write all chunks to a file that does not exist yet, or to standard output.

    Args:
        chunks: the artifact's content.
        output: the file; None for standard output.

    Raises:
        NameTaken: the file exists.
        CannotSave: it cannot be made, or the disk failed; a file that was begun is removed.
    """
    if output is None:
        await _print(chunks)
        return
    try:
        file = await anyio.open_file(output, "xb")
    except OSError as error:
        fix = "Make room on its disk." if error.errno in _DISK else "Name another file."
        kind = NameTaken if isinstance(error, FileExistsError) else CannotSave
        raise kind(output, error, fix) from error
    try:
        async with file:
            async for chunk in chunks:
                await file.write(chunk)
    except BaseException as problem:
        output.unlink(missing_ok=True)  # noqa: ASYNC240 - one call, where the disk has just answered
        if isinstance(problem, OSError):
            raise CannotSave(output, problem, "Make room, or name a file on another disk.") from problem
        raise


def replace_file(file: Path, content: bytes, *, force: bool) -> None:
    """Write a whole file, or leave what is there as it was."""
    draft = file.with_name(f".{file.name}.new")
    if file.exists() and not file.is_file():  # as root, a device of the machine
        raise NameTaken(file, OSError("it is no regular file"), "Name another file.")
    if not force and os.path.lexists(file):
        raise NameTaken(file, OSError("there is one already"), "Name another file, or remove it first.")
    try:
        draft.unlink(missing_ok=True)
        with draft.open("xb") as out:
            out.write(content)
            os.fsync(out.fileno())
        draft.chmod(0o644)
        draft.replace(file)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CannotSave(file, error, "Make room, or name another file.") from error


async def _print(chunks: AsyncIterator[bytes]) -> None:
    """The bytes as they are; a person at a terminal sees them as text, which cannot take it over."""
    shown = codecs.getincrementaldecoder("utf-8")("backslashreplace") if sys.stdout.isatty() else None
    async for chunk in chunks:
        if shown is None:
            sys.stdout.buffer.write(chunk)
        else:
            sys.stdout.write(printable(shown.decode(chunk), LAYOUT))
    if shown is not None:
        sys.stdout.write(printable(shown.decode(b"", final=True), LAYOUT))
    sys.stdout.flush()
