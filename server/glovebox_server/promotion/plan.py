"""The plan of a promotion: computed and shown before approval. Nothing is written.

The patch of an overlay is applied exactly or not at all. It names git's ids of the old and of the new content, so a
file that is not the one or does not become the other changes nothing.
Must never be imported here: the command line, anything async.
"""

import difflib
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from glovebox_sandboxes.contract.errors import RefusedError
from glovebox_sandboxes.plural import counted
from glovebox_server import workspace
from glovebox_server.artifacts.diff_form import FILES, MAX_PATCH_BYTES, NO_ID, FilePatch, inflated, read_patch
from glovebox_server.artifacts.media import Sniffer
from glovebox_server.artifacts.names import MAX_NAME_BYTES, CallNames, check_name, name_risks, quoted
from glovebox_server.artifacts.record import Artifact, Disk, expired, id_of, translated
from glovebox_server.promotion.folder import FileState, TargetFolder
from glovebox_server.promotion.scanner import ScanFindings
from glovebox_server.promotion.transaction import Change, Promotion, drafted
from glovebox_server.settings import Settings

MAX_FILES: Final = 256
"""Files of one promotion: as many as one record names, and more than a person reviews."""
_SHOWN_BYTES: Final = 256 * 1024
_SHOWN_LINES: Final = 4000
"""Comparing takes quadratic time at worst: some seconds."""
_CHUNK: Final = 1 << 20
_FEWER: Final = "Promote fewer at a time, or by hand."


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file that would change."""

    change: Change
    artifact: Artifact
    """Source of the change."""
    content: Callable[[], Iterable[bytes]]
    """Yields the new content."""
    media_type: str = ""
    risks: tuple[str, ...] = ()
    findings: ScanFindings | None = None

    def told(self) -> str:
        """Return what happens to a file: its size, its media type, and its mode if that changes."""
        before, after = self.change.before, self.change.after
        if after is None:
            return "goes"
        word = f"changes, {before.bytes} →" if before else "new,"
        told = f"{word} {counted(after.bytes, 'byte')}, {self.media_type}"
        if before and before.mode != after.mode:
            told += f", mode {before.mode:03o} → {after.mode:03o}"
        return told

    def difference(self, folder: TargetFolder) -> list[str] | None:
        """Return the ``diff -u`` lines of a file; None if it is not text, or too large."""
        change = self.change
        if any(state and state.bytes > _SHOWN_BYTES for state in (change.before, change.after)):
            return None
        before = _lines(folder.head(change.name, _SHOWN_BYTES)) if change.before else []
        after = _lines(b"".join(self.content())) if change.after else []
        if before is None or after is None:
            return None
        old, new = (change.name if state else "/dev/null" for state in (change.before, change.after))
        text = "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
            for line in difflib.unified_diff(before, after, old, new)
        )
        return text.split("\n")[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A promotion that is not approved yet."""

    promotion: Promotion
    files: tuple[PlannedFile, ...]
    """In the order of the promotion's changes."""
    same: tuple[str, ...] = ()

    def scanned(self, findings: Mapping[str, ScanFindings]) -> "Planned":
        """Return a copy with the findings of the scanned artifacts, whose counts the record has."""
        files = tuple(replace(each, findings=findings.get(each.artifact.uri)) for each in self.files)
        changes = tuple(replace(each.change, findings=each.findings.count if each.findings else None) for each in files)
        return replace(self, files=files, promotion=replace(self.promotion, changes=changes))

    def content(self, number: int) -> Iterable[bytes]:
        """Return a file's new content."""
        return self.files[number].content()


def target(settings: Settings, into: dict[str, str], name: str) -> Path:
    """Return the policy's folder of that name; refuse one that is unknown or unsuitable (``promotion.folder``)."""
    if name not in into:
        example = '`into = { reports = "/srv/reports" }` in `[promote]` of policy.toml would name one.'
        named = f"It names {', '.join(into)}." if into else example
        raise RefusedError("promotion.folder", f"The policy names no folder {name!r} to promote into.", named)
    found = workspace.place(Path(into[name]))
    reason = workspace.objection(found, workspace.own(settings))
    if not reason and not found.path.is_dir():
        reason = "is not a directory"
    if reason:
        raise RefusedError("promotion.folder", f"{found.path} {reason}.", f"Name another as `{name}` in `[promote]`.")
    return found.path


