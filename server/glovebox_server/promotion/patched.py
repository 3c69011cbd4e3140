"""Applies a patch exactly or not at all: no offset, no fuzz, no rename, no link. Pure: no I/O.

Only the form of ``artifacts.diff_form`` is accepted, which every program reads alike. If the patch names git's ids of
the old or new content, the files must match.
"""

import base64
import hashlib
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from glovebox_server.artifacts.diff_form import HEAD, DiffForm, WorkBudget, target_of
from glovebox_server.artifacts.names import MAX_NAME_BYTES, quoted
from glovebox_server.errors import RefusedError

MAX_PATCH_BYTES: Final = 32 << 20
MAX_MADE_BYTES: Final = 64 << 20
"""Bytes of all files that one patch makes; they are in memory."""
_HUNK: Final = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+\d{1,9}(?:,\d{1,9})? @@(?: .*)?")
_LITERAL: Final = re.compile(rb"literal (\d{1,10})")
_INDEX: Final = re.compile(rb"^index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: |$)", re.MULTILINE)
_FILES: Final = (b"100644", b"100755")
_LETTERS: Final = 26
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
    same: bool = False
    """True if the file is in that state already."""


def made(patch: bytes, read: Read) -> list[Made]:
    """Apply a patch, any bytes, to what ``read`` returns.

    Raises:
        RefusedError: rule ``promotion.patch``: it is ambiguous, or changes more than regular files. Rule
            ``promotion.conflict``: a file is not what the patch was made from.
    """
    form = DiffForm(lambda *_: None, WorkBudget())
    form.feed(patch)
    if not patch or len(patch) > MAX_PATCH_BYTES or not form.finish():
        raise _unfit("it is no patch as `git diff` writes it, or is cut off, or too large")
    found: dict[str, Made] = {}
    size = 0
    for section in _sections(patch):
        one = _file(section, read)
        size += len(one.content or b"")
        if size > MAX_MADE_BYTES:
            raise _unfit(f"it makes more than {MAX_MADE_BYTES} bytes")
        if one.name in found:
            raise _unfit(f"it changes {quoted(one.name)} twice")
        found[one.name] = one
    return list(found.values())


def _sections(patch: bytes) -> Iterator[list[bytes]]:
    section: list[bytes] = []
    for line in patch.split(b"\n")[:-1]:
        if line.startswith(b"diff --git ") and section:
            yield section
            section = []
        section.append(line)
    yield section


def _file(section: list[bytes], read: Read) -> Made:
    begins = (number for number, line in enumerate(section) if line.startswith((b"@@ ", b"literal ", b"delta ")))
    end = next(begins, len(section))
    head, body = b"\n".join(section[:end]) + b"\n", section[end:]
    name, found = _head(head)
    runs = (found["made"] or found["changed"]) == _FILES[1] if found["made"] or found["changed"] else None
    named = _INDEX.search(head)
    before, after = (named[1].decode(), named[2].decode()) if named else (None, None)
    old = read(name)
    if found["gone"]:
        return _gone(name, old, body, before)
    if found["made"]:
        content = _content(name, b"", body)
        if old is not None and old != content:
            raise _conflict(name, "it is there already")
        return Made(name=name, content=_checked(name, content, after), runs=runs, same=old is not None)
    if old is not None and after is not None and _blob(old) == after:
        return Made(name=name, content=old, runs=runs, same=runs is None)
    if body and before is None:
        raise _unfit(f"of {quoted(name)} it does not say what it was made from")
    _require(name, old, before)
    return Made(name=name, content=_checked(name, _content(name, old or b"", body), after), runs=runs)


def _head(head: bytes) -> tuple[str, re.Match[bytes]]:
    found = HEAD.fullmatch(head)
    name = target_of(found) if found else None
    if found is None or name is None or len(name.encode()) > MAX_NAME_BYTES:
        raise _unfit("a file's head does not say which file is meant")
    mode = found["made"] or found["gone"] or found["changed"]
    if found["how"] or (mode and mode not in _FILES) or b"Binary files " in head:
        raise _unfit(f"{quoted(name)} is renamed, a link, or not in it")
    if any(part.casefold() == ".git" for part in name.split("/")):
        raise _unfit(f"{quoted(name)} belongs to git")
    return name, found


