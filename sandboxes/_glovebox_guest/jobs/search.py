"""Searching the text files of the workspace line by line. Runs in the guest's child.

A pattern that backtracks without end is ended by the sandbox's time limit, like any other program.
"""

from __future__ import annotations

import os
import re
import warnings

from _glovebox_guest import wording
from _glovebox_guest.stdlib import TYPE_CHECKING
from _glovebox_guest.workspace import paths
from _glovebox_guest.workspace.tree import Walk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from _glovebox_guest.program.emit import Emit

MAX_FILE = 8 * 1024 * 1024
"""Bytes: a larger text is data, which a program reads better."""
MAX_SECONDS = 10.0
"""Below the 15 seconds of processor time the shipped profile grants."""
MAX_SHOWN = 400
"""Characters of one line that are shown, the match among them."""
_LEAD = 80
"""Characters shown before a match that stands far to the right."""
_OVERHEAD = 60
"""Bytes of JSON a match takes beside its texts."""
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FIRST_READ = 16 * 1024
"""Most source files are smaller: one read(2) each, and no fstat(2)."""
# Whether text was searched as a whole or line by line can only make a difference to what looks around, or does not
# try again with less.
_NEEDS_LINES = re.compile(r"\(\?[=!<>(]|\\[AZ]|[*+?}]\+")
_SPECIAL = re.compile(r"[.^$*+?{}\[\]\\|()]")
"""What makes a pattern more than a text."""


def run(payload: dict[str, Any], emit: Emit) -> None:
    """Hand back the first ``limit`` lines of files like ``path`` that ``pattern`` matches."""
    try:
        search = _Search(payload)
        walk = Walk(payload.get("path", "**"), MAX_SECONDS, include_ignored=payload.get("include_ignored", False))
    except paths.Refused as problem:
        emit.value(problem.value())
        return
    for path, entry in walk:
        if entry.is_file(follow_symlinks=False):
            search.file(path, entry.path)
            if search.full or walk.out_of_time():
                break
    notes = [f"stopped at {search.full}"] if search.full else []
    for count, what in ((search.large, f"files over {MAX_FILE} bytes"), (search.unreadable, "unreadable files")):
        if count:
            notes.append(f"not searched: {what}, {count}")
    notes += walk.notes()
    emit.value(
        {
            "matches": search.matches,
            "searched": search.searched,
            "binary": search.binary,
            "passed_over": sorted(walk.passed_over),
            "ignored": walk.ignored,
            "truncated": "; ".join(notes) or None,
        }
    )


