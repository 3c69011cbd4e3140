"""Office documents, notebooks and mails: macros, controls, fields and queries, links, and the files inside."""

import email
import json
import re
from collections.abc import Iterable, Iterator

from glovebox_server.promotion.scanner import ole
from glovebox_server.promotion.scanner.budget import Findings, ScanBudget, ScannedPart
from glovebox_server.promotion.scanner.markup import markup, told

_OFFICE = (
    ("macros", re.compile(r"vbaProject|vbaData|macrosheets/", re.IGNORECASE)),
    ("a control that runs code", re.compile(r"activeX|webextensions/", re.IGNORECASE)),
    ("a file inside", re.compile(r"embeddings/|oleObject", re.IGNORECASE)),
    ("a link to other data", re.compile(r"externalLinks/|connections\.xml|queryTables/", re.IGNORECASE)),
)
_TYPES = "[content_types].xml"
_XML = (".xml", ".rels", ".bin")
_FLAT = (b"schemas.microsoft.com/office/2006/xmlPackage", b"schemas.microsoft.com/office/word/2003/wordml")
"""Namespaces of Office documents in one XML file."""
_FLAT_ACTS = (
    ("macros", re.compile(rb"macrosPresent\s*=\s*[\"']yes")),
    ("a file inside", re.compile(rb"[:<](?:binData|docOleData)\b")),
)
_OPEN = b"urn:oasis:names:tc:opendocument:"
_OPEN_ACTS = (
    ("a handler of events", re.compile(rb"[:<]event-listener\b")),
    ("a macro's address", re.compile(rb"vnd\.sun\.star\.script:")),
    ("a field that starts programs (DDE)", re.compile(rb"[:<]dde-(?:source|connection-decl)\b")),
    ("a control that runs code", re.compile(rb"[:<](?:applet|plugin)\b")),
    (
        "what is loaded from elsewhere, or a link",
        re.compile(rb"[:\s]href\s*=\s*[\"']\s*(?:[a-z]+:)?[\\/][\\/]", re.IGNORECASE),
    ),
)
_EXTERNAL = re.compile(rb'TargetMode\s*=\s*["\']External', re.IGNORECASE)
_DDE = re.compile(rb"\bDDE(?:AUTO)?\b")

_SHOWN = re.compile(rb"www\.w3\.org/(?:1999/xhtml|2000/svg)|<!ENTITY|<\?xml-stylesheet")

_SYLK_ACTS = (
    ("a formula, which may start programs", re.compile(rb"(?:\A|[\r\n])[CF];(?:[^\r\n]*?;)?E")),
    ("a name that may start a macro", re.compile(rb"[\r\n]NN;")),
    ("a sheet of macros", re.compile(rb"[\r\n]O;(?:[^\r\n]*?;)?E")),
)
_QUERY = re.compile(rb"\A\s*(?:WEB\r?\n1\r?\n|XLODBC\r?\n|QueryType=)", re.IGNORECASE)
_QUERIES = (".iqy", ".oqy", ".rqy", ".dqy")
MAX_MAIL_BYTES = 2 << 20
"""Bytes of a mail that are parsed in Python: two seconds at most."""
_MAIL_HEADS = 64 << 10
_IS_MAIL = re.compile(rb"^MIME-Version:[ \t]*1\.0", re.IGNORECASE | re.MULTILINE)


def is_office(names: Iterable[str]) -> bool:
    """Return whether a zip with these entries is an Office document."""
    return _TYPES in map(str.casefold, names)


def office_names(names: Iterable[str]) -> Iterator[str]:
    """Yield the findings from part names of an Office document."""
    for name in names:
        yield from (f"Office document: {what}" for what, form in _OFFICE if form.search(name))


def office(name: str, data: bytes) -> Iterator[str]:
    """Yield the active content of one part of an Office document."""
    # Relationships define the type of a part, not its name.
    if not _is_xml(data) and not name.casefold().endswith(_XML):
        return
    text = told(data)
    if name.casefold() == _TYPES:
        yield from office_names([text.decode("latin-1")])
    if _EXTERNAL.search(text):
        yield "Office document: what is loaded from elsewhere, or a link"
    # Markup may split a field's text.
    if _DDE.search(text) or _DDE.search(re.sub(rb"<[^<>]*>", b"", text)):
        yield "Office document: a field that starts programs (DDE)"


def _is_xml(data: bytes) -> bool:
    return data.lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n").startswith(b"<")


def is_office_xml(part: ScannedPart) -> bool:
    """Return whether it is an Office document, or a part of an OpenDocument one, in one XML file."""
    return _is_xml(part.data) and any(each in part.data.replace(b"\0", b"") for each in (*_FLAT, _OPEN))


def office_xml(part: ScannedPart, _: ScanBudget) -> Findings:
    """Yield the active content of an XML document."""
    text = told(part.data)
    if _OPEN in text:
        yield from (f"OpenDocument: {what}" for what, form in _OPEN_ACTS if form.search(text))
    if any(each in text for each in _FLAT):
        yield from office_names([text.decode("latin-1")])
        yield from (f"Office document: {what}" for what, form in _FLAT_ACTS if form.search(text))
        yield from office(part.name, part.data)


