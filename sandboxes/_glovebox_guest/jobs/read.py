"""Reads one file of the workspace: lines of a text, or a picture. Runs in the guest's child."""

from __future__ import annotations

import sys
from codecs import utf_8_decode
from io import BufferedReader, BytesIO, FileIO

from _glovebox_guest import wording
from _glovebox_guest.pictures import header
from _glovebox_guest.program.emit import Emit
from _glovebox_guest.stdlib import Any, Iterable
from _glovebox_guest.workspace import paths
from _glovebox_guest.workspace.hidden import HiddenPaths
from _glovebox_guest.workspace.paths import JobRefusedError

MAX_LINE = 4_000
"""Characters of one line that are shown: a longer one is data or minified code."""
MAX_PICTURE = 32 * 1024 * 1024
"""Bytes: some formats are read whole before decoding."""
MAX_SCAN = 1024 * 1024 * 1024
"""Bytes read to find or count lines: about a second, well inside the profile's limits."""
MAX_UTF16 = 16 * 1024 * 1024
"""Bytes of a UTF-16 file: it is converted as a whole, in memory."""
NEAR_SECONDS = 0.5
"""Time for each of two searches for names similar to that of a missing file."""
MAX_NEAR_NAMES = 5_000
"""Names of a folder that are compared, some 20 microseconds each."""
MAX_NEAR = 3
MAX_NEAR_CHARACTERS = 200
"""Characters of a suggestion: a longer one is omitted."""
_BLOCK = 256 * 1024
_CONTINUATION = bytes(range(0x80, 0xC0))
"""UTF-8 bytes that begin no character, RFC 3629 section 3."""


