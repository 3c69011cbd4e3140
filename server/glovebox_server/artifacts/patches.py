"""Finds the paths that a streamed patch touches, and marks them as ``names`` marks a file's own name.

Lines that may name a path are checked anywhere. A patch without the form of ``diff_form``, which every program reads
alike, is marked as a whole: paths may have been missed. A patch is never applied here; ``git apply`` writes each path
into a real folder. Pure: no I/O, bounded memory.
"""

import re
from functools import partial
from typing import Final

from glovebox_server.artifacts.diff_form import LONGEST, RUNS, DiffForm, WorkBudget, unescaped
from glovebox_server.artifacts.names import CODE, UNKNOWN, quoted, reasons

ENDINGS: Final = (".patch", ".diff")
MAX_NAMES: Final = 5
"""Paths listed for one reason; the rest are counted."""
_LONGEST: Final = 1200
"""Bytes of a line that are checked: two names of 255 bytes, with each character escaped, are fewer."""
# In units of ``WorkBudget``. Checking a line takes as long as a hundred bytes of a longer one.
_BYTE_COST: Final = 6
_LINE_END_COST: Final = 128
_SIGN_COST: Final = 32
_NAMED_COST: Final = 16
_NAMES_COST: Final = 3072
_CHARACTER_COST: Final = 192
_QUOTE_COST: Final = 4
_REST: Final = "it was not read in full: not all of its paths were looked at"
_CHANGES: Final = "it changes files when it is applied"
_UNREAD: Final = "it cannot be read in full: look at what it makes"
_INDENT: Final = b" \tX"
"""Prefix of a line that patch(1) strips."""
# A line of a file starts with a sign, and binary parts have no spaces.
_LINE: Final = re.compile(
    rb"^[ \tX]*+(?:- [ \tX]*+)*+(?:diff --git (?P<both>.+)"
    rb"|(?:(?:\+\+\+|---|\*\*\*|rename (?:from|to|old|new)|copy (?:from|to)) |Index:[ \t]*)(?P<one>.+)"
    rb"|(?:new|new file) mode (?P<mode>.*))",
    re.MULTILINE,
)
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*+)"')
_BLANK: Final = re.compile(r"[ \t\r\f\v]+")
_FILES: Final = (b"100644", b"100755")
_Marks = dict[str, tuple[list[str], int]]
"""The first paths and their number, by reason."""
_LINK: Final = "it makes a symbolic link or a submodule"


class PatchPaths:
    """The marked paths of one patch."""

    __slots__ = ("_budget", "_empty", "_form", "_found", "_last", "_noted", "_over", "_shown", "_tail")

    def __init__(self, budget: WorkBudget) -> None:
        """Take the budget, shared by all patches of a call."""
        self._budget = budget
        self._over = False
        self._tail = b""
        self._last = ""
        self._noted = {CODE, UNKNOWN}
        """Reasons noted of the last path, or never noted."""
        self._found: _Marks = {}
        self._shown: _Marks = {}
        self._form = DiffForm(partial(_note, self._shown), budget)
        self._empty = True

    def feed(self, chunk: bytes) -> None:
        """Check the next bytes, split anywhere."""
        self._empty = self._empty and not chunk
        lines, signs = chunk.count(b"\n"), chunk.count(b"- ")
        if not self._pay(_BYTE_COST * len(chunk) + _LINE_END_COST * lines + _SIGN_COST * signs):
            return
        self._form.feed(chunk)
        window = self._tail + chunk
        whole, _, rest = window.rpartition(b"\n")
        # The start of a line defines it: the rest of a long one is not needed.
        self._tail = rest.lstrip(_INDENT)[:_LONGEST]
        self._look(whole)

    def risks(self) -> tuple[str, ...]:
        """Return one sentence for each reason, after the last byte."""
        self._look(self._tail)
        self._tail = b""
        if self._empty:
            return ()
        unread = _REST if self._over else "" if self._form.finish() else _UNREAD
        marks = [_sentence(reason, *found) for reason, found in (*self._found.items(), *self._shown.items())]
        return (*marks, *filter(None, (unread, _CHANGES)))

    def _pay(self, cost: int) -> bool:
        self._over = self._over or not self._budget.spend(cost)
        return not self._over

    def _look(self, lines: bytes) -> None:
        for found in _LINE.finditer(lines):
            if not self._pay(_NAMES_COST):
                return
            if (mode := found["mode"]) is not None:
                self._mode(mode.rstrip(b"\r"))
            else:
                self._names(found["both"] or found["one"], both=found["both"] is not None)

    def _mode(self, mode: bytes) -> None:
        if mode not in _FILES:
            _note(self._found, _LINK, self._last)
        elif mode == _FILES[1]:
            _note(self._found, RUNS, self._last)

    def _names(self, line: bytes, *, both: bool) -> None:
        # An unclosed quotation mark is searched to the end of the line.
        if len(line) > LONGEST or not self._pay((_NAMED_COST + _QUOTE_COST * line.count(b'"')) * len(line)):
            return
        path, *others = _paths(line, both=both)
        if path not in {self._last, "/dev/null"}:  # up to three consecutive lines name one file
            self._last = path
            self._noted = {CODE, UNKNOWN}
        elif not others:
            return
        for each in (path, *others):
            if not self._pay(_CHARACTER_COST * len(each)):
                return
            for reason in reasons(each).keys() - self._noted:
                self._noted.add(reason)
                _note(self._found, reason, each)


def _note(marks: _Marks, reason: str, path: str) -> None:
    names, count = marks.get(reason, ([], 0))
    marks[reason] = ([*names, quoted(path)][:MAX_NAMES], count + 1)


def _sentence(reason: str, names: list[str], count: int) -> str:
    more = f" and {count - len(names)} more" if count > len(names) else ""
    return f"it touches {', '.join(names)}{more}: {reason}"


def _paths(line: bytes, *, both: bool) -> list[str]:
    """Return every path that git or patch may read in a line, the likeliest first; of two, the second is the new one.

    If two differ, the whole line is one: the segments that count are those of the second, at its end.
    """
    named = line.decode("utf-8", "replace").rstrip()
    half = len(named) // 2
    same = both and named[:half].replace("a/", "b/", 1) == named[half + 1 :]
    likeliest = named[half + 1 :] if same else named if both else named.partition("\t")[0].rstrip()
    if '"' not in named and (both or not _BLANK.search(named)):
        return [_stripped(likeliest)]
    quoted_names = [unescaped(each.encode()).decode("utf-8", "replace") for each in _QUOTED.findall(named)][::-1]
    cut = [] if both else [named[: blank.start()] for blank in _BLANK.finditer(named)]
    return list(dict.fromkeys(map(_stripped, (*quoted_names, likeliest, named, *cut))))


def _stripped(name: str) -> str:
    return name[2:] if name.startswith(("a/", "b/")) else name
