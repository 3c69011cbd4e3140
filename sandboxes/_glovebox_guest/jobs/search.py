"""Searches the text files of the workspace line by line. Runs in the guest's child.

A pattern that backtracks without end is stopped by the sandbox's time limit, like any other program.
"""

from __future__ import annotations

import os
import re
import warnings
from collections import Counter, deque
from contextlib import closing

from _glovebox_guest import wording
from _glovebox_guest.program.emit import Emit
from _glovebox_guest.stdlib import Any, Iterable, Iterator, TypeAlias
from _glovebox_guest.workspace import hidden, paths
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
_FIRST_READ = 16 * 1024
"""Most source files are smaller: one read(2) each, and no fstat(2)."""
# Searching a whole text or line by line differs only for lookarounds, atomic groups, anchors and possessive repetition.
_NEEDS_LINES = re.compile(r"\(\?[=!<>(]|\\[AZ]|[*+?}]\+")
_SEARCHED, _BINARY, _LARGE, _UNREADABLE = "tblu"
"""The results of a file, one letter each."""


@paths.answering
def run(payload: dict[str, Any], _: Emit) -> dict[str, Any]:
    """Return the first ``limit`` lines of files like ``path`` that ``pattern`` matches."""
    search = _Search(payload)
    walk = Walk(payload.get("path", "**"), MAX_SECONDS, payload)
    files = (path for path, entry in walk if entry.is_file(follow_symlinks=False))
    matches: list[dict[str, Any]] = []
    count = Counter[str]()
    room, full = wording.MAX_ANSWER, ""
    with closing(in_order(lambda batch: search.batch(batch, walk), files)) as searched:
        for letters, found in searched:
            counted = len(letters)
            for at, cost, match in found:
                room -= cost
                if len(matches) == search.limit:
                    full = f"{search.limit} matches"
                elif room < 0:
                    full = f"{len(matches)} matches, as much as fits into one answer"
                if full:
                    counted = at + 1
                    break
                matches.append(match)
            count.update(letters[:counted])
            if full or walk.out_of_time():
                break
    notes = [f"stopped at {full}"] if full else []
    for letter, what in ((_LARGE, f"files over {MAX_FILE} bytes"), (_UNREADABLE, "unreadable files")):
        if count[letter]:
            notes.append(f"not searched: {what}, {count[letter]}")
    return walk.answer({"matches": matches, "searched": count[_SEARCHED], "binary": count[_BINARY]}, notes)


class _Search:
    def __init__(self, payload: dict[str, Any]) -> None:
        pattern, literal = payload["pattern"], payload.get("literal", False)
        flags = re.MULTILINE | (re.IGNORECASE if payload.get("ignore_case", False) else 0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about sets that a later Python may read otherwise
                self._pattern = re.compile(re.escape(pattern) if literal else pattern, flags)
        except (re.error, OverflowError, RecursionError, ValueError) as error:
            why = f"The pattern is no regular expression: {paths.display_name(str(error))}."
            hint = "Set literal to search for the text as it stands."
            raise paths.JobRefusedError("pattern.invalid", why, hint) from None
        self._by_line = not literal and _NEEDS_LINES.search(pattern) is not None
        # Bytes that a file in UTF-8 must hold to match.
        self._needle = needle(self._pattern).encode()
        self._context = payload.get("context", 0)
        self.limit = payload.get("limit", 100)

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
            for match in self._matches(paths.display_name(path), text) if text else ():
                texts = [match["path"], match["text"], *match.get("before", ()), *match.get("after", ())]
                cost = _OVERHEAD + sum(_PER_TEXT + wording.cost(each) for each in texts)
                found.append((at, cost, match))
                room -= cost
                # One more than fits shows that it did not.
                if len(found) > self.limit or room < 0:
                    return letters, found
            if walk.out_of_time():
                break
        return letters, found

    def _matches(self, name: str, text: str) -> Iterator[dict[str, Any]]:
        """Yield a match for each line; a line of context belongs to one match and is no match."""
        match: dict[str, Any] | None = None
        before = deque[str](maxlen=self._context)
        number, at, candidate = 0, 0, -1
        while at < len(text):
            in_context = match is not None and len(match.get("after", ())) < self._context
            if not self._by_line and at > candidate and not in_context:
                # Faster than line by line: go to the next line that may match, and the context before it.
                found = self._pattern.search(text, at)
                if found is None:
                    break
                start = candidate = text.rfind("\n", at, found.start()) + 1 or at
                for _ in range(self._context):
                    start = text.rfind("\n", at, max(at, start - 1)) + 1 or at
                number += text.count("\n", at, start)
                at = start
                continue
            number += 1
            end = text.find("\n", at)
            line = text[at:] if end < 0 else text[at:end]
            at += len(line) + 1
            if found := self._pattern.search(line):
                if match is not None:
                    yield match
                match = {"path": name, "line": number, "text": _cut(line, found.start())}
                if self._context:
                    match |= {"before": [*map(_cut, before)], "after": []}
                before.clear()
            elif match is not None and in_context:
                match["after"].append(_cut(line))
            else:
                before.append(line)
        if match is not None:
            yield match


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
    descriptor = os.open(path, hidden.FLAGS)
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


def _cut(line: str, column: int = 0) -> str:
    if len(line) <= MAX_SHOWN:
        return line
    start = 0 if column < MAX_SHOWN // 2 else column - _LEAD
    cut = line[start : start + MAX_SHOWN]
    return ("…" if start else "") + cut + ("…" if start + MAX_SHOWN < len(line) else "")
