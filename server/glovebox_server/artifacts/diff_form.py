"""Checks that a patch has the form of ``git diff``, which every program reads alike. Pure: no I/O.

Readers may differ on any other form: which path is meant, where a file ends, what kind it is. So only this form is
accepted: each file begins with ``diff --git`` and has the lines of git's documentation in order. Names are as git
writes them and the same in every line. Hunks have the announced number of lines. Each file states its kind, or its
source. Source: git-diff(1), "Generating patch text with -p". Memory is bounded.
"""

import re
from collections.abc import Callable
from typing import Final

LONGEST: Final = 1100
"""Bytes of a header line: two names of 255 bytes, with each character escaped, are fewer."""
_LONGEST_HEAD: Final = 8 * LONGEST
_WORK: Final = 512 * 1024 * 1024
"""Units of one ``WorkBudget``: about a second. 20,000 files of our own patches need less."""
_STEP_COST: Final = 1024

COPIED: Final = "it is a copy of another file, or was another, and whether that is a link or a program is not said"
RUNS: Final = "it may be run as a program"

_KIND: Final = rb"(?:100644|100755|120000|160000)"
_FILE: Final = rb"(?:100644|100755)"
HEAD: Final = re.compile(
    rb"diff --git (?P<both>.+)\n"
    rb"(?:old mode " + _FILE + rb"\nnew mode (?P<changed>" + _FILE + rb")\n"
    rb"|new file mode (?P<made>" + _KIND + rb")\n|deleted file mode (?P<gone>" + _KIND + rb")\n)?"
    rb"(?:(?:dis)?similarity index \d{1,3}%\n)?"
    rb"(?:(?P<how>rename|copy) from (?P<source>.+)\n(?P=how) to (?P<target>.+)\n)?"
    rb"(?:index [0-9a-f]{4,64}\.\.[0-9a-f]{4,64}(?: (?P<kept>" + _FILE + rb"))?\n)?"
    rb"(?:--- (?P<old>.+)\n\+\+\+ (?P<new>.+)\n|(?P<packed>GIT binary patch)\n|Binary files [ -~\x80-\xff]+ differ\n)?"
)
_HUNK: Final = re.compile(rb"@@ -\d{1,9}(?:,(\d{1,9}))? \+\d{1,9}(?:,(\d{1,9}))? @@(?: .*)?")
_BODY: Final = re.compile(rb"(?:(?:[-+ ]|\\ )[^\n]*\n)+")
_PART: Final = re.compile(rb"(?:literal|delta) \d{1,10}")
_PACKED: Final = re.compile(rb"(?:[A-Za-z][0-9A-Za-z!#-&(-+\-;-@^-`{-~]{5,65}\n)+")  # fmt: skip  # git's base 85
_NAME: Final = re.compile(rb'[^"\\]+|"(?:[^"\\]|\\["\\]|\\[0-3][0-7]{2})+"')
_ESCAPED: Final = re.compile(rb"\\([0-7]{1,3}|.)", re.DOTALL)


