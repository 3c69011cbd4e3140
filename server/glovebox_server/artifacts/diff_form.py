"""Reads patches in the form of ``git diff`` that every program reads alike. Pure: no I/O.

Readers may differ on any other form: which path is meant, where a file ends, what kind it is. So only this form is
accepted: each file begins with ``diff --git`` and has the lines of git's documentation in order. Names are as git
writes them and the same in every line. Hunks have the announced number of lines. Each file states its kind, or its
source. Source: git-diff(1), "Generating patch text with -p". The scanner's program contains this module: standard
library only.
"""

import base64
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

MAX_PATCH_BYTES: Final = 32 << 20
LONGEST: Final = 1100
"""Bytes of a header line: two names of 255 bytes, with each character escaped, are fewer."""
_WORK: Final = 512 * 1024 * 1024
"""Units of one ``WorkBudget``: about a second. 20,000 files of our own patches need less."""
_STEP_COST: Final = 1024

FILES: Final = (b"100644", b"100755")
"""Modes of regular files; those of the second may be run."""
_KIND: Final = rb"(?:100644|100755|120000|160000)"
_FILE: Final = rb"(?:100644|100755)"
_NAMES: Final = rb".{1,%d}" % LONGEST
_HEAD: Final = re.compile(
    rb"diff --git (?P<both>" + _NAMES + rb")\n"
    rb"(?:old mode " + _FILE + rb"\nnew mode (?P<changed>" + _FILE + rb")\n"
    rb"|new file mode (?P<made>" + _KIND + rb")\n|deleted file mode (?P<gone>" + _KIND + rb")\n)?"
    rb"(?:(?:dis)?similarity index \d{1,3}%\n)?"
    rb"(?:(?P<how>rename|copy) from (?P<source>" + _NAMES + rb")\n(?P=how) to (?P<target>" + _NAMES + rb")\n)?"
    rb"(?:index (?P<before>[0-9a-f]{4,64})\.\.(?P<after>[0-9a-f]{4,64})(?: (?P<kept>" + _FILE + rb"))?\n)?"
    rb"(?:--- (?P<old>" + _NAMES + rb")\n\+\+\+ (?P<new>" + _NAMES + rb")\n"
    rb"|(?P<packed>GIT binary patch)\n|(?P<unseen>Binary files) [ -~\x80-\xff]{1,2200} differ\n)?"
)
_HUNK: Final = re.compile(
    rb"@@ -(?P<first>\d{1,9})(?:,(?P<old>\d{1,9}))? \+\d{1,9}(?:,(?P<new>\d{1,9}))? @@(?: .*)?\n"
    rb"(?P<lines>(?:(?:[-+ ]|\\ ).*\n)*+)"
)
_HALF: Final = re.compile(
    rb"(?P<kind>literal|delta) (?P<size>\d{1,10})\n"
    rb"(?P<lines>(?:[A-Za-z][0-9A-Za-z!#-&(-+\-;-@^-`{-~]{5,65}\n)*+)\n"  # git's base 85
)
_NAME: Final = re.compile(rb'[^"\\]+|"(?:[^"\\]|\\["\\]|\\[0-3][0-7]{2})+"')
_ESCAPED: Final = re.compile(rb"\\([0-7]{1,3}|.)", re.DOTALL)
_BEFORE_A: Final = ord("A") - 1
_BEFORE_SMALL_A: Final = ord("a") - 27


class WorkBudget:
    """Processor time for the patches of one call, in units of about two nanoseconds."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = _WORK

    def spend(self, cost: int) -> bool:
        """Subtract a cost; return False if it exceeds the rest."""
        self.left -= cost
        return self.left >= 0


class FilePatch(NamedTuple):
    """One file of a patch."""

    name: str
    head: re.Match[bytes]
    """Its head, whose groups are those of ``_HEAD``."""
    parts: list[re.Match[bytes]]
    """Its hunks, or the halves of a binary file: all matches of ``_HUNK``, or all of ``_HALF``."""


def read_patch(patch: bytes, budget: WorkBudget) -> Iterator[FilePatch]:
    """Yield each file of a patch; raise ``ValueError`` where it has not the form, or the budget is spent."""
    at = 0
    while at < len(patch):
        head = _HEAD.match(patch, at)
        name = target_of(head) if head else None
        if head is None or name is None or not budget.spend(_STEP_COST):
            raise ValueError(at)
        form = _HUNK if head["old"] else _HALF
        parts, at = [], head.end()
        while (head["old"] or head["packed"]) and (part := form.match(patch, at)):
            if not budget.spend(_STEP_COST) or (head["old"] and not _is_whole(part)):
                raise ValueError(at)
            parts.append(part)
            at = part.end()
        if not parts and (head["old"] or head["packed"]):
            raise ValueError(at)
        yield FilePatch(name, head, parts)


def _is_whole(hunk: re.Match[bytes]) -> bool:
    """Return whether a hunk has as many lines of the old and the new file as it says."""
    lines = b"\n" + hunk["lines"]
    both = lines.count(b"\n ")
    said = [1 if count is None else int(count) for count in hunk.group("old", "new")]
    return any(said) and said == [both + lines.count(b"\n-"), both + lines.count(b"\n+")]


def target_of(head: re.Match[bytes]) -> str | None:
    """Return the path in each line of a head; None if they differ, or the file's kind is open."""
    both, made, gone = head["both"], head["made"], head["gone"]
    source, target = head["source"], head["target"]
    if not head["how"]:
        if not (made or gone or head["changed"] or head["kept"]):
            return None
        source = target = _without(both[: len(both) // 2])
    elif made or gone:
        return None
    path = path_of(target)
    if path is None or path_of(source) is None or both != _with(b"a/", source) + b" " + _with(b"b/", target):
        return None
    old = b"/dev/null" if made else _ended(_with(b"a/", source))
    new = b"/dev/null" if gone else _ended(_with(b"b/", target))
    return path if not head["old"] or (head["old"], head["new"]) == (old, new) else None


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


def unpacked(lines: bytes) -> Iterator[bytes]:
    """Yield the bytes of each line in git's base 85, whose first letter is its length; raise ``ValueError``."""
    for line in lines.split():
        length = line[0] - (_BEFORE_A if line[0] <= ord("Z") else _BEFORE_SMALL_A)
        yield base64.b85decode(line[1:])[:length]


def _character(code: bytes) -> bytes:
    return bytes((int(code, 8) & 255,)) if code.isdigit() else code


def _with(prefix: bytes, name: bytes) -> bytes:
    return b'"' + prefix + name[1:] if name.startswith(b'"') else prefix + name


def _without(name: bytes) -> bytes:
    return b'"' + name[3:] if name.startswith(b'"') else name[2:]


def _ended(name: bytes) -> bytes:
    return name + b"\t" if b" " in name else name
