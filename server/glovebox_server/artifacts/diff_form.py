"""Reads the patches that an overlay writes, and nothing else. Pure: no I/O.

Readers of patches differ on any other form: which path is meant, where a file ends, what kind it is. In this one each
file states its kind, and git's whole ids of its old and its new content; its name is the same in every line, and its
hunks have the announced number of lines. Writer: ``_glovebox_guest.files.changes``. Source: git-diff(1), "Generating
patch text with -p". The scanner's program contains this module: standard library only.
"""

import base64
import re
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

MAX_PATCH_BYTES: Final = 32 << 20
LONGEST: Final = 1100
"""Bytes of a header line: two names of 255 bytes, with each character escaped, are fewer."""
_WORK: Final = 512 * 1024 * 1024
"""Units of one ``WorkBudget``: about a second. 20,000 files of our own patches need less."""
_STEP_COST: Final = 1024

FILES: Final = (b"100644", b"100755")
NO_ID: Final = b"0" * 40
_FILE: Final = rb"100644|100755"
_NAMES: Final = rb".{1,%d}" % LONGEST
_HEAD: Final = re.compile(
    rb"diff --git (?P<both>" + _NAMES + rb")\n(?:(?P<how>new|deleted) file mode (?P<mode>" + _FILE + rb")\n"
    rb"|old mode (?:" + _FILE + rb")\nnew mode (?P<changed>" + _FILE + rb")\n)?"
    rb"index (?P<before>[0-9a-f]{40})\.\.(?P<after>[0-9a-f]{40})(?: (?P<kept>" + _FILE + rb"))?\n"
    rb"(?:--- (?P<old>" + _NAMES + rb")\n\+\+\+ (?P<new>" + _NAMES + rb")\n|(?P<packed>GIT binary patch)\n)?"
)
_HUNK: Final = re.compile(
    rb"@@ -(?P<first>\d{1,9})(?:,(?P<old>\d{1,9}))? \+\d{1,9}(?:,(?P<new>\d{1,9}))? @@\n"
    rb"(?P<lines>(?:(?:[-+ ]|\\ ).*\n)*+)"
)
_LITERAL: Final = re.compile(
    rb"literal (?P<size>\d{1,10})\n(?P<lines>(?:[A-Za-z][0-9A-Za-z!#-&(-+\-;-@^-`{-~]{5,65}\n)*+)\n"  # git's base 85
)
_ESCAPED: Final = re.compile(rb"\\(?:([0-7]{1,3})|(.))", re.DOTALL)


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
    parts: list[re.Match[bytes]]
    """Its hunks, or its whole content: all matches of ``_HUNK``, or one of ``_LITERAL``; none if only its mode changes
    or it is empty."""


def read_patch(patch: bytes, budget: WorkBudget | None = None) -> Iterator[FilePatch]:
    """Yield each file of a patch; raise ``ValueError`` where it is too large, has not the form, or spent the budget."""
    at, budget = 0, budget or WorkBudget()
    if len(patch) > MAX_PATCH_BYTES:
        raise ValueError(at)
    while at < len(patch):
        head = _HEAD.match(patch, at)
        if head is None or not budget.spend(_STEP_COST):
            raise ValueError(at)
        name = _name_in(head)
        parts: list[re.Match[bytes]] = []
        at = head.end()
        while (head["old"] or (head["packed"] and not parts)) and (
            part := (_HUNK if head["old"] else _LITERAL).match(patch, at)
        ):
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


def _name_in(head: re.Match[bytes]) -> str:
    """Return the path that a head names; raise ``ValueError`` if its lines differ from what an overlay writes of it."""
    half = head["both"][: len(head["both"]) // 2]
    path = unescaped(half[1:-1] if half.startswith(b'"') else half)[2:].decode()
    first, second = _as_written(f"a/{path}"), _as_written(f"b/{path}")
    tab = b"\t" if " " in path else b""
    how, none = head["how"], b"/dev/null"
    names = (none if how == b"new" else first + tab, none if how == b"deleted" else second + tab)
    if (
        head["both"] != first + b" " + second
        or head.group("old", "new") not in {(None, None), names}
        or not (how or head["changed"] or head["kept"])
        or (how and head["kept"])
        or [head[each] == NO_ID for each in ("before", "after")] != [how == b"new", how == b"deleted"]
        or not path.isprintable()
        or any(part.strip() != part or part in {"", ".", ".."} for part in path.split("/"))
    ):
        raise ValueError(path)
    return path


def _as_written(name: str) -> bytes:
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return (name if escaped == name else f'"{escaped}"').encode()


def unescaped(text: bytes) -> bytes:
    """Return a quoted name without its escapes."""
    return _ESCAPED.sub(lambda found: bytes((int(found[1], 8) & 255,)) if found[1] else found[2], text)


def inflated(lines: bytes, most: int) -> tuple[bytes, bool]:
    """Return at most ``most`` bytes that lines of git's base 85 pack, and whether these are all.

    The first letter of a line is its length.
    """
    unpacker, out = zlib.decompressobj(), bytearray()
    try:
        for line in lines.split():
            length = line[0] - (ord("A") - 1 if line[0] <= ord("Z") else ord("a") - 27)
            packed = base64.b85decode(line[1:])[:length]
            # Behind the end, it would copy all that follows again with each line.
            out += b"" if unpacker.eof else unpacker.decompress(packed, most - len(out))
            if unpacker.unconsumed_tail or len(out) >= most:
                break
    except (ValueError, zlib.error):
        return bytes(out), False
    return bytes(out), unpacker.eof
