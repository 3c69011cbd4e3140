"""Looks into files for what acts when they are opened: the program that `glovebox artifact scan` runs in a sandbox.

Its text is sent there as a call's program, so that no hostile byte is parsed outside. Each look is bounded; what was
not looked at is said. Standard library only; must never be called by anything of ours on the host but its tests.
"""

import io
import json
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

MOST_BYTES = 32 << 20
"""Of a file; of what lies behind, nothing is said but that."""
MOST_ENTRIES = 2000
MOST_STREAMS = 2000
MOST_UNPACKED = 8 << 20
"""Bytes of an archive's entries, or of a PDF's streams, that are unpacked to be looked at."""
MOST_FINDINGS = 60
MOST_NAME = 80
_RATIO = 200
_LINK = 0xA
"""The kind of a symbolic link in the mode of a zip's entry."""

Found = Iterator[str]
Pattern = tuple[str, str]
"""Kind of a secret, and its form."""

_MARKUP = (
    ("a script", re.compile(rb"<(?:\w+:)?script\b", re.IGNORECASE)),
    ("a handler of events", re.compile(rb"<[^<>]{1,500}\son[a-z]{3,20}\s*=", re.IGNORECASE)),
    ("a javascript: address", re.compile(rb"j\s*a\s*v\s*a\s*s\s*c\s*r\s*i\s*p\s*t\s*:", re.IGNORECASE)),
    ("a frame or an embedded object", re.compile(rb"<(?:iframe|frame|object|embed|applet|portal)\b", re.IGNORECASE)),
    ("other markup inside a drawing", re.compile(rb"<(?:\w+:)?foreignObject\b", re.IGNORECASE)),
    ("a page that leads elsewhere by itself", re.compile(rb"<meta\b[^>]{0,300}\brefresh\b", re.IGNORECASE)),
    ("a form that sends", re.compile(rb"<form\b", re.IGNORECASE)),
    ("what is loaded from elsewhere",
     re.compile(rb"(?:\b(?:src|srcset|data|poster|background)|<(?:link|image|use|base)\b[^>]{0,300}\bhref)\s*=\s*[\"']?"
                rb"\s*(?:https?:)?//|url\(\s*[\"']?(?:https?:)?//|@import", re.IGNORECASE)),
    ("an entity of XML", re.compile(rb"<!ENTITY", re.IGNORECASE)),
)  # fmt: skip
_PDF = (
    ("a script", rb"/(?:JavaScript|JS)\b"), ("an action when it is opened", rb"/(?:OpenAction|AA)\b"),
    ("a program to start", rb"/Launch\b"), ("a file inside", rb"/(?:EmbeddedFiles?|Filespec)\b"),
    ("a form that sends", rb"/(?:SubmitForm|ImportData|XFA)\b"), ("film or sound", rb"/(?:RichMedia|Screen|Movie)\b"),
    ("an address", rb"/URI\b"), ("a way to another file", rb"/GoTo[RE]\b"), ("encryption", rb"/Encrypt\b"),
)  # fmt: skip
_OFFICE = (
    ("macros", re.compile(r"vbaProject|vbaData|macrosheets/", re.IGNORECASE)),
    ("a control that runs code", re.compile(r"activeX", re.IGNORECASE)),
    ("a file inside", re.compile(r"embeddings/|oleObject", re.IGNORECASE)),
    ("a link to other data", re.compile(r"externalLinks/|connections\.xml|queryTables/", re.IGNORECASE)),
)
_EXTERNAL = re.compile(rb'TargetMode\s*=\s*["\']External', re.IGNORECASE)
_DDE = re.compile(rb"\bDDE(?:AUTO)?\b")
_RUNS = re.compile(
    r"\.(?:exe|dll|so|dylib|sh|bash|bat|cmd|ps1|js|vbs|scr|lnk|jar|py|pyc|pth|desktop|app|msi|apk)$", re.IGNORECASE
)
_PACKED = re.compile(r"\.(?:zip|jar|whl|tar|tgz|gz|bz2|xz|7z|rar|zst|iso)$", re.IGNORECASE)


def scan(data: bytes, name: str, secrets: Sequence[Pattern]) -> list[str]:
    """Say what acts in a file when it is opened, and which secrets are in it."""
    found: dict[str, None] = {}
    for look in (_kinds, lambda data, _: _secrets(data, secrets)):
        try:
            for each in look(data, name):
                found.setdefault(each[:300])
                if len(found) >= MOST_FINDINGS:
                    return [*found, "there is more, which is not listed"]
        except Exception as problem:  # noqa: BLE001 - hostile bytes, and whatever a library makes of them
            found.setdefault(f"it cannot be looked into: {type(problem).__name__}")
    return list(found)


