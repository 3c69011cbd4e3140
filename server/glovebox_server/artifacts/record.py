"""The records of artifacts and their quarantine directory: all disk access of the artifact store.

    items/<id>/{content,record.json}   one artifact
    incoming/<process>/<id>/…          files being received by one server process, which holds a lock on the folder
    totals/{all,<digest of owner>}     number and bytes of all items, and of one owner's

Several server processes share the directory. These facts keep them from harming each other:

1. An artifact is published by renaming its finished folder into ``items`` and removed by renaming it out: atomically.
2. Changes of ``items`` hold a ``flock`` on the root folder; the kernel releases it when a process dies.
3. An ``incoming`` folder whose lock can be taken belongs to a dead process and is removed.
4. ``totals/all`` is unknown from before a change of ``items`` until after a publication, which looks at two totals
   however many items there are. Where it is still unknown, after a removal or a crash, the next one counts anew.

Paths are made of random ids only; blocking calls are for a worker thread. Must never be imported here: names from a
sandbox, anything async, the store, or anything of a transport.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, ClassVar, Final, NamedTuple

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter

from glovebox_audit.place import take_lock
from glovebox_sandboxes.contract.errors import DiagnosedError, RefusedError
from glovebox_sandboxes.host.descriptors import opened

_ID_BYTES: Final = 16
"""128 random bits: a URI cannot be guessed, so it reveals nothing."""
_ID: Final = re.compile(r"[0-9a-f]{32}")
_SCHEME: Final = "artifact://"


class ArtifactStoreError(DiagnosedError):
    """A failure of the artifact store; nothing half-done is left. The operator can act, the model cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One collected file. Read from disk only through ``decode``, which checks every field."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    uri: Annotated[str, Field(pattern=r"^artifact://[0-9a-f]{32}$")]
    """A capability that works only for its owner."""
    owner: str
    call_id: str
    name: str
    """Accepted name relative to ``/output``; a label, never a path on the host."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: Annotated[int, Field(ge=0)]
    media_type: str
    """Detected; active documents are ``text/plain``."""
    created: AwareDatetime
    expires: AwareDatetime
    """From then on it is unknown to all callers."""
    client: str | None = None
    run: str | None = None
    workflow: str | None = None
    tool: str | None = None
    risks: tuple[str, ...]
    """Why it must not be opened or promoted unseen, one sentence each."""

    @property
    def id(self) -> str:
        """Return the random part of the URI, which names its folder in the store."""
        return self.uri.removeprefix(_SCHEME)


_ADAPTER: Final = TypeAdapter(Artifact)


def encode(artifact: Artifact) -> bytes:
    """Return the record as one JSON object."""
    return _ADAPTER.dump_json(artifact, exclude_none=True)


def decode(data: bytes) -> Artifact:
    """Return the record that ``encode`` wrote; raise ``ValueError`` if torn, edited, or of another version."""
    return _ADAPTER.validate_json(data, strict=True)


def new_id() -> str:
    """Return the random part of a new URI, which cannot be guessed."""
    return secrets.token_hex(_ID_BYTES)


def uri_of(identifier: str) -> str:
    """Return the URI with this random part."""
    return _SCHEME + identifier


def id_of(uri: str) -> str | None:
    """Return the random part of a well-formed URI, else None; ``uri`` is unchecked."""
    identifier = uri.removeprefix(_SCHEME)
    return identifier if uri.startswith(_SCHEME) and is_id(identifier) else None


def is_id(text: str) -> bool:
    """Return whether this is the random part of a URI: only such strings become part of a path."""
    return _ID.fullmatch(text) is not None


def unknown() -> RefusedError:
    """Return the one refusal for every unavailable artifact, whatever the reason: F7, no oracle."""
    return RefusedError(
        "artifacts.unknown",
        "There is no artifact of yours at this address: it never existed, has expired, or belongs to someone else.",
        "Use an artifact:// address from a result of your own calls, or run the call again.",
    )


def expired(artifact: Artifact, now: datetime) -> bool:
    """Return whether the artifact has expired."""
    return artifact.expires <= now


MAX_ARTIFACTS: Final = 4096
"""Artifacts at one time: bounds the table in memory (about 1 KB each) and the listing (about 10 ms)."""
LOCK_WAIT_SECONDS: Final = 5.0
"""The lock is held for milliseconds; a process that holds it longer is stopped or stuck, which is reported."""
_RECORD_BYTES: Final = 64 * 1024
"""A record has a name of at most 512 bytes and a few sentences: anything larger is not a record."""
_NEW: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO must fail the check that follows, not hang
_OLD: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_AN_ARTIFACT: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO})
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextmanager
def translated(attempted: str) -> Iterator[None]:
    """Turn an ``OSError`` into ``ArtifactStoreError``, without its path; ``attempted`` is the purpose."""
    try:
        yield
    except OSError as error:
        fix = "Check the state directory's file system and permissions."
        if error.errno in _FULL:
            fix = "Free space on the file system of the state directory."
        raise ArtifactStoreError(attempted, os.strerror(error.errno or errno.EIO), fix) from error


class _Total(NamedTuple):
    """Artifacts together; ``due`` is the Unix time before which none of them expires."""

    files: float = 0
    size: float = 0
    due: float = math.inf

    def plus(self, artifacts: Iterable[Artifact]) -> "_Total":
        files, size, due = self
        for each in artifacts:
            files, size, due = files + 1, size + each.bytes, min(due, each.expires.timestamp())
        return _Total(files, size, due)


_ALL: Final = "all"
_TOTAL_BYTES: Final = 128
"""A total is written over the one before, with blanks behind: to replace or cut a file costs ten times as much."""
_UNKNOWN: Final = _Total(math.inf, math.inf, -math.inf)
"""As if all were full, and some had expired: nothing is refused before it is counted."""


class Disk:
    """One process's view of the directory. Not thread-safe by itself; each method may run in any one thread."""

    def __init__(self, root: Path, *, max_bytes_total: int, parts: int) -> None:
        self._root = root
        self._items = root / "items"
        self._incoming = root / "incoming"
        self._totals = root / "totals"
        self._mine = self._incoming / secrets.token_hex(8)
        self._mine_fd = -1
        self._max_bytes_total = max_bytes_total
        self._parts = parts
        self._known: dict[str, Artifact] = {}  # records never change, so reading each once is enough

    def start(self, now: datetime) -> None:
        """Create or check the directory, remove what crashes left, and take an ``incoming`` folder."""
        with translated("opening the artifact store"):
            self._root.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self._root, self._items, self._incoming, self._totals):
                _make_private(folder)
            with self._exclusive():  # else the folder, not locked yet, looks like a dead process's
                self._mine.mkdir(mode=0o700)
                self._mine_fd = os.open(self._mine, _FOLDER)
                fcntl.flock(self._mine_fd, fcntl.LOCK_EX)  # waits for a `glovebox clean` that looks at it right now
                self._clean(now)

    def stop(self) -> None:
        """Remove the ``incoming`` folder and release it."""
        if self._mine_fd < 0:
            return
        shutil.rmtree(self._mine, ignore_errors=True)
        os.close(self._mine_fd)
        self._mine_fd = -1

    def create(self, identifier: str) -> int:
        """Return a descriptor for a new file's content. The caller closes it, then seals or drops the file."""
        folder = self._mine / identifier
        folder.mkdir(mode=0o700)
        return os.open(folder / "content", _NEW, 0o600)

    def seal(self, artifact: Artifact) -> None:
        """Make a received file and its record durable; it is not visible yet."""
        folder = self._mine / artifact.id
        record = os.open(folder / "record.json", _NEW, 0o600)
        with os.fdopen(record, "wb") as file:
            file.write(encode(artifact))
            file.flush()
            os.fsync(record)
        _sync(folder)

    def drop(self, identifiers: Iterable[str]) -> None:
        """Remove received files."""
        for identifier in identifiers:
            shutil.rmtree(self._mine / identifier, ignore_errors=True)

    def publish(self, artifacts: tuple[Artifact, ...], now: datetime, room: int | None = None) -> None:
        """Make sealed files of one owner visible, all or none; ``room`` bounds its bytes, if less than one part.

        Raises RefusedError: rule ``artifacts.full``; they do not fit beside what has not expired.
        """
        with self._exclusive():
            if self._crowded(artifacts, room) and self._total(_ALL).due <= now.timestamp():
                self._clean(now)
            if problem := self._crowded(artifacts, room):
                hint = "Write fewer or smaller files to /output, or try again when older artifacts have expired."
                raise RefusedError("artifacts.full", problem, hint)
            try:
                with self._counted(artifacts):
                    for artifact in artifacts:
                        (self._mine / artifact.id).rename(self._items / artifact.id)
                    _sync(self._items)
            except OSError:
                # Renaming back needs no space, of which there may be none.
                for artifact in artifacts:
                    with suppress(OSError):  # not moved yet
                        (self._items / artifact.id).rename(self._mine / artifact.id)
                raise

    def withdraw(self, artifacts: tuple[Artifact, ...]) -> None:
        """Remove published files."""
        with self._exclusive():
            self._remove(artifact.id for artifact in artifacts)

    def load(self, identifier: str) -> Artifact | None:
        """Return the record of a visible artifact with its content in place, else None."""
        folder = self._items / identifier
        try:
            record = os.open(folder / "record.json", _OLD)
            with os.fdopen(record, "rb") as file:
                artifact = decode(file.read(_RECORD_BYTES))
            content = (folder / "content").lstat()
        except ValueError:
            return None
        except OSError as error:
            # Other errors, such as too many open files, say nothing about the artifact, which must not be removed.
            if error.errno in _NOT_AN_ARTIFACT:
                return None
            raise
        whole = stat.S_ISREG(content.st_mode) and content.st_size == artifact.bytes
        return artifact if whole and artifact.id == identifier else None

    def open(self, artifact: Artifact) -> int | None:
        """Return a descriptor of the content; None if it is removed."""
        try:
            return os.open(self._items / artifact.id / "content", _OLD)
        except FileNotFoundError:
            return None

    def listed(self, now: datetime) -> list[Artifact]:
        """Return all visible artifacts that have not expired."""
        with self._exclusive():
            return [artifact for artifact in self._visible() if not expired(artifact, now)]

    def clean(self, now: datetime) -> int:
        """Remove expired artifacts and what crashes left; return the number of artifacts removed."""
        with self._exclusive():
            return self._clean(now)

    def _clean(self, now: datetime) -> int:
        for folder in self._incoming.iterdir():
            if folder != self._mine and _abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
        over = [artifact.id for artifact in self._visible() if expired(artifact, now)]
        self._remove(over)
        for each in self._totals.iterdir():
            each.unlink()
        owned = defaultdict[str, list[Artifact]](list)
        for artifact in self._known.values():
            owned[_digest(artifact.owner)].append(artifact)
        for name, theirs in (*owned.items(), (_ALL, self._known.values())):
            self._set(name, _Total().plus(theirs))
        return len(over)

    def _total(self, name: str) -> _Total:
        try:
            with opened(self._totals / name) as file:
                return _Total(*json.loads(os.read(file, _TOTAL_BYTES)))
        except (FileNotFoundError, ValueError):  # torn: of an owner only where that of all is unknown
            return _UNKNOWN if name == _ALL else _Total()

    def _set(self, name: str, total: _Total) -> None:
        with opened(self._totals / name, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600) as file:
            os.write(file, json.dumps(total).encode().ljust(_TOTAL_BYTES))

    @contextmanager
    def _counted(self, added: Sequence[Artifact]) -> Iterator[None]:
        """Add one owner's artifacts to the totals, once the block has made them visible."""
        after = [(name, self._total(name).plus(added)) for name in (_digest(added[0].owner), _ALL)]
        self._set(_ALL, _UNKNOWN)
        yield
        for name, total in after:
            self._set(name, total)

    def _visible(self) -> list[Artifact]:
        with os.scandir(self._items) as entries:  # a third of the time of iterdir
            names = {entry.name for entry in entries}
        known = {name: artifact for name, artifact in self._known.items() if name in names}
        for name in names - known.keys():
            artifact = self.load(name) if is_id(name) else None
            if artifact is None:  # torn, edited, incomplete, or not ours
                self._remove([name])
            else:
                known[name] = artifact
        self._known = known
        return list(known.values())

    def _remove(self, names: Iterable[str]) -> None:
        self._set(_ALL, _UNKNOWN)
        for name in names:
            self._known.pop(name, None)
            away = self._mine / f"gone-{secrets.token_hex(8)}"
            away.mkdir(mode=0o700)
            with suppress(FileNotFoundError):
                (self._items / name).rename(away / "item")
            shutil.rmtree(away, ignore_errors=True)

    def _crowded(self, artifacts: tuple[Artifact, ...], room: int | None) -> str | None:
        held, theirs = self._total(_ALL), self._total(_digest(artifacts[0].owner))
        count, size, _ = _Total().plus(artifacts)
        part, part_bytes = MAX_ARTIFACTS // self._parts, self._max_bytes_total // self._parts
        part_bytes = part_bytes if room is None else min(part_bytes, room)
        full = f"The artifact store is full: {size} more bytes do not fit into its {self._max_bytes_total}."
        for found, most, why in (
            (held.files + count, MAX_ARTIFACTS, f"The artifact store already holds its {MAX_ARTIFACTS} files."),
            (held.size + size, self._max_bytes_total, full),
            (theirs.files + count, part, f"You may have {part} artifacts at one time, and {count} more are too many."),
            (theirs.size + size, part_bytes, f"Your artifacts may hold {part_bytes} bytes; {size} more do not fit."),
        ):
            if found > most:
                return why
        return None

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        # A new descriptor each time: flock belongs to the open file, so this also excludes other threads.
        with opened(self._root, _FOLDER) as root:
            if not take_lock(root, LOCK_WAIT_SECONDS):
                reason = f"another Glovebox process has held its lock for {LOCK_WAIT_SECONDS:g} seconds"
                raise ArtifactStoreError("changing the artifact store", reason, "Look for a stopped server process.")
            yield


def records(root: Path, now: datetime) -> list[Artifact]:
    """Return the artifacts of a directory that have not expired; changes nothing, raises ``ArtifactStoreError``."""
    disk = Disk(root, max_bytes_total=0, parts=1)
    with translated("listing artifacts"):
        try:
            names = sorted(each.name for each in (root / "items").iterdir())
        except FileNotFoundError:
            return []
        found = [disk.load(name) for name in names[:MAX_ARTIFACTS] if is_id(name)]
    return [artifact for artifact in found if artifact is not None and not expired(artifact, now)]


def _digest(owner: str) -> str:
    return hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()


def _make_private(folder: Path) -> None:
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        reason = "its directory is a link, belongs to someone else, or is open to others"
        fix = "Make the state directory's artifacts folder yours alone (chmod -R go= and chown), or move it away."
        raise ArtifactStoreError("opening the artifact store", reason, fix)


def _abandoned(folder: Path) -> bool:
    with suppress(OSError), opened(folder, _FOLDER) as descriptor:
        return take_lock(descriptor, 0)
    return False


def _sync(folder: Path) -> None:
    with opened(folder, _FOLDER) as descriptor:
        os.fsync(descriptor)
