"""Applies a patch exactly or not at all: no offset, no fuzz, no rename, no link. Pure: no I/O.

Only the form of ``artifacts.diff_form`` is accepted, which every program reads alike. If the patch names git's ids of
the old or new content, the files must match.
"""

import hashlib
import io
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from glovebox_server.artifacts.diff_form import FILES, MAX_PATCH_BYTES, FilePatch, WorkBudget, read_patch, unpacked
from glovebox_server.artifacts.names import MAX_NAME_BYTES, quoted
from glovebox_server.errors import RefusedError

MAX_MADE_BYTES: Final = 64 << 20
"""Bytes of all files that one patch makes; they are in memory."""
_ID_LENGTH: Final = 40
"""Of git's whole name of a content; shorter ones are ambiguous."""
_AGAIN: Final = "Run the program again on what is there now, or merge by hand."

Read = Callable[[str], bytes | None]
"""Maps a path to the file's content; None if it does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A file as a patch makes it."""

    name: str
    content: bytes | None
    """The new content; None to remove the file."""
    runs: bool | None = None
    """The new executable bit; None if unchanged."""


def made(patch: bytes, read: Read) -> list[Made]:
    """Apply a patch, any bytes, to what ``read`` returns.

    Raises:
        RefusedError: rule ``promotion.patch``: it is ambiguous, or changes more than regular files. Rule
            ``promotion.conflict``: a file is not what the patch was made from.
    """
    try:
        files = list(read_patch(patch[: MAX_PATCH_BYTES + 1], WorkBudget()))
    except ValueError:
        files = []
    if not files or len(patch) > MAX_PATCH_BYTES:
        raise _unfit("it is no patch as `git diff` writes it, or is cut off, or too large")
    found: dict[str, Made] = {}
    size = 0
    for file in files:
        one = _applied(file, read)
        size += len(one.content or b"")
        if size > MAX_MADE_BYTES:
            raise _unfit(f"it makes more than {MAX_MADE_BYTES} bytes")
        if one.name in found:
            raise _unfit(f"it changes {quoted(one.name)} twice")
        found[one.name] = one
    return list(found.values())


def _applied(file: FilePatch, read: Read) -> Made:
    name, head, _ = file
    mode = head["made"] or head["gone"] or head["changed"]
    if len(name.encode()) > MAX_NAME_BYTES or any(part.casefold() == ".git" for part in name.split("/")):
        raise _unfit(f"{quoted(name)} is too long, or belongs to git")
    if head["how"] or head["unseen"] or (mode and mode not in FILES):
        raise _unfit(f"{quoted(name)} is renamed, a link, or not in it")
    whole = head["after"] and len(head["before"]) == len(head["after"]) == _ID_LENGTH
    before, after = (head["before"], head["after"]) if whole else (None, None)
    old = read(name)
    if head["gone"]:
        return _gone(file, old, before)
    runs = (head["made"] or head["changed"]) == FILES[1] if head["made"] or head["changed"] else None
    if head["made"]:
        content = _content(file, b"")
        if old not in {None, content}:
            raise _conflict(name, "it is there already")
        return Made(name=name, content=_checked(name, content, after), runs=runs)
    if old is not None and after is not None and _blob(old) == after:
        return Made(name=name, content=old, runs=runs)
    if file.parts and before is None:
        raise _unfit(f"of {quoted(name)} it does not say what it was made from")
    content = _content(file, _required(name, old, before))
    return Made(name=name, content=_checked(name, content, after), runs=runs)


def _gone(file: FilePatch, old: bytes | None, before: bytes | None) -> Made:
    if old is not None:
        # The same answer for every difference: a caller must not guess the file line by line.
        try:
            rest = _content(file, _required(file.name, old, before))
        except RefusedError:
            rest = old
        if rest:
            raise _conflict(file.name, "it is not what the program was given")
    return Made(name=file.name, content=None)


def _required(name: str, old: bytes | None, before: bytes | None) -> bytes:
    if old is None:
        raise _conflict(name, "it is not there")
    if before is not None and _blob(old) != before:
        raise _conflict(name, "it is not what the program was given")
    return old


def _content(file: FilePatch, old: bytes) -> bytes:
    if not file.parts:
        return old
    if file.head["old"]:
        return _hunked(file.name, old, file.parts)
    if file.parts[0]["kind"] == b"delta":
        raise _unfit(f"{quoted(file.name)} is given as a difference of bytes")
    return _inflated(file.name, int(file.parts[0]["size"]), file.parts[0]["lines"])


def _hunked(name: str, old: bytes, hunks: Sequence[re.Match[bytes]]) -> bytes:
    lines, out, at = list(io.BytesIO(old)), bytearray(), 0
    for hunk in hunks:
        begin = int(hunk["first"]) - (hunk["old"] != b"0")
        if not at <= begin <= len(lines):
            raise _conflict(name, f"it has no line {int(hunk['first'])}")
        out += b"".join(lines[at:begin])
        at = begin
        for sign, line in _signed(hunk["lines"].split(b"\n")[:-1]):
            if sign != b"+":
                if at >= len(lines) or lines[at] != line:
                    raise _conflict(name, f"line {at + 1} is not what the program was given")
                at += 1
            if sign != b"-":
                out += line
    return bytes(out) + b"".join(lines[at:])


def _signed(body: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    for number, line in enumerate(body):
        if not line.startswith(b"\\"):
            ended = number + 1 < len(body) and body[number + 1].startswith(b"\\")
            yield line[:1], line[1:] + (b"" if ended else b"\n")


def _inflated(name: str, size: int, lines: bytes) -> bytes:
    content = b""
    try:
        if size <= MAX_MADE_BYTES:
            content = zlib.decompressobj().decompress(b"".join(unpacked(lines)), size + 1)
    except (ValueError, zlib.error):
        raise _unfit(f"{quoted(name)} cannot be unpacked") from None
    if len(content) != size:
        raise _unfit(f"{quoted(name)} has not the size that it says")
    return content


def _checked(name: str, content: bytes, after: bytes | None) -> bytes:
    if after is not None and _blob(content) != after:
        raise _unfit(f"{quoted(name)} does not become what it says")
    return content


def _blob(content: bytes) -> bytes:
    digest = hashlib.sha1(b"blob %d\0" % len(content), usedforsecurity=False)
    digest.update(content)
    return digest.hexdigest().encode()


def _unfit(reason: str) -> RefusedError:
    hint = "Only whole patches of plain files are applied, as `changes.patch` of an overlay is one."
    return RefusedError("promotion.patch", f"The patch was not applied: {reason}; nothing was changed.", hint)


def _conflict(name: str, reason: str) -> RefusedError:
    return RefusedError("promotion.conflict", f"{quoted(name)}: {reason}; nothing was changed.", _AGAIN)
