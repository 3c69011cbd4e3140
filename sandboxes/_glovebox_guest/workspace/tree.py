"""Walks the workspace: the files of a pattern, in a fixed order, within bounds. Standard library only."""

from __future__ import annotations

import os
import re
import stat
from itertools import islice
from operator import attrgetter
from time import monotonic

from _glovebox_guest.stdlib import Any, Callable, Iterator, Mapping, TypeAlias
from _glovebox_guest.workspace import matching, paths
from _glovebox_guest.workspace.hidden import HiddenPaths, may_be_among
from _glovebox_guest.workspace.paths import JobRefusedError

Obeyed: TypeAlias = tuple[tuple[int, matching.Rules], ...]

PASSED_OVER = frozenset({".git", "node_modules", "__pycache__", ".venv"})
"""Folders made by tools, large and seldom meant; a pattern can name one to include it."""
MAX_ENTRIES = 300_000
"""Names examined in one call: about 100 MiB of them in one folder, inside the profiles' 256 MiB."""
_AT_ONCE = 1024
_by_name = attrgetter("name")


class Walk:
    """The files and folders of one pattern. Iterate once; afterwards the counters describe omissions.

    The order is that of a sorted tree: by name in code points, a folder before its entries. Symlinks are entries, never
    followed below the pattern's own folder. Secret files are neither yielded nor counted.
    """

    def __init__(self, pattern: str, seconds: float, options: Mapping[str, Any]) -> None:
        """Parse the pattern (a file, a folder with all below it, or a pattern) and find where to start.

        It stops after ``seconds``, so that a slow disk gives part of an answer instead of none. Options are
        ``include_ignored``, to include what ``.gitignore`` excludes, and ``reveal``: paths to show although they are
        named as secrets are. Raises JobRefusedError where the pattern is malformed, leaves the workspace, or names what
        does not exist or is hidden; or the workspace cannot be read, which must not look as if it were empty.
        """
        parts = paths.parts(pattern)
        if ".." in parts:
            raise paths.outside(pattern)
        literal = next((at for at, part in enumerate(parts) if matching.SPECIAL & set(part)), len(parts))
        self._prefix, rest = parts[:literal], parts[literal:]
        self.folder = "/".join(self._prefix)
        """The folder the pattern begins in, relative to the workspace."""
        self.whole = not rest
        """True for a folder, with all that is in it."""
        self._single = False
        self._hidden = HiddenPaths(options.get("reveal", ()))
        with paths.find(self.folder, self._hidden) as place:
            self._base = place.absolute
            self._way = place.names
            if not stat.S_ISDIR(place.info.st_mode):
                if rest:
                    reason = f"{paths.display_name(self.folder)}: is a file, so nothing is below it."
                    raise JobRefusedError("path.missing", reason, "Give the file's own path.")
                self._single = True
                self.whole = False
        if self._base == paths.ROOT and not os.access(paths.ROOT, os.R_OK | os.X_OK):
            raise paths.closed()
        self._named = set(re.split(r"[/{},]", pattern))
        self._obeys = not options.get("include_ignored") and not self._single
        self._reader = matching.RuleReader()
        # Of a folder every path below is meant, and none is empty.
        self._depth, self._match = _compiled(rest) if rest not in ([], ["**"]) else (None, len)
        self._seconds = seconds
        self._deadline = monotonic() + seconds
        self.scanned = 0
        self.unreadable = 0
        self.passed_over: set[str] = set()
        self.ignored = 0
        """Entries that ``.gitignore`` excludes; an excluded folder counts once, as it is not entered."""
        self.stopped: str | None = None

    def __iter__(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        if self._single:
            yield from self._alone()
            return
        # Paths are matched relative to the folder the pattern starts in, and shown relative to the workspace.
        prefix = "/".join([*self._prefix, ""])
        way = "/".join([*self._way, ""])
        stack = [("", iter(self._sorted(self._base, way)), self._above())]
        while stack:
            folder, entries, obeyed = stack[-1]
            for entry in entries:
                path = folder + entry.name
                is_folder = entry.is_dir(follow_symlinks=False)
                left_out = obeyed and _left_out(obeyed, entry.name, way + path, folder=is_folder)
                if left_out and entry.name not in self._named:
                    self.ignored += (is_folder and self._reaches(len(stack))) or bool(self._match(path))
                    continue
                if self._match(path):
                    yield prefix + path, entry
                if is_folder and entry.name in PASSED_OVER and entry.name not in self._named:
                    self.passed_over.add(entry.name)
                elif is_folder and self._reaches(len(stack)):
                    # A folder that the pattern matches is meant with all that is in it.
                    inside = self._sorted(entry.path, way + path)
                    below = None if left_out else obeyed
                    if below is not None and any(each.name == matching.FILE for each in inside):
                        below = self._with(below, entry.path, len(way) + len(path) + 1)
                    stack.append((f"{path}/", iter(inside), below))
                    break
            else:
                stack.pop()
            if self.out_of_time():
                return

    def _alone(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        parent, _, name = self._base.rpartition("/")
        try:
            with os.scandir(parent) as entries:
                entry = next((entry for entry in entries if self.late() or entry.name == name), None)
        except OSError:
            self.unreadable += 1
            return
        if entry is not None and entry.name == name:
            self.scanned = 1
            yield "/".join(self._prefix), entry

    def answer(self, found: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
        """Return a job's answer: what it found, and what it and the walk have left out."""
        notes = notes + [f"stopped after {self.stopped}"] * bool(self.stopped)
        notes += [f"unreadable folders: {self.unreadable}"] * bool(self.unreadable)
        notes += [f"{matching.FILE} files not obeyed: {self._reader.unread}"] * bool(self._reader.unread)
        left = {"passed_over": sorted(self.passed_over), "ignored": self.ignored}
        return {**found, **left, "truncated": "; ".join(notes) or None}

    def _above(self) -> Obeyed | None:
        """Return the rules of the pattern's folder and of those above; None where it is excluded itself."""
        if not self._obeys:
            return None
        first = self._reader.read(f"{paths.ROOT}/{matching.EXCLUDE}")
        obeyed = self._with(((0, first),) if first else (), paths.ROOT, 0)
        path = ""
        for name in self._way:
            path += name
            if _left_out(obeyed, name, path, folder=True):
                return None
            obeyed = self._with(obeyed, f"{paths.ROOT}/{path}", len(path) + 1)
            path += "/"
        return obeyed

    def _with(self, obeyed: Obeyed, folder: str, offset: int) -> Obeyed:
        """Add a folder's own rules, for paths whose first ``offset`` characters lead to it."""
        rules = self._reader.read(f"{folder}/{matching.FILE}")
        return (*obeyed, (offset, rules)) if rules else obeyed

    def place(self, path: str) -> str:
        """Return the sandbox path of something that was yielded: the pattern's folder may be a link."""
        return self._base + path[len(self.folder) :] if self.folder else f"{self._base}/{path}"

    def out_of_time(self) -> bool:
        """Return whether the walk has to end now; ``stopped`` then has the reason."""
        return self.late() or self.stopped is not None

    def late(self) -> bool:
        """Return whether its time is over; ``stopped`` then has the reason, unless another bound was reached first."""
        late = monotonic() > self._deadline
        if late and self.stopped is None:
            self.stopped = f"{self._seconds:g} seconds"
        return late

    def _reaches(self, depth: int) -> bool:
        return self._depth is None or depth < self._depth

    def _sorted(self, place: str, folder: str) -> list[os.DirEntry[str]]:
        """Return the entries of a folder that are not hidden; ``place`` is its path in the sandbox."""
        shown: list[os.DirEntry[str]] = []
        try:
            with os.scandir(place) as entries:
                while some := list(islice(entries, _AT_ONCE)):
                    if may_be_among([entry.name for entry in some]):
                        some = [entry for entry in some if not self._hidden.hides(folder, entry.name, entry.path)]
                    room = MAX_ENTRIES - self.scanned
                    if len(some) > room:
                        self.stopped = f"{MAX_ENTRIES} names"
                        del some[room:]
                    self.scanned += len(some)
                    shown += some
                    if self.out_of_time():
                        break
        except OSError:
            self.unreadable += 1
        shown.sort(key=_by_name)
        return shown


def _left_out(obeyed: Obeyed, name: str, path: str, *, folder: bool) -> bool:
    """Return whether the nearest file of rules that covers an entry excludes it."""
    called = matching.as_bytes(name)
    for offset, rules in reversed(obeyed):
        verdict = rules.verdict(called, matching.as_bytes(path[offset:]), folder=folder)
        if verdict is not None:
            return verdict
    return False


def _compiled(parts: list[str]) -> tuple[int | None, Callable[[str], object]]:
    """Return the depth the pattern reaches in folders (None for any), and its path matcher."""
    try:
        patterns = [paths.parts(pattern) for pattern in matching.alternatives("/".join(parts))]
        expression = "|".join(f"(?:{matching.expression(_escaped('/'.join(pattern)))})" for pattern in patterns)
        match = re.compile(expression).fullmatch
    except (ValueError, re.error) as error:
        hint = "Patterns have *, ?, [a-z], {a,b} within a name and ** for any number of folders."
        raise JobRefusedError(
            "pattern.invalid", f"The file pattern cannot be read: {paths.display_name(str(error))}.", hint
        ) from None
    deep = any("**" in pattern for pattern in patterns)
    return None if deep else max(map(len, patterns)), match


def _escaped(pattern: str) -> str:
    """Escape what stands for itself in a caller's pattern: a backslash, and a bracket that nothing closes."""
    pattern = pattern.replace("\\", "\\\\")
    return pattern if "]" in pattern else pattern.replace("[", "\\[")