def planned(
    settings: Settings, uris: Sequence[str], into: str, folder: TargetFolder, *, apply: bool = False
) -> Planned:
    """Compute what would change in ``folder``, named ``into``; with ``apply`` the one artifact is a patch.

    Raises RefusedError: an artifact is unknown, two have one name, the patch cannot be applied, or something is in the
    way.
    """
    disk = Disk(settings.state_dir / "artifacts", max_bytes_total=0, parts=1)
    now = datetime.now(UTC)
    artifacts = []
    for uri in dict.fromkeys(uris):
        identifier = id_of(uri)
        with translated("reading an artifact"):
            artifact = disk.load(identifier) if identifier else None
        if artifact is None or expired(artifact, now):
            raise unknown(uri)
        artifacts.append(artifact)
    _require_few(len(artifacts))
    changing, same = [], []
    for each in _patched(disk, artifacts[0], folder) if apply else _copied(disk, artifacts, folder):
        change = each.change
        if change.after == (change.before and replace(change.before, mode=change.before.mode & 0o777)):
            same.append(change.name)
        else:
            changing.append(each)
    _require_few(len(changing))
    changing.sort(key=lambda each: each.change.name)
    promotion = drafted(into, folder, (each.change for each in changing))
    return Planned(promotion=promotion, files=tuple(changing), same=tuple(sorted(same)))


def _require_few(count: int) -> None:
    if count > MAX_FILES:
        raise RefusedError("promotion.files", f"{count} files are more than {MAX_FILES}.", _FEWER)


def _after(before: FileState | None, sha256: str, size: int, *, runs: bool | None = None) -> FileState:
    """Return a file's new state: execute permission follows read permission, or is removed for all."""
    mask = os.umask(0o077)
    os.umask(mask)
    mode = before.mode & 0o777 if before else 0o666 & ~mask
    if runs is not None:
        mode = mode | (mode & 0o444) >> 2 if runs else mode & ~0o111
    return FileState(sha256=sha256, bytes=size, mode=mode)


def _copied(disk: Disk, artifacts: Sequence[Artifact], folder: TargetFolder) -> Iterator[PlannedFile]:
    names = CallNames()
    for each in artifacts:
        check_name(each.name)
        names.add(each.name)
        before = folder.look(each.name)
        change = Change(name=each.name, before=before, after=_after(before, each.sha256, each.bytes), origin=each.uri)
        content = partial(_chunks, disk, each)
        yield PlannedFile(change=change, artifact=each, content=content, media_type=each.media_type, risks=each.risks)


def _patched(disk: Disk, artifact: Artifact, folder: TargetFolder) -> Iterator[PlannedFile]:
    states: dict[str, FileState | None] = {}

    def read(name: str) -> bytes | None:
        states[name] = state = folder.look(name)
        if state is None:
            return None
        if state.bytes > MAX_MADE_BYTES:
            raise RefusedError("promotion.path", f"{quoted(name)} is too large to be patched.", "Change it by hand.")
        content = folder.head(name, state.bytes)
        if hashlib.sha256(content).hexdigest() != state.sha256:
            reason = f"{quoted(name)} is being changed right now; nothing was changed."
            raise RefusedError("promotion.conflict", reason, "Run the command again.")
        return content

    if artifact.bytes > MAX_PATCH_BYTES:
        raise RefusedError("promotion.patch", "The patch is too large; nothing was changed.", "Apply it by hand.")
    for name, content, runs in made(b"".join(_chunks(disk, artifact)), read):
        before, after, media_type = states[name], None, ""
        risks: tuple[str, ...] = ()
        if content is not None:
            after = _after(before, hashlib.sha256(content).hexdigest(), len(content), runs=runs)
            sniffer = Sniffer()
            sniffer.feed(content)
            media_type, found = sniffer.finish(name)
            risks = (*name_risks(name), *found, *("it may be run as a program",) * bool(after.mode & 0o111))
        change = Change(name=name, before=before, after=after, origin=artifact.uri)
        whole = partial(iter, [content or b""])
        yield PlannedFile(change=change, artifact=artifact, content=whole, media_type=media_type, risks=risks)


def unknown(uri: str) -> RefusedError:
    """Return the refusal for an unknown artifact."""
    hint = "`glovebox artifact list` shows those there are."
    return RefusedError("artifacts.unknown", f"There is no artifact at {quoted(uri)}: it expired, or never was.", hint)


