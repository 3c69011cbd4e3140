"""Scans files for active content: the entry of the program that `glovebox artifact scan` runs in a sandbox.

Each look is bounded, and reports what it did not scan.
"""

import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from glovebox_server.guards.redaction.patterns import find_secrets
from glovebox_server.promotion.scanner import archives, documents, pdf, pictures
from glovebox_server.promotion.scanner.budget import MOST_DEPTH, Findings, ScanBudget, ScannedPart, missed, shown

MOST_BYTES = 32 << 20
"""Bytes of a file; the rest is reported as not scanned."""
MOST_FINDINGS = 60
_MOST_COUNTED = 10_000
_MOST_CHARACTERS = 300
_MOST_SECRETS = 1000

_LOOKS: tuple[Callable[[ScannedPart, ScanBudget], Findings], ...] = (
    lambda part, _: documents.markup(part.data),  # of any kind of file: a browser may take each for a page
    pdf.pdf,
    documents.office_xml,
    documents.old_office,
    documents.rtf,
    documents.notebook,
    documents.sheet,
    documents.mail,
    archives.patch,
    pictures.picture,
    archives.zipped,
    archives.tarred,
    archives.packed,
    archives.unread,
)
"""Looks, which yield nothing for a file of another kind; those of linear cost come before those that unpack."""


def scan(data: bytes, name: str) -> list[str]:
    """Return the active content of a file and the kinds of its secrets."""
    found: dict[str, None] = {}
    for each in _inside(ScannedPart(name, data), "", 0, ScanBudget()):
        found.setdefault(each[:_MOST_CHARACTERS])
        if len(found) >= _MOST_COUNTED:
            break
    return list(found)


def _inside(part: ScannedPart, where: str, depth: int, budget: ScanBudget) -> Iterator[str]:
    told = f"in {shown(where)}: " if where else ""
    for look in (_secrets,) if part.is_text else (_secrets, *_LOOKS):
        try:
            for each in look(part, budget):
                if isinstance(each, str):
                    yield told + each
                    continue
                budget.parts -= 1
                why = budget.over() or (depth == MOST_DEPTH and f"deeper than {MOST_DEPTH} files in each other")
                if why:
                    yield told + missed(why)
                    break
                yield from _inside(each, f"{where}/{each.name}" if where else each.name, depth + 1, budget)
        except Exception as problem:  # noqa: BLE001 - hostile bytes, and whatever a library makes of them
            yield f"{told}it cannot be scanned: {type(problem).__name__}"


def _secrets(part: ScannedPart, _: ScanBudget) -> Findings:
    texts = [part.data]
    if b"\0" in part.data:  # UTF-16
        texts.append(part.data.replace(b"\0", b""))
    if part.is_text:  # markup may split words
        texts.append(re.sub(rb"<[^<>]*>", b"", part.data))
    for kind in dict.fromkeys(
        kind for text in texts for _begin, _end, kind in islice(find_secrets(text), _MOST_SECRETS)
    ):
        yield f"a secret: {kind}"


def main(directory: str) -> dict[str, dict[str, object]]:
    """Scan every file below a directory; return the first findings of each, and the number of the others."""
    found: dict[str, dict[str, object]] = {}
    for path in sorted(Path(directory).rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
            name = str(path.relative_to(directory))
            lines = scan(data[:MOST_BYTES], name)
            if len(data) > MOST_BYTES:
                lines.insert(0, f"behind its first {MOST_BYTES} bytes it was not scanned")
            found[name] = {"findings": lines[:MOST_FINDINGS], "more": max(0, len(lines) - MOST_FINDINGS)}
    return found
