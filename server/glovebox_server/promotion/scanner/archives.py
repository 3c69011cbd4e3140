"""Archives and compressed files: escaping names, links, executables, bombs, and the files inside."""

import bz2
import gzip
import io
import lzma
import re
import tarfile
import zipfile
from typing import cast

from glovebox_server.artifacts.diff_form import inflated
from glovebox_server.promotion.scanner.budget import Findings, ScanBudget, ScannedPart, missed, shown
from glovebox_server.promotion.scanner.documents import is_no_page, is_office, office, office_names

MOST_ENTRIES = 2000
_MOST_LISTED = 50_000
"""Entries of a zip that are read: the library keeps some 600 bytes of each."""
_RATIO = 200
_EXPANDS = 8 << 20
_LINK = 0xA
"""File type of a symbolic link, in the mode of a zip entry."""
_BLOCK = 512
_LOCAL = b"PK\x03\x04"
_LOCAL_BYTES = 30
_ENTRY = b"PK\x01\x02"
_END = b"PK\x05\x06"
_LAST = 65_557
"""A zip's end record and its longest comment: programs read the zip despite any data before it."""

_RUNS = re.compile(
    r"\.(?:exe|dll|so|dylib|sh|bash|bat|cmd|ps1|js|vbs|scr|lnk|jar|py|pyc|pth|desktop|app|msi|apk)$", re.IGNORECASE
)
_PACKED = re.compile(
    r"\.(?:zip|jar|whl|tar|tgz|gz|bz2|tbz2?|xz|txz|7z|rar|zst|iso|cab|lz4|br|z|lzh|arj)$", re.IGNORECASE
)
_UNREAD = re.compile(
    rb"7z\xbc\xaf\x27\x1c|Rar!\x1a\x07|\x28\xb5\x2f\xfd|MSCF\0{4}|!<arch>\n|\x04\x22\x4d\x18|\x02\x21\x4c\x18"
    rb"|\xed\xab\xee\xdb|\xc7\x71|\x1f\x9d|\x1f\xa0|LZIP\x01|xar!\0|MSWIM\0{3}|\x60\xea"
    rb"|07070[127][0-9A-Fa-f]{70}|..-lh",
    re.DOTALL,
)
"""Magic numbers of archives that are not read here: 7z, RAR, Zstandard, cabinet, ar, LZ4 (two), RPM, old cpio,
compress (two), lzip, xar, WIM, ARJ, cpio, LHA."""
_OUTER = re.compile(r"\.(?:(?P<tar>t)(?:gz|bz2?|xz)|gz|bz2|xz|lzma)$", re.IGNORECASE)


def unread(part: ScannedPart, _: ScanBudget) -> Findings:
    """Yield that it is an archive, by content or name, that cannot be unpacked here."""
    if not (_is_zip(part) or _is_tar(part) or _is_packed(part)) and (
        _UNREAD.match(part.data) or part.data[32769:32774] == b"CD001" or _PACKED.search(part.name)
    ):
        yield "it is an archive, which was not scanned"


def _is_zip(part: ScannedPart) -> bool:
    """Return whether programs take it for a zip, even after other data."""
    return part.data.startswith(b"PK") or (_END in part.data[-_LAST:] and not _is_tar(part))


def zipped(part: ScannedPart, budget: ScanBudget) -> Findings:
    """Yield the findings of a zip, and its files."""
    if not _is_zip(part):
        return
    if part.data.count(_ENTRY) > _MOST_LISTED:
        yield f"archive: more than {_MOST_LISTED} entries, and so it was not scanned"
        return
    with zipfile.ZipFile(io.BytesIO(part.data)) as archive:
        entries = archive.infolist()
        in_office = is_office(each.filename for each in entries)
        sized = [(each.filename, each.file_size, each.external_attr >> 28 != _LINK) for each in entries]
        yield from _entries("Office document" if in_office else "archive", sized, len(part.data))
        if any(each.flag_bits & 1 for each in entries):
            yield "archive: entries that are encrypted"
        if in_office:
            yield from office_names(each.filename for each in entries[:MOST_ENTRIES])
        for each in entries[:MOST_ENTRIES]:
            if each.is_dir() or each.flag_bits & 1:
                continue
            data, why = _unzipped(archive, each, budget)
            if why:
                yield f"archive: {shown(each.filename)} was not scanned to its end: {why}"
            if in_office:
                yield from office(each.filename, data)
            yield ScannedPart(each.filename, data, is_text=in_office and is_no_page(each.filename, data))
        if _has_unnamed(part.data, entries):
            yield "archive: entries that its directory does not name, and which were not scanned"


def _unzipped(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, budget: ScanBudget) -> tuple[bytes, str]:
    try:
        with cast("zipfile.ZipExtFile", archive.open(entry)) as file:
            return budget.read(file.read1)
    except Exception as problem:  # noqa: BLE001 - of one entry; the others are scanned
        return b"", f"it cannot be unpacked ({type(problem).__name__})"