def _chunks(disk: Disk, artifact: Artifact) -> Iterator[bytes]:
    """Yield an artifact's content; raise ``RefusedError`` after the last piece if it was changed."""
    with translated("reading an artifact"):
        descriptor = disk.open(artifact)
    if descriptor is None:
        raise unknown(artifact.uri)
    digest = hashlib.sha256()
    with os.fdopen(descriptor, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            yield chunk
    if digest.hexdigest() != artifact.sha256:
        reason = f"What was kept of {quoted(artifact.name)} is no longer what it was; nothing was changed."
        raise RefusedError("promotion.content", reason, "Check the disk of the state directory.")


def _lines(content: bytes) -> list[str] | None:
    if b"\0" in content:
        return None
    try:
        # Only a line feed ends a line, and is kept: splitting at other characters would hide a difference.
        lines = [line.decode() for line in io.BytesIO(content)]
    except UnicodeDecodeError:
        return None
    return lines if len(lines) <= _SHOWN_LINES else None


MAX_MADE_BYTES: Final = 64 << 20
_NEW_LINE: Final = re.compile(rb"^[+ ](.*\n)(\\)?", re.MULTILINE)
"""A line of a hunk's new file, and a mark that its line feed does not count."""

Read = Callable[[str], bytes | None]


class Made(NamedTuple):
    """A file as a patch makes it: its new content, None to remove it, and its executable bit, None if unchanged."""

    name: str
    content: bytes | None
    runs: bool | None


def made(patch: bytes, read: Read) -> list[Made]:
    """Apply a patch, any bytes, to what ``read`` returns.

    Raises RefusedError: rule ``promotion.patch``: no overlay wrote it so. Rule ``promotion.conflict``: a file is not
    what the program was given.
    """
    try:
        files = list(read_patch(patch))
    except ValueError:
        files = []
    if not files:
        raise _unfit("it is no patch as an overlay writes it, or is cut off, or too large")
    found: dict[str, Made] = {}
    size = 0
    for file in files:
        if file.name in found:
            raise _unfit(f"it changes {quoted(file.name)} twice")
        found[file.name] = one = _applied(file, read)
        size += len(one.content or b"")
        if size > MAX_MADE_BYTES:
            raise _unfit(f"it makes more than {MAX_MADE_BYTES} bytes")
    return list(found.values())


def _applied(file: FilePatch, read: Read) -> Made:
    name, head, _ = file
    if len(name.encode()) > MAX_NAME_BYTES or any(part.casefold() == ".git" for part in name.split("/")):
        raise _unfit(f"{quoted(name)} is too long, or belongs to git")
    mode = head["changed"] or (head["mode"] if head["how"] == b"new" else None)
    content = read(name)
    if _id(content) != head["after"]:
        if _id(content) != head["before"]:
            what = "it is not there" if content is None else "it is not what the program was given"
            hint = "Run the program again on what is there now, or merge by hand."
            raise RefusedError("promotion.conflict", f"{quoted(name)}: {what}; nothing was changed.", hint)
        content = None if head["how"] == b"deleted" else _content(file, content or b"")
        if _id(content) != head["after"]:
            raise _unfit(f"{quoted(name)} does not become what it says")
    return Made(name, content, None if mode is None else mode == FILES[1])


def _content(file: FilePatch, old: bytes) -> bytes:
    """Return what a file becomes; any bytes where the patch is false, which its id shows."""
    if file.head["packed"]:
        content, is_whole = inflated(file.parts[0]["lines"], min(int(file.parts[0]["size"]), MAX_MADE_BYTES) + 1)
        return content if is_whole else b""
    lines, out, at = list(io.BytesIO(old)), bytearray(), 0
    for hunk in file.parts:
        begin = int(hunk["first"]) - (hunk["old"] != b"0")
        if begin < at:
            return b""  # else a few hunks could copy the file many times
        out += b"".join(lines[at:begin])
        out += b"".join(line[:-1] if endless else line for line, endless in _NEW_LINE.findall(hunk["lines"]))
        at = begin + int(hunk["old"] or 1)
    return bytes(out) + b"".join(lines[at:])


def _id(content: bytes | None) -> bytes:
    """Return git's id of a file's content."""
    if content is None:
        return NO_ID
    digest = hashlib.sha1(b"blob %d\0" % len(content), usedforsecurity=False)
    digest.update(content)
    return digest.hexdigest().encode()


def _unfit(reason: str) -> RefusedError:
    hint = "Only a whole `changes.patch` of an overlay is applied; apply another by hand."
    return RefusedError("promotion.patch", f"The patch was not applied: {reason}; nothing was changed.", hint)