def _gone(name: str, old: bytes | None, body: list[bytes], before: str | None) -> Made:
    if old is None:
        return Made(name=name, content=None, same=True)
    _require(name, old, before)
    # The same answer for every difference: a caller must not guess the file line by line.
    try:
        rest = _content(name, old, body)
    except RefusedError:
        rest = old
    if rest:
        raise _conflict(name, "it is not what the program was given")
    return Made(name=name, content=None)


def _require(name: str, old: bytes | None, before: str | None) -> None:
    if old is None:
        raise _conflict(name, "it is not there")
    if before is not None and _blob(old) != before:
        raise _conflict(name, "it is not what the program was given")


def _content(name: str, old: bytes, body: list[bytes]) -> bytes:
    if not body:
        return old
    if body[0].startswith(b"@@ "):
        return _hunked(name, old, body)
    found = _LITERAL.fullmatch(body[0])
    if found is None:
        raise _unfit(f"{quoted(name)} is given as a difference of bytes")
    return _unpacked(name, int(found[1]), body[1:])


def _hunked(name: str, old: bytes, body: list[bytes]) -> bytes:
    lines, out, at, hunk = _lines(old), bytearray(), 0, 0
    while hunk < len(body):
        found = _HUNK.fullmatch(body[hunk])
        if found is None:
            raise _unfit(f"{quoted(name)} has a hunk without its line")
        end = next((n for n in range(hunk + 1, len(body)) if body[n].startswith(b"@@ ")), len(body))
        begin = int(found[1]) - (found[2] != b"0")
        if not at <= begin <= len(lines):
            raise _conflict(name, f"it has no line {int(found[1])}")
        out += b"".join(lines[at:begin])
        at = begin
        for sign, line in _signed(body[hunk + 1 : end]):
            if sign != b"+":
                if at >= len(lines) or lines[at] != line:
                    raise _conflict(name, f"line {at + 1} is not what the program was given")
                at += 1
            if sign != b"-":
                out += line
        hunk = end
    return bytes(out) + b"".join(lines[at:])


def _signed(body: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    for number, line in enumerate(body):
        if not line.startswith(b"\\"):
            ended = number + 1 < len(body) and body[number + 1].startswith(b"\\")
            yield line[:1], line[1:] + (b"" if ended else b"\n")


def _lines(content: bytes) -> list[bytes]:
    *whole, rest = content.split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])


def _unpacked(name: str, size: int, body: list[bytes]) -> bytes:
    packed = bytearray()
    for line in body:
        if not line:
            break
        length = line[0] - ord("A") + 1 if line[:1].isupper() else line[0] - ord("a") + _LETTERS + 1
        try:
            packed += base64.b85decode(line[1:])[:length]
        except ValueError:
            raise _unfit(f"{quoted(name)} cannot be unpacked") from None
    content, unpacker = b"", zlib.decompressobj()
    if size <= MAX_MADE_BYTES:
        try:
            content = unpacker.decompress(bytes(packed), size + 1)
        except zlib.error:
            raise _unfit(f"{quoted(name)} cannot be unpacked") from None
    if len(content) != size:
        raise _unfit(f"{quoted(name)} has not the size that it says")
    return content


def _checked(name: str, content: bytes, after: str | None) -> bytes:
    if after is not None and _blob(content) != after:
        raise _unfit(f"{quoted(name)} does not become what it says")
    return content


def _blob(content: bytes) -> str:
    digest = hashlib.sha1(b"blob %d\0" % len(content), usedforsecurity=False)
    digest.update(content)
    return digest.hexdigest()


def _unfit(reason: str) -> RefusedError:
    hint = "Only whole patches of plain files are applied, as `changes.patch` of an overlay is one."
    return RefusedError("promotion.patch", f"The patch was not applied: {reason}; nothing was changed.", hint)


def _conflict(name: str, reason: str) -> RefusedError:
    return RefusedError("promotion.conflict", f"{quoted(name)}: {reason}; nothing was changed.", _AGAIN)
