"""Compound files, the containers of old Office documents: their streams, and the files embedded in those.

[MS-CFB] 2.2 to 2.6, as far as needed for streams; [MS-OLEDS] 2.3.6. A broken link between sectors ends the stream.
"""

from collections.abc import Iterator
from struct import Struct

from glovebox_server.promotion.scanner.budget import ScanBudget

MAGIC = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_MOST_STREAMS = 1000
_HEAD = 512
_ENTRY = 128
_STREAM, _ROOT = 2, 5
_SECTOR, _MINI = (9, 12), 6
"""Sector sizes, as powers of two."""
_SMALL = 4096
"""Shorter streams are in the root's stream, in small sectors."""
_LAST = 0xFFFFFFFA
"""This number and higher ones mark an end, or no sector."""
_U16, _U32 = Struct("<H"), Struct("<I")


def streams(data: bytes, budget: ScanBudget) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of each stream, within the budget."""
    if len(data) < _HEAD or _U16.unpack_from(data, 30)[0] not in _SECTOR or _U16.unpack_from(data, 32)[0] != _MINI:
        return
    file = _SectorFile(data)
    directory = file.chain(_U32.unpack_from(data, 48)[0], len(data))
    entries = [directory[at : at + _ENTRY] for at in range(0, len(directory) - _ENTRY + 1, _ENTRY)]
    for entry in entries:
        if entry[66] == _ROOT:
            small = file.chain(_U32.unpack_from(entry, 116)[0], len(data))
            file.small = small
            break
    for entry in [each for each in entries if each[66] == _STREAM][:_MOST_STREAMS]:
        if budget.over():
            return
        name = entry[: max(0, min(64, _U16.unpack_from(entry, 64)[0]) - 2)].decode("utf-16-le", "replace")
        begin, size = _U32.unpack_from(entry, 116)[0], _U32.unpack_from(entry, 120)[0]
        content = file.small_chain(begin, size) if size < _SMALL else file.chain(begin, min(size, len(data)))
        budget.bytes -= len(content)
        yield name, content


def native(data: bytes) -> tuple[str, bytes]:
    """Return name and content of an embedded file."""
    name, _, rest = data[6:].partition(b"\0")
    _, _, rest = rest.partition(b"\0")
    length = _U32.unpack_from(rest, 4)[0] if len(rest) >= 8 else 0
    content = rest[8 + length + 4 :]
    if not length or not content or not name:
        return "object", data
    size = _U32.unpack_from(rest, 8 + length)[0]
    return name.decode("latin-1"), content[:size]


class _SectorFile:
    """The sectors of a compound file, and their order."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._size = 1 << _U16.unpack_from(data, 30)[0]
        self._most = len(data) // self._size + 1
        self.small = b""
        self._next = self._table()
        self._next_small = self.chain(_U32.unpack_from(data, 60)[0], len(data))

    def _table(self) -> bytes:
        numbers = [_U32.unpack_from(self._data, 76 + 4 * each)[0] for each in range(109)]
        at, seen = _U32.unpack_from(self._data, 68)[0], 0
        while at < _LAST and seen < self._most and (sector := self._sector(at)):
            numbers += [_U32.unpack_from(sector, each)[0] for each in range(0, len(sector) - 7, 4)]
            at, seen = _U32.unpack_from(sector, len(sector) - 4)[0], seen + 1
        return b"".join(self._sector(each) for each in numbers[: self._most] if each < _LAST)

    def _sector(self, number: int) -> bytes:
        found = self._data[(number + 1) * self._size : (number + 2) * self._size]
        return found if len(found) == self._size else b""

    def chain(self, begin: int, size: int) -> bytes:
        """Return the content of the sector chain from ``begin``."""
        out: list[bytes] = []
        at = begin
        while at < _LAST and len(out) < min(self._most, -(-size // self._size)) and (sector := self._sector(at)):
            out.append(sector)
            at = _at(self._next, at)
        return b"".join(out)[:size]

    def small_chain(self, begin: int, size: int) -> bytes:
        """Return the content of the chain of small sectors from ``begin``."""
        out: list[bytes] = []
        at, each = begin, 1 << _MINI
        while at < _LAST and len(out) < -(-size // each) and (sector := self.small[at * each : (at + 1) * each]):
            out.append(sector)
            at = _at(self._next_small, at)
        return b"".join(out)[:size]


def _at(table: bytes, number: int) -> int:
    found: int = _U32.unpack_from(table, 4 * number)[0] if 4 * number + 4 <= len(table) else _LAST
    return found
