"""The journal of promotions: what each changes, how far it is, and what the files held before.

    promotions/<id>.json   one promotion; replaced as a whole whenever its state changes
    promotions/<id>/<n>    what its file number n held before, to be put back

Rule 1  ``staging``: no file was touched. ``moving``: some may have been; whoever finds it puts them back. ``moved``:
        all were, and it is in force. ``undone``: all are as before. From there only what was laid ready is cleared
        away: ``applied``, ``withdrawn``.
Rule 2  Who changes anything holds the lock of the folder. One that is not at its end while nobody holds it was
        interrupted.
"""

import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Literal

from pydantic import AwareDatetime, ConfigDict, TypeAdapter

from glovebox_server import secret_files
from glovebox_server.errors import RefusedError
from glovebox_server.promotion.folder import FileState, TargetFolder, opened
from glovebox_server.secret_files import SecretDirectory, SecretFileError

FOLDER: Final = "promotions"
"""Below the state directory."""
MAX_KEPT: Final = 100
"""Promotions that can be put back; an older one is forgotten when a new one comes. The audit log keeps all."""
MAX_BYTES: Final = 4 << 20
"""Of one journal: ``MAX_FILES`` names of 512 bytes, escaped, with two digests each, are fewer."""
LOCK_SECONDS: Final = 10.0
"""A promotion takes about that long at most; one that takes longer is told to the next."""

State = Literal["staging", "moving", "moved", "undone", "applied", "withdrawn"]
ENDED: Final = ("applied", "withdrawn")
IN_FORCE: Final = ("moved", "applied")
_KIND = "journal of promotions"
"""For errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One file."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    name: str
    """Relative to the folder."""
    before: FileState | None
    """What it held; None where there was none."""
    after: FileState | None
    """What it is to hold; None where it is to go."""
    origin: str
    """The artifact it comes from, or the promotion that is put back."""
    findings: int | None = None
    """How many things a scan found in that artifact, which were accepted; None where it was not looked into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """One promotion, as the journal has it."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    version: Literal[1] = 1
    id: str
    state: State
    made: AwareDatetime
    by: str
    """Who did it: ``local:<uid>``, or the caller that proposed it."""
    asked_by: str | None = None
    """Id of the call that proposed it; None where none did."""
    folder: str
    """Its name in the policy."""
    path: str
    """Where it was."""
    inode: tuple[int, int]
    """Device and inode of the folder."""
    digest: str
    """Of all that was shown: ``sha256:…``."""
    of: str | None = None
    """The promotion that this one puts back."""
    changes: tuple[Change, ...]
    made_folders: tuple[str, ...] = ()
    """Folders that are made on the way."""
    gone_folders: tuple[str, ...] = ()
    """Folders that go where they are empty, once the files have."""
    kept: tuple[str, ...] = ()
    """Files that somebody had changed when it was put back: they stayed."""

    @property
    def stage(self) -> str:
        """The folder beside the files in which they are laid ready."""
        return f".glovebox-promotion-{self.id}"


_ID: Final = re.compile(r"p_[0-9a-f]{20}")
_ADAPTER: Final = TypeAdapter(Promotion)


def new_id() -> str:
    """An id that no other promotion has."""
    return f"p_{secrets.token_hex(10)}"


class Journal:
    """The journal of a state directory, whose lock is held; see ``locked``."""

    def __init__(self, directory: SecretDirectory) -> None:
        """Take the open directory."""
        self._directory = directory
        self.path = directory.path

    def save(self, promotion: Promotion) -> None:
        """Have the journal say this of a promotion, once it outlasts a crash.

        Raises:
            SecretFileError: it cannot be written.
        """
        self._directory.make(f"{promotion.id}.json", _ADAPTER.dump_json(promotion), replace=True)

    def keep(self, promotion: Promotion, number: int, chunks: Iterable[bytes]) -> str:
        """Keep what a file held before, and return its digest once it outlasts a crash."""
        with self._contents(promotion.id, make=True) as contents:
            return contents.write(str(number), chunks, 0o600, None)

    def contents(self, identifier: str, number: int) -> Iterator[bytes]:
        """What a file held before a promotion, in pieces."""
        with self._contents(identifier) as contents:
            yield from contents.chunks(str(number))

    def forget(self, identifier: str) -> None:
        """Remove what files held before."""
        shutil.rmtree(self.path / identifier, ignore_errors=True)

    def all(self) -> list[Promotion]:
        """Every promotion, oldest first.

        Raises:
            SecretFileError: one is not what was written.
        """
        return _read(self._directory)

    def make_room(self) -> None:
        """Forget the oldest promotions."""
        ended = [each for each in self.all() if each.state in ENDED]
        for each in ended[: max(0, len(ended) - MAX_KEPT + 1)]:
            self.forget(each.id)
            self._directory.remove(f"{each.id}.json")

    @contextmanager
    def _contents(self, identifier: str, *, make: bool = False) -> Iterator[TargetFolder]:
        place = self.path / identifier
        if make:
            place.mkdir(mode=0o700, exist_ok=True)
        with opened(place) as found:
            yield found
            if make:
                found.sync(["."])


@contextmanager
def locked(state_dir: Path, *, seconds: float = LOCK_SECONDS) -> Iterator[Journal]:
    """The journal, while nobody else changes anything.

    Args:
        state_dir: the state directory.
        seconds: how long to wait for the lock.

    Raises:
        RefusedError: rule ``promotion.busy``: somebody else has it.
        SecretFileError: it cannot be used safely.
        StateDirectoryError: nor can the state directory.
    """
    with secret_files.opened(state_dir / FOLDER, _KIND) as directory:
        descriptor = os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _take(descriptor, time.monotonic() + seconds)
            yield Journal(directory)
        finally:
            os.close(descriptor)


def listed(state_dir: Path) -> list[Promotion]:
    """Every promotion, oldest first, without waiting for anybody; none where nothing was promoted.

    Raises:
        SecretFileError: one is not what was written.
    """
    if not os.path.lexists(state_dir / FOLDER):
        return []
    with secret_files.opened(state_dir / FOLDER, _KIND) as directory:
        return _read(directory)


def interrupted(promotions: Iterable[Promotion]) -> list[Promotion]:
    """Those that are not at their end."""
    return [each for each in promotions if each.state not in ENDED]


def put_back(promotions: Iterable[Promotion]) -> Callable[[str], str | None]:
    """Tells of a promotion which other put it back."""
    by = {each.of: each.id for each in promotions if each.of and each.state in IN_FORCE}
    return by.get


def _read(directory: SecretDirectory) -> list[Promotion]:
    found = []
    for name in directory.names():
        if not name.endswith(".json"):
            continue
        path = directory.path / name
        try:
            promotion = _ADAPTER.validate_json(directory.read(name, MAX_BYTES), strict=True)
            fits = _ID.fullmatch(promotion.id) is not None and name == f"{promotion.id}.json"
        except ValueError:
            fits = False
        if not fits:  # its id names files and folders, which are then removed
            fix = f"Compare the folder it names with your backup, then remove {path}."
            raise SecretFileError(_KIND, path, "it is not what was written", fix)
        found.append(promotion)
    return sorted(found, key=lambda each: each.made)


def _take(descriptor: int, until: float) -> None:
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        if time.monotonic() > until:
            raise RefusedError("promotion.busy", "Another promotion is under way.", "Try again once it is done.")
        time.sleep(0.02)
