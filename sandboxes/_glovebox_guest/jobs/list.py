"""Listing the files of the workspace that a pattern means. Runs in the guest's child."""

from __future__ import annotations

import time

from _glovebox_guest import wording
from _glovebox_guest.stdlib import TYPE_CHECKING
from _glovebox_guest.workspace import paths
from _glovebox_guest.workspace.tree import Walk

if TYPE_CHECKING:
    import os
    from typing import Any

    from _glovebox_guest.program.emit import Emit

MAX_SECONDS = 4.0
"""Below the 5 seconds of processor time the shipped profile grants."""
_OVERHEAD = 130
"""Bytes of JSON an entry takes beside its path, in the data and in the text."""


def run(payload: dict[str, Any], emit: Emit) -> None:
    """Hand back the first ``limit`` entries of the tree that fit ``pattern``, and the number of all of them."""
    try:
        walk = Walk(payload.get("pattern", "**"), MAX_SECONDS)
    except paths.Refused as problem:
        emit.value(problem.value())
        return
    limit = payload.get("limit", 500)
    entries: list[dict[str, Any]] = []
    total = 0
    room = 2 * wording.MAX_ANSWER
    for path, entry in walk:
        total += 1
        if len(entries) == limit or room < 0:
            continue  # counted on: how many there are is half of the answer
        described = _described(path, entry)
        # The path stands in the text once more.
        room -= 2 * wording.cost(described["path"]) + _OVERHEAD
        if room >= 0:
            entries.append(described)
    notes = [f"{len(entries)} of {total} shown"] if len(entries) < total else []
    if walk.stopped:
        notes.append(f"stopped after {walk.stopped}")
    if walk.unreadable:
        notes.append(f"unreadable folders: {walk.unreadable}")
    emit.value(
        {
            "entries": entries,
            "total": total,
            "scanned": walk.scanned,
            "passed_over": sorted(walk.passed_over),
            "truncated": "; ".join(notes) or None,
        }
    )


def _described(path: str, entry: os.DirEntry[str]) -> dict[str, Any]:
    kind = "symlink" if entry.is_symlink() else "directory" if entry.is_dir(follow_symlinks=False) else "file"
    if kind == "file" and not entry.is_file(follow_symlinks=False):
        kind = "special"
    try:
        info = entry.stat(follow_symlinks=False)
    except OSError:  # gone in the meantime, or its folder may be listed but not entered
        return {"path": paths.display_name(path), "type": kind, "bytes": None, "modified": None}
    return {
        "path": paths.display_name(path),
        "type": kind,
        "bytes": info.st_size if kind == "file" else None,
        "modified": _timestamp(info.st_mtime),
    }


def _timestamp(seconds: float) -> str | None:
    """RFC 3339 in UTC, whole seconds; None for a time of no calendar."""
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return None
