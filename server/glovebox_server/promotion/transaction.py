"""Promotions: their journal, and the writing of files into a folder, all or none.

    promotions/<id>.json   one promotion; replaced as a whole whenever its state changes
    promotions/<id>/<n>    the old content of its file number n

Rule 1  Before a file is touched, its old content is kept, the new content is staged, and the audit log and the
        journal say so, on disk.
Rule 2  A file is exchanged, not overwritten. What comes out must be what was shown, or all files go back.
Rule 3  Putting back never loses a later change: such a file stays, and is named.
Rule 4  ``staging``: no file was touched. ``moving``: some may have been; recovery puts them back. ``moved``: all were,
        and it is in effect. ``undone``: all are as before. After these only staged files are removed: ``applied``,
        ``withdrawn``.
Rule 5  Any change holds the lock of the journal. A promotion that has not ended while the lock is free was interrupted.

Must never be imported here: policy, the command line, anything async.
"""

import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal

from pydantic import AwareDatetime, ConfigDict, Field, TypeAdapter

from glovebox_audit import chain
from glovebox_audit.event import Event
from glovebox_audit.events import PromotionApplied, PromotionRolledBack
from glovebox_audit.place import take_lock
from glovebox_audit.receipts.parts import PromotedFile
from glovebox_sandboxes.contract.errors import DiagnosedError, RefusedError
from glovebox_server import secret_files
from glovebox_server.artifacts.names import quoted
from glovebox_server.promotion.folder import FileState, TargetFolder, opened

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
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_UNSETTLED: Final = ("staging", "moving")

Record = Callable[[Event], None]
"""Returns once an event is on disk, or raises ``AuditError``."""
Content = Callable[[int], Iterable[bytes]]


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


@dataclass(frozen=True, slots=True)
class Journal:
    """The journal of a state directory, with its lock held; see ``locked``."""

    directory: secret_files.SecretDirectory
    _folder: TargetFolder

    def save(self, promotion: Promotion) -> None:
        """Store a promotion durably; raise ``SecretFileError`` if that fails."""
        self.directory.make(f"{promotion.id}.json", encode(promotion), replace=True)

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
        return _read(self.directory)

    def make_room(self) -> None:
        """Remove the oldest promotions beyond ``MAX_KEPT``."""
        ended = [each for each in self.all() if each.state in ENDED]
        for each in ended[: max(0, len(ended) - MAX_KEPT + 1)]:
            self.forget(each.id)
            self.directory.remove(f"{each.id}.json")


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


def encode(promotion: Promotion) -> bytes:
    """Return the content of a promotion's file."""
    return _ADAPTER.dump_json(promotion)


def _read(directory: secret_files.SecretDirectory) -> list[Promotion]:
    found = []
    for name in (each for each in directory.names() if each.endswith(".json")):
        promotion = None
        with suppress(ValueError):
            promotion = _ADAPTER.validate_json(directory.read(name, MAX_BYTES), strict=True)
        if promotion is None or name != f"{promotion.id}.json":
            path = directory.path / name
            fix = f"Compare the folder it names with your backup, then remove {path}."
            raise secret_files.SecretFileError(_KIND, path, "it is not what was written", fix)
        found.append(promotion)
    return sorted(found, key=lambda each: each.made)


