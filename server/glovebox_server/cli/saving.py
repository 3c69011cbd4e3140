"""Saves an artifact to a new file, or to standard output. A failing disk is reported in one sentence.

Only the command line uses it; must not be imported by anything that serves clients.
"""

import codecs
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import anyio

from glovebox_audit.printable import LAYOUT, printable
from glovebox_sandboxes.contract.errors import DiagnosedError, MisnamedError


def _failure(place: Path, error: OSError) -> DiagnosedError:
    """Return the failure of a write. A name that is taken is a wrong argument; other failures are the disk's."""
    kind = MisnamedError if isinstance(error, FileExistsError) else DiagnosedError
    room = "" if isinstance(error, FileExistsError | FileNotFoundError) else "Make room, or "
    fix = f"{room}name another file."
    return kind(f"{place} cannot be written", error.strerror or str(error), fix[0].upper() + fix[1:])


async def save(chunks: AsyncIterator[bytes], output: Path | None) -> None:
    """Write all chunks to a file that does not exist yet, or to standard output.

    Raises MisnamedError if the file exists; DiagnosedError if it cannot be made, or the disk failed. An incomplete file
    is removed.
    """
    if output is None:
        await _print(chunks)
        return
    try:
        file = await anyio.open_file(output, "xb")
    except OSError as error:
        raise _failure(output, error) from error
    try:
        async with file:
            async for chunk in chunks:
                await file.write(chunk)
    except BaseException as problem:
        output.unlink(missing_ok=True)  # noqa: ASYNC240 - one call, where the disk has just answered
        if isinstance(problem, OSError):
            raise _failure(output, problem) from problem
        raise


def write_new_file(file: Path, content: bytes) -> None:
    """Write a file that does not exist yet; raises as ``save`` does, and leaves as little."""
    try:
        opened = file.open("xb")
    except OSError as error:
        raise _failure(file, error) from error
    try:
        with opened:
            opened.write(content)
    except OSError as error:
        file.unlink(missing_ok=True)
        raise _failure(file, error) from error


def replace_file(file: Path, content: bytes, *, force: bool) -> None:
    """Replace a file as a whole, or leave it unchanged."""
    draft, doing = file.with_name(f".{file.name}.new"), f"{file} cannot be written"
    if file.exists() and not file.is_file():  # as root, a device of the machine
        raise MisnamedError(doing, "it is no regular file", "Name another file.")
    if not force and os.path.lexists(file):
        raise MisnamedError(doing, "there is one already", "Name another file, or remove it first.")
    try:
        draft.unlink(missing_ok=True)
        with draft.open("xb") as out:
            out.write(content)
            os.fsync(out.fileno())
        draft.chmod(0o644)
        draft.replace(file)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise _failure(file, error) from error


async def _print(chunks: AsyncIterator[bytes]) -> None:
    """Print the bytes unchanged; to a terminal, as text that cannot control it."""
    shown = codecs.getincrementaldecoder("utf-8")("backslashreplace") if sys.stdout.isatty() else None
    async for chunk in chunks:
        if shown is None:
            sys.stdout.buffer.write(chunk)
        else:
            sys.stdout.write(printable(shown.decode(chunk), LAYOUT))
    if shown is not None:
        sys.stdout.write(printable(shown.decode(b"", final=True), LAYOUT))
    sys.stdout.flush()
