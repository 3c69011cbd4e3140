"""Remember how far the log was verified: a file beside it, which saves reading and is evidence of nothing.

A process that may write the log may write this file too, so ``glovebox audit verify --all`` ignores it. It counts only
while each segment in it has the same inode, length and times of change.
"""

import contextlib
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from glovebox_audit.chain import Head
from glovebox_audit.segments import files

NAME = "verified.json"

#: Longest file that is read: a thousand segments take 100 KB.
_MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedSegments:
    """The result of a verification of the sealed segments, from the oldest there was."""

    last: int
    end: Head
    stamps: Mapping[int, tuple[int, int, int, int]]
    """Each segment's inode, length, and times of change."""
    calls: tuple[str, ...] = ()
    """Calls under way at its end."""
    forgot: bool = False
    """True if there may be more of them."""
    removed: Mapping[int, str] = field(default_factory=dict)
    """Seals of the segments that are recorded as removed."""
    records: int = 0
    gaps: int = 0
    keys: tuple[str, ...] = ()
    """Ids of the keys that the signatures were checked with."""


_FORM = TypeAdapter(VerifiedSegments)


def stamps(directory: Path, numbers: Iterable[int]) -> dict[int, tuple[int, int, int, int]]:
    """Return the stamps of these segments; raises OSError."""
    found = {number: (directory / files.name(number)).lstat() for number in numbers}
    return {number: (each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for number, each in found.items()}


def load(directory: Path) -> VerifiedSegments | None:
    """Return the result of the last verification, if any."""
    with contextlib.suppress(OSError, ValueError), files.opened(directory / NAME) as descriptor:
        return _FORM.validate_json(os.pread(descriptor, _MAX_BYTES, 0))
    return None


def fits(found: VerifiedSegments, directory: Path, sealed: Iterable[int], keys: Iterable[str]) -> bool:
    """Return whether these segments were verified, with all of these keys."""
    there = [number for number in sealed if number <= found.last]
    known = {number: found.stamps.get(number) for number in there}
    with contextlib.suppress(OSError):
        return (
            there[-1:] == [found.last]
            and sorted(keys) in ([], sorted(found.keys))
            and stamps(directory, there) == known
        )
    return False


def save(directory: Path, found: VerifiedSegments) -> None:
    """Save it if the verifier may write the directory; else it is read again."""
    draft = directory / f".{NAME}-{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        if directory.stat().st_uid != os.geteuid():
            return  # another user's file in it would be in the way of its owner
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_FORM.dump_json(found))
            draft.replace(directory / NAME)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
