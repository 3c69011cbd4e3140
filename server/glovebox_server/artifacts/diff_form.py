"""Tells whether a patch has the form that ``git diff`` writes, which every program reads alike. Pure: no I/O.

What has not, different readers may read differently: which path is meant, where a file ends, what kind it is. So only
this form is taken for read: each file begins with ``diff --git`` and has the lines of git's documentation in order,
names are as git writes them and the same in every line, hunks have as many lines as they say, and each file says what
kind it is, or whose copy. Source: git-diff(1), "Generating patch text with -p". Memory is bounded.
"""

import re
from collections.abc import Callable
from typing import Final

LONGEST: Final = 1100
"""Bytes of a line of a head: two names of 255 bytes, with each of their characters escaped, are fewer."""
_LONGEST_HEAD: Final = 8 * LONGEST
_WORK: Final = 512 * 1024 * 1024
"""Of one ``WorkBudget``: about a second. 20,000 files of a patch of ours need less."""
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
        """Take a cost off; return False where it is more than what was left."""
        self.left -= cost
        return self.left >= 0


class DiffForm:
    """One patch as it streams past."""

    __slots__ = ("_budget", "_head", "_left", "_note", "_state", "_tail", "kept")

    def __init__(self, note: Callable[[str, str], None], budget: WorkBudget) -> None:
        """Take what is told of a reason to look at a file, and the file's path; and what pays for each step."""
        self._note = note
        self._budget = budget
        self._tail = b""
        self._state = "start"
        """``head`` of a file, its ``hunks``, ``packed`` lines of one that is no text, or after its ``parts``."""
        self._head = b""
        self._left = [0, 0]
        """Lines of the old and of the new file that a hunk still has."""
        self.kept = True
        """Whether all of it, until now, has the form."""

    def feed(self, chunk: bytes) -> None:
        """Look at the next bytes, however they are cut."""
        if not self.kept:
            return
        whole, end, rest = (self._tail + chunk).rpartition(b"\n")
        # More of a line than this decides nothing: of a head it is too much, and of a hunk the sign is enough.
        self._tail = rest[: 2 * LONGEST]
        lines, at = whole + end, 0
        while self.kept and at < len(lines):
            self.kept = self._budget.spend(_STEP_COST)
            at = self._next(lines, at)

    def finish(self) -> bool:
        """Whether all of it had the form, after the last byte."""
        whole = not self._tail and not any(self._left) and self._state != "packed"
        self.kept = self.kept and whole and (self._state != "head" or self._headed(""))
        return self.kept

    def _next(self, lines: bytes, at: int) -> int:
        """Take lines from there on, and say how far."""
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
        self.kept = min(self._left) >= 0  # else lines of no hunk follow, and only a hunk's begin with a sign
        return found.end()

    def _take(self, line: bytes) -> bool:
        """Take one line outside of hunks and packed lines; whether it may stand there."""
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
        """Whether the head that ends here has the form, with this kind of content behind it."""
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
    """The path that a head names in each of its lines; None where they differ, or leave open what kind it is."""
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
    """The path that a name stands for; None for a name that git does not write, or that readers may cut differently."""
    if not _NAME.fullmatch(name):
        return None
    try:
        path = (unescaped(name[1:-1]) if name.startswith(b'"') else name).decode()
    except UnicodeDecodeError:
        return None
    plain = path.isprintable() and all(part.strip() == part and part not in {"", ".", ".."} for part in path.split("/"))
    return path if plain else None


def unescaped(text: bytes) -> bytes:
    """What stands between quotation marks in a name."""
    return _ESCAPED.sub(lambda found: _character(found[1]), text)


def _character(code: bytes) -> bytes:
    return bytes((int(code, 8) & 255,)) if code.isdigit() else code


def _with(prefix: bytes, name: bytes) -> bytes:
    return b'"' + prefix + name[1:] if name.startswith(b'"') else prefix + name


def _without(name: bytes) -> bytes:
    return b'"' + name[3:] if name.startswith(b'"') else name[2:]


def _ended(name: bytes) -> bytes:
    return name + b"\t" if b" " in name else name
