"""Applies the patch of an overlay exactly or not at all. Pure: no I/O.

Only the form of ``artifacts.diff_form`` is accepted. It names git's ids of the old and of the new content, so a file
that is not the one or does not become the other changes nothing.
"""

import hashlib
import io
import re
import zlib
from collections.abc import Callable
from typing import Final, NamedTuple

from glovebox_server.artifacts.diff_form import FILES, NO_ID, FilePatch, WorkBudget, read_patch, unpacked
from glovebox_server.artifacts.names import MAX_NAME_BYTES, quoted
from glovebox_server.errors import RefusedError

MAX_MADE_BYTES: Final = 64 << 20
_NEW_LINE: Final = re.compile(rb"^[+ ](.*\n)(\\)?", re.MULTILINE)
"""A line of a hunk's new file, and a mark that its line feed does not count."""

Read = Callable[[str], bytes | None]


class Made(NamedTuple):
    """A file as a patch makes it: its new content, None to remove it, and its executable bit, None if unchanged."""

    name: str
    content: bytes | None
    runs: bool | None


def made(patch: bytes, read: Read) -> list[Made]:
    """Apply a patch, any bytes, to what ``read`` returns.

    Raises:
        RefusedError: rule ``promotion.patch``: no overlay wrote it so. Rule ``promotion.conflict``: a file is not what
            the program was given.
    """
    try:
        files = list(read_patch(patch, WorkBudget()))
    except ValueError:
        files = []
    if not files:
        raise _unfit("it is no patch as an overlay writes it, or is cut off, or too large")
    found: dict[str, Made] = {}
    size = 0
    for file in files:
        if file.name in found:
            raise _unfit(f"it changes {quoted(file.name)} twice")
        found[file.name] = one = _applied(file, read)
        size += len(one.content or b"")
        if size > MAX_MADE_BYTES:
            raise _unfit(f"it makes more than {MAX_MADE_BYTES} bytes")
    return list(found.values())


def _applied(file: FilePatch, read: Read) -> Made:
    name, head, _ = file
    if len(name.encode()) > MAX_NAME_BYTES or any(part.casefold() == ".git" for part in name.split("/")):
        raise _unfit(f"{quoted(name)} is too long, or belongs to git")
    mode = head["changed"] or (head["mode"] if head["how"] == b"new" else None)
    content = read(name)
    if _id(content) != head["after"]:
        if _id(content) != head["before"]:
            what = "it is not there" if content is None else "it is not what the program was given"
            hint = "Run the program again on what is there now, or merge by hand."
            raise RefusedError("promotion.conflict", f"{quoted(name)}: {what}; nothing was changed.", hint)
        content = None if head["how"] == b"deleted" else _content(file, content or b"")
        if _id(content) != head["after"]:
            raise _unfit(f"{quoted(name)} does not become what it says")
    return Made(name, content, None if mode is None else mode == FILES[1])


def _content(file: FilePatch, old: bytes) -> bytes:
    """Return what a file becomes; any bytes where the patch is false, which its id shows."""
    if file.head["packed"]:
        size = int(file.parts[0]["size"])
        try:
            packed = b"".join(unpacked(file.parts[0]["lines"]))
            return zlib.decompressobj().decompress(packed, size + 1) if size <= MAX_MADE_BYTES else b""
        except (ValueError, zlib.error):
            return b""
    lines, out, at = list(io.BytesIO(old)), bytearray(), 0
    for hunk in file.parts:
        begin = int(hunk["first"]) - (hunk["old"] != b"0")
        if begin < at:
            return b""  # else a few hunks could copy the file many times
        out += b"".join(lines[at:begin])
        out += b"".join(line[:-1] if endless else line for line, endless in _NEW_LINE.findall(hunk["lines"]))
        at = begin + int(hunk["old"] or 1)
    return bytes(out) + b"".join(lines[at:])


def _id(content: bytes | None) -> bytes:
    """Return git's id of a file's content."""
    if content is None:
        return NO_ID
    digest = hashlib.sha1(b"blob %d\0" % len(content), usedforsecurity=False)
    digest.update(content)
    return digest.hexdigest().encode()


def _unfit(reason: str) -> RefusedError:
    hint = "Only a whole `changes.patch` of an overlay is applied; apply another by hand."
    return RefusedError("promotion.patch", f"The patch was not applied: {reason}; nothing was changed.", hint)
