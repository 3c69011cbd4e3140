"""Copies the workspace to a place that the program may change, and remembers the original.

The original stays mounted read-only; the copy lies in a tmpfs and disappears with the sandbox. Folders of tools, which
are large and never part of a patch, are links to the original. Differences leave as a patch in git's format
(``changes``). Names, sizes and contents of both are hostile. Standard library only.
"""

from __future__ import annotations

import os
import stat
from _blake2 import blake2b

from _glovebox_guest.files.output import MAX_LOOK, opened, walk
from _glovebox_guest.workspace.tree import PASSED_OVER

MAX_DEPTH = 32
"""Nested folders: deeper trees are made to hurt programs that walk them."""
PAGE = 4096
"""Bytes: the minimum of an entry in a tmpfs; sizes are counted in it."""
_CHUNK = 1 << 20


Copied = tuple[str, bool, bytes, int]
"""``file`` or ``link``, whether its owner may execute it, digest of the content (or target), size."""


class Original:
    """Copied entries, and those that could not be copied."""

    __slots__ = ("absent", "files", "names")

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.files: dict[str, Copied] = {}
        self.absent: dict[str, str] = {}
        """Name → why it has no copy. Its absence is no change."""


def copy(source: str, target: str, *, max_files: int, max_bytes: int) -> Original:
    """Copy every folder, regular file and symbolic link below ``source``; links as links, never followed.

    A folder of PASSED_OVER becomes a link to the original: visible, and not to be changed. Contents, times, and the
    owner's execute permission are kept. Special and unreadable files have no copy.

    Raises ValueError: there are more entries or bytes than may be copied, or it cannot be read; nothing was copied;
    OSError: the copy could not be written.
    """
    if not os.access(source, os.R_OK | os.X_OK):  # or it would look as if it were empty
        raise ValueError("it cannot be read (permission denied)")
    found = _counted(source, max_files, max_bytes)
    original = Original([name for name, _ in found])
    for name, status in found:
        path, place = os.path.join(source, name), os.path.join(target, name)
        try:
            if os.path.dirname(name) in original.absent:
                original.absent[name] = "its folder cannot be read"
            elif stat.S_ISLNK(status.st_mode) or _left(name, status):
                link = os.readlink(path) if stat.S_ISLNK(status.st_mode) else path
                os.symlink(link, place)
                original.files[name] = ("link", False, os.fsencode(link), 0)
            elif stat.S_ISDIR(status.st_mode):
                os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
                os.mkdir(place, 0o755)
            elif stat.S_ISREG(status.st_mode):
                runs = bool(status.st_mode & stat.S_IXUSR)
                original.files[name] = ("file", runs, *_copy_file(path, place, status, runs=runs))
            else:
                original.absent[name] = "it is not a regular file"
        except PermissionError:
            original.absent[name] = "it cannot be read"
        except FileNotFoundError:
            original.absent[name] = "it went away meanwhile"
    return original


def _left(name: str, status: os.stat_result) -> bool:
    return os.path.basename(name) in PASSED_OVER and stat.S_ISDIR(status.st_mode)


def _counted(source: str, max_files: int, max_bytes: int) -> list[tuple[str, os.stat_result]]:
    """Return every entry, folders before their entries, if all may be copied."""
    found = []
    size = 0
    for name, status in walk(
        source, into=lambda name, status: not _left(name, status) and name.count("/") <= MAX_DEPTH
    ):
        found.append((name, status))
        pages = -(-status.st_size // PAGE) if stat.S_ISREG(status.st_mode) else 1
        size += max(1, pages) * PAGE
        if len(found) >= MAX_LOOK:
            break
        if name.count("/") >= MAX_DEPTH:
            raise ValueError(f"it has folders more than {MAX_DEPTH} deep")
    if len(found) > max_files or size > max_bytes:
        least = "at least " if len(found) >= MAX_LOOK else ""
        raise ValueError(
            f"it holds {least}{len(found)} files and folders with {size} bytes (in pages of {PAGE}), "
            f"and {max_files} with {max_bytes} bytes may be copied"
        )
    return found


def _copy_file(path: str, place: str, status: os.stat_result, *, runs: bool) -> tuple[bytes, int]:
    # Not one byte more than was counted, whatever the host does to the file meanwhile.
    remaining = status.st_size
    digest = blake2b()
    with opened(path) as source, open(place, "xb") as target:
        while remaining and (data := source.read(min(remaining, _CHUNK))):
            remaining -= len(data)
            digest.update(data)
            target.write(data)
        target.flush()
        os.fchmod(target.fileno(), 0o755 if runs else 0o644)
        os.utime(target.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    return digest.digest(), status.st_size - remaining


def digest_of(path: str) -> bytes:
    """Return the digest of a regular file's content. Raises OSError."""
    digest = blake2b()
    with opened(path) as file:
        while data := file.read(_CHUNK):
            digest.update(data)
    return digest.digest()
