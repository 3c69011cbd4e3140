"""Finds the paths that a patch touches, and marks them as ``names`` marks a file's own name.

Lines that may name a path are checked anywhere. A patch without the form of ``diff_form``, in which an overlay writes
it, is marked as a whole: paths may have been missed. A patch is never applied here; ``git apply`` writes each path
into a real folder. Pure: no I/O.
"""

import re
from typing import Final

from glovebox_server.artifacts.diff_form import FILES, LONGEST, WorkBudget, read_patch, unescaped
from glovebox_server.artifacts.names import CODE, UNKNOWN, quoted, reasons

ENDINGS: Final = (".patch", ".diff")
MAX_NAMES: Final = 5
"""Paths listed for one reason; the rest are counted."""
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
_RUNS: Final = "it may be run as a program"
_LINK: Final = "it makes a symbolic link or a submodule"
# patch(1) strips blanks and X before a line. A line of a file starts with a sign, and binary parts have no spaces.
_LINE: Final = re.compile(
    rb"^[ \tX]*+(?:- [ \tX]*+)*+(?:diff --git (?P<both>.+)"
    rb"|(?:(?:\+\+\+|---|\*\*\*|rename (?:from|to|old|new)|copy (?:from|to)) |Index:[ \t]*)(?P<one>.+)"
    rb"|(?:new|new file) mode (?P<mode>.*))",
    re.MULTILINE,
)
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*+)"')
_BLANK: Final = re.compile(r"[ \t\r\f\v]+")
_Marks = dict[str, tuple[list[str], int]]
"""The first paths and their number, by reason."""


def patch_risks(patch: bytes | None, budget: WorkBudget) -> tuple[str, ...]:
    """Return one sentence for each reason to review a patch; None is one that is too large to be read.

    ``budget`` is shared by all patches of a call.
    """
    if patch == b"":
        return ()
    if patch is None or not budget.spend(
        _BYTE_COST * len(patch) + _LINE_END_COST * patch.count(b"\n") + _SIGN_COST * patch.count(b"- ")
    ):
        return _REST, _CHANGES
    found: _Marks = {}
    unread: tuple[str, ...] = ()
    try:
        for _ in read_patch(patch, budget):
            pass
    except ValueError:
        unread = (_UNREAD,)
    if not _note_paths(patch, budget, found):
        unread = (_REST,)
    return (*(_sentence(reason, *paths) for reason, paths in found.items()), *unread, _CHANGES)


def _note_paths(patch: bytes, budget: WorkBudget, marks: _Marks) -> bool:
    """Note the paths that lines name; return False if the budget is spent."""
    last = ""
    noted = {CODE, UNKNOWN}  # reasons noted of the last path, or never noted
    for found in _LINE.finditer(patch):
        if (mode := found["mode"]) is not None and (mode := mode.rstrip(b"\r")) != FILES[0]:
            _note(marks, _RUNS if mode == FILES[1] else _LINK, last)
        paths = _paths_within(found, budget)
        if paths is None:
            return False
        if not paths or (len(paths) == 1 and paths[0] in {last, "/dev/null"}):
            continue
        if paths[0] not in {last, "/dev/null"}:  # up to three consecutive lines name one file
            last = paths[0]
            noted = {CODE, UNKNOWN}
        if not budget.spend(_CHARACTER_COST * sum(map(len, paths))):
            return False
        for path in paths:
            for reason in reasons(path).keys() - noted:
                noted.add(reason)
                _note(marks, reason, path)
    return True


def _paths_within(found: re.Match[bytes], budget: WorkBudget) -> list[str] | None:
    """Return the paths that a line may name; None if the budget is spent."""
    line = found["both"] or found["one"] or b""
    if not budget.spend(_NAMES_COST):
        return None
    if not line or len(line) > LONGEST:
        return []
    # An unclosed quotation mark is searched to the end of the line.
    if not budget.spend((_NAMED_COST + _QUOTE_COST * line.count(b'"')) * len(line)):
        return None
    return _paths(line, both=found["both"] is not None)


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
