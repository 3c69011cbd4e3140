"""Finds the paths that a patch touches while it streams past, and marks them as ``names`` marks a file's own name.

A patch is only looked at, never applied: ``git apply`` puts each path into a real folder. Pure: no I/O, bounded memory.
"""

import re
from typing import Final

from glovebox_server.artifacts.names import CODE, quoted, reasons

ENDINGS: Final = (".patch", ".diff")
"""Of the names of patches, case-folded."""
MAX_NAMES: Final = 5
"""Paths that are named for one reason; the rest are counted."""
_LONGEST: Final = 1200
"""Bytes of a line that are looked at: two names of 255 bytes, with each of their characters escaped, are fewer."""
_MOST: Final = 2 * 1024 * 1024
"""Characters of paths that are looked at in all, about a second's work: 20,000 files of a patch of ours have fewer."""
_LINE_COSTS: Final = 16
_REST: Final = "not all of its paths were looked at"
# At the start of a line stands a sign in front of every line of a file, and binary parts have no spaces.
_LINE: Final = re.compile(
    rb"^(?:diff --git (?P<both>.{1,1100})|(?:\+\+\+|---|rename (?:from|to)|copy to|Index:) (?P<one>.{1,1100})"
    rb"|(?P<link>new (?:file )?mode 1[26]0000)\r?$)",
    re.MULTILINE,
)
_QUOTED: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\([0-7]{1,3}|.)")
_LINK: Final = "it makes a symbolic link or a submodule"


class PatchPaths:
    """The marked paths of one patch."""

    __slots__ = ("_found", "_last", "_left", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._last = ""
        self._left = _MOST
        self._found: dict[str, tuple[list[str], int]] = {}

    def feed(self, chunk: bytes) -> None:
        """Look at the next bytes, however they are cut."""
        window = self._tail + chunk
        whole, _, rest = window.rpartition(b"\n")
        # Its beginning is what tells what a line is: the rest of a long one is of no use.
        self._tail = rest[:_LONGEST]
        self._look(whole)

    def risks(self) -> tuple[str, ...]:
        """One sentence for each reason, after the last byte."""
        self._look(self._tail)
        self._tail = b""
        marks = [_sentence(reason, names, count) for reason, (names, count) in self._found.items()]
        return (*marks, *([_REST] if self._left < 0 else []))

    def _look(self, lines: bytes) -> None:
        for found in _LINE.finditer(lines):
            self._left -= _LINE_COSTS
            if self._left < 0:
                return
            if found["link"]:
                self._note(_LINK, self._last)
                continue
            path = _path(found["both"] or found["one"], both=found["both"] is not None)
            if path in {self._last, "/dev/null"}:  # one file is named by up to three lines in turn
                continue
            self._last = path
            self._left -= len(path)
            for reason in reasons(path):
                if reason != CODE:
                    self._note(reason, path)

    def _note(self, reason: str, path: str) -> None:
        names, count = self._found.get(reason, ([], 0))
        self._found[reason] = ([*names, quoted(path)][:MAX_NAMES], count + 1)


def _sentence(reason: str, names: list[str], count: int) -> str:
    more = f" and {count - len(names)} more" if count > len(names) else ""
    return f"it touches {', '.join(names)}{more}: {reason}"


def _path(text: bytes, *, both: bool) -> str:
    """The path in such a line: the second of two, without quotes, time and the ``a/`` or ``b/`` in front."""
    named = text.decode("utf-8", "replace").partition("\t")[0].rstrip()
    if both:
        half = len(named) // 2
        same = named[:half].replace("a/", "b/", 1) == named[half + 1 :]
        mark = ' "' if named.endswith('"') else " b/"
        named = named[half + 1 :] if same else mark[1:] + named.rpartition(mark)[2]
    if escaped := _QUOTED.match(named):
        named = _ESCAPED.sub(_character, escaped[1]).encode("latin-1", "replace").decode("utf-8", "replace")
    return named[2:] if named.startswith(("a/", "b/")) else named


def _character(found: re.Match[str]) -> str:
    code = found[1]
    return chr(int(code, 8) & 255) if code.isdigit() else code
