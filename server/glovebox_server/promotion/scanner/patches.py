"""Patches of git: binary files in them."""

import re
import zlib

from glovebox_server.artifacts.diff_form import unpacked
from glovebox_server.promotion.scanner.budget import Findings, ScanBudget, ScannedPart, shown

_FILE = re.compile(rb"^diff --git (?:.* )?\"?b/(.+?)\"?\r?$|^GIT binary patch\r?$", re.MULTILINE)
_HALF = re.compile(rb"(literal|delta) (\d{1,10})\r?\n((?:[A-Za-z][!-~]{5,65}\r?\n)*)")


def is_patch(part: ScannedPart) -> bool:
    """Return whether a patch has binary files."""
    return b"GIT binary patch" in part.data


def patch(part: ScannedPart, budget: ScanBudget) -> Findings:
    """Yield the binary files, and the content of those that are complete. gitformat, base85.c and apply.c of git."""
    name = "a file"
    for found in _FILE.finditer(part.data):
        if found[1] is not None:
            name = found[1].decode("utf-8", "replace")
            continue
        yield f"patch: {shown(name)} is no text"
        half = _HALF.match(part.data, found.end() + 1)
        if why := budget.over():
            yield f"patch: {shown(name)} was not looked into: {why}"
        elif half is None or half[1] == b"delta":
            yield f"patch: {shown(name)} is a difference of two files that are no text, which was not looked into"
        else:
            content, whole = _content(half[3], budget)
            if not whole or len(content) != int(half[2]):
                yield f"patch: {shown(name)} was not looked into to its end"
            yield ScannedPart(name, content)


def _content(lines: bytes, budget: ScanBudget) -> tuple[bytes, bool]:
    unpacker, out = zlib.decompressobj(), bytearray()
    try:
        for packed in unpacked(lines):
            out += unpacker.decompress(packed, budget.bytes + 1 - len(out))
            if unpacker.unconsumed_tail or len(out) > budget.bytes:
                break
    except (ValueError, zlib.error):
        return bytes(out), False
    finally:
        budget.bytes -= len(out)
    return bytes(out), unpacker.eof
