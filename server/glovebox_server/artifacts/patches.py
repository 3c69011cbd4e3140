"""Finds the paths that a patch touches, and marks them as ``names`` marks a file's own name.

A patch without the form of ``diff_form``, in which an overlay writes it, is marked as a whole, as paths may be missed;
any word of its lines that may name a path is checked. A patch is never applied here; ``git apply`` writes each path
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
_NAME_COST: Final = 3072
_CHARACTER_COST: Final = 192
_REST: Final = "it was not read in full: not all of its paths were looked at"
_CHANGES: Final = "it changes files when it is applied"
_UNREAD: Final = "it cannot be read in full: look at what it makes"
_RUNS: Final = "it may be run as a program"
_LINK: Final = "it makes a symbolic link or a submodule"
# patch(1) strips blanks and X before a line. A line of a file starts with a sign, and binary parts have no spaces.
_LINE: Final = re.compile(
    rb"^[ \tX]*+(?:- [ \tX]*+)*+"
    rb"(?:(?:(?:diff --git|\+\+\+|---|\*\*\*|(?:rename|copy) (?:from|to|old|new)) |Index:)(?P<names>.+)"
    rb"|(?:new|new file) mode (?P<mode>.*))",
    re.MULTILINE,
)


class _Marks:
    """The first paths and their number, by reason."""

    def __init__(self, budget: WorkBudget) -> None:
        self._budget = budget
        self._found: dict[str, tuple[list[str], int]] = {}
        self._last = ""

    def look_at(self, path: str, *more: str) -> bool:
        """Note the reasons of a path; return False if the budget is spent."""
        if path != self._last and not self._budget.spend(_NAME_COST + _CHARACTER_COST * len(path)):
            return False
        new = reasons(path).keys() - {CODE, UNKNOWN} if path != self._last else ()
        self._last = path
        for reason in (*new, *more):
            names, count = self._found.get(reason, ([], 0))
            self._found[reason] = ([*names, quoted(path)][:MAX_NAMES], count + 1)
        return True

    def look_for(self, patch: bytes) -> bool:
        """Note the paths that any line names; return False if the budget is spent."""
        for found in _LINE.finditer(patch):
            names = found["names"] or b""
            if not self._budget.spend(_NAME_COST + _CHARACTER_COST * min(len(names), LONGEST)):
                return False
            if (mode := found["mode"]) is not None and (mode := mode.rstrip(b"\r")) != FILES[0]:
                self.look_at(self._last, _RUNS if mode == FILES[1] else _LINK)
            # No name or ending that is marked has blanks, so words have the reasons of a path with blanks.
            line = unescaped(names) if len(names) <= LONGEST else b""
            for word in re.split(r'[\s"]+', line.decode("utf-8", "replace")):
                path = word[2:] if word.startswith(("a/", "b/")) else word
                if path not in {"", "/dev/null"} and not self.look_at(path):
                    return False
        return True

    def told(self) -> tuple[str, ...]:
        """Return a sentence for each reason."""
        more = {reason: count - len(names) for reason, (names, count) in self._found.items()}
        return tuple(
            f"it touches {', '.join(names)}{f' and {more[reason]} more' if more[reason] else ''}: {reason}"
            for reason, (names, _) in self._found.items()
        )


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
    marks = _Marks(budget)
    try:
        for name, head, _ in read_patch(patch, budget):
            runs = FILES[1] in head.group("mode", "changed")
            if not marks.look_at(name, *[_RUNS] * runs):
                return *marks.told(), _REST, _CHANGES
    except ValueError:
        marks = _Marks(budget)
        unread = _UNREAD if marks.look_for(patch) else _REST
        return *marks.told(), unread, _CHANGES
    return *marks.told(), _CHANGES