def drafted(name: str, folder: TargetFolder, changes: Iterable[Change], of: Promotion | None = None) -> Promotion:
    """Return a promotion with these changes, in the state ``staging``."""
    made, path = tuple(changes), str(folder.path)
    told = [
        [each.name, each.before and each.before.sha256, each.after and [each.after.sha256, each.after.mode]]
        for each in made
    ]
    digest = hashlib.sha256(chain.canonical({"folder": name, "path": path, "changes": told})).hexdigest()
    return Promotion(
        id=f"p_{secrets.token_hex(10)}", state="staging", made=datetime.now(UTC), by=f"local:{os.getuid()}",
        folder=name, path=path, inode=(folder.device, folder.inode), digest=f"sha256:{digest}", changes=made,
        of=of.id if of else None, gone_folders=of.made_folders if of else (),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The outcome of an interrupted promotion."""

    promotion: Promotion
    problem: str = ""

    @property
    def settled(self) -> bool:
        """Return False while files are still to be put back. Staged files may be left, which do no harm."""
        return self.promotion.state not in _UNSETTLED

    def __str__(self) -> str:
        ended = "is in effect" if self.promotion.state in IN_FORCE else "was put back"
        if not self.settled:
            ended = "cannot be put back yet"
        kept = ", ".join(map(quoted, self.promotion.kept))
        told = f"{ended}, except what somebody changed since: {kept}" if kept else ended
        if self.problem and self.settled:
            told += ", but what was laid ready cannot be cleared away yet"
        why = f": {self.problem}" if self.problem else "."
        return f"{self.promotion.id}, into {self.promotion.folder}, was interrupted, and {told}{why}"


def promote(
    folder: TargetFolder, journal: Journal, promotion: Promotion, content: Content, record: Record
) -> Promotion:
    """Make all changes of a promotion in the state ``staging``, or none.

    The result is ``moved`` if the staged files could not be removed, which the next recovery does.

    Raises RefusedError: nothing was changed: a file is not as shown, something is in the way, or a disk is full;
    AuditError: nothing was changed, as it could not be recorded.
    """
    with _translated("preparing the promotion"):
        if changed := [each.name for each in promotion.changes if folder.look(each.name) != each.before]:
            raise _conflict(changed[0], len(changed))
        made = (way for each in promotion.changes if each.after for way in folder.missing(each.name))
        promotion = replace(promotion, made_folders=tuple(dict.fromkeys(made)))
        journal.make_room()
        journal.save(promotion)
    try:
        with _translated("promoting"):
            _stage(folder, journal, promotion, content)
            record(_event(promotion))
            promotion = replace(promotion, state="moving")
            journal.save(promotion)
            for way in promotion.made_folders:
                folder.make(way)
            for number, change in enumerate(promotion.changes):
                _move(folder, promotion, number, change)
            _sync(folder, promotion)
            moved = replace(promotion, state="moved")
            journal.save(moved)
    except BaseException:
        if promotion.state == "moving":
            with suppress(DiagnosedError):  # put back even if it cannot be recorded
                record(_rolled_back(promotion, "failed"))
        try:
            undone = _undo(folder, journal, promotion)
        except (OSError, RefusedError, DiagnosedError) as problem:
            reason = f"{promotion.id} failed, and is not put back yet: {problem}"
            hint = "`glovebox artifact promotions` puts it back once that is repaired."
            raise RefusedError("promotion.interrupted", reason, hint) from problem
        with suppress(OSError, RefusedError, DiagnosedError):  # all is as before, even if this fails
            _clear(folder, journal, undone)
        if undone.kept:
            reason = f"{promotion.id} was put back, except {quoted(undone.kept[0])}, which somebody changed meanwhile."
            hint = f"What it held is in {journal.directory.path / promotion.id}."
            raise RefusedError("promotion.conflict", reason, hint) from None
        raise
    with suppress(OSError, RefusedError, DiagnosedError):  # it is in effect, even if this fails
        return _clear(folder, journal, moved)
    return moved


def recover(journal: Journal, record: Record) -> list[Recovered]:
    """End each interrupted promotion: one that had not made all its changes makes none.

    Raises AuditError: putting back could not be recorded, so it was not done; SecretFileError: the journal cannot be
    read or written.
    """
    found = []
    for promotion in (each for each in journal.all() if each.state not in ENDED):
        settled, problem = promotion, ""
        try:
            with _translated("to bring it to an end", then="."), opened(Path(promotion.path)) as folder:
                require_same(folder, promotion)
                if promotion.state in _UNSETTLED:
                    record(_rolled_back(promotion, "interrupted"))
                    settled = _undo(folder, journal, promotion)
                settled = _clear(folder, journal, settled)
        except RefusedError as refusal:
            problem = refusal.reason
        found.append(Recovered(promotion=settled, problem=problem))
    return found


def require_settled(recovered: Iterable[Recovered]) -> None:
    """Raise ``RefusedError`` if files of another promotion are still to be put back."""
    if not all(each.settled for each in recovered):
        reason = "An interrupted promotion could not be brought to its end; nothing was changed."
        hint = "`glovebox artifact promotions` says why, for the operator to repair it."
        raise RefusedError("promotion.interrupted", reason, hint)


def require_same(folder: TargetFolder, promotion: Promotion) -> None:
    """Raise ``RefusedError`` if another folder took the place of the promotion's folder."""
    if (folder.device, folder.inode) != promotion.inode:
        reason = f"{promotion.path} is another folder than the one that was promoted into; nothing was changed."
        raise RefusedError("promotion.path", reason, "Put that one back in its place.")


def roll_back(journal: Journal, identifier: str, record: Record) -> Promotion:
    """Put back every file of a promotion, and return the promotion that does it.

    Raises RefusedError: nothing was changed: the promotion is unknown, its folder is another, or a file changed since;
    AuditError: nothing was changed, as it could not be recorded.
    """
    known = journal.all()
    promotion = next((each for each in known if each.id == identifier), None)
    if promotion is None:
        hint = "`glovebox artifact promotions` shows those that can be put back."
        raise RefusedError("promotion.unknown", f"There is no promotion {identifier}.", hint)
    by = put_back(known).get(identifier)
    if promotion.of or promotion.state not in IN_FORCE or by:
        told = f"was put back by {by}" if by else standing(promotion, None)
        reason = f"{identifier} {told}; nothing was changed."
        raise RefusedError("promotion.unknown", reason, "Promote the files again.")
    with opened(Path(promotion.path)) as folder:
        require_same(folder, promotion)
        changes = (replace(each, origin=promotion.id, findings=None) for each in _reversed(promotion))
        back = drafted(promotion.folder, folder, changes, promotion)
        return promote(folder, journal, back, lambda number: journal.contents(identifier, number), record)


def standing(promotion: Promotion, by: str | None) -> str:
    """Return the status of a promotion in words; ``by`` is the promotion that put it back."""
    if promotion.state == "withdrawn":
        kept = f", except {', '.join(promotion.kept)}" if promotion.kept else ""
        return f"failed or interrupted, and put back{kept}"
    if promotion.state not in IN_FORCE:
        return promotion.state
    if promotion.of:
        return f"puts {promotion.of} back"
    return f"put back by {by}" if by else "in effect"


def _conflict(name: str, count: int = 1) -> RefusedError:
    more = f" and {count - 1} more" if count > 1 else ""
    reason = f"{quoted(name)}{more} changed since this was shown; nothing was changed."
    return RefusedError("promotion.conflict", reason, "Look at what is there now, then run the command again.")


def _stage(folder: TargetFolder, journal: Journal, promotion: Promotion, content: Content) -> None:
    folder.make(promotion.stage, 0o700)
    for number, change in enumerate(promotion.changes):
        if change.before and journal.keep(promotion, number, folder.chunks(change.name)) != change.before.sha256:
            raise _conflict(change.name)
        if change.after:
            staged = f"{promotion.stage}/{number}"
            if folder.write(staged, content(number), change.after.mode, change.name) != change.after.sha256:
                reason = f"What was kept for {quoted(change.name)} is no longer what it was; nothing was changed."
                raise RefusedError("promotion.content", reason, "Check the disk of the state directory.")
    folder.sync([f"{promotion.stage}/."])


def _move(folder: TargetFolder, promotion: Promotion, number: int, change: Change) -> None:
    staged = f"{promotion.stage}/{number}"
    try:
        _swap(folder, staged, change.name, change)
    except OSError as problem:
        if problem.errno in (errno.EEXIST, errno.ENOENT):
            raise _conflict(change.name) from problem
        raise
    if change.before and folder.look(staged) != change.before:
        raise _conflict(change.name)


def _undo(folder: TargetFolder, journal: Journal, promotion: Promotion) -> Promotion:
    kept: list[str] = []
    if promotion.state == "moving":
        for number, change in reversed(list(enumerate(promotion.changes))):
            if not _put_back(folder, promotion, number, change):
                kept.append(change.name)
        folder.unmake(promotion.made_folders)
        _sync(folder, promotion)
    undone = replace(promotion, state="undone", kept=tuple(kept))
    journal.save(undone)
    return undone


def _put_back(folder: TargetFolder, promotion: Promotion, number: int, change: Change) -> bool:
    """Put a file back; return False if it was changed since."""
    staged = f"{promotion.stage}/{number}"
    if change.after is None:
        if is_moved := folder.is_there(staged) and not folder.is_there(change.name):
            _swap(folder, change.name, staged, change)
        return is_moved or not folder.is_there(staged)
    if _is(folder, staged, change):
        return True  # it was never moved
    if not folder.is_there(change.name):
        return change.before is None  # else it was removed
    _swap(folder, change.name, staged, change)
    if _is(folder, staged, change):
        return True
    _swap(folder, staged, change.name, change)
    return False


def _swap(folder: TargetFolder, one: str, other: str, change: Change) -> None:
    """Bring the new file from ``one`` to ``other``, or only the old one the other way."""
    if change.before and change.after:
        folder.exchange(one, other)
    elif change.after:
        folder.move(one, other)
    else:
        folder.move(other, one)


def _is(folder: TargetFolder, name: str, change: Change) -> bool:
    """Return whether this is the new file; a file that is not regular is not."""
    try:
        return folder.look(name) == change.after
    except RefusedError:
        return False


def _clear(folder: TargetFolder, journal: Journal, promotion: Promotion) -> Promotion:
    folder.clear(promotion.stage)
    ended = replace(promotion, state="applied" if promotion.state == "moved" else "withdrawn")
    if ended.state == "applied":
        folder.unmake(promotion.gone_folders)
    elif not promotion.kept:
        journal.forget(promotion.id)
    journal.save(ended)
    return ended


def _sync(folder: TargetFolder, promotion: Promotion) -> None:
    folder.sync([f"{promotion.stage}/.", *(each.name for each in promotion.changes)])


def _event(promotion: Promotion) -> Event:
    if promotion.of is not None:
        return PromotionRolledBack(
            promotion=promotion.of, rollback=promotion.id, by=promotion.by, folder=promotion.folder,
            because="operator", files=_files(promotion.changes),
        )  # fmt: skip
    return PromotionApplied(
        promotion=promotion.id, by=promotion.by, asked_by=promotion.asked_by, folder=promotion.folder,
        digest=promotion.digest, files=_files(promotion.changes),
    )  # fmt: skip


def _rolled_back(promotion: Promotion, because: str) -> PromotionRolledBack:
    files = _files(_reversed(promotion))
    return PromotionRolledBack(
        promotion=promotion.id, by=f"local:{os.getuid()}", folder=promotion.folder, because=because, files=files
    )


def _reversed(promotion: Promotion) -> list[Change]:
    return [replace(each, before=each.after, after=each.before) for each in promotion.changes]


def _files(changes: Iterable[Change]) -> tuple[PromotedFile, ...]:
    return tuple(
        PromotedFile(
            name=each.name,
            origin=each.origin,
            findings=each.findings,
            before=f"sha256:{each.before.sha256}" if each.before else None,
            after=f"sha256:{each.after.sha256}" if each.after else None,
        )
        for each in changes
    )


@contextmanager
def _translated(doing: str, then: str = "; nothing was changed.") -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        reason = os.strerror(problem.errno or errno.EIO)
        hint = "Free space on the disks of the folder and of the state directory."
        if problem.errno not in _FULL:
            hint = "Make the folder one that you may write to, on a local file system."
        raise RefusedError("promotion.disk", f"The system refused {doing}: {reason}{then}", hint) from problem