def is_no_page(name: str, data: bytes) -> bool:
    """Return whether this part of an Office document is no page of its own: no browser shows it."""
    return name.casefold().endswith((".xml", ".rels")) and not _SHOWN.search(told(data))


def is_old_office(part: ScannedPart) -> bool:
    """Return whether it is a compound file, the old format of Office documents."""
    return part.data.startswith(ole.MAGIC)


def old_office(part: ScannedPart, budget: ScanBudget) -> Findings:
    """Yield the findings of a compound file, and the files inside."""
    if "_VBA_PROJECT".encode("utf-16-le") in part.data or "Macros".encode("utf-16-le") in part.data:
        yield "Office document (OLE): macros"
    else:
        yield "Office document (OLE): it was not looked into"
    for name, data in ole.streams(part.data, budget):
        if name == "EncryptedPackage":
            yield "Office document (OLE): encryption"
        elif name == "\1Ole10Native":
            yield "Office document (OLE): a file inside"
            yield ScannedPart(*ole.native(data))
        elif name in {"Package", "CONTENTS"}:
            yield "Office document (OLE): a file inside"
            yield ScannedPart(name, data)


def is_rtf(part: ScannedPart) -> bool:
    """Return whether Word takes it for RTF."""
    return part.data[:1024].lstrip().startswith(b"{\\rt")


def rtf(part: ScannedPart, budget: ScanBudget) -> Findings:
    """Yield the findings of RTF, and its plainly written objects."""
    yield "RTF document: it was not looked into"
    for number, found in enumerate(re.finditer(rb"\\objdata\b([^}]*)", part.data)):
        if budget.over():
            return
        if not number:
            yield "RTF document: an embedded object"
        text = re.sub(rb"[^0-9A-Fa-f]+", b"", found[1])
        data = bytes.fromhex(text[: len(text) & ~1].decode())
        budget.bytes -= len(data)
        for magic in (ole.MAGIC, b"PK\x03\x04", b"%PDF-"):
            if (at := data.find(magic)) >= 0:
                yield ScannedPart(f"object {number + 1}", data[at:])


def is_sylk(part: ScannedPart) -> bool:
    """Return whether spreadsheets take it for SYLK: by its name, or its beginning if it has cells."""
    return part.name.casefold().endswith(".slk") or (
        part.data.startswith(b"ID;") and bool(re.search(rb"[\r\n]C;(?:[XYKE]|[^\r\n]*;K)", part.data))
    )


def sylk(part: ScannedPart, _: ScanBudget) -> Findings:
    """Yield the active content of a SYLK sheet."""
    yield from (f"SYLK: {what}" for what, form in _SYLK_ACTS if form.search(part.data))


def is_query(part: ScannedPart) -> bool:
    """Return whether a spreadsheet loads external data when it opens the file."""
    return part.name.casefold().endswith(_QUERIES) or bool(_QUERY.match(part.data[:1024]))


def query(_: ScannedPart, __: ScanBudget) -> Findings:
    """Yield that it loads external data."""
    yield "query: data that is loaded from elsewhere when it is opened"


def is_notebook(part: ScannedPart) -> bool:
    """Return whether it is a notebook, by name or content."""
    return part.name.casefold().endswith(".ipynb") or b'"nbformat"' in part.data


def notebook(part: ScannedPart, _: ScanBudget) -> Findings:
    """Yield the active content of a notebook: cells, and their outputs."""
    whole = json.loads(part.data)
    cells = whole["cells"]
    code = sum(1 for each in cells if each.get("cell_type") == "code")
    if code:
        yield f"notebook: {code} cells of code, which run when somebody runs them"
    for cell in cells:
        for output in cell.get("outputs", ()):
            shown = output.get("data", {})
            yield from ("notebook: a script in an output" for kind in shown if "javascript" in kind)
            yield from ("notebook: a widget in an output" for kind in shown if "widget" in kind)
    # All strings, decoded: JSON may escape each character of markup.
    yield from markup("\n".join(_strings(whole)).encode("utf-8", "replace"))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        if value and all(isinstance(each, str) for each in value):
            yield "".join(value)
            return
        for each in value:
            yield from _strings(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _strings(each)


def is_mail(part: ScannedPart) -> bool:
    """Return whether programs take it for a mail or a web archive (MHTML), by name or headers."""
    return part.name.casefold().endswith((".eml", ".mht", ".mhtml")) or bool(_IS_MAIL.search(part.data[:_MAIL_HEADS]))


def mail(part: ScannedPart, budget: ScanBudget) -> Findings:
    """Yield the encoded parts of a mail, RFC 2045 and RFC 2557; the others are scanned as they are."""
    if len(part.data) > MAX_MAIL_BYTES:
        yield f"mail: behind its first {MAX_MAIL_BYTES} bytes its parts were not looked into"
    for number, each in enumerate(email.message_from_bytes(part.data[:MAX_MAIL_BYTES]).walk(), 1):
        if each.is_multipart() or "Content-Transfer-Encoding" not in each:
            continue
        data = each.get_payload(decode=True)
        if not isinstance(data, bytes):
            continue
        budget.bytes -= len(data)
        if data.startswith(b"ActiveMime"):
            yield "mail: macros of an Office document"
        yield ScannedPart(each.get_filename() or f"part {number}", data)
