"""Makes one patch of a program's changes to its copy of the workspace, in the form that ``git apply`` reads.

Text becomes unified hunks, anything else git's literal form, which holds the whole file. Both trees are hostile: each
file, the patch, the number of entries and the steps of the search for short hunks are bounded. Standard library only.
"""

from __future__ import annotations

import io
import os
import stat
from _blake2 import blake2b

from _glovebox_guest.files import git
from _glovebox_guest.files.output import MAX_LOOK, full_since, opened, walk
from _glovebox_guest.files.overlay import MAX_DEPTH, Copied, Original, digest_of

MAX_TEXT = 1 << 20
"""Bytes of a file compared line by line; larger ones are given whole."""
MAX_NAMES = 50
"""Names in each part of the summary; all are in the patch."""
MAX_SKIPPED = 25
MAX_NAME = 255
_TOO_LARGE = "larger than what is left of the output limit"
_CUT = "its end may be missing, the workspace was full when it was written"
_STEPS = 2_000_000
"""Pairs of equal lines in the search for short hunks, in all files together: about a second."""
_RARE = 200
"""Occurrences of a line up to which it is searched in any file."""


class Comparison:
    """Collects the parts of one patch."""

    def __init__(self, original: Original, source: str, target: str, *, max_files: int, room: int) -> None:
        self._original = original
        self._source = source
        self._target = target
        self._folders = {name for name in original.names if name not in original.files and name not in original.absent}
        self._left = max_files
        self._room = room
        self._steps = _STEPS
        self._layout: dict[str, set[str]] = {}
        self._full_since: int | None = None
        self.parts: list[tuple[bool, bytes]] = []
        """Of the patch, each with whether it leaves a file there."""
        self.names: dict[str, list[str]] = {"created": [], "changed": [], "deleted": []}
        self.skipped: list[dict[str, object]] = []
        self.uncounted = 0

    def run(self) -> None:
        """Compare both trees."""
        found: dict[str, os.stat_result] = {}
        unseen = False
        for name, status in walk(self._target, into=lambda name, _: name.count("/") <= MAX_DEPTH):
            if len(found) == MAX_LOOK:
                self._skip(name, f"more than {MAX_LOOK} entries; the rest was not looked at")
                unseen = True
                break
            found[name] = status
            # The program may have taken away its own read permission; the guest has the same user.
            if stat.S_ISDIR(status.st_mode):
                os.chmod(os.path.join(self._target, name), 0o700)
                if name.count("/") >= MAX_DEPTH:
                    self._skip(name, f"more than {MAX_DEPTH} folders deep")
            elif stat.S_ISREG(status.st_mode) and not status.st_mode & stat.S_IRUSR:
                os.chmod(os.path.join(self._target, name), 0o600)
        self._full_since = full_since(self._target, found.values())
        # What lay there before counts although the program has removed it: a patch may not carry that.
        self._layout = git.layout((*self._original.names, *found))
        # What was not seen may be there: nothing is called deleted then.
        deleted = [] if unseen else sorted(self._original.files.keys() - found.keys())
        for name in (*found, *deleted):
            now = found.get(name)
            if now is None or not stat.S_ISDIR(now.st_mode) or name in self._original.files:
                try:
                    self._one(name, now)
                except ValueError as reason:
                    self._skip(name, str(reason))
                except OSError as problem:
                    self._skip(name, f"cannot be read: {problem.strerror}")

    def _one(self, name: str, status: os.stat_result | None) -> None:
        before = self._original.files.get(name)
        if status is not None and before is not None and self._same(name, before, status):
            return
        self._check(name, before, status)
        old_mode = new_mode = None
        old = new = b""
        if status is not None:
            if self._full_since is not None and status.st_size and status.st_mtime_ns >= self._full_since:
                raise ValueError(_CUT)  # applied, it would replace what is whole
            new, new_mode = self._read(self._target, name, status.st_size), _mode(runs=status.st_mode & stat.S_IXUSR)
        if before is not None:
            old, old_mode = self._read(self._source, name, before[3]), _mode(runs=before[1])
            if blake2b(old).digest() != before[2]:
                raise ValueError("the original was changed meanwhile")
        part = self._part(name, old_mode, old, new_mode, new)
        if len(part) > self._room or not self._left:
            raise ValueError(_TOO_LARGE if self._left else "too many changed files")
        self._room -= len(part)
        self._left -= 1
        self.parts.append((new_mode is not None, part))
        kind = "created" if old_mode is None else "changed" if new_mode else "deleted"
        self.names[kind].append(name)

    def _read(self, root: str, name: str, size: int) -> bytes:
        if size > self._room:
            raise ValueError(_TOO_LARGE)
        with opened(os.path.join(root, name)) as file:
            return file.read(size + 1) or b""

    def _same(self, name: str, before: Copied, status: os.stat_result) -> bool:
        path = os.path.join(self._target, name)
        if before[0] == "link":
            return stat.S_ISLNK(status.st_mode) and os.fsencode(os.readlink(path)) == before[2]
        if not stat.S_ISREG(status.st_mode) or bool(status.st_mode & stat.S_IXUSR) != before[1]:
            return False
        # By content: a time can be set, and a write through a mapping sets none on a tmpfs.
        return status.st_size == before[3] and digest_of(path) == before[2]

    def _check(self, name: str, before: Copied | None, status: os.stat_result | None) -> None:
        kind = stat.S_IFMT(status.st_mode) if status else stat.S_IFREG
        parts = name.split("/")
        ways = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        forbidden = git.why_not(name, self._layout)
        absent = next((self._original.absent[way] for way in ways if way in self._original.absent), "")
        for is_so, reason in (
            (kind == stat.S_IFLNK or (before and before[0] == "link"), "a symbolic link"),
            # git aborts half-way when something it cannot remove lies in the way.
            (kind == stat.S_IFDIR and before, "a folder stands in the place of a file"),
            (before is None and name in self._folders, "it stands in the place of a folder"),
            (kind != stat.S_IFREG, "not a regular file"),
            (
                not name.isprintable()
                or len(os.fsencode(name)) > MAX_NAME
                or any(each.strip() != each for each in parts),
                "its name is not plain text of bounded length, or a part of it begins or ends with a blank",
            ),
            (forbidden, forbidden),
            (
                status and not self._original.files.keys().isdisjoint(ways[:-1]),
                "its folder stands in the place of a file or a link",
            ),
            (absent, f"the original was not copied: {absent}"),
        ):
            if is_so:
                raise ValueError(reason)

    def _part(self, name: str, old_mode: str | None, old: bytes, new_mode: str | None, new: bytes) -> bytes:
        first, second = _quoted(f"a/{name}"), _quoted(f"b/{name}")
        head = f"diff --git {first} {second}\n"
        if old_mode is None:
            head += f"new file mode {new_mode}\n"
        elif new_mode is None:
            head += f"deleted file mode {old_mode}\n"
        elif old_mode != new_mode:
            head += f"old mode {old_mode}\nnew mode {new_mode}\n"
        # An unchanged mode is stated: git then refuses to change a link that lies there instead.
        kind = f" {new_mode}" if old_mode == new_mode else ""
        before, after = _blob(old) if old_mode else "0" * 40, _blob(new) if new_mode else "0" * 40
        head += f"index {before}..{after}{kind}\n"
        if old == new:
            return head.encode()
        if _is_text(old) and _is_text(new):
            # git ends a name that has a space in it with a tab, so that no time is expected behind it.
            tab = "\t" if " " in name else ""
            names = f"--- {first + tab if old_mode else '/dev/null'}\n+++ {second + tab if new_mode else '/dev/null'}\n"
            return (head + names + self._hunks(_lines(old), _lines(new))).encode()
        return head.encode() + b"GIT binary patch\n" + _literal(new)

    def _hunks(self, old: list[str], new: list[str]) -> str:
        """Return unified hunks; one that replaces all where the search for shorter ones takes too many steps."""
        from collections import Counter
        from difflib import unified_diff

        counts = Counter(new)
        most = max(_RARE, len(new) // 100 + 1)  # difflib leaves more frequent lines out of its search
        self._steps -= sum(counts[line] for line in old if counts[line] <= most)
        if self._steps >= 0:
            lines = list(unified_diff(old, new))[2:]
        else:
            head = f"@@ -{min(1, len(old))},{len(old)} +{min(1, len(new))},{len(new)} @@\n"
            lines = [head, *(f"-{line}" for line in old), *(f"+{line}" for line in new)]
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def _skip(self, name: str, reason: str) -> None:
        if len(self.skipped) == MAX_SKIPPED:
            self.uncounted += 1
            return
        display_name = name.encode("utf-8", "backslashreplace").decode()[:255]
        self.skipped.append({"name": display_name, "reason": f"not in the patch: {reason}"[:200]})


def compare(
    original: Original, source: str, target: str, *, max_files: int, room: int
) -> tuple[dict[str, object], bytes]:
    """Return summary and patch; see ``overlay.summary``."""
    found = Comparison(original, source, target, max_files=max_files, room=room)
    found.run()
    if more := found.uncounted:
        reason = f"and {more} more changes that are not in the patch"
        found.skipped.append({"name": "…", "reason": reason, "count": more})
    # So that names that differ only in case do not collide.
    deletions_first = sorted(found.parts, key=lambda each: each[0])
    names = {kind: names[:MAX_NAMES] for kind, names in found.names.items()}
    return {
        **names,
        "counts": {kind: len(names) for kind, names in found.names.items()},
        "skipped": found.skipped,
    }, b"".join(part for _, part in deletions_first)


def _literal(content: bytes) -> bytes:
    """Return git's binary form: the whole file, deflated, 52 bytes of it a line."""
    import base64
    import zlib

    packed = zlib.compress(content)
    out = bytearray(f"literal {len(content)}\n".encode())
    for at in range(0, len(packed), 52):
        piece = packed[at : at + 52]
        size = len(piece)
        sign = chr(ord("A") + size - 1) if size <= 26 else chr(ord("a") + size - 27)
        out += sign.encode() + base64.b85encode(piece, pad=True) + b"\n"
    return bytes(out + b"\n")


def _blob(content: bytes) -> str:
    """Return git's name for this content: it applies a binary patch only to the file it was made from."""
    from _glovebox_guest.stdlib import sha1

    return str(sha1(b"blob %d\0" % len(content) + content).hexdigest())


def _lines(content: bytes) -> list[str]:
    # By line feeds alone, as git does: str.splitlines has eight more ends of a line.
    return [line.decode() for line in io.BytesIO(content)]


def _is_text(content: bytes) -> bool:
    try:
        return len(content) <= MAX_TEXT and "\0" not in content.decode()
    except UnicodeDecodeError:
        return False


def _mode(*, runs: int) -> str:
    return "100755" if runs else "100644"


def _quoted(name: str) -> str:
    """Return a name as git writes it; unprintable names were rejected before."""
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return name if escaped == name else f'"{escaped}"'
