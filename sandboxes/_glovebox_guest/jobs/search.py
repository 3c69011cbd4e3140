"""Searches the text files of the workspace line by line. Runs in the guest's child.

A pattern that backtracks without end is stopped by the sandbox's time limit, like any other program.
"""

from __future__ import annotations

import os
import re
import warnings

from _glovebox_guest import wording
from _glovebox_guest.program.emit import Emit
from _glovebox_guest.stdlib import Any, Iterable, Iterator, TypeAlias
from _glovebox_guest.workspace import paths
from _glovebox_guest.workspace.helper import in_order
from _glovebox_guest.workspace.tree import Walk

_ENDS = frozenset("\r\n\ufffd")
"""Characters that a line does not have, or that stand for undecodable bytes."""


def needle(pattern: re.Pattern[str]) -> str:
    """Return a text that stands in every matching line, as in the file; empty where none is known."""
    try:
        # The parser behind re.compile: private, but the same from Python 3.11 on.
        from re import _parser  # type: ignore[attr-defined]  # private, so no stub has it

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = _parser.parse(pattern.pattern, pattern.flags)
        if tree.state.flags & re.IGNORECASE:
            return ""
        return max(_texts(tree), key=len, default="")
    except (ImportError, AttributeError, TypeError, ValueError, LookupError, RecursionError, re.error):
        return ""


def _texts(items: Iterable[tuple[Any, Any]]) -> list[str]:
    """Return the texts that every match of these items holds, one after the other."""
    found = [""]
    for operation, argument in items:
        name = str(operation)
        if name == "LITERAL":
            character = chr(argument)
            if character in _ENDS or "\ud800" <= character <= "\udfff":
                found.append("")
            else:
                found[-1] += character
        elif name == "SUBPATTERN" and not argument[1] and not argument[2]:
            found += [*_texts(argument[3]), ""]
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") and argument[0]:
            found += [*_texts(argument[2]), ""]
        elif name != "AT":  # an anchor takes no room
            found.append("")
    return found


Result: TypeAlias = tuple[str, list[tuple[int, int, dict[str, Any]]]]

MAX_FILE = 8 * 1024 * 1024
"""Bytes: a larger text is data, which a program reads better."""
MAX_SECONDS = 7.0
"""Two processes take below the 15 seconds of processor time the shipped profile grants."""
MAX_SHOWN = 400
_LEAD = 80
_OVERHEAD = 60
"""Bytes of JSON of a match, its texts excepted."""
_PER_TEXT = 12
"""Bytes of a line, its text excepted: its number and its end, or quotes and a comma."""
_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_FIRST_READ = 16 * 1024
"""Most source files are smaller: one read(2) each, and no fstat(2)."""
# Searching a whole text or line by line differs only for lookarounds, atomic groups, anchors and possessive repetition.
_NEEDS_LINES = re.compile(r"\(\?[=!<>(]|\\[AZ]|[*+?}]\+")
_SEARCHED, _BINARY, _LARGE, _UNREADABLE = "tblu"
"""The results of a file, one letter each."""


def run(payload: dict[str, Any], emit: Emit) -> None:
    """Send the first ``limit`` lines of files like ``path`` that ``pattern`` matches."""
    try:
        search = _Search(payload)
        walk = Walk(payload.get("path", "**"), MAX_SECONDS, payload)
    except paths.JobRefusedError as problem:
        emit.value(problem.value())
        return
    answer = _SearchAnswer(payload.get("limit", 100))
    files = (path for path, entry in walk if entry.is_file(follow_symlinks=False))
    searched = in_order(lambda batch: search.batch(batch, walk), files)
    try:
        for batch in searched:
            answer.take(batch)
            if answer.full or walk.out_of_time():
                break
    finally:
        searched.close()
    count = answer.count
    notes = [f"stopped at {answer.full}"] if answer.full else []
    for letter, what in ((_LARGE, f"files over {MAX_FILE} bytes"), (_UNREADABLE, "unreadable files")):
        if count[letter]:
            notes.append(f"not searched: {what}, {count[letter]}")
    notes += walk.notes()
    emit.value(
        {
            "matches": answer.matches,
            "searched": count[_SEARCHED],
            "binary": count[_BINARY],
            "passed_over": sorted(walk.passed_over),
            "ignored": walk.ignored,
            "truncated": "; ".join(notes) or None,
        }
    )


class _SearchAnswer:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._room = wording.MAX_ANSWER
        self.matches: list[dict[str, Any]] = []
        self.count = dict.fromkeys((_SEARCHED, _BINARY, _LARGE, _UNREADABLE), 0)
        self.full = ""
        """The bound of the answer that is reached; empty for none."""

    def take(self, batch: Result) -> None:
        """Add the results of files, until one does not fit."""
        letters, matches = batch
        for at, cost, match in matches:
            self._room -= cost
            if len(self.matches) == self._limit:
                self.full = f"{self._limit} matches"
            elif self._room < 0:
                self.full = f"{len(self.matches)} matches, as much as fits into one answer"
            if self.full:
                letters = letters[: at + 1]
                break
            self.matches.append(match)
        for letter in self.count:
            self.count[letter] += letters.count(letter)


