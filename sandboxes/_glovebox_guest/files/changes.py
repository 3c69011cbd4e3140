"""Copies the workspace to a place that a program may change, and makes one patch of the differences.

The original stays mounted read-only; the copy lies in a tmpfs and disappears with the sandbox. Folders of tools, which
are large and never part of a patch, are links to the original. The patch is in the form that ``git apply`` reads: text
becomes unified hunks, anything else git's literal form, which holds the whole file. Names, sizes and contents of both
trees are hostile: each file, the patch, the number of entries and the steps of the search for short hunks are bounded.
Standard library only.
"""

from __future__ import annotations

import io
import os
import stat
from _blake2 import blake2b

from _glovebox_guest.files import git
from _glovebox_guest.files.output import MAX_LOOK, full_since, opened, walk
from _glovebox_guest.workspace.tree import PASSED_OVER

MAX_DEPTH = 32
"""Nested folders: deeper trees are made to hurt programs that walk them."""
PAGE = 4096
"""Bytes: the minimum of an entry in a tmpfs; sizes are counted in it."""
_CHUNK = 1 << 20
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


Copied = tuple[str, bool, bytes, int]
"""``file`` or ``link``, whether its owner may execute it, digest of the content (or target), size."""


class WorkspaceCopy:
    """A copy that a program may change, and what has become of it."""

    def __init__(self, source: str, target: str, *, max_files: int, max_bytes: int) -> None:
        """Copy every folder, regular file and symbolic link below ``source``; links as links, never followed.

        A folder of PASSED_OVER becomes a link to the original: visible, and not to be changed. Contents, times, and the
        owner's execute permission are kept. Special and unreadable files have no copy.

        Raises ValueError: there are more entries or bytes than may be copied, or it cannot be read; nothing was copied;
        OSError: the copy could not be written.
        """
        if not os.access(source, os.R_OK | os.X_OK):  # or it would look as if it were empty
            raise ValueError("it cannot be read (permission denied)")
        self._source = source
        self._target = target
        self._copied: dict[str, Copied] = {}
        self._absent: dict[str, str] = {}
        """Name → why it has no copy. Its absence is no change."""
        found = _counted(source, max_files, max_bytes)
        for name, status in found:
            path, place = os.path.join(source, name), os.path.join(target, name)
            try:
                if os.path.dirname(name) in self._absent:
                    self._absent[name] = "its folder cannot be read"
                elif stat.S_ISLNK(status.st_mode) or _left(name, status):
                    link = os.readlink(path) if stat.S_ISLNK(status.st_mode) else path
                    os.symlink(link, place)
                    self._copied[name] = ("link", False, os.fsencode(link), 0)
                elif stat.S_ISDIR(status.st_mode):
                    os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
                    os.mkdir(place, 0o755)
                elif stat.S_ISREG(status.st_mode):
                    runs = bool(status.st_mode & stat.S_IXUSR)
                    self._copied[name] = ("file", runs, *_copy_file(path, place, status, runs=runs))
                else:
                    self._absent[name] = "it is not a regular file"
            except PermissionError:
                self._absent[name] = "it cannot be read"
            except FileNotFoundError:
                self._absent[name] = "it went away meanwhile"
        self._names = [name for name, _ in found]
        self._folders = set(self._names) - self._copied.keys() - self._absent.keys()
        self._max_files = max_files

    def compare(self, room: int) -> tuple[dict[str, object], bytes]:
        """Return summary and patch, of at most ``room`` bytes."""
        self._room = room
        self._left = self._max_files
        self._steps = _STEPS
        self._parts: list[tuple[bool, bytes]] = []
        """Of the patch, each with whether it leaves a file there."""
        self._changes: dict[str, list[str]] = {"created": [], "changed": [], "deleted": []}
        self._skipped: list[dict[str, object]] = []
        self._uncounted = 0
        found, unseen = self._look()
        self._full_since = full_since(self._target, found.values())
        # What lay there before counts although the program has removed it: a patch may not carry that.
        self._layout = git.layout((*self._names, *found))
        # What was not seen may be there: nothing is called deleted then.
        deleted = [] if unseen else sorted(self._copied.keys() - found.keys())
        for name in (*found, *deleted):
            now = found.get(name)
            if now is None or not stat.S_ISDIR(now.st_mode) or name in self._copied:
                try:
                    self._one(name, now)
                except ValueError as reason:
                    self._skip(name, str(reason))
                except OSError as problem:
                    self._skip(name, f"cannot be read: {problem.strerror}")
        if count := self._uncounted:
            rest = f"and {count} more changes that are not in the patch"
            self._skipped.append({"name": "…", "reason": rest, "count": count})
        # So that names that differ only in case do not collide.
        deletions_first = sorted(self._parts, key=lambda each: each[0])
        names = {kind: names[:MAX_NAMES] for kind, names in self._changes.items()}
        counts = {kind: len(names) for kind, names in self._changes.items()}
        return {**names, "counts": counts, "skipped": self._skipped}, b"".join(part for _, part in deletions_first)

    def _look(self) -> tuple[dict[str, os.stat_result], bool]:
        """Return what is in the copy now, and whether there is more."""
        found: dict[str, os.stat_result] = {}
        for name, status in walk(self._target, into=lambda name, _: name.count("/") <= MAX_DEPTH):
            if len(found) == MAX_LOOK:
                self._skip(name, f"more than {MAX_LOOK} entries; the rest was not looked at")
                return found, True
            found[name] = status
            # The program may have taken away its own read permission; the guest has the same user.
            if stat.S_ISDIR(status.st_mode):
                os.chmod(os.path.join(self._target, name), 0o700)
                if name.count("/") >= MAX_DEPTH:
                    self._skip(name, f"more than {MAX_DEPTH} folders deep")
            elif stat.S_ISREG(status.st_mode) and not status.st_mode & stat.S_IRUSR:
                os.chmod(os.path.join(self._target, name), 0o600)
        return found, False

    def _one(self, name: str, status: os.stat_result | None) -> None:
        before = self._copied.get(name)
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
        self._parts.append((new_mode is not None, part))
        kind = "created" if old_mode is None else "changed" if new_mode else "deleted"
        self._changes[kind].append(name)

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
        return status.st_size == before[3] and _digest_of(path) == before[2]

    def _check(self, name: str, before: Copied | None, status: os.stat_result | None) -> None:
        kind = stat.S_IFMT(status.st_mode) if status else stat.S_IFREG
        parts = name.split("/")
        ways = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        forbidden = git.why_not(name, self._layout)
        absent = next((self._absent[way] for way in ways if way in self._absent), "")
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
                status and not self._copied.keys().isdisjoint(ways[:-1]),
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
        if len(self._skipped) == MAX_SKIPPED:
            self._uncounted += 1
            return
        display_name = name.encode("utf-8", "backslashreplace").decode()[:255]
        self._skipped.append({"name": display_name, "reason": f"not in the patch: {reason}"[:200]})


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