@paths.answering
def run(payload: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Return lines ``offset`` to ``offset + limit - 1`` of ``path`` (from 1), or send the picture."""
    path = payload["path"]
    name = paths.display_name(path)
    try:
        descriptor, info = paths.open_file(path, HiddenPaths(payload.get("reveal", ())))
        with BufferedReader(FileIO(descriptor), _BLOCK) as file:
            head = file.peek()
            media_type = header.kind(head)
            if media_type is None:
                value = _text(file, head, payload.get("offset", 1), payload.get("limit", 2000))
            else:
                value = _picture(file, head, media_type, info.st_size, emit)
    except JobRefusedError as problem:
        if problem.rule == "path.missing":
            problem.hint = _near(path, payload.get("reveal", ())) + problem.hint
        raise
    except OSError:
        raise JobRefusedError("path.unreadable", f"{name}: reading it failed.", "Try again.") from None
    return {"path": name, "bytes": info.st_size} | value


def _near(path: str, reveal: Iterable[str]) -> str:
    """Return a sentence with similar paths, empty for none. All are from a walk, which omits hidden files."""
    from difflib import get_close_matches
    from itertools import islice

    from _glovebox_guest.workspace import matching, tree

    *folder, wanted = paths.parts(path)
    if ".." in folder or not matching.SPECIAL.isdisjoint(path):
        return ""
    found: list[str] = []
    try:
        elsewhere = tree.Walk(f"**/{wanted}", NEAR_SECONDS, {"reveal": reveal})
        inside = None
        while inside is None:  # the deepest folder on the way that exists
            try:
                inside = tree.Walk("/".join([*folder, "*"]), NEAR_SECONDS, {"reveal": reveal, "include_ignored": True})
            except JobRefusedError:
                wanted = folder.pop()
        names = {near.rpartition("/")[2].casefold(): near for near, _ in islice(inside, MAX_NEAR_NAMES)}
        close = [names[name] for name in get_close_matches(wanted.casefold(), names, MAX_NEAR)]
        for walk, some in ((inside, close), (elsewhere, [near for near, _ in islice(elsewhere, MAX_NEAR)])):
            found += [] if walk.stopped else some
    except (JobRefusedError, OSError, IndexError):  # IndexError: the workspace itself cannot be listed
        return ""
    shown = [name for name in map(paths.display_name, dict.fromkeys(found)) if len(name) <= MAX_NEAR_CHARACTERS]
    return f"The nearest: {', '.join(shown[:MAX_NEAR])}. " if shown else ""


def _picture(file: BufferedReader[Any], head: bytes, media_type: str, size: int, emit: Emit) -> dict[str, Any]:
    if size > MAX_PICTURE:
        reason = f"The file is a picture of {size} bytes; at most {MAX_PICTURE} are read."
        raise JobRefusedError("path.too_large", reason, "Use run_python to make a smaller copy.")
    width, height = header.size(head, media_type) or (None, None)
    truncated = None
    if header.fits(head, media_type, size, header.MAX_BYTES):
        emit.blob(media_type, file.read(header.MAX_BYTES))
    else:
        from _glovebox_guest.pictures import smaller

        try:
            made, data, shown, (width, height) = smaller.smaller(file, header.MAX_BYTES)
        except smaller.PictureError as problem:
            raise JobRefusedError(
                "path.picture", f"The picture cannot be shown: {problem}.", "Use run_python to open the file."
            ) from None
        emit.blob(made, data)
        truncated = "shown at {} × {}".format(*shown)
    return {"media_type": media_type, "width": width, "height": height, "truncated": truncated}


def _text(file: BufferedReader[Any], head: bytes, first: int, limit: int) -> dict[str, Any]:
    encoding = "utf-8"
    if wording.is_binary(head):
        raise _binary()
    if head.startswith(wording.UTF16_MARKS):
        encoding, file = "utf-16", _converted(file)
    elif head.startswith(wording.UTF8_MARK):
        encoding = "utf-8-sig"
        file.read(len(wording.UTF8_MARK))
    skipped = _skip(file, first - 1)
    if skipped is None:
        reason = f"Line {first} lies behind the first {MAX_SCAN} bytes of the file."
        raise JobRefusedError("path.too_large", reason, "Use run_python to read that far.")
    lines: list[str] = []
    cut = 0
    room = wording.MAX_ANSWER
    while len(lines) < limit and (line := file.readline(4 * MAX_LINE)):
        text, dropped = _line(file, line)
        room -= wording.cost(text)
        if room < 0:  # never with the first line: MAX_LINE characters always fit
            break
        lines.append(text)
        cut += dropped > 0
    # The line that did not fit has been read, so it is counted here.
    rest = _skip(file, sys.maxsize)
    last = skipped + len(lines)
    total = None if rest is None else last + (room < 0) + rest
    more = (len(lines) == limit or room < 0) and (total is None or total > last)
    notes = [f"{len(lines)} lines of {total or 'more'}"] if more else []
    if cut:
        notes.append(f"{cut} lines longer than {MAX_LINE} characters cut")
    return {
        "text": "".join(lines),
        "first_line": first,
        "lines": len(lines),
        "total_lines": total,
        "truncated": "; ".join(notes) or None,
        "next_offset": last + 1 if more else None,
        "encoding": encoding,
    }


def _converted(file: BufferedReader[Any]) -> BufferedReader[Any]:
    data = file.read(MAX_UTF16 + 1)
    if len(data) > MAX_UTF16:
        reason = f"The file is UTF-16 and larger than {MAX_UTF16} bytes."
        raise JobRefusedError("path.too_large", reason, 'Use run_python: open(path, encoding="utf-16").')
    try:
        return BufferedReader(BytesIO(data.decode("utf-16").encode()))
    except UnicodeError:
        raise _binary() from None


def _skip(file: BufferedReader[Any], lines: int) -> int | None:
    """Skip lines, block by block; return how many there were, None where that exceeds the read limit."""
    skipped = 0
    ended = True
    while skipped < lines and (block := file.peek()):
        count = block.count(b"\n")
        if skipped + count >= lines:
            for _ in range(lines - skipped):
                file.readline()
            return lines
        skipped += count
        ended = block.endswith(b"\n")
        file.read(len(block))
        if file.tell() > MAX_SCAN:
            return None
    return skipped + (not ended)


def _line(file: BufferedReader[Any], beginning: bytes) -> tuple[str, int]:
    """Decode the line with this beginning; return it, clipped, and how many characters were omitted."""
    dropped = 0
    continued = False
    rest = beginning
    while not rest.endswith(b"\n") and (rest := file.readline(_BLOCK)):
        continued = True
        dropped += len(rest.removesuffix(b"\n").translate(None, _CONTINUATION))
    try:
        # Of a character that was split, which was not counted above, the beginning is not shown.
        body, used = utf_8_decode(beginning.removesuffix(b"\n"), "strict", not continued)
    except UnicodeDecodeError:
        raise _binary() from None
    dropped += used < len(beginning.removesuffix(b"\n"))
    if "\0" in body:
        raise _binary()
    end = "\n" if rest.endswith(b"\n") else ""
    dropped += max(0, len(body) - MAX_LINE)
    return (f"{body[:MAX_LINE]}… [+{dropped} characters]{end}" if dropped else body + end), dropped


def _binary() -> JobRefusedError:
    reason = "The file is neither UTF-8 nor UTF-16 text."
    hint = "Use run_python to read it, with another encoding or a parser for its format."
    return JobRefusedError("path.binary", reason, hint)