class _Search:
    def __init__(self, payload: dict[str, Any]) -> None:
        literal, fold = payload.get("literal", False), payload.get("ignore_case", False)
        self._pattern = _compiled(payload["pattern"], literal=literal, fold=fold)
        self._by_line = not literal and _NEEDS_LINES.search(payload["pattern"]) is not None
        # Bytes that a file in UTF-8 must hold to match.
        self._needle = needle(self._pattern).encode()
        self._context = payload.get("context", 0)
        self._limit = payload.get("limit", 100)

    def batch(self, files: list[str], walk: Walk) -> Result:
        """Search some files; return each file's result, and the matches.

        A match comes with its file's index and its cost in the answer. Remaining files have no result where the matches
        exceed one answer, or time is over.
        """
        letters = ""
        found: list[tuple[int, int, dict[str, Any]]] = []
        room = wording.MAX_ANSWER
        for at, path in enumerate(files):
            letter, text = _text(walk.place(path), self._needle)
            letters += letter
            for cost, match in self._matches(path, text) if text else ():
                found.append((at, cost, match))
                room -= cost
                # One more than fits shows that it did not.
                if len(found) > self._limit or room < 0:
                    return letters, found
            if walk.out_of_time():
                break
        return letters, found

    def _matches(self, name: str, text: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the cost and the match of each line; a line of context belongs to one match and is no match."""
        number, counted, shown, display_name = 1, 0, 0, paths.display_name(name)
        lines = self._lines(text)
        following = next(lines, None)
        while following is not None:
            start, end, column = following
            following = next(lines, None)
            number += text.count("\n", counted, start)
            counted = start
            match: dict[str, Any] = {"path": display_name, "line": number, "text": _cut(text[start:end], column)}
            if self._context:
                match["before"] = _before(text, start, self._context, shown)
                match["after"], shown = _after(text, end, self._context, following[0] if following else len(text))
            texts = [display_name, match["text"], *match.get("before", ()), *match.get("after", ())]
            yield _OVERHEAD + sum(_PER_TEXT + wording.cost(shown_text) for shown_text in texts), match

    def _lines(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yield start, end and the match's column (from 0) of each line that matches."""
        at = 0
        while at < len(text):
            if not self._by_line:
                # Finds candidates faster than line by line; the line itself is matched below.
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
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        why = f"The pattern is no regular expression: {paths.display_name(str(error))}."
        raise paths.JobRefusedError("pattern.invalid", why, hint) from None


def _text(path: str, needle: bytes) -> tuple[str, str]:
    """Return the result of a file, and its text where it may match."""
    try:
        data = _content(path)
    except OSError:
        return _UNREADABLE, ""
    if data is None:
        return _LARGE, ""
    # Most files have no match, and searching bytes is several times as fast as text.
    lacks = needle not in data and not data.startswith(wording.UTF16_MARKS)
    if lacks and not wording.is_binary(data):
        return _SEARCHED, ""
    text = wording.lenient(data)
    if text is None:
        return _BINARY, ""
    # A pattern's $ means the end of the line, whichever system wrote the file.
    return _SEARCHED, text.replace("\r\n", "\n")


def _content(path: str) -> bytes | None:
    """Return a file's bytes, None for more than MAX_FILE; never blocks."""
    descriptor = os.open(path, _FLAGS)
    try:
        data = os.read(descriptor, _FIRST_READ)
        if len(data) < _FIRST_READ:
            return data
        if os.fstat(descriptor).st_size > MAX_FILE:
            return None
        while len(data) <= MAX_FILE and (more := os.read(descriptor, MAX_FILE + 1 - len(data))):
            data += more
        return data if len(data) <= MAX_FILE else None
    finally:
        os.close(descriptor)


def _before(text: str, start: int, count: int, floor: int) -> list[str]:
    """Return up to ``count`` lines before ``start``, none of which begins before ``floor``."""
    lines: list[str] = []
    while start > floor and len(lines) < count:
        previous = text.rfind("\n", 0, start - 1) + 1
        lines.append(_cut(text[previous : start - 1]))
        start = previous
    return lines[::-1]


def _after(text: str, end: int, count: int, stop: int) -> tuple[list[str], int]:
    """Return up to ``count`` lines behind ``end`` that begin before ``stop``, and where the next line begins."""
    lines: list[str] = []
    while end + 1 < stop and len(lines) < count:
        following = text.find("\n", end + 1)
        following = len(text) if following < 0 else following
        lines.append(_cut(text[end + 1 : following]))
        end = following
    return lines, end + 1


def _cut(line: str, column: int = 0) -> str:
    if len(line) <= MAX_SHOWN:
        return line
    start = 0 if column < MAX_SHOWN // 2 else column - _LEAD
    cut = line[start : start + MAX_SHOWN]
    return ("…" if start else "") + cut + ("…" if start + MAX_SHOWN < len(line) else "")
