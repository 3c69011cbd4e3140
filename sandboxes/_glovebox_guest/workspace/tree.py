"""Walking the workspace: which files a pattern means, in a fixed order, within bounds. Standard library only."""

from __future__ import annotations

import os
import re
import stat
from bisect import bisect_left
from itertools import islice
from operator import attrgetter
from time import monotonic

from _glovebox_guest.stdlib import TYPE_CHECKING
from _glovebox_guest.workspace import glob, ignore, paths
from _glovebox_guest.workspace.hidden import HiddenPaths, may_be_among
from _glovebox_guest.workspace.paths import JobRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import TypeAlias

    Matcher: TypeAlias = Callable[[str], object]
    Obeyed: TypeAlias = tuple[tuple[int, ignore.Rules], ...]

PASSED_OVER = frozenset({".git", "node_modules", "__pycache__", ".venv"})
"""Folders made by tools, large and seldom meant; a pattern that names one means it."""
MAX_ENTRIES = 300_000
"""Names looked at in one call: about 100 MiB of them in one folder, inside the profiles' 256 MiB."""
_AT_ONCE = 1024
"""Names of a folder that are read before the time is looked at."""
_by_name = attrgetter("name")


class Walk:
    """The files and folders one pattern means. Iterate once; afterwards the counters say what was left out.

    The order is that of a sorted tree: by name in code points, a folder before what is in it. Symlinks are entries,
    never followed below the pattern's own folder. What is named as a secret is not there, and nothing counts it.
    """

    def __init__(
        self, pattern: str, seconds: float, *, include_ignored: bool = False, reveal: Iterable[str] = ()
    ) -> None:
        """Read the pattern and find where to start.

        Args:
            pattern: a file, a folder (with all below it) or a pattern, relative to the workspace.
            seconds: after which to stop, so that a slow disk gives part of an answer instead of none.
            include_ignored: whether what ``.gitignore`` leaves out is looked at as well.
            reveal: paths that are shown though they are named as secrets are.

        Raises:
            JobRefusedError: the pattern is malformed, leaves the workspace, or names what does not exist or is hidden;
                or the workspace itself cannot be read, which must not look as if it were empty.
        """
        parts = paths.parts(pattern)
        if ".." in parts:
            raise paths.outside(pattern)
        literal = 0
        while literal < len(parts) and not glob.SPECIAL & set(parts[literal]):
            literal += 1
        self._prefix, rest = parts[:literal], parts[literal:]
        self.folder = "/".join(self._prefix)
        """Where the pattern begins, relative to the workspace."""
        self.whole = not rest
        """Whether the pattern is a folder, and means all that is in it."""
        self._single = False
        self._hidden = HiddenPaths(reveal)
        with paths.find(self.folder, self._hidden) as place:
            self._base = place.absolute
            self._way = place.names
            if not stat.S_ISDIR(place.info.st_mode):
                if rest:
                    raise _no_folder(self._prefix)
                self._single = True
                self.whole = False
        if self._base == paths.ROOT and not os.access(paths.ROOT, os.R_OK | os.X_OK):
            raise paths.closed()
        self._named = set(re.split(r"[/{},]", pattern))
        self._obeys = not include_ignored and not self._single
        self._reader = ignore.RuleReader()
        # Of a folder every path below is meant, and none is empty.
        self._depth, self._match = _compiled(rest) if rest not in ([], ["**"]) else (None, len)
        self._seconds = seconds
        self._deadline = monotonic() + seconds
        self.scanned = 0
        """Names looked at, without those that are hidden."""
        self.unreadable = 0
        """Folders that could not be listed."""
        self.passed_over: set[str] = set()
        """Names of folders that were not entered."""
        self.ignored = 0
        """Entries that ``.gitignore`` leaves out; of a folder itself alone, as it is not looked into."""
        self.stopped: str | None = None
        """Which bound ended the walk, None for none."""

    def __iter__(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield path relative to the workspace, and entry."""
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
                if is_folder and self._enters(entry.name, len(stack)):
                    # What the pattern names is meant, with all that is in it.
                    inside = self._sorted(entry.path, way + path)
                    below = None if left_out else obeyed
                    if below is not None and _has_rules(inside):
                        below = self._with(below, entry.path, len(way) + len(path) + 1)
                    stack.append((f"{path}/", iter(inside), below))
                    break
            else:
                stack.pop()
            if self.out_of_time():
                return

    def _alone(self) -> Iterator[tuple[str, os.DirEntry[str]]]:
        """The one file that was named."""
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

    def notes(self) -> list[str]:
        """What was not looked at, in words."""
        found = [f"stopped after {self.stopped}"] if self.stopped else []
        found += [f"unreadable folders: {self.unreadable}"] * bool(self.unreadable)
        return found + [f"{ignore.FILE} files not obeyed: {self._reader.unread}"] * bool(self._reader.unread)

    def _above(self) -> Obeyed | None:
        """The rules of the folder the pattern starts in and of those it lies in; None where it is left out itself."""
        if not self._obeys:
            return None
        first = self._reader.read(f"{paths.ROOT}/{ignore.EXCLUDE}")
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
        """These rules and a folder's own, for paths whose first ``offset`` characters lead to it."""
        rules = self._reader.read(f"{folder}/{ignore.FILE}")
        return (*obeyed, (offset, rules)) if rules else obeyed

    def place(self, path: str) -> str:
        """Where something that was yielded is in the sandbox: the folder the pattern begins in may be a link."""
        return self._base + path[len(self.folder) :] if self.folder else f"{self._base}/{path}"

    def out_of_time(self) -> bool:
        """Whether the walk has to end now; ``stopped`` then says why."""
        return self.late() or self.stopped is not None

    def late(self) -> bool:
        """Whether its time is over, whatever ended it; ``stopped`` then says so, unless it says another bound."""
        late = monotonic() > self._deadline
        if late and self.stopped is None:
            self.stopped = f"{self._seconds:g} seconds"
        return late

    def _enters(self, name: str, depth: int) -> bool:
        if name in PASSED_OVER and name not in self._named:
            self.passed_over.add(name)
            return False
        return self._reaches(depth)

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


def _has_rules(entries: list[os.DirEntry[str]]) -> bool:
    at = bisect_left(entries, ignore.FILE, key=_by_name)
    return at < len(entries) and entries[at].name == ignore.FILE


def _left_out(obeyed: Obeyed, name: str, path: str, *, folder: bool) -> bool:
    """Whether the nearest file of rules that says anything of an entry leaves it out."""
    called = ignore.as_bytes(name)
    for offset, rules in reversed(obeyed):
        verdict = rules.verdict(called, ignore.as_bytes(path[offset:]), folder=folder)
        if verdict is not None:
            return verdict
    return False


def _compiled(parts: list[str]) -> tuple[int | None, Matcher]:
    """Return how many folders deep the pattern reaches (None for any), and what decides about a path."""
    try:
        patterns = [paths.parts(pattern) for pattern in glob.alternatives("/".join(parts))]
        expression = "|".join(f"(?:{glob.expression(pattern)})" for pattern in patterns)
        match = re.compile(expression).fullmatch
    except (ValueError, re.error) as error:
        hint = "Patterns have *, ?, [a-z], {a,b} within a name and ** for any number of folders."
        raise JobRefusedError(
            "pattern.invalid", f"The file pattern cannot be read: {paths.display_name(str(error))}.", hint
        ) from None
    deep = any("**" in pattern for pattern in patterns)
    return None if deep else max(map(len, patterns)), match


def _no_folder(parts: list[str]) -> JobRefusedError:
    name = paths.display_name("/".join(parts))
    return JobRefusedError("path.missing", f"{name}: is a file, so nothing is below it.", "Give the file's own path.")