def _left(name: str, status: os.stat_result) -> bool:
    return os.path.basename(name) in PASSED_OVER and stat.S_ISDIR(status.st_mode)


def _counted(source: str, max_files: int, max_bytes: int) -> list[tuple[str, os.stat_result]]:
    """Return every entry, folders before their entries, if all may be copied."""
    found = []
    size = 0
    for name, status in walk(
        source, into=lambda name, status: not _left(name, status) and name.count("/") <= MAX_DEPTH
    ):
        found.append((name, status))
        pages = -(-status.st_size // PAGE) if stat.S_ISREG(status.st_mode) else 1
        size += max(1, pages) * PAGE
        if len(found) >= MAX_LOOK:
            break
        if name.count("/") >= MAX_DEPTH:
            raise ValueError(f"it has folders more than {MAX_DEPTH} deep")
    if len(found) > max_files or size > max_bytes:
        least = "at least " if len(found) >= MAX_LOOK else ""
        raise ValueError(
            f"it holds {least}{len(found)} files and folders with {size} bytes (in pages of {PAGE}), "
            f"and {max_files} with {max_bytes} bytes may be copied"
        )
    return found


def _copy_file(path: str, place: str, status: os.stat_result, *, runs: bool) -> tuple[bytes, int]:
    # Not one byte more than was counted, whatever the host does to the file meanwhile.
    remaining = status.st_size
    digest = blake2b()
    with opened(path) as source, open(place, "xb") as target:
        while remaining and (data := source.read(min(remaining, _CHUNK))):
            remaining -= len(data)
            digest.update(data)
            target.write(data)
        target.flush()
        os.fchmod(target.fileno(), 0o755 if runs else 0o644)
        os.utime(target.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    return digest.digest(), status.st_size - remaining


def _digest_of(path: str) -> bytes:
    """Return the digest of a regular file's content. Raises OSError."""
    digest = blake2b()
    with opened(path) as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    return digest.digest()