class _Search:
    def __init__(self, payload: dict[str, Any]) -> None:
        self._pattern = _compiled(
            payload["pattern"], literal=payload.get("literal", False), fold=payload.get("ignore_case", False)
        )
        self._by_line = not payload.get("literal") and _NEEDS_LINES.search(payload["pattern"]) is not None
        self._needle = _needle(
            payload["pattern"], literal=payload.get("literal", False), fold=payload.get("ignore_case", False)
        )
        self._context = payload.get("context", 0)
        self._limit = payload.get("limit", 100)
        self._room = wording.MAX_ANSWER
        self.matches: list[dict[str, Any]] = []
        self.searched = self.binary = self.large = self.unreadable = 0
        self.full = ""
        """Which bound of the answer is reached, empty for none."""

    def file(self, name: str, path: str) -> None:
        """Search one file; ``name`` is its path relative to the workspace."""
        try:
            data = _content(path)
        except OSError:
            self.unreadable += 1
            return
        if data is None:
            self.large += 1
            return
        # Most files have no match, and looking at bytes is several times as fast as at text.
        lacks = self._needle not in data and not data.startswith(wording.UTF16_MARKS)
        if lacks and not wording.is_binary(data):
            self.searched += 1
            return
        text = wording.lenient(data)
        if text is None:
            self.binary += 1
            return
        self.searched += 1
        # A pattern's $ means the end of the line, whoever wrote the file.
        text = text.replace("\r\n", "\n")
        number, counted, display_name = 1, 0, paths.display_name(name)
        for start, end, column in self._lines(text):
            if len(self.matches) == self._limit:
                self.full = f"{self._limit} matches"
                return
            number += text.count("\n", counted, start)
            counted = start
            match: dict[str, Any] = {"path": display_name, "line": number, "text": _cut(text[start:end], column)}
            if self._context:
                match["before"] = _before(text, start, self._context)
                match["after"] = _after(text, end, self._context)
            self._room -= (
                _OVERHEAD
                + wording.cost(display_name)
                + sum(map(wording.cost, [match["text"], *match.get("before", ()), *match.get("after", ())]))
            )
            if self._room < 0:
                self.full = f"{len(self.matches)} matches, as much as fits into one answer"
                return
            self.matches.append(match)

    def _lines(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield start, end and the match's column (from 0) of each line that matches."""
        at = 0
        while at < len(text):
            if not self._by_line:
                # Finds candidates faster than going from line to line; whether the line itself matches is asked below.
                found = self._pattern.search(text, at)
                if found is None:
                    return
                at = text.rfind("\n", at, found.start()) + 1 or at
            end = text.find("\n", at)
            end = len(text) if end < 0 else end
            if at < len(text) and (found := self._pattern.search(text[at:end])):
                yield at, end, found.start()
            at = end + 1


def _compiled(pattern: str, *, literal: bool, fold: bool) -> re.Pattern[str]:
    hint = "Set literal to search for the text as it stands."
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sets that a later Python may read otherwise
            flags = re.MULTILINE | (re.IGNORECASE if fold else 0)
            return re.compile(re.escape(pattern) if literal else pattern, flags)
    except re.error as error:
        where = "" if error.pos is None else f" at position {error.pos}"
        raise paths.Refused(
            "pattern.invalid", f"The pattern is no regular expression: {paths.display_name(error.msg)}{where}.", hint
        ) from None
    except (OverflowError, RecursionError, ValueError):
        raise paths.Refused("pattern.invalid", "The pattern is too large or too deeply nested.", hint) from None


def _needle(pattern: str, *, literal: bool, fold: bool) -> bytes:
    """Return what a file in UTF-8 must hold to match; nothing where that cannot be said so simply."""
    # Whatever is no UTF-8 is read as U+FFFD.
    if fold or "\ufffd" in pattern or not (literal or _SPECIAL.search(pattern) is None):
        return b""
    return pattern.encode("utf-8", "surrogatepass")


def _content(path: str) -> bytes | None:
    """Return a file's bytes, None for more than MAX_FILE; never waits."""
    descriptor = os.open(path, _FLAGS)
    try:
        data = os.read(descriptor, _FIRST_READ)
        if len(data) < _FIRST_READ:
            return data
        if os.fstat(descriptor).st_size > MAX_FILE:
            return None
        chunks = [data]
        room = MAX_FILE + 1 - len(data)
        while room > 0 and (data := os.read(descriptor, room)):
            chunks.append(data)
            room -= len(data)
        return b"".join(chunks) if room > 0 else None
    finally:
        os.close(descriptor)


def _before(text: str, start: int, count: int) -> list[str]:
    lines: list[str] = []
    while start > 0 and len(lines) < count:
        previous = text.rfind("\n", 0, start - 1) + 1
        lines.append(_cut(text[previous : start - 1]))
        start = previous
    return lines[::-1]


def _after(text: str, end: int, count: int) -> list[str]:
    lines: list[str] = []
    while end + 1 < len(text) and len(lines) < count:
        following = text.find("\n", end + 1)
        following = len(text) if following < 0 else following
        lines.append(_cut(text[end + 1 : following]))
        end = following
    return lines


def _cut(line: str, column: int = 0) -> str:
    """Show at most MAX_SHOWN characters of a line, those around ``column``."""
    if len(line) <= MAX_SHOWN:
        return line
    start = 0 if column < MAX_SHOWN // 2 else column - _LEAD
    cut = line[start : start + MAX_SHOWN]
    return ("…" if start else "") + cut + ("…" if start + MAX_SHOWN < len(line) else "")