def _has_unnamed(data: bytes, entries: list[zipfile.ZipInfo]) -> bool:
    """Return whether unlisted entries are in the file: some programs read a zip from its beginning."""
    at = 0
    for each in sorted(entries, key=lambda each: each.header_offset):
        if _LOCAL in data[at : each.header_offset]:
            return True
        names = data[each.header_offset + 26 : each.header_offset + _LOCAL_BYTES]  # lengths of its name and extra field
        size = int.from_bytes(names[:2], "little") + int.from_bytes(names[2:], "little") + each.compress_size
        at = max(at, each.header_offset + _LOCAL_BYTES + size)
    return _LOCAL in data[at:]


_CUT = "archive: it cannot be scanned to its end: an entry leads backwards, or is none"


def _is_tar(part: ScannedPart) -> bool:
    """Return whether it begins with a tar entry of the right checksum."""
    try:
        tarfile.TarInfo.frombuf(part.data[:_BLOCK], "utf-8", "surrogateescape")
    except Exception:  # noqa: BLE001 - a library raises anything on hostile bytes
        return False
    return True


def tarred(part: ScannedPart, budget: ScanBudget) -> Findings:
    """Yield the findings of a tar, and its files."""
    if not _is_tar(part):
        return
    with tarfile.open(fileobj=io.BytesIO(part.data), mode="r:") as archive:
        members, at = [], -1
        while (each := archive.next()) is not None:
            # A negative size leads backwards, in an endless loop (CVE-2025-8194).
            if archive.offset <= at or each.size < 0:
                yield _CUT
                break
            at = archive.offset
            members.append(each)
            if len(members) > MOST_ENTRIES or budget.over():
                break
        else:  # newer versions of the library take such an entry, or an invalid one, for the end
            if part.data[archive.offset :].strip(b"\0"):
                yield _CUT
        sized = [(each.name, each.size, (each.isreg() and not each.issparse()) or each.isdir()) for each in members]
        yield from _entries("archive", sized, len(part.data))
        for each in members[:MOST_ENTRIES]:
            if each.isreg() and not each.issparse():  # a sparse file may claim any size
                yield ScannedPart(each.name, part.data[each.offset_data : each.offset_data + each.size])


def _is_packed(part: ScannedPart) -> bool:
    return part.data.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0")) or part.name.casefold().endswith(".lzma")


def packed(part: ScannedPart, budget: ScanBudget) -> Findings:
    """Yield the findings of one compressed file, and its content."""
    if not _is_packed(part):
        return
    source = io.BytesIO(part.data)
    with (
        gzip.GzipFile(fileobj=source) if part.data.startswith(b"\x1f\x8b")
        else bz2.BZ2File(source) if part.data.startswith(b"BZh")
        else lzma.LZMAFile(source)
    ) as file:  # fmt: skip
        data, why = budget.read(file.read1)
    if why:
        yield f"archive: {missed(why)}"
    if len(data) > _RATIO * len(part.data) + _EXPANDS:
        yield f"archive: unpacks to more than {_RATIO} times its size"
    yield ScannedPart(_OUTER.sub(lambda found: ".tar" if found["tar"] else "", part.name), data)


def _entries(what: str, entries: list[tuple[str, int, bool]], packed: int) -> Findings:
    """Yield the findings of names, sizes, and whether each is a plain file or a folder."""
    total = sum(size for _, size, _ in entries)
    if what == "archive":
        yield f"archive: {len(entries)} entries, {total} bytes unpacked"
    if len(entries) > MOST_ENTRIES:
        yield f"{what}: more than {MOST_ENTRIES} entries, of which the rest was not looked at"
    if total > _RATIO * packed + _EXPANDS:
        yield f"{what}: unpacks to more than {_RATIO} times its size"
    for name, _, is_plain in entries[:MOST_ENTRIES]:
        parts = name.replace("\\", "/").split("/")
        if ".." in parts or name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name):
            yield f"{what}: {shown(name)} unpacks outside of its folder"
        if not is_plain:
            yield f"{what}: {shown(name)} is a link or no plain file"
        if _RUNS.search(name) or any(part.startswith(".") and part not in {".", ".rels"} for part in parts):
            yield f"{what}: {shown(name)} may be run or obeyed"


_FILE = re.compile(rb"^diff --git (?:.* )?\"?b/(.+?)\"?\r?$|^GIT binary patch\r?$", re.MULTILINE)
_HALF = re.compile(rb"(literal|delta) (\d{1,10})\r?\n((?:[A-Za-z][!-~]{5,65}\r?\n)*)")


def patch(part: ScannedPart, budget: ScanBudget) -> Findings:
    """Yield a patch's binary files, and the content of those that are complete. base85.c and apply.c of git."""
    if b"GIT binary patch" not in part.data:
        return
    name = "a file"
    for found in _FILE.finditer(part.data):
        if found[1] is not None:
            name = found[1].decode("utf-8", "replace")
            continue
        yield f"patch: {shown(name)} is no text"
        half = _HALF.match(part.data, found.end() + 1)
        if why := budget.over():
            yield f"patch: {shown(name)} was not scanned: {why}"
        elif half is None or half[1] == b"delta":
            yield f"patch: {shown(name)} is a difference of two files that are no text, which was not scanned"
        else:
            content, whole = inflated(half[3], budget.bytes + 1)
            budget.bytes -= len(content)
            if not whole or len(content) != int(half[2]):
                yield f"patch: {shown(name)} was not scanned to its end"
            yield ScannedPart(name, content)
