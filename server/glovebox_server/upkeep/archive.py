"""The file of a backup: a tar of plain files by known names, and last a manifest of their sizes and digests.

Nothing is compressed, so its length bounds what it unpacks to. It has one form only: what a header says besides a name
and a size, such as a link or a device, is refused.
"""

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, BinaryIO, Final, NoReturn

from glovebox_audit import chain
from glovebox_audit.receipts.dsse import MAX_KEY_BYTES
from glovebox_sandboxes.contract.errors import DiagnosedError
from glovebox_server import secret_files
from glovebox_server.promotion import transaction
from glovebox_server.promotion.folder import MAX_FILE_BYTES
from glovebox_server.stores import database
from glovebox_server.transport import tokens

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
MAX_FILES: Final = 1 << 17
"""Artifacts, tokens and stops are a tenth of that; the rest is for 1.8 TiB of segments."""
UNCHANGED: Final = "Nothing was changed. Restore another backup."
_CHUNK: Final = 1 << 20
_LARGE: Final = 1 << 40
_FORMS: Final = {
    r"audit/(?:audit|segments/\d{6,9})\.jsonl": _LARGE,
    r"audit/head\.json|audit/writers/[\w.:@-]{1,64}\.json": chain.HEAD_BYTES,
    r"artifacts/items/[0-9a-f]{32}/content": _LARGE,
    r"artifacts/items/[0-9a-f]{32}/record\.json": 64 << 10,
    r"governance/(?:approvals|budgets)\.sqlite": database.MAX_MIB << 20,
    r"governance/(?:stops/s|canaries/y)_[0-9a-z]{26}": secret_files.MAX_BYTES,
    r"promotions/p_[0-9a-f]{20}\.json": transaction.MAX_BYTES,
    r"promotions/p_[0-9a-f]{20}/\d{1,6}": MAX_FILE_BYTES,
    r"keys/(?:receipts\.pem|server\.key|notify\.key)": MAX_KEY_BYTES,
    r"tokens/[a-z0-9][a-z0-9-]{0,31}": tokens.MAX_FILE_BYTES,
    re.escape(MANIFEST): MAX_FILES * 256,
}
"""Every name that there may be, and its longest content: none leads out of a directory."""
Files = dict[str, list[Any]]
"""Size and SHA-256 by name."""


def most_bytes(name: str) -> int:
    """Return the longest content of a file of this name; -1 if a backup has no such file."""
    return next((most for form, most in _FORMS.items() if re.fullmatch(form, name, re.ASCII)), -1)


class ArchiveWriter:
    """Writes a backup to an open file, one file after the other."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.files: Files = {}

    def add(self, name: str, size: int, chunks: Iterable[bytes]) -> str:
        """Add a file; return its SHA-256. Raises DiagnosedError if it is not of this size, or does not belong there."""
        if size > most_bytes(name) or name in self.files or len(self.files) >= MAX_FILES:
            reason = f"it is not expected there, with {size} bytes"
            raise DiagnosedError(f"Backing up {name}", reason, "Look at it, and move it away.")
        digest, left = hashlib.sha256(), size
        self._file.write(_header(name, size))
        for chunk in chunks:
            digest.update(chunk)
            self._file.write(chunk)
            left -= len(chunk)
        if left:
            raise DiagnosedError(f"Backing up {name}", "it was changed while it was read", "Run the command again.")
        self._file.write(bytes(-size % tarfile.BLOCKSIZE))
        self.files[name] = [size, digest.hexdigest()]
        return digest.hexdigest()

    def end(self, **told: object) -> None:
        """Write the manifest, and the end."""
        content = json.dumps({"format": FORMAT, **told, "files": self.files}).encode()
        self.add(MANIFEST, len(content), [content])
        self._file.write(bytes(2 * tarfile.BLOCKSIZE))


def unpack(file: BinaryIO, write: Callable[[str, Iterator[bytes]], None]) -> tuple[str, Files]:
    """Give each file's name and content to ``write``; return when it was made, and all files, as its manifest has them.

    Raises DiagnosedError: it is damaged, or holds anything else; what was written until then is to be removed.
    """
    found: Files = {}
    whole = os.fstat(file.fileno()).st_size
    while True:
        name, size = _next(file, whole)
        if name in found or len(found) > MAX_FILES:
            refuse(f"{name} is in it twice, or it holds more than {MAX_FILES} files")
        digest = hashlib.sha256()

        def chunks(size: int = size, look: Callable[[bytes], None] = digest.update) -> Iterator[bytes]:
            for at in range(0, size, _CHUNK):
                look(chunk := _exactly(file, min(size - at, _CHUNK)))
                yield chunk
            _exactly(file, -size % tarfile.BLOCKSIZE)

        if name == MANIFEST:
            content = b"".join(chunks())
            if _exactly(file, 2 * tarfile.BLOCKSIZE).strip(b"\0") or file.read(1):
                refuse("something follows its end")
            return _told(content, found), found
        write(name, chunks())
        found[name] = [size, digest.hexdigest()]


def _told(content: bytes, found: Files) -> str:
    """Compare a manifest with what was found; return when it was made."""
    try:
        told = json.loads(content)
        version, files, made = told["format"], told["files"], datetime.fromisoformat(told["made"]).isoformat()
        apart = [name for name in {**found, **files} if found.get(name) != files.get(name)]
    except (ValueError, LookupError, TypeError, RecursionError):
        refuse("its manifest is none")
    if version != FORMAT:
        refuse("its form is not this version's", "Restore it with the version of Glovebox that made it.")
    if apart:
        refuse(f"{ascii(apart[0])[1:-1][:100]} is not as its manifest says")
    return made


def _next(file: BinaryIO, whole: int) -> tuple[str, int]:
    """Return name and size of the next file, whose content follows."""
    block = _exactly(file, tarfile.BLOCKSIZE)
    try:
        info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
    except (tarfile.HeaderError, ValueError):
        refuse("a header in it is none, or is cut off")
    shown, most = ascii(info.name)[1:-1][:100], most_bytes(info.name)
    if info.type != tarfile.REGTYPE:
        refuse(f"{shown} is a link, a device, a folder, or no plain file")
    if most < 0:
        refuse(f"{shown} is no file of a state directory")
    if not 0 <= info.size <= min(most, whole):
        refuse(f"{shown} claims {info.size} bytes")
    if block != _header(info.name, info.size):
        refuse(f"the header of {shown} is not as it was written")
    return info.name, info.size


def _exactly(file: BinaryIO, size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        refuse("it is cut off")
    return content


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o600
    return info.tobuf(tarfile.GNU_FORMAT)


def refuse(reason: str, fix: str = UNCHANGED) -> NoReturn:
    """Raise DiagnosedError: a backup cannot be restored."""
    raise DiagnosedError("Reading the backup", reason, fix)
