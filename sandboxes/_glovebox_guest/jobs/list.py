"""Lists the files of the workspace that match a pattern. Runs in the guest's child.

A folder with more entries than the limit becomes an overview: as deep as fits; each closed folder is one entry with a
summary of its content.
"""

from __future__ import annotations

import os
import time

from _glovebox_guest import wording
from _glovebox_guest.program.emit import Emit
from _glovebox_guest.stdlib import Any, Container, Iterable, TypeAlias
from _glovebox_guest.workspace import paths
from _glovebox_guest.workspace.tree import Walk

Found: TypeAlias = tuple[str, os.DirEntry[str]]

MAX_SECONDS = 4.0
"""Below the 5 seconds of processor time the shipped profile grants."""
_OVERHEAD = 150
"""Bytes of JSON of an entry, its path excepted, in the data and in the text."""


@paths.answering
def run(payload: dict[str, Any], _: Emit) -> dict[str, Any]:
    """Return at most ``limit`` entries of the tree that fit ``pattern``, and the number of all of them."""
    walk = Walk(payload.get("pattern", ""), MAX_SECONDS, payload)
    limit = payload.get("limit", 500)
    top = _gathered(walk, limit)
    opened = top.opened(limit)
    entries: list[dict[str, Any]] = []
    room = 2 * wording.MAX_ANSWER
    closed: dict[str, dict[str, Any]] = {}
    for path, entry in top.shown(limit, opened):
        described = _described(path, entry)
        folder = None if path in opened else top.folders.get(path)
        if folder is not None and folder.count:
            described["files"] = folder.files
        # The path is repeated in the text.
        room -= 2 * wording.cost(described["path"]) + _OVERHEAD
        if room < 0:
            break
        if "files" in described:
            closed[path] = described
        entries.append(described)
    for path, size in top.sizes(closed, walk).items():
        closed[path]["bytes"] = size
    notes = [f"{len(entries)} of {top.total} shown"] if len(entries) < top.total else []
    if closed:
        notes.append(f"{len(closed)} folders closed, name one as pattern to look inside")
    return walk.answer({"entries": entries, "total": top.total, "scanned": walk.scanned}, notes)


class _ListedFolder:
    __slots__ = ("bytes", "count", "entries", "files")

    def __init__(self) -> None:
        self.entries: list[Found] = []
        self.count = 0
        self.files = 0
        """Files at any depth."""
        self.bytes = 0
        """Bytes of direct files that are not among the entries."""


class _ListedTree:
    """The result of a walk, by folder; of a pattern that is no folder all is in the first."""

    def __init__(self, top: str) -> None:
        self.top = top
        self.folders = {top: _ListedFolder()}
        """Folders by path, each before those in it."""
        self.total = 0

    def opened(self, limit: int) -> set[str]:
        """Return the folders whose entries are shown: level by level, small ones first, while all of each fits."""
        opened = {self.top}
        room = limit - self.folders[self.top].count
        level = [self.top]
        while level and room > 0:
            inside = [path for folder in level for path, _ in self.folders[folder].entries if path in self.folders]
            level = []
            for path in sorted(inside, key=lambda path: self.folders[path].count):
                if self.folders[path].count > room:
                    break
                room -= self.folders[path].count
                opened.add(path)
                level.append(path)
        return opened

    def shown(self, limit: int, opened: set[str]) -> Iterable[Found]:
        first = self.folders[self.top].entries
        if self.folders[self.top].count > limit:
            # Folders are more informative than files.
            chosen = sorted(range(len(first)), key=lambda at: first[at][0] not in self.folders)[:limit]
            first = [first[at] for at in sorted(chosen)]
        waiting = first[::-1]
        while waiting:
            path, entry = waiting.pop()
            yield path, entry
            if path in opened:
                waiting += self.folders[path].entries[::-1]

    def sizes(self, closed: Container[str], walk: Walk) -> dict[str, int]:
        """Return the bytes of the files in each of these folders; none for those that exceed the walk's time.

        Other folders are skipped: looking sizes up takes longer than finding the files.
        """
        found: dict[str, int] = {}
        within: dict[str, str] = {}
        for path, folder in self.folders.items():
            outer = path if path in closed else within.get(path.rpartition("/")[0])
            if outer is None:
                continue
            if walk.late():
                found.pop(outer, None)
                break
            within[path] = outer
            files = (each for _, each in folder.entries if each.is_file(follow_symlinks=False))
            found[outer] = found.get(outer, 0) + folder.bytes + sum(map(_size, files))
        return found


def _gathered(walk: Walk, limit: int) -> _ListedTree:
    tree = _ListedTree(walk.folder if walk.whole else "")
    last, folder = tree.top, tree.folders[tree.top]
    for path, entry in walk:
        tree.total += 1
        if walk.whole:
            parent = path.rpartition("/")[0]
            if parent != last:
                last, folder = parent, tree.folders[parent]
            if entry.is_file(follow_symlinks=False):
                folder.files += 1
            elif entry.is_dir(follow_symlinks=False):
                tree.folders[path] = _ListedFolder()
        folder.count += 1
        # Of a folder that stays closed the names are not needed; of the first one some are always shown.
        if folder.count <= limit or (walk.whole and last == tree.top):
            folder.entries.append((path, entry))
        elif walk.whole and entry.is_file(follow_symlinks=False):
            folder.bytes += _size(entry)
    for path in reversed(tree.folders):
        if path != tree.top:
            tree.folders[path.rpartition("/")[0]].files += tree.folders[path].files
    return tree


def _size(entry: os.DirEntry[str]) -> int:
    try:
        # Not by the entry, which would keep all of it: half a kibibyte each.
        return os.lstat(entry.path).st_size
    except OSError:
        return 0


def _described(path: str, entry: os.DirEntry[str]) -> dict[str, Any]:
    kind = "symlink" if entry.is_symlink() else "directory" if entry.is_dir(follow_symlinks=False) else "file"
    if kind == "file" and not entry.is_file(follow_symlinks=False):
        kind = "special"
    described: dict[str, Any] = {"path": paths.display_name(path), "type": kind, "bytes": None, "modified": None}
    if kind == "directory":  # its time changes when a file in it is made or removed, also a hidden one
        return described
    try:
        info = entry.stat(follow_symlinks=False)
        described["bytes"] = info.st_size if kind == "file" else None
        described["modified"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(info.st_mtime))
    except (OSError, OverflowError, ValueError):
        pass  # gone, or in a folder that may not be entered; no time of the calendar
    return described
