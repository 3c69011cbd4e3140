"""The journal of promotions: the changes and state of each, and the old contents.

    promotions/<id>.json   one promotion; replaced as a whole whenever its state changes
    promotions/<id>/<n>    the old content of its file number n

Rule 1  ``staging``: no file was touched. ``moving``: some may have been; recovery puts them back. ``moved``: all were,
        and it is in effect. ``undone``: all are as before. After these only staged files are removed: ``applied``,
        ``withdrawn``.
Rule 2  Any change holds the lock of the folder. A promotion that has not ended while the lock is free was interrupted.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter

from glovebox_audit.place import take_lock
from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_server import secret_files
from glovebox_server.promotion.folder import FileState, TargetFolder, opened
from glovebox_server.secret_files import SecretDirectory, SecretFileError

FOLDER: Final = "promotions"
MAX_KEPT: Final = 100
"""Promotions that can be put back; a new one removes the oldest. The audit log keeps all."""
MAX_BYTES: Final = 4 << 20
"""Bytes of one journal: ``MAX_FILES`` names of 512 bytes, escaped, with two digests each, are fewer."""
LOCK_SECONDS: Final = 10.0
"""A promotion takes about that long at most; if one takes longer, the next is refused."""

State = Literal["staging", "moving", "moved", "undone", "applied", "withdrawn"]
ENDED: Final = ("applied", "withdrawn")
IN_FORCE: Final = ("moved", "applied")
_KIND = "journal of promotions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of one file."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    name: str
    before: FileState | None
    after: FileState | None
    origin: str
    """The source artifact, or the promotion that is put back."""
    findings: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """A promotion as the journal stores it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    version: Literal[1] = 1
    id: Annotated[str, Field(pattern=r"^p_[0-9a-f]{20}$")]
    """It names files and folders to remove."""
    state: State
    made: AwareDatetime
    by: str
    asked_by: str | None = None
    folder: str
    path: str
    inode: tuple[int, int]
    digest: str
    """``sha256:…`` of all that was shown."""
    of: str | None = None
    changes: tuple[Change, ...]
    made_folders: tuple[str, ...] = ()
    gone_folders: tuple[str, ...] = ()
    """Folders that are removed if they are empty afterwards."""
    kept: tuple[str, ...] = ()
    """Files that stayed when it was put back, as they were changed since."""

    @property
    def stage(self) -> str:
        """Return the name of the staging folder, in the target folder."""
        return f".glovebox-promotion-{self.id}"


_ADAPTER: Final = TypeAdapter(Promotion)


class Journal:
    """The journal of a state directory, with its lock held; see ``locked``."""

    def __init__(self, directory: SecretDirectory, folder: TargetFolder) -> None:
        """Take the directory, open."""
        self._directory = directory
        self._folder = folder
        self.path = directory.path

    def save(self, promotion: Promotion) -> None:
        """Store a promotion durably; raise ``SecretFileError`` if that fails."""
        self._directory.make(f"{promotion.id}.json", _ADAPTER.dump_json(promotion), replace=True)

    def keep(self, promotion: Promotion, number: int, chunks: Iterable[bytes]) -> str:
        """Store a file's old content durably, and return its digest."""
        name = f"{promotion.id}/{number}"
        if not self._folder.is_there(promotion.id):
            self._folder.make(promotion.id, 0o700)
        digest = self._folder.write(name, chunks, 0o600)
        self._folder.sync([name])
        return digest

    def contents(self, identifier: str, number: int) -> Iterator[bytes]:
        """Yield a file's old content."""
        return self._folder.chunks(f"{identifier}/{number}")

    def forget(self, identifier: str) -> None:
        """Remove the old contents."""
        with suppress(OSError):
            self._folder.clear(identifier)

    def all(self) -> list[Promotion]:
        """Return every promotion, oldest first; raise ``SecretFileError`` if an entry is malformed."""
        return _read(self._directory)

    def make_room(self) -> None:
        """Remove the oldest promotions beyond ``MAX_KEPT``."""
        ended = [each for each in self.all() if each.state in ENDED]
        for each in ended[: max(0, len(ended) - MAX_KEPT + 1)]:
            self.forget(each.id)
            self._directory.remove(f"{each.id}.json")


@contextmanager
def locked(state_dir: Path, *, seconds: float = LOCK_SECONDS) -> Iterator[Journal]:
    """Yield the journal, with its lock held.

    Raises RefusedError: rule ``promotion.busy``: another process holds the lock for longer than ``seconds``;
    SecretFileError: the journal or the state directory cannot be used safely.
    """
    with secret_files.opened(state_dir / FOLDER, _KIND) as directory, opened(directory.path) as folder:
        if not take_lock(folder.descriptor, seconds):
            raise RefusedError("promotion.busy", "Another promotion is under way.", "Try again once it is done.")
        yield Journal(directory, folder)


def listed(state_dir: Path) -> list[Promotion]:
    """Return the same as ``Journal.all`` without taking the lock; empty if nothing was promoted."""
    if not os.path.lexists(state_dir / FOLDER):
        return []
    with secret_files.opened(state_dir / FOLDER, _KIND) as directory:
        return _read(directory)


def put_back(promotions: Iterable[Promotion]) -> dict[str, str]:
    """Return each promotion that was put back, with the one that did it."""
    return {each.of: each.id for each in promotions if each.of and each.state in IN_FORCE}


def _read(directory: SecretDirectory) -> list[Promotion]:
    found = []
    for name in directory.names():
        if not name.endswith(".json"):
            continue
        promotion = None
        with suppress(ValueError):
            promotion = _ADAPTER.validate_json(directory.read(name, MAX_BYTES), strict=True)
        if promotion is None or name != f"{promotion.id}.json":
            path = directory.path / name
            fix = f"Compare the folder it names with your backup, then remove {path}."
            raise SecretFileError(_KIND, path, "it is not what was written", fix)
        found.append(promotion)
    return sorted(found, key=lambda each: each.made)