class WorkBudget:
    """Processor time for the patches of one call, in units of about two nanoseconds."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = _WORK

    def spend(self, cost: int) -> bool:
        """Subtract a cost; return False if it exceeds the rest."""
        self.left -= cost
        return self.left >= 0


class DiffForm:
    """The check of one streamed patch."""

    __slots__ = ("_budget", "_head", "_left", "_note", "_state", "_tail", "kept")

    def __init__(self, note: Callable[[str, str], None], budget: WorkBudget) -> None:
        """Take a callback for a reason to review a file and the file's path, and the budget of each step."""
        self._note = note
        self._budget = budget
        self._tail = b""
        self._state = "start"
        """In the ``head`` of a file, its ``hunks``, ``packed`` lines of a binary file, or after its ``parts``."""
        self._head = b""
        self._left = [0, 0]
        """Remaining lines of the old and the new file in a hunk."""
        self.kept = True
        """False once the form is broken."""

    def feed(self, chunk: bytes) -> None:
        """Check the next bytes, split anywhere."""
        if not self.kept:
            return
        whole, end, rest = (self._tail + chunk).rpartition(b"\n")
        # More of a line is not needed: for a header it is too long, and for a hunk the sign is enough.
        self._tail = rest[: 2 * LONGEST]
        lines, at = whole + end, 0
        while self.kept and at < len(lines):
            self.kept = self._budget.spend(_STEP_COST)
            at = self._next(lines, at)

    def finish(self) -> bool:
        """Return whether the whole patch had the form, after the last byte."""
        whole = not self._tail and not any(self._left) and self._state != "packed"
        self.kept = self.kept and whole and (self._state != "head" or self._headed(""))
        return self.kept

    def _next(self, lines: bytes, at: int) -> int:
        """Check lines from ``at`` on, and return where the next begin."""
        if any(self._left):
            return self._in_hunk(lines, at)
        if self._state == "packed" and (found := _PACKED.match(lines, at)):
            return found.end()
        end = lines.index(b"\n", at)
        self.kept = self.kept and self._take(lines[at : min(end, at + LONGEST + 1)])
        return end + 1

    def _in_hunk(self, lines: bytes, at: int) -> int:
        found = _BODY.match(lines, at)
        if not found:
            self.kept = False
            return at
        run = b"\n" + found[0]
        both = run.count(b"\n ")
        self._left[0] -= both + run.count(b"\n-")
        self._left[1] -= both + run.count(b"\n+")
        self.kept = min(self._left) >= 0  # else lines outside a hunk follow, which begin without a sign
        return found.end()

    def _take(self, line: bytes) -> bool:
        """Return whether a line outside of hunks and packed lines is allowed there."""
        state = self._state
        if state != "packed" and line.startswith(b"diff --git ") and len(line) <= LONGEST:
            fits = state != "head" or self._headed("")
            self._state, self._head = "head", line + b"\n"
        elif state in {"head", "hunks"} and (found := _HUNK.fullmatch(line)):
            fits = state == "hunks" or self._headed("text")
            self._state = "hunks"
            self._left = [1 if count is None else int(count) for count in found.groups()]
            fits = fits and any(self._left)
        elif state in {"head", "parts"} and _PART.fullmatch(line):
            fits = state == "parts" or self._headed("packed")
            self._state = "packed"
        elif state == "packed":
            fits = not line
            self._state = "parts"
        elif state == "head":
            self._head += line + b"\n"
            fits = len(line) <= LONGEST and len(self._head) <= _LONGEST_HEAD
        else:
            fits = state == "hunks" and line.startswith(b"\\ ")
        return fits

    def _headed(self, content: str) -> bool:
        """Return whether the head that ends here has the form, for this kind of content."""
        found = HEAD.fullmatch(self._head)
        if not found or content != ("text" if found["old"] else "packed" if found["packed"] else ""):
            return False
        target = target_of(found)
        if target is None:
            return False
        if found["how"] and not (found["changed"] or found["kept"]):
            self._note(COPIED, target)
        elif found["how"] == b"copy" and found["kept"] == b"100755":
            self._note(RUNS, target)
        return True


def target_of(found: re.Match[bytes]) -> str | None:
    """Return the path in each line of a head; None if they differ, or the file's kind is open."""
    both, made, gone = found["both"], found["made"], found["gone"]
    source, target = found["source"], found["target"]
    if not found["how"]:
        if not (made or gone or found["changed"] or found["kept"]):
            return None
        source = target = _without(both[: len(both) // 2])
    elif made or gone:
        return None
    path = path_of(target)
    if path is None or path_of(source) is None or both != _with(b"a/", source) + b" " + _with(b"b/", target):
        return None
    old = b"/dev/null" if made else _ended(_with(b"a/", source))
    new = b"/dev/null" if gone else _ended(_with(b"b/", target))
    return path if not found["old"] or (found["old"], found["new"]) == (old, new) else None


def path_of(name: bytes) -> str | None:
    """Return the path of a name; None if git does not write it so, or readers may split it differently."""
    if not _NAME.fullmatch(name):
        return None
    try:
        path = (unescaped(name[1:-1]) if name.startswith(b'"') else name).decode()
    except UnicodeDecodeError:
        return None
    plain = path.isprintable() and all(part.strip() == part and part not in {"", ".", ".."} for part in path.split("/"))
    return path if plain else None


def unescaped(text: bytes) -> bytes:
    """Return a quoted name without its escapes."""
    return _ESCAPED.sub(lambda found: _character(found[1]), text)


def _character(code: bytes) -> bytes:
    return bytes((int(code, 8) & 255,)) if code.isdigit() else code


def _with(prefix: bytes, name: bytes) -> bytes:
    return b'"' + prefix + name[1:] if name.startswith(b'"') else prefix + name


def _without(name: bytes) -> bytes:
    return b'"' + name[3:] if name.startswith(b'"') else name[2:]


def _ended(name: bytes) -> bytes:
    return name + b"\t" if b" " in name else name
