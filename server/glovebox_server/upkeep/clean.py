"""Finds and removes expired and unused files of the state and data directories; never what is in use.

Each kind is found with the locks that its owner takes: a search changes nothing. Leftovers of sandboxes are not here: a
killed server's janitor has removed them.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from glovebox_audit import writers
from glovebox_audit.file import LogFile
from glovebox_audit.segments import files, rotation
from glovebox_audit.segments.rotation import Retention
from glovebox_sandboxes.contract.spec import DEFAULT
from glovebox_sandboxes.runtime import guest_gc, runtime
from glovebox_server.artifacts import record
from glovebox_server.artifacts.record import Disk
from glovebox_server.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A file or directory that can go."""

    kind: str
    """``artifact``, ``upload``, ``server``, ``segment``, ``guest`` or ``runtime``."""
    name: str
    bytes: int
    why: str


def look(settings: Settings, retention: Retention) -> list[Item]:
    """Return everything that can go now, by kind and name; changes nothing. Raises OSError."""
    state, data = settings.state_dir, settings.data_dir
    items = [*_artifacts(state / "artifacts"), *_servers(state / "audit"), *_segments(state / "audit", retention)]
    if current := _current(data):
        why = "of another version, and not in use"
        for path in guest_gc.removable(data, current):
            kind = "runtime" if path.name.startswith("runtime") else "guest"
            items.append(Item(kind=kind, name=path.name, bytes=size_of(path), why=why))
    return items


def _current(data: Path) -> list[Path]:
    """Return the directories of the runtimes; none if nothing says which guest is this version's."""
    found = runtime.every(data)
    return [path for each in found.values() for path in each.directories] if DEFAULT in found else []


def clean(settings: Settings, retention: Retention, open_log: Callable[[], LogFile]) -> list[Item]:
    """Remove what ``look`` finds, and return what is gone of it. ``open_log`` is called only if needed.

    Raises ArtifactStoreError or AuditError if a directory cannot be changed; earlier removals stay.
    """
    before = look(settings, retention)
    kinds = {item.kind for item in before}
    if kinds & {"artifact", "upload"}:
        disk = Disk(settings.state_dir / "artifacts", max_bytes_total=0, parts=1)
        try:
            disk.start(datetime.now(UTC))  # a store that opens removes what can go
        finally:
            disk.stop()
    if kinds & {"server", "segment"}:
        with contextlib.closing(open_log()) as log:  # so does a log
            log.retain()
    if current := _current(settings.data_dir):
        guest_gc.remove(settings.data_dir, current)
    left = {(item.kind, item.name) for item in look(settings, retention)}
    return [item for item in before if (item.kind, item.name) not in left]


def _artifacts(root: Path) -> Iterator[Item]:
    now = datetime.now(UTC)
    for folder in _folders(root / "items"):
        name, size = f"artifacts/items/{folder.name}", size_of(folder)
        try:
            kept = record.decode((folder / "record.json").read_bytes()[: 1 << 16])
            why = "expired" if record.expired(kept, now) else ""
        except (OSError, ValueError):
            why = "damaged"
        if why:
            yield Item(kind="artifact", name=name, bytes=size, why=why)
    for folder in _folders(root / "incoming"):
        if not _in_use(folder):
            yield Item(kind="upload", name=f"artifacts/incoming/{folder.name}", bytes=size_of(folder), why=_GONE)


_GONE = "its server is gone"


def _servers(audit: Path) -> Iterator[Item]:
    for path in sorted((audit / writers.DIRECTORY).glob("*.json")):
        if not _in_use(path):
            with contextlib.suppress(FileNotFoundError):
                size = path.lstat().st_size
                yield Item(kind="server", name=f"audit/{writers.DIRECTORY}/{path.name}", bytes=size, why=_GONE)


def _segments(audit: Path, retention: Retention) -> Iterator[Item]:
    current = 0
    with contextlib.suppress(FileNotFoundError):
        current = (audit / files.LOG_NAME).lstat().st_size
    for each, reason in rotation.removable(audit, retention, current=current):
        name = f"audit/{files.name(each.number)}"
        why = "older than is kept" if reason == "age" else "the log is larger than is kept"
        yield Item(kind="segment", name=name, bytes=each.size, why=why)


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if path.is_dir() and not path.is_symlink())
    except FileNotFoundError:
        return []


def size_of(place: Path) -> int:
    """Return the bytes that go with it."""
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(folder) / name).lstat().st_size
    return total


def _in_use(place: Path) -> bool:
    """Return whether a living process holds its lock; tries a shared one, so that searches do not see each other."""
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return True  # gone, or nothing of ours
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
