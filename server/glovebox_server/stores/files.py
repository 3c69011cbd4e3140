"""A directory of small files that every process checks before each call: one ``stat`` if nothing changed.

Rule 1  A file is there whole or not at all, and never changes: making and removing one are single operations of the
        file system. So readers need no lock, and a killed command leaves nothing half done. A writer counts the files
        under a lock, but waits for it no longer than ``LOCK_SECONDS``: a process that hangs blocks no other.
Rule 2  A file with other content than was written is damaged; the reader decides what that means.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from glovebox_server import secret_files
from glovebox_server.secret_files import SecretDirectory, SecretFileError

FOLDER = "governance"
"""Below the state directory."""
MAX_BYTES = 8192
"""Of one file."""
LOCK_SECONDS = 1.0
"""Others hold the lock for a few writes to the disk."""
_TICK_NS = 50_000_000
"""Two changes of a directory within one tick of the kernel's clock (at most 10 ms) look the same to ``stat``."""


class StoredItem(BaseModel):
    """The content of one file, which is named by its id."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    version: Literal[1] = 1
    id: str


T = TypeVar("T", bound=StoredItem)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItems(Generic[T]):
    """The items of a directory."""

    items: tuple[T, ...] = ()
    """By the names of their files, which begin with the time."""
    damaged: tuple[SecretFileError, ...] = ()
    """Unreadable files, each with its fix."""


class Files(Generic[T]):
    """One directory. It costs only its name until it is used."""

    def __init__(self, path: Path, model: type[T], *, fix: Callable[[Path], str], kind: str, most: int) -> None:
        """Take the directory, in ``FOLDER`` of a state directory; nothing is read.

        ``fix`` says what to do with a damaged file; ``kind`` names the content in errors.
        """
        self.path = path
        self._model = model
        self._fix = fix
        self._kind = kind
        self._most = most
        self._seen: object = None
        self._found: StoredItems[T] = StoredItems()

    def prepare(self) -> None:
        """Make the directory if missing. Raises SecretFileError if it cannot be used safely."""
        with self._opened():
            pass

    def look(self) -> StoredItems[T]:
        """Return the current items of a directory that was prepared; one that is gone is damaged."""
        try:
            found = os.stat(self.path)  # noqa: PTH116 - a Path's own costs as much again, for every call
        except OSError as problem:
            self._seen = None
            return StoredItems(damaged=(self._unusable(self.path, problem),))
        mark = (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
        if mark != self._seen:
            settled = abs(time.time_ns() - found.st_ctime_ns) > _TICK_NS
            self._found, self._seen = self.read(), mark if settled else None
        return self._found

    def read(self) -> StoredItems[T]:
        """Read the items anew; empty without a directory."""
        if not os.path.lexists(self.path):
            return StoredItems()
        try:
            with self._opened() as directory:
                names = directory.names()
                read = [self._item(directory, name) for name in names[: self._most]]
        except SecretFileError as problem:
            return StoredItems(damaged=(problem,))
        except OSError as problem:
            return StoredItems(damaged=(self._unusable(self.path, problem),))
        damaged = [each for each in read if isinstance(each, SecretFileError)]
        if len(names) > self._most:
            damaged.append(
                SecretFileError(self._kind, self.path, f"it has more than {self._most} files", "Remove some.")
            )
        items = (each for each in read if each is not None and not isinstance(each, SecretFileError))
        return StoredItems(items=tuple(items), damaged=tuple(damaged))

    def names(self) -> list[str]:
        """Return the names of the files, whole or damaged. Raises SecretFileError if the directory is unsafe."""
        with self._opened() as directory:
            return directory.names()

    def add(self, name: str, content: bytes, *, instead: bytes | None = None, spare: int = 0) -> bool:
        """Add a file, with the content ``instead`` if the disk is full; return whether it has its own content.

        ``spare`` places are left to others. Raises SecretFileError if it could not be made, or there are too many.
        """
        with self._opened() as directory, directory.locked(LOCK_SECONDS):
            if len(directory.names()) >= self._most - spare:
                raise SecretFileError(
                    self._kind, self.path, f"it has {self._most - spare} files already", "Remove some."
                )
            try:
                directory.make(name, content)
            except SecretFileError:
                if instead is None:
                    raise
                directory.make(name, instead)
                return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file, if it exists. Raises SecretFileError if it could not be removed."""
        with self._opened() as directory:
            try:
                directory.remove(name)
            except SecretFileError:
                if os.path.lexists(self.path / name):
                    raise

    @contextmanager
    def _opened(self) -> Iterator[SecretDirectory]:
        secret_files.prepare_state(self.path.parent.parent)
        with secret_files.opened(self.path, self._kind) as directory:
            yield directory

    def _item(self, directory: SecretDirectory, name: str) -> T | SecretFileError | None:
        try:
            content = directory.read(name, MAX_BYTES)
        except SecretFileError as problem:
            return problem if os.path.lexists(self.path / name) else None  # removed in this moment
        except OSError as problem:
            return self._unusable(self.path / name, problem)
        with suppress(ValidationError):
            item = self._model.model_validate_json(content)
            if item.id == name and len(content) <= MAX_BYTES:
                return item
        path = self.path / name
        return SecretFileError(self._kind, path, "it is not what was written", self._fix(path))

    def _unusable(self, path: Path, problem: OSError) -> SecretFileError:
        fix = f"Make {path} usable for the user that runs Glovebox, then start the server again."
        return SecretFileError(self._kind, path, f"it cannot be used: {problem.strerror}", fix)
