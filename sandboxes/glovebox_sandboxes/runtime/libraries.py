"""Copies the host's shared libraries that a runtime's programs need into its tree.

ldd(1) lists the interpreter's. It has the dynamic linker load a file, which a malicious file could exploit; so the
needs of packages are read from their files, see elf(5).
"""

import os
import re
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from glovebox_sandboxes.runtime.packages import output

_ELF = b"\x7fELF\x02\x01"
"""64 bits, little-endian: locks exist for nothing else."""
_NAME = re.compile(rb"([A-Za-z0-9_][A-Za-z0-9_.+-]{0,127})\0")
"""Of a library, and no path: it is searched in the host's directories."""
_HEADERS, _ENTRIES = 64, 1024
"""Most headers and entries read of one file: linkers make a dozen, and about fifty."""
_LOAD, _DYNAMIC, _NEEDED, _STRINGS = 1, 2, 1, 5
_ELSEWHERE = ("/usr/lib64", "/usr/lib", "/lib64", "/lib")


async def copy(root: Path, originals: list[str]) -> None:
    """Copy libraries from outside the tree to the dynamic linker's directory, beside the C library.

    Not to their original place: a Python below a home directory has a libpython there, and no such place exists inside.
    ``originals`` are the interpreter and its modules on the host: a copy does not find the libraries beside those.
    """
    found = await _linked(originals, root)
    beside = next((path.parent for name, path in found.items() if name.startswith("libc.so")), Path("/usr/lib"))
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]  # noqa: ASYNC240 - once
    own = {path.name for path in files}
    wanted = {name for path in files for name in needed(path)} - own - found.keys()
    places = [Path(beside), *map(Path, _ELSEWHERE)]
    there = [
        path for name in sorted(wanted) for path in [place / name for place in places if _is_elf(place / name)][:1]
    ]
    found |= {path.name: path for path in there} | await _linked([str(path) for path in there], root)
    for name, path in found.items():
        target = root / _merged(beside / name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)


async def _linked(programs: list[str], root: Path) -> dict[str, Path]:
    """Return what the dynamic linker loads with each of the host's own files, by name."""
    # ldd ends with 1 if one of the files is not dynamic; only its output counts.
    return _named(await output(["ldd", *programs], check=False), root) if programs else {}


def _named(told: str, root: Path) -> dict[str, Path]:
    """Return the path of each library outside the tree, by the name it is searched by."""
    found = {}
    for line in told.splitlines():
        name, arrow, place = line.strip().rpartition("=> ")
        path = Path(place.partition(" (")[0])
        if path.is_absolute() and not path.is_relative_to(root) and path.is_file():
            # The linker itself has no other name than its path.
            found[name.strip() if arrow else str(path)] = path
    return found


def needed(path: Path) -> Iterable[str]:
    """Return the DT_NEEDED names of an ELF file; empty if it is not ELF, or broken."""
    with path.open("rb") as file:
        if file.read(len(_ELF)) != _ELF:
            return ()
        try:
            return tuple(_needed(file.fileno()))
        except (struct.error, ValueError, OverflowError, OSError):
            return ()


def _needed(file: int) -> Iterator[str]:
    (headers,) = struct.unpack("<Q", os.pread(file, 8, 0x20))
    size, count = struct.unpack("<HH", os.pread(file, 4, 0x36))
    segments = [
        struct.unpack("<II6Q", os.pread(file, 56, headers + size * each)) for each in range(min(count, _HEADERS))
    ]
    for kind, _, offset, *_, length, _, _ in segments:
        if kind != _DYNAMIC:
            continue
        table = os.pread(file, 16 * min(length // 16, _ENTRIES), offset)
        entries = list(struct.iter_unpack("<QQ", table[: len(table) // 16 * 16]))
        tables = [value for tag, value in entries if tag == _STRINGS]
        loaded = [segment for segment in segments if segment[0] == _LOAD]
        # Offset of the names in the file: the table of entries has their address in memory.
        places = [at - each[3] + each[2] for at in tables for each in loaded if each[3] <= at < each[3] + each[5]]
        for tag, value in entries:
            if tag == _NEEDED and places:
                name = _NAME.match(os.pread(file, 256, places[0] + value))
                if name:
                    yield name[1].decode()


def _merged(path: Path) -> str:
    """Return the path with /lib as /usr/lib, as on Debian and in the tree."""
    text = str(path)
    return text[1:] if text.startswith("/usr/") else f"usr{text}" if text.startswith("/lib") else text[1:]


def _is_elf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_ELF)) == _ELF
    except OSError:
        return False