def _kinds(data: bytes, name: str) -> Found:
    looks: tuple[tuple[bool, Callable[[bytes], Found]], ...] = (
        (b"%PDF-" in data[:1024], _pdf),
        (data.startswith(b"PK"), _zip),
        (data[257:262] == b"ustar" or data.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ")), _tar),
        (data.startswith(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"), _ole),
        (name.casefold().endswith(".ipynb") or b'"nbformat"' in data, _notebook),
    )
    known = False
    for fits, look in looks:
        if fits:
            known = True
            yield from look(data)
    if not known and b"<" in data and b"\0" not in data[:4096]:
        yield from _markup(data)


def _markup(data: bytes) -> Found:
    for what, form in _MARKUP:
        if form.search(data):
            yield f"markup: {what}"


def _pdf(data: bytes) -> Found:
    texts, left = [data], MOST_UNPACKED
    for number, begin in enumerate(re.finditer(rb"\bstream\r?\n", data)):
        if left <= 0 or number >= MOST_STREAMS:
            yield "PDF: not all of its streams were looked into"
            break
        try:
            packed = memoryview(data)[begin.end() : begin.end() + (1 << 20)]
            text = zlib.decompressobj().decompress(packed, min(left, 1 << 20))
        except zlib.error:
            continue
        left -= len(text)
        texts.append(text)
    for what, form in _PDF:
        # A name may be written in hexadecimal: /J#61vaScript. ISO 32000-1, 7.3.5.
        if any(re.search(form, re.sub(rb"#([0-9A-Fa-f]{2})", _byte, text)) for text in texts):
            yield f"PDF: {what}"


def _byte(found: re.Match[bytes]) -> bytes:
    return bytes((int(found[1], 16),))


def _zip(data: bytes) -> Found:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        office = any(each.filename == "[Content_Types].xml" for each in entries)
        sized = [(each.filename, each.file_size, each.external_attr >> 28 == _LINK) for each in entries]
        yield from _entries("Office document" if office else "archive", sized, len(data))
        if any(each.flag_bits & 1 for each in entries):
            yield "archive: entries that are encrypted"
        left = MOST_UNPACKED
        for each in entries[:MOST_ENTRIES]:
            if office:
                yield from (f"Office document: {what}" for what, form in _OFFICE if form.search(each.filename))
            if not each.filename.endswith((".xml", ".rels", ".html", ".svg", ".bin")) or each.flag_bits & 1:
                continue
            if left <= 0:
                yield "archive: not all entries were looked into"
                break
            with archive.open(each) as file:
                text = file.read(min(left, 1 << 20))
            left -= len(text)
            if office and _EXTERNAL.search(text):
                yield "Office document: what is loaded from elsewhere, or a link"
            if office and _DDE.search(text):
                yield "Office document: a field that starts programs (DDE)"
            if each.filename.endswith((".html", ".svg")):
                yield from _markup(text)


def _tar(data: bytes) -> Found:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|*") as archive:
        sized, total = [], 0
        for each in archive:
            sized.append((each.name, each.size, each.issym() or each.islnk() or not (each.isreg() or each.isdir())))
            total += each.size
            if len(sized) > MOST_ENTRIES or total > _RATIO * len(data) + MOST_UNPACKED:
                break
        yield from _entries("archive", sized, len(data))


def _entries(what: str, entries: list[tuple[str, int, bool]], packed: int) -> Found:
    total = sum(size for _, size, _ in entries)
    if what == "archive":
        yield f"archive: {len(entries)} entries, {total} bytes unpacked"
    if len(entries) > MOST_ENTRIES:
        yield f"{what}: more than {MOST_ENTRIES} entries, of which the rest was not looked at"
    if total > _RATIO * packed + MOST_UNPACKED:
        yield f"{what}: unpacks to more than {_RATIO} times its size"
    for name, _, link in entries[:MOST_ENTRIES]:
        shown = ascii(name[:MOST_NAME])
        parts = name.replace("\\", "/").split("/")
        if ".." in parts or name.startswith(("/", "\\")) or re.match(r"[A-Za-z]:", name):
            yield f"{what}: {shown} unpacks outside of its folder"
        if link:
            yield f"{what}: {shown} is a link or no plain file"
        if _RUNS.search(name) or any(part.startswith(".") and part != "." for part in parts):
            yield f"{what}: {shown} may be run or obeyed"
        if _PACKED.search(name):
            yield f"{what}: {shown} is an archive, which was not looked into"


def _ole(data: bytes) -> Found:
    macros = "_VBA_PROJECT".encode("utf-16-le") in data or "Macros".encode("utf-16-le") in data
    yield "Office document (OLE): macros" if macros else "Office document (OLE): it was not looked into"


def _notebook(data: bytes) -> Found:
    cells = json.loads(data)["cells"]
    code = sum(1 for each in cells if each.get("cell_type") == "code")
    if code:
        yield f"notebook: {code} cells of code, which run when somebody runs them"
    for cell in cells:
        for output in cell.get("outputs", ()):
            shown = output.get("data", {})
            yield from ("notebook: a script in an output" for kind in shown if "javascript" in kind)
            yield from ("notebook: a widget in an output" for kind in shown if "widget" in kind)
            html = shown.get("text/html", "")
            yield from _markup(("".join(html) if isinstance(html, list) else str(html)).encode())
        if cell.get("cell_type") == "markdown":
            source = cell.get("source", "")
            yield from _markup(("".join(source) if isinstance(source, list) else str(source)).encode())


def _secrets(data: bytes, secrets: Sequence[Pattern]) -> Found:
    for kind, form in secrets:
        if re.search(form.encode("latin-1"), data):
            yield f"a secret: {kind}"


def main(directory: str, secrets: Sequence[Pattern]) -> dict[str, list[str]]:
    """Scan every file below a directory."""
    found = {}
    for path in sorted(Path(directory).rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
            name = str(path.relative_to(directory))
            found[name] = scan(data[:MOST_BYTES], name, secrets)
            if len(data) > MOST_BYTES:
                found[name].append(f"behind its first {MOST_BYTES} bytes it was not looked into")
    return found
